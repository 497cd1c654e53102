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

from ..plan.partial import partial_results
from ..plan.plan import MAX_GRID, Plan, make_plan
from ..plan.table import Device
from ..problem.arrays import DTYPES, ArrayInfo, cupy_ndarray, extent
from ..problem.checks import workspace_size
from ..problem.problem import Operands, Problem, result_rows
from ..settings import settings
from .arguments import POINTERS_SIZE, SIZE, pack_pointers_into, pack_values
from .compile import kernel_function
from .workspace import Result, Split, allocate_with_workspace, check_size, split_of

CACHE_SIZE = 4096
_launches: dict[Any, Launch] = {}

_NO_POINTERS = (0,) * (len(Operands._fields) - 3)
_OUT, _LSE = Operands._fields.index("out"), Operands._fields.index("lse")
_RESULTS = slice(_OUT, _LSE + 1)


class _Arguments:
    """Memory for one argument struct, and what CuPy needs to pass it by value. The driver copies it at the launch."""

    def __init__(self) -> None:
        from cupy.cuda.function import CPointer

        array = np.empty(SIZE, np.uint8)
        self.memory = array.data
        self.by_value = (CPointer(array.ctypes.data),)


_free_arguments: list[_Arguments] = []


Part = tuple[tuple[int], bytes, "tuple[int, ...] | None"]
"""One launch: its grid, the struct behind the addresses, and what to add to the addresses (None: nothing)."""


