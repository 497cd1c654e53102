"""The only file that touches device memory: allocates results, fills the argument struct, launches.

A call that looks like an earlier one - same shapes, strides, dtypes, alignments and options - finds its `Launch` in a
bounded cache and costs one look-up, one allocation per result and the launch itself.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy import frombuffer

from . import compile as compile_module
from . import cpu
from .arrays import DTYPES, HOST, ArrayInfo, cupy_ndarray, extent
from .kernels import CPU_KERNEL, Device
from .knobs import Settings, settings
from .params import BY_VALUE, POINTERS, pack_after_pointers, pack_pointers
from .plan import MAX_GRID, Plan, make_plan
from .problem import Operand, Problem

CACHE_SIZE = 4096
_launches: dict[Any, Launch] = {}

_NO_POINTERS = (0,) * (len(POINTERS) - 3)
_INFO_NAMES = {"query_offsets": "query_offset"}
"""Argument names of the struct's addresses, where they differ."""


class Launch:
    """A planned and compiled call, ready for new addresses."""

    def __init__(self, problem: Problem, plan: Plan, device_id: int) -> None:
        self.problem = problem
        self.plan = plan
        self.device_id = device_id
        self._cupy = sys.modules["cupy"]
        self._get_device = self._cupy.cuda.runtime.getDevice
        self._function: Any = compile_module.kernel_function(plan, device_id) if plan.num_blocks else None
        self._block = (plan.tile.num_threads,)
        self._shared_memory = plan.shared_memory
        self._parts = self._split(problem, plan)
        rows = result_rows(problem)
        self._out = _Result((*rows, problem.head_dim_v), problem.out)
        self._lse = _Result(rows, problem.lse) if problem.lse else None
        self._extents: list[tuple[int, int]] | None = None

    def set_extents(self, infos: dict[str, ArrayInfo]) -> None:
        """Note how far each array reaches from its address, for `results_apart`."""
        self._extents = []
        for name in POINTERS:
            info = infos.get(_INFO_NAMES.get(name, name))
            itemsize = DTYPES[info.dtype].itemsize if info else 0
            self._extents.append(extent(0, info.shape, info.strides, itemsize) if info else (0, 0))

    def results_apart(self, pointers: list[int]) -> bool:
        """Whether given results certainly share no memory with another array of the call (False: look closer)."""
        spans = [(p + low, p + high) for p, (low, high) in zip(pointers, self._extents or (), strict=False)]
        for result in (3, 4):
            low, high = spans[result]
            if low < high and any(i != result and a < high and low < b for i, (a, b) in enumerate(spans)):
                return False
        return True

    @staticmethod
    def _split(problem: Problem, plan: Plan) -> list[tuple[tuple[int], bytes, tuple[int, ...] | None]]:
        """Grid, struct without addresses, and what to add to the addresses, for each launch that the plan needs."""
        parts: list[tuple[tuple[int], bytes, tuple[int, ...] | None]] = []
        if not plan.outer_axes and 0 < plan.num_blocks <= MAX_GRID:
            return [((plan.num_blocks,), pack_after_pointers(problem, plan), None)]
        operands = [getattr(problem, name) for name in POINTERS]
        for index in product(*(range(length) for _, length in plan.outer_axes)):
            offsets = None
            if index:
                offsets = tuple(
                    sum(i * operand.strides[axis] for i, (axis, _) in zip(index, plan.outer_axes, strict=True))
                    if operand
                    else 0
                    for operand in operands
                )
            for first_block in range(0, plan.num_blocks, MAX_GRID):
                grid = (min(MAX_GRID, plan.num_blocks - first_block),)
                parts.append((grid, pack_after_pointers(problem, plan, first_block), offsets))
        return parts

    def run(self, pointers: list[int], out: Any, lse: Any) -> Any:
        """Run on the current stream of the arrays' device; `pointers` are the addresses in the order of the struct."""
        if settings().log:
            print(f"cuflash: {self.problem} -> {self.plan}", file=sys.stderr)
        if self._get_device() != self.device_id:
            with self._cupy.cuda.Device(self.device_id):
                return self.run(pointers, out, lse)
        if out is None:
            out = self._out.allocate(self._cupy)
            pointers[3] = out.data.ptr
        if self._lse is not None and lse is None:
            lse = self._lse.allocate(self._cupy)
            pointers[4] = lse.data.ptr
        for grid, rest, offsets in self._parts:
            at = pointers if offsets is None else [p + o if p else 0 for p, o in zip(pointers, offsets, strict=True)]
            self._function(grid, self._block, (frombuffer(pack_pointers(*at) + rest, BY_VALUE),), self._shared_memory)
        return out if self._lse is None else (out, lse)


