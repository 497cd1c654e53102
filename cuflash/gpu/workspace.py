"""Results and scratch memory, the caller's or allocated, and the launches that merge partial results."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from operator import ge
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..plan.partial import partial_layout
from ..problem.arrays import DTYPES, ITEMSIZE, ArrayInfo
from ..problem.checks import BOUNDARY, workspace_size
from ..problem.problem import Operand, Problem, result_axes, result_rows
from .arguments import start
from .compile import kernel_function
from .merge import Merge, plan_merge
from .overlap import can_overlap, start_overlapping

if TYPE_CHECKING:
    from ..plan.plan import Plan


def merge_of_splits(problem: Problem, num_splits: int) -> Merge:
    """How the partial results of a split problem are merged into its `out` and `lse`."""
    traits, strides = problem.traits, problem.strides
    out, lse = (
        Operand(dtype, steps, ITEMSIZE[dtype] if 1 < traits.result_alignment < 16 else traits.result_alignment)
        if steps is not None
        else None
        for dtype, steps in ((traits.out_dtype, strides.out), (traits.lse_dtype, strides.lse))
    )
    return _merge(result_axes(problem), traits.head_dim_v, traits.lse_dtype, out, lse, num_splits)


@lru_cache(maxsize=1024)  # a key more or less, as from step to step of decoding, changes nothing here
def _merge(
    rows: tuple[int, ...], head_dim_v: int, dtype: str, out: Operand | None, lse: Operand | None, num_splits: int
) -> Merge:
    partial = partial_layout(rows, head_dim_v, dtype, num_splits)
    out = out or partial.out  # without values, of no features: nothing is read or written
    return plan_merge(rows, head_dim_v, [partial.out], [partial.lse], out, lse, num_splits, partial.strides)


class Split(NamedTuple):
    """What a launch with several splits needs beside one without."""

    merge: Merge
    function: Any
    """The compiled kernel."""
    lse_offset: int
    """Where the partial lse begins in it."""
    start: Any
    """What launches it: where a GPU can, it begins while blocks that it waits for are still at work."""

    def finish(self, workspace: int, out: int, lse: int) -> None:
        """Merge what lies in a workspace, given addresses, on the current stream of the current device."""
        merge = self.merge
        for packed in merge.arguments_of_stacked(workspace, workspace + self.lse_offset, out, lse):
            self.start(self.function, (merge.num_blocks,), (merge.num_threads,), merge.program.shared_memory, packed)


def split_of(problem: Problem, plan: Plan, device_id: int, compute_capability: int) -> Split:
    """Work out what a plan with several splits needs, and compile it."""
    merge = merge_of_splits(problem, plan.num_splits)
    function = kernel_function(merge.program, device_id)
    launches = start_overlapping if can_overlap(compute_capability) else start
    assert plan.partial is not None, "else there is one split"
    return Split(merge, function, plan.partial.sizes[0], launches)


def launch_merge(function: Any, merge: Merge, outs: list[int], lses: list[int], out: int, lse: int) -> None:
    """Merge parts, given their addresses, on the current stream of the current device."""
    for packed in merge.arguments(outs, lses, out, lse):
        start(function, (merge.num_blocks,), (merge.num_threads,), merge.program.shared_memory, packed)


class Result:
    """Shape, type and layout of a result to allocate."""

    __slots__ = ("dtype", "shape", "strides")

    def __init__(self, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...]) -> None:
        self.shape = shape
        self.dtype = DTYPES[dtype]
        strides = strides[len(strides) - len(shape) :]
        # New results are packed, so falling strides mean C order.
        self.strides = None if 0 in shape or all(map(ge, strides, strides[1:])) else strides

    def allocate(self, cupy: Any) -> Any:
        """Return a new array."""
        if self.strides is None:
            return cupy.empty(self.shape, self.dtype)
        memory = cupy.empty(prod(self.shape), self.dtype)
        return cupy.ndarray(self.shape, self.dtype, memory.data, self.strides)

    def allocate_with(self, cupy: Any, workspace: int) -> tuple[Any, Any]:
        """Return a new array and a workspace, in memory that lives as long as either."""
        offset = -(-prod(self.shape) * self.dtype.itemsize // BOUNDARY) * BOUNDARY
        memory = cupy.empty(offset + workspace, np.uint8)
        return cupy.ndarray(self.shape, self.dtype, memory.data, self.strides), memory[offset:]


def results_of(problem: Problem) -> tuple[Result | None, Result | None]:
    """Return `out` and `lse` as they would be allocated; None for those that the problem has not."""
    rows, traits, strides = result_rows(problem), problem.traits, problem.strides
    out = None if strides.out is None else Result((*rows, traits.head_dim_v), traits.out_dtype, strides.out)
    return out, None if strides.lse is None else Result(rows, traits.lse_dtype, strides.lse)


def is_capturing(cupy: Any) -> bool:
    """Whether the current stream captures a graph."""
    capturing: bool = cupy.cuda.get_current_stream().is_capturing()
    return capturing


def allocate_with_workspace(cupy: Any, result: Result, out: Any, size: int, workspace: Any) -> tuple[Any, Any, int]:
    """Return `out` and a workspace, both allocated if not given, and the address of its first boundary.

    Under capture of a graph, `out` keeps an allocated workspace alive: the graph runs when the call has long returned,
    in memory that must be nobody else's.
    """
    if workspace is None and size:
        if not is_capturing(cupy):
            workspace = cupy.empty(size, np.uint8)
        elif out is None:
            out, workspace = result.allocate_with(cupy, size)
        else:
            raise ValueError(
                f"workspace is None, expected a uint8 array of {size} bytes: out is given, the keys are split, and a "
                "captured graph needs the partial results' memory for as long as it lives"
            )
    if out is None:
        out = result.allocate(cupy)
    return out, workspace, -(-workspace.data.ptr // BOUNDARY) * BOUNDARY if workspace is not None else 0


def check_size(infos: dict[str, ArrayInfo], needed: int) -> None:
    """Raise ValueError if the caller's workspace is too small."""
    info = infos.get("workspace")
    if info is not None and workspace_size(info.pointer, info.shape[0]) < needed:
        raise ValueError(
            f"workspace has {workspace_size(info.pointer, info.shape[0])} bytes from a {BOUNDARY}-byte boundary on, "
            f"expected at least {needed}"
        )