class Launch:
    """A planned and compiled call, ready for new addresses."""

    __slots__ = (
        "_block", "_cupy", "_extents", "_function", "_get_device", "_lse", "_out", "_parts", "_problem", "_split",
        "device_id", "plan",
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
        self._split = split_of(problem, plan, device_id) if plan.num_splits > 1 else None
        rows, operands = result_rows(problem), problem.operands
        self._out = Result((*rows, problem.traits.head_dim_v), operands.out)
        self._lse = Result(rows, operands.lse) if operands.lse is not None else None
        self._extents: list[tuple[int, int]] | None = None

    def __str__(self) -> str:
        return f"{self._problem} -> {self.plan}"

    def set_extents(self, infos: dict[str, ArrayInfo]) -> None:
        """Note how far each array reaches from its address, for `results_apart`."""
        self._extents = []
        for name in Operands._fields:
            info = infos.get(name)
            itemsize = DTYPES[info.dtype].itemsize if info else 0
            self._extents.append(extent(0, info.shape, info.strides, itemsize) if info else (0, 0))

    def results_apart(self, pointers: list[int]) -> bool:
        """Whether given results certainly share no memory with another array of the call (False: look closer)."""
        spans = [(p + low, p + high) for p, (low, high) in zip(pointers, self._extents or (), strict=False)]
        for result in (_OUT, _LSE):
            low, high = spans[result]
            if low < high and any(i != result and a < high and low < b for i, (a, b) in enumerate(spans)):
                return False
        return True

    def takes(self, workspace: Any, pointers: list[int]) -> bool:
        """Whether a given workspace certainly serves the call (False: look closer)."""
        gpu_type: Any = _gpu_type()
        if self._extents is None or type(workspace) is not gpu_type or workspace.dtype != np.uint8:
            return False
        data, size = workspace.data, workspace.size
        if workspace.ndim != 1 or workspace.strides != (1,) or data.device_id != self.device_id:
            return False
        low, high = data.ptr, data.ptr + size
        apart = all(
            p + end <= low or high <= p + begin or begin == end
            for p, (begin, end) in zip(pointers, self._extents, strict=True)
        )
        return apart and workspace_size(low, size) >= self.plan.workspace

    def run(self, pointers: list[int], out: Any, lse: Any, workspace: Any = None) -> Any:
        """Run on the current stream of the arrays' device; `pointers` are the addresses in the order of the struct."""
        if self._get_device() != self.device_id:
            with self._cupy.cuda.Device(self.device_id):
                return self.run(pointers, out, lse, workspace)
        if settings().log:
            print(f"cuflash: {self}", file=sys.stderr)
        if self._split is not None:
            return self._run_split(self._split, pointers, out, lse, workspace)
        if out is None:
            out = self._out.allocate(self._cupy)
            pointers[_OUT] = out.data.ptr
        if self._lse is not None and lse is None:
            lse = self._lse.allocate(self._cupy)
            pointers[_LSE] = lse.data.ptr
        self._start(pointers)
        return out if self._lse is None else (out, lse)

    def _run_split(self, split: Split, pointers: list[int], out: Any, lse: Any, workspace: Any) -> Any:
        """Write partial results into a workspace, then merge them."""
        cupy = self._cupy
        allocates = out is None
        out, workspace, address = allocate_with_workspace(cupy, self._out, out, split.size, workspace)
        if allocates:
            pointers[_OUT] = out.data.ptr
        if self._lse is not None and lse is None:
            lse = self._lse.allocate(cupy)
            pointers[_LSE] = lse.data.ptr
        result, pointers[_RESULTS] = pointers[_RESULTS], (address, address + split.lse_offset)
        self._start(pointers)
        split.finish(address, *result)
        return out if self._lse is None else (out, lse)

    def _start(self, pointers: list[int]) -> None:
        # A buffer of this call's own while it lasts: other threads, and calls that interrupt this one, take another.
        try:
            arguments = _free_arguments.pop()
        except IndexError:
            arguments = _Arguments()
        for grid, packed, offsets in self._parts:
            at = pointers if offsets is None else [p + o if p else 0 for p, o in zip(pointers, offsets, strict=True)]
            pack_pointers_into(arguments.memory, 0, *at)
            arguments.memory[POINTERS_SIZE:] = packed
            self._function(grid, self._block, arguments.by_value, self.plan.program.shared_memory)
        _free_arguments.append(arguments)


def launch_parts(problem: Problem, plan: Plan) -> tuple[Part, ...]:
    """Launches that a plan needs: usually one, more beyond four leading axes or the largest grid."""
    if not plan.outer_axes and 0 < plan.num_blocks <= MAX_GRID:
        return (((plan.num_blocks,), pack_values(problem, plan), None),)
    operands = (partial_results(problem) if plan.num_splits > 1 else problem).operands
    parts: list[Part] = []
    for index in product(*(range(length) for _, length in plan.outer_axes)):
        offsets = tuple(
            sum(i * operand.strides[axis] for i, (axis, _) in zip(index, plan.outer_axes, strict=True))
            if operand
            else 0
            for operand in operands
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
    return Device(capability, memory, attributes["MultiProcessorCount"])


def find_on_gpu(
    q: Any, k: Any, v: Any, others: tuple[Any, ...] | None, options: tuple
) -> tuple[Any, Launch | None, list[int]]:
    """Look up the launch of an earlier call of the same form; see `dispatch.find`."""
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
        launch = _launches.get(key)
    except TypeError:
        return None, None, pointers
    return key, launch, pointers


def execute_on_gpu(problem: Problem, infos: dict[str, ArrayInfo], key: Any, out: Any, lse: Any) -> Any:
    """Compute a checked problem; `out` and `lse` are the caller's own objects, which are returned if given."""
    device_id = infos["q"].device
    plan = make_plan(problem, device_info(device_id), settings())
    check_size(infos, plan.workspace)
    launch = Launch(problem, plan, device_id)
    if "out" in infos or "lse" in infos or "workspace" in infos:
        launch.set_extents(infos)
    if key is not None:
        if len(_launches) >= CACHE_SIZE:
            _launches.clear()  # atomic, unlike removing the oldest entry while other threads add theirs
        _launches[key] = launch
    pointers = [infos[name].pointer if name in infos else 0 for name in Operands._fields]
    workspace = infos["workspace"].array if "workspace" in infos else None
    return launch.run(pointers, out, lse, workspace)