def result_rows(problem: Problem) -> tuple[int, ...]:
    """Shape of the lse, which is that of the output without its features."""
    if problem.op == "attention_varlen":
        return problem.seqlen_q, problem.num_heads_q
    if problem.is_2d:
        return (problem.seqlen_q,)
    return *problem.batch, problem.num_heads_q, problem.seqlen_q


class _Result:
    """Shape, type and layout of a result to allocate."""

    def __init__(self, shape: tuple[int, ...], operand: Operand) -> None:
        self.shape = shape
        self.dtype = DTYPES[operand.dtype]
        strides = operand.strides[len(operand.strides) - len(shape) :]
        # New results are packed, so falling strides mean C order.
        plain = 0 in shape or list(strides) == sorted(strides, reverse=True)
        self.strides = None if plain else strides

    def allocate(self, xp: Any) -> Any:
        if self.strides is None:
            return xp.empty(self.shape, self.dtype)
        memory = xp.empty(int(np.prod(self.shape)), self.dtype)
        if xp is np:
            return np.ndarray(self.shape, self.dtype, memory, 0, self.strides)
        return xp.ndarray(self.shape, self.dtype, memory.data, self.strides)


_found_gpu_type: type | None = None


def _gpu_type() -> type | None:
    """CuPy's array type, looked up until there is one."""
    global _found_gpu_type
    if _found_gpu_type is None:
        _found_gpu_type = cupy_ndarray()
    return _found_gpu_type


@lru_cache(maxsize=64)
def device_info(device_id: int) -> Device:
    """Read a GPU's properties from the driver."""
    import cupy

    device = cupy.cuda.Device(device_id)
    attributes = device.attributes
    capability = int(device.compute_capability)
    memory = attributes["MaxSharedMemoryPerBlockOptin"] or attributes["MaxSharedMemoryPerBlock"]
    return Device(capability, memory, attributes["MultiProcessorCount"])


def find(
    q: Any, k: Any, v: Any, others: tuple[Any, ...] | None, options: tuple
) -> tuple[Any, Launch | None, list[int]]:
    """Look up the launch of an earlier call of the same form.

    Parameters
    ----------
    q, k, v, others
        The call's arrays in the order of the argument struct; None for those it has not, or for all the others.
    options
        Everything else that decides the launch, hashable or not.

    Returns
    -------
    key, launch, pointers
        The key is None where the cache cannot help: arrays that are not CuPy's, options that cannot be hashed.
    """
    gpu_type = type(q)
    if gpu_type is not _gpu_type() or type(k) is not gpu_type or type(v) is not gpu_type:
        return None, None, []
    q_data, k_data, v_data = q.data, k.data, v.data
    pointers = [q_data.ptr, k_data.ptr, v_data.ptr]
    alignment = (pointers[0] & 15) << 8 | (pointers[1] & 15) << 4 | pointers[2] & 15
    devices = q_data.device_id, k_data.device_id, v_data.device_id
    key: tuple[Any, ...] = (
        options, settings(), alignment, devices, q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape,
        v.strides, v.dtype
    )  # fmt: skip
    if others is None:
        pointers += _NO_POINTERS
    else:
        parts: list[Any] = []
        for array in others:
            if array is None:
                parts.append(None)
                pointers.append(0)
            elif type(array) is gpu_type:
                pointer = array.data.ptr
                pointers.append(pointer)
                parts += (array.shape, array.strides, array.dtype, pointer & 15, array.data.device_id)
            else:
                return None, None, []
        key += tuple(parts)
    try:
        return key, _launches.get(key), pointers
    except TypeError:
        return None, None, pointers


