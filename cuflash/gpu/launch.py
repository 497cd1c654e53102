"""From a plan to the results: allocates them, fills the argument struct, launches.

A call that looks like an earlier one - same shapes, strides, dtypes, alignments and options - finds its `Launch` in a
bounded cache and costs one look-up, one allocation per result and the launch itself. Any other call goes the whole way,
on which what does not depend on lengths is remembered.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from ..log import DEBUG, is_enabled, log_call, log_plan
from ..plan.partial import partial_results
from ..plan.plan import MAX_GRID, Plan, make_plan
from ..plan.table import Device
from ..plan.tiles import APPENDING, PREPARING
from ..problem.arrays import ArrayInfo, cupy_ndarray, extent, overlaps_itself
from ..problem.checks import workspace_size
from ..problem.kind import Kind
from ..problem.problem import ARRAYS, Problem, array_shapes, itemsizes, shapes_of
from ..settings import settings
from .arguments import pack_pointers, pack_values, start
from .compile import kernel_function, nvrtc_version
from .installed import WGMMA_NVRTC
from .workspace import allocate_with_workspace, check_size, is_capturing, results_of, split_of

CACHE_SIZE = 4096
_launches: dict[Any, Launch] = {}
_kinds: dict[Any, Kind] = {}

_NO_POINTERS = (0,) * (len(ARRAYS) - 3)
_OTHERS = 13
"""Where in a key the arrays beside q, k and v begin: each has shape, strides, dtype, alignment and device."""
_NOT_GIVEN = (None,) * 5
_NO_OTHERS = _NOT_GIVEN * (len(ARRAYS) - 3)
_K, _V, _OUT, _LSE, _K_NEW = map(ARRAYS.index, ("k", "v", "out", "lse", "k_new"))
_RESULTS = slice(_OUT, _LSE + 1)


Part = tuple[tuple[int], bytes, "tuple[int, ...] | None"]
"""One launch: its grid, the struct behind the addresses, and what to add to the addresses (None: nothing)."""


class Launch:
    """A planned and compiled call, ready for new addresses."""

    __slots__ = (
        "_append", "_block", "_cupy", "_extents", "_function", "_get_device", "_lse", "_out", "_parts", "_preparing",
        "_problem", "_split", "device_id", "plan",
    )  # fmt: skip

    def __init__(self, problem: Problem, plan: Plan, device_id: int) -> None:
        self.plan = plan
        self.device_id = device_id
        self._problem = problem
        self._cupy = sys.modules["cupy"]
        self._get_device = self._cupy.cuda.runtime.getDevice
        self._function: Any = kernel_function(plan.program, device_id) if plan.num_blocks else None
        self._block = (plan.tile.num_threads,)
        self._parts = launch_parts(problem, plan)
        preparation = plan.preparation
        self._preparing: Any = kernel_function(preparation.program, device_id) if preparation else None
        self._append: Any = None
        if plan.append is not None:
            function = kernel_function(plan.append.program, device_id)
            self._append = function, (plan.append.num_blocks,), pack_values(problem, plan)
        self._split = None
        if plan.num_splits > 1:
            self._split = split_of(problem, plan, device_id, device_info(device_id).compute_capability)
        self._out, self._lse = results_of(problem)
        self._extents: list[tuple[int, int]] | None = None
        log_plan(problem, plan)

    @property
    def extents(self) -> list[tuple[int, int]]:
        """How far each array reaches from its address."""
        if self._extents is None:
            problem = self._problem
            described = zip(shapes_of(problem), problem.strides, itemsizes(problem), strict=True)
            self._extents = [
                (0, 0) if steps is None else extent(0, shape, steps, size) for shape, steps, size in described
            ]
        return self._extents

    def results_apart(self, pointers: list[int]) -> bool:
        """Whether what is written certainly shares no memory with another array of the call (False: look closer)."""
        extents = self.extents
        for result in (_OUT, _LSE) if self._append is None else (_K, _V, _OUT, _LSE):
            begin, end = extents[result]
            begin, end = pointers[result] + begin, pointers[result] + end
            # What is written is one of the arrays: it shares memory with itself.
            others = zip(pointers, extents, strict=True)
            sharing = [p for p, (low, high) in others if begin < p + high and p + low < end]
            if begin < end and len(sharing) > 1:
                return False
        return True

    def takes(self, workspace: Any, pointers: list[int]) -> bool:
        """Whether a given workspace certainly serves the call (False: look closer)."""
        gpu_type: Any = _gpu_type()
        if type(workspace) is not gpu_type or workspace.dtype != np.uint8:
            return False
        data, size = workspace.data, workspace.size
        if workspace.ndim != 1 or workspace.strides != (1,) or data.device_id != self.device_id:
            return False
        low, high = data.ptr, data.ptr + size
        apart = all(
            p + end <= low or high <= p + begin or begin == end
            for p, (begin, end) in zip(pointers, self.extents, strict=True)
        )
        return apart and workspace_size(low, size) >= self.plan.workspace

    def run(self, pointers: list[int], out: Any, lse: Any, workspace: Any = None) -> Any:
        """Run on the current stream of the arrays' device; `pointers` are the addresses in the order of the struct."""
        if self._get_device() != self.device_id:
            with self._cupy.cuda.Device(self.device_id):
                return self.run(pointers, out, lse, workspace)
        if settings().log or is_enabled(DEBUG):
            log_call(self._problem, self.plan, array_shapes(self._problem))
        if self.plan.workspace:
            return self._run_in_workspace(pointers, out, lse, workspace)
        if out is None and self._out is not None:
            out = self._out.allocate(self._cupy)
            pointers[_OUT] = out.data.ptr
        if lse is None and self._lse is not None:
            lse = self._lse.allocate(self._cupy)
            pointers[_LSE] = lse.data.ptr
        if self._append is not None:
            self._append_keys(pointers)
        self._start(pointers)
        return out if self._lse is None else lse if self._out is None else (out, lse)

    def _run_in_workspace(self, pointers: list[int], out: Any, lse: Any, workspace: Any) -> Any:
        """Make keys and values ready in a workspace, or write partial results into it, and merge them; or both."""
        cupy, allocates_out, allocates_lse, size = self._cupy, out is None, lse is None, self.plan.workspace
        if self._preparing is not None and workspace is None:
            # Without memory, or what keeps it alive as long as a captured graph, blocks prepare for themselves.
            if not is_capturing(cupy):
                try:
                    workspace = cupy.empty(size, np.uint8)
                except cupy.cuda.memory.OutOfMemoryError:
                    return self._without_preparation().run(pointers, out, lse)
            elif (lse if self._out is None else out) is not None:
                return self._without_preparation().run(pointers, out, lse)
        if self._out is not None:
            out, workspace, address = allocate_with_workspace(cupy, self._out, out, size, workspace)
            if allocates_lse and self._lse is not None:
                lse = self._lse.allocate(cupy)
        else:
            assert self._lse is not None, "there is some result"
            lse, workspace, address = allocate_with_workspace(cupy, self._lse, lse, size, workspace)
        if allocates_out and out is not None:
            pointers[_OUT] = out.data.ptr
        if allocates_lse and lse is not None:
            pointers[_LSE] = lse.data.ptr
        if self._append is not None:
            self._append_keys(pointers)
        prepared = self._prepare(pointers, address) if self._preparing is not None else (0, 0)
        if self._split is None:
            self._start(pointers, *prepared)
        else:
            result, pointers[_RESULTS] = pointers[_RESULTS], (address, address + self._split.lse_offset)
            self._start(pointers, *prepared)
            self._split.finish(address, *result)
        return out if self._lse is None else lse if self._out is None else (out, lse)

    def _append_keys(self, pointers: list[int]) -> None:
        function, grid, packed = self._append
        start(function, grid, (APPENDING.num_threads,), 0, pack_pointers(*pointers, 0, 0) + packed)

    def _without_preparation(self) -> Launch:
        plan = make_plan(self._problem, device_info(self.device_id), settings(), prepares=False)
        return Launch(self._problem, plan, self.device_id)

    def _prepare(self, pointers: list[int], workspace: int) -> tuple[int, int]:
        """Make keys and values ready; return the addresses of what is made of them."""
        preparation = self.plan.preparation
        assert preparation is not None, "else there is no kernel for it"
        prepared = workspace + preparation.offset_k, workspace + preparation.offset_v
        packed = pack_pointers(*pointers, *prepared) + self._parts[0][1]
        program = preparation.program
        start(self._preparing, (preparation.num_blocks,), (PREPARING.num_threads,), program.shared_memory, packed)
        return prepared

    def _start(self, pointers: list[int], prepared_k: int = 0, prepared_v: int = 0) -> None:
        for grid, packed, offsets in self._parts:
            at = pointers if offsets is None else [p + o if p else 0 for p, o in zip(pointers, offsets, strict=True)]
            arguments = pack_pointers(*at, prepared_k, prepared_v) + packed
            start(self._function, grid, self._block, self.plan.program.shared_memory, arguments)


