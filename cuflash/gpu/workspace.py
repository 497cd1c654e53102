"""Results and scratch memory, the caller's or allocated, and the launches that join partial results."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..plan.splits import Partial, partial_layout, result_axes
from ..problem.arrays import DTYPES, ArrayInfo
from ..problem.checks import BOUNDARY, workspace_size
from ..problem.problem import Operand, Problem
from . import compile as compile_module
from .combine import NUM_THREADS, Combination, combine_parts

if TYPE_CHECKING:
    from ..plan.plan import Plan


def combination_of(problem: Problem, num_splits: int) -> Combination:
    """How the partial results of a split problem are joined into its `out` and `lse`."""
    return _combination(
        result_axes(problem), problem.head_dim_v, problem.lse_dtype, problem.out, problem.lse, num_splits
    )


@lru_cache(maxsize=1024)  # a key more or less, as from step to step of decoding, changes nothing here
def _combination(
    rows: tuple[int, ...], head_dim_v: int, dtype: str, out: Operand, lse: Operand | None, num_splits: int
) -> Combination:
    partial = partial_layout(rows, head_dim_v, dtype)
    return combine_parts(rows, head_dim_v, [partial.out], [partial.lse], out, lse, num_splits, partial.strides)


class Split(NamedTuple):
    """What a launch with several splits needs beside one without."""

    combination: Combination
    function: Any
    """The compiled kernel."""
    size: int
    """Bytes of the workspace."""
    lse_offset: int
    """Where the partial lse begins in it."""
    partial: Partial

    def combine(self, workspace: int, out: int, lse: int) -> None:
        """Join what lies in a workspace, given addresses, on the current stream of the current device."""
        addresses = [workspace], [workspace + self.lse_offset], out, lse
        launch_combination(self.function, self.combination, *addresses)


def split_of(
    rows: tuple[int, ...], problem: Problem, out: Operand, lse: Operand | None, plan: Plan, device_id: int
) -> Split:
    """Work out what a plan with several splits needs, and compile it.

    `rows` are the `result_axes` of the call and `out` and `lse` its results; of the problem only what does not depend
    on lengths is used.
    """
    partial = partial_layout(rows, problem.head_dim_v, problem.lse_dtype)
    combination = _combination(rows, problem.head_dim_v, problem.lse_dtype, out, lse, plan.num_splits)
    function = compile_module.kernel_function(combination.build, device_id)
    return Split(combination, function, plan.workspace, partial.strides[0] * plan.num_splits, partial)


def launch_combination(
    function: Any, combination: Combination, outs: list[int], lses: list[int], out: int, lse: int
) -> None:
    """Join parts, given their addresses, on the current stream of the current device."""
    from cupy.cuda.function import CPointer

    for packed in combination.arguments(outs, lses, out, lse):
        memory = np.frombuffer(packed, np.uint8)  # the driver copies it at the launch
        function((combination.num_blocks,), (NUM_THREADS,), (CPointer(memory.ctypes.data),), 0)


class Result:
    """Shape, type and layout of a result to allocate."""

    __slots__ = ("dtype", "shape", "size", "strides")

    def __init__(self, shape: tuple[int, ...], operand: Operand) -> None:
        self.shape = shape
        self.dtype = DTYPES[operand.dtype]
        self.size = prod(shape)
        strides = operand.strides[len(operand.strides) - len(shape) :]
        # New results are packed, so falling strides mean C order.
        plain = 0 in shape or list(strides) == sorted(strides, reverse=True)
        self.strides = None if plain else strides

    def allocate(self, cupy: Any) -> Any:
        """Return a new array."""
        if self.strides is None:
            return cupy.empty(self.shape, self.dtype)
        memory = cupy.empty(self.size, self.dtype)
        return cupy.ndarray(self.shape, self.dtype, memory.data, self.strides)

    def allocate_with(self, cupy: Any, workspace: int) -> tuple[Any, Any]:
        """Return a new array and a workspace, in memory that lives as long as either."""
        offset = -(-self.size * self.dtype.itemsize // BOUNDARY) * BOUNDARY
        memory = cupy.empty(offset + workspace, np.uint8)
        return cupy.ndarray(self.shape, self.dtype, memory.data, self.strides), memory[offset:]


def allocate_with_workspace(cupy: Any, result: Result, out: Any, size: int, workspace: Any) -> tuple[Any, Any, int]:
    """Return `out` and a workspace, both allocated if not given, and the address of its first boundary.

    Under capture of a graph, `out` keeps an allocated workspace alive: the graph runs when the call has long returned,
    in memory that must be nobody else's.
    """
    if workspace is None and size:
        if not cupy.cuda.get_current_stream().is_capturing():
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
