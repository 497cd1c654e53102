"""From a plan to the results: allocates them, fills the argument struct, launches."""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from ..log import DEBUG, is_enabled, log_call, log_plan
from ..plan.plan import MAX_GRID, Plan, make_plan
from ..plan.table import Device
from ..plan.tiles import APPENDING, PREPARING
from ..problem.arrays import extent
from ..problem.checks import workspace_size
from ..problem.problem import ARRAYS, Problem, array_shapes, itemsizes, shapes_of, written_places
from ..settings import settings
from .arguments import Packer, pack_pointers, start, strides_of
from .compile import kernel_function, nvrtc_version
from .installed import WGMMA_NVRTC
from .workspace import allocate_with_workspace, is_capturing, results_of, split_of

_OUT, _LSE = map(ARRAYS.index, ("out", "lse"))
_RESULTS = slice(_OUT, _LSE + 1)


Part = tuple[tuple[int], bytes, "tuple[int, ...] | None"]
"""One launch: its grid, the struct behind the addresses, and what to add to the addresses (None: nothing)."""


class Launch:
    """A planned and compiled call, ready for new addresses."""

    __slots__ = (
        "_append", "_block", "_cupy", "_extents", "_function", "_get_device", "_lse", "_out", "_parts", "_preparing",
        "_problem", "_split", "device_id", "plan",
    )  # fmt: skip

    def __init__(self, problem: Problem, plan: Plan, device_id: int, packer: Packer | None = None) -> None:
        packer = packer or Packer(problem, plan)
        self.plan = plan
        self.device_id = device_id
        self._problem = problem
        self._cupy = sys.modules["cupy"]
        self._get_device = self._cupy.cuda.runtime.getDevice
        self._function: Any = kernel_function(plan.program, device_id) if plan.num_blocks else None
        self._block = (plan.tile.num_threads,)
        self._parts = launch_parts(problem, plan, packer)
        preparation = plan.preparation
        self._preparing: Any = kernel_function(preparation.program, device_id) if preparation else None
        self._append: Any = None
        if plan.append is not None:
            function = kernel_function(plan.append.program, device_id)
            packed = self._parts[0][1] if self._parts else packer(problem, plan)
            self._append = function, (plan.append.num_blocks,), packed
        self._split = None
        if plan.partial is not None:
            self._split = split_of(problem, plan, device_id, device_info(device_id).compute_capability)
        self._out, self._lse = results_of(problem)
        self._extents: list[tuple[int, int, int, bool]] | None = None
        log_plan(problem, plan)

    @property
    def extents(self) -> list[tuple[int, int, int, bool]]:
        """Place of each array that is not empty, how far it reaches from its address, whether it is written."""
        if self._extents is None:
            problem = self._problem
            written = written_places(self._append is not None)
            shapes, sizes = shapes_of(problem), itemsizes(problem)
            found = []  # other threads see all of it or none
            for i, strides in enumerate(problem.strides):
                if strides is not None:
                    low, high = extent(0, shapes[i], strides, sizes[i])
                    if low < high:
                        found.append((i, low, high, i in written))
            self._extents = found
        return self._extents

    def results_apart(self, pointers: list[int]) -> bool:
        """Whether what is written certainly shares no memory with another array of the call (False: look closer)."""
        spans = sorted([(pointers[i] + low, pointers[i] + high, written) for i, low, high, written in self.extents])
        end = end_of_written = -sys.maxsize  # of those that begin in front of the next one
        for first, last, written in spans:
            if first < (end if written else end_of_written):
                return False
            if last > end:
                end = last
            if written and last > end_of_written:
                end_of_written = last
        return True

    def takes(self, workspace: Any, pointers: list[int]) -> bool:
        """Whether a given workspace certainly serves the call (False: look closer)."""
        if type(workspace) is not self._cupy.ndarray or workspace.dtype != np.uint8:
            return False
        data, size = workspace.data, workspace.size
        if workspace.ndim != 1 or workspace.strides != (1,) or data.device_id != self.device_id:
            return False
        low, high = data.ptr, data.ptr + size
        apart = all(pointers[i] + end <= low or high <= pointers[i] + begin for i, begin, end, _ in self.extents)
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


def launch_parts(problem: Problem, plan: Plan, packer: Packer) -> tuple[Part, ...]:
    """Launches that a plan needs: usually one, more beyond four leading axes or the largest grid."""
    if not plan.outer_axes and 0 < plan.num_blocks <= MAX_GRID:
        return (((plan.num_blocks,), packer(problem, plan), None),)
    strides = strides_of(problem, plan)
    parts: list[Part] = []
    for index in product(*(range(length) for _, length in plan.outer_axes)):
        offsets = tuple(
            sum(i * steps[axis] for i, (axis, _) in zip(index, plan.outer_axes, strict=True)) if steps else 0
            for steps in strides
        )
        for first_block in range(0, plan.num_blocks, MAX_GRID):
            grid = (min(MAX_GRID, plan.num_blocks - first_block),)
            parts.append((grid, packer(problem, plan, first_block), offsets if index else None))
    return tuple(parts)


@lru_cache(maxsize=64)
def device_info(device_id: int) -> Device:
    """Read a GPU's properties from the driver."""
    import cupy

    device = cupy.cuda.Device(device_id)
    attributes = device.attributes
    capability = int(device.compute_capability)
    memory = attributes["MaxSharedMemoryPerBlockOptin"] or attributes["MaxSharedMemoryPerBlock"]
    return Device(capability, memory, attributes["MultiProcessorCount"], nvrtc_version() >= WGMMA_NVRTC)