def launch_parts(problem: Problem, plan: Plan) -> tuple[Part, ...]:
    """Launches that a plan needs: usually one, more beyond four leading axes or the largest grid."""
    if not plan.outer_axes and 0 < plan.num_blocks <= MAX_GRID:
        return (((plan.num_blocks,), pack_values(problem, plan), None),)
    strides = (partial_results(problem) if plan.num_splits > 1 else problem).strides
    parts: list[Part] = []
    for index in product(*(range(length) for _, length in plan.outer_axes)):
        offsets = tuple(
            sum(i * steps[axis] for i, (axis, _) in zip(index, plan.outer_axes, strict=True)) if steps else 0
            for steps in strides
        )
        for first_block in range(0, plan.num_blocks, MAX_GRID):
            grid = (min(MAX_GRID, plan.num_blocks - first_block),)
            parts.append((grid, pack_values(problem, plan, first_block), offsets if index else None))
    return tuple(parts)


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
    return Device(capability, memory, attributes["MultiProcessorCount"], nvrtc_version() >= WGMMA_NVRTC)


def find_on_gpu(
    q: Any, k: Any, v: Any, others: tuple[Any, ...] | None, options: tuple[Any, ...]
) -> tuple[Any, Launch | None, list[int]]:
    """Look up the launch of an earlier call of the same form; see `dispatch.find`."""
    gpu_type = type(q)
    if v is None:
        v = k  # the options say that there are no values, and nobody reads what stands for them
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
                parts += _NOT_GIVEN
                pointers.append(0)
            elif type(array) is gpu_type:
                data = array.data
                pointer = data.ptr
                pointers.append(pointer)
                parts += (array.shape, array.strides, array.dtype, pointer & 15, data.device_id)
            else:
                return None, None, []
        left = len(ARRAYS) - len(pointers)
        pointers += _NO_POINTERS[:left]
        key += (*parts, *_NO_OTHERS[: 5 * left])
    try:
        launch = _launches.get(key)
    except TypeError:
        return None, None, pointers
    if launch is None:
        launch = _launch_of_known_kind(key, pointers)
    return key, launch, pointers