def hashable_window(window: Any) -> Any:
    """Return a key for `window` that tells (1, 2) from (True, 2) and (1.0, 2), which are equal but not both valid."""
    if type(window) in (tuple, list):
        return (*window, *map(type, window))
    return window, type(window)


def execute(problem: Problem, infos: dict[str, ArrayInfo], key: Any, out: Any, lse: Any) -> Any:
    """Compute a checked problem; `out` and `lse` are the caller's own objects, which are returned if given."""
    chosen = settings()
    if infos["q"].device == HOST:
        return _execute_on_host(problem, infos, chosen, out, lse)
    device_id = infos["q"].device
    launch = Launch(problem, make_plan(problem, device_info(device_id), chosen), device_id)
    if "out" in infos or "lse" in infos:
        launch.set_extents(infos)
    if key is not None:
        if len(_launches) >= CACHE_SIZE:
            _launches.pop(next(iter(_launches)), None)
        _launches[key] = launch
    pointers = []
    for name in POINTERS:
        info = infos.get(_INFO_NAMES.get(name, name))
        pointers.append(info.pointer if info else 0)
    return launch.run(pointers, out, lse)


def _execute_on_host(problem: Problem, infos: dict[str, ArrayInfo], chosen: Settings, out: Any, lse: Any) -> Any:
    if chosen.kernel not in ("", CPU_KERNEL):
        raise ValueError(f"kernel {chosen.kernel!r} cannot serve this call: it needs GPU arrays, these are NumPy's")
    if chosen.tile:
        raise ValueError(f"tile {chosen.tile!r} cannot serve this call: the NumPy back end has no choice of tile")
    varlen = problem.op == "attention_varlen"
    batch = () if varlen else problem.batch
    heads = (*problem.batch, problem.num_heads_q)
    rows = (problem.seqlen_q, problem.num_heads_q) if varlen else (*heads, problem.seqlen_q)
    keys = (problem.seqlen_k, problem.num_heads_kv) if varlen else (*batch, problem.num_heads_kv, problem.seqlen_k)
    shapes = {
        "q": (*rows, problem.head_dim),
        "k": (*keys, problem.head_dim),
        "v": (*keys, problem.head_dim_v),
        "bias": (*rows, problem.seqlen_k),
        "mask": (*rows, problem.seqlen_k),
        "alibi_slopes": heads,
        "sinks": heads,
        "query_offset": batch,
    }
    arrays: dict[str, np.ndarray | None] = {
        name: np.broadcast_to(infos[name].array, shape) if name in infos else None for name, shape in shapes.items()
    }
    arrays["query_offsets"] = arrays.pop("query_offset")
    results = {"out": out, "lse": lse}
    for name, shape, operand in (("out", (*rows, problem.head_dim_v), problem.out), ("lse", rows, problem.lse)):
        if operand is None:
            arrays[name] = None
            continue
        given = infos.get(name)
        array = _Result(shape, operand).allocate(np) if given is None else given.array
        arrays[name] = array.reshape(shape) if given is None else array[None] if problem.is_2d else array
        if given is None:
            results[name] = array[0] if problem.is_2d else array
    if chosen.log:
        print(f"cuflash: {problem} -> {CPU_KERNEL}", file=sys.stderr)
    if varlen:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            arrays[name] = infos[name].array
        cpu.attention_varlen(problem, arrays)
    else:
        cpu.attention(problem, arrays)
    return results["out"] if problem.lse is None else (results["out"], results["lse"])