def _kind_key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """What of a call's key its lengths do not change."""
    options, chosen, _, devices, q_shape, _, q_dtype, k_shape, _, k_dtype, v_shape, _, v_dtype = key[:_OTHERS]
    fixed: tuple[Any, ...]
    if options[0] != "attention_varlen":
        # An array of one axis, which is wrong, has no last axis behind a sequence.
        features = q_shape[-2:][1:], k_shape[-2:][1:], v_shape[-2:][1:]
        fixed = q_shape[:-2], k_shape[:-2], v_shape[:-2], features
    else:
        fixed = q_shape[1:], k_shape[1:], v_shape[1:]
    others = key[_OTHERS:]
    return options, chosen, devices, q_dtype, k_dtype, v_dtype, fixed, others[2::5], others[4::5]


def _launch_of_known_kind(key: tuple[Any, ...], pointers: list[int]) -> Launch | None:
    """Plan a call that an earlier one differs from in lengths and strides alone; None if it has to be checked."""
    kind = _kinds.get(_kind_key(key))
    if kind is None:
        return None
    others = key[_OTHERS:] or _NO_OTHERS
    shapes, strides = (*key[4:_OTHERS:3], *others[::5]), (*key[5:_OTHERS:3], *others[1::5])
    dtypes = (*key[6:_OTHERS:3], *others[2::5])
    for i in (_OUT, _LSE) if shapes[_K_NEW] is None else (_K, _V, _OUT, _LSE):
        if shapes[i] is not None and overlaps_itself(shapes[i], strides[i], dtypes[i].itemsize):
            return None
    problem = kind.at(shapes, strides, pointers)
    if problem is None:
        return None
    device_id = key[3][0]
    launch = Launch(problem, make_plan(problem, device_info(device_id), key[1]), device_id)
    _remember(_launches, key, launch)
    return launch


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= CACHE_SIZE:
        cache.clear()  # atomic, unlike removing the oldest entry while other threads add theirs
    cache[key] = value


def execute_on_gpu(problem: Problem, infos: dict[str, ArrayInfo], key: Any, out: Any, lse: Any) -> Any:
    """Compute a checked problem; `out` and `lse` are the caller's own objects, which are returned if given."""
    device_id = infos["q"].device
    plan = make_plan(problem, device_info(device_id), settings())
    check_size(infos, plan.workspace)
    launch = Launch(problem, plan, device_id)
    if key is not None:
        _remember(_launches, key, launch)
        _remember(_kinds, _kind_key(key), Kind(problem))
    pointers = [infos[name].pointer if name in infos else 0 for name in ARRAYS]
    workspace = infos["workspace"].array if "workspace" in infos else None
    return launch.run(pointers, out, lse, workspace)
