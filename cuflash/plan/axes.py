"""Leading axes as kernels walk them: as few as strides allow."""

from __future__ import annotations

from collections.abc import Sequence

from ..problem.problem import Problem
from .partial import partial_of, partial_strides

BATCH_AXES = 4
"""Leading axes that a kernel walks."""

Axes = tuple[tuple[int, int], ...]


def merge_axes(shape: tuple[int, ...], operands: Sequence[tuple[int, ...]]) -> Axes:
    """Merge neighbouring axes that every operand steps through as one, given its strides.

    Each result is the last axis of those it stands for and the product of their lengths; axes of length 1 are left out.
    """
    merged: list[tuple[int, int]] = []
    for axis in range(len(shape) - 1, -1, -1):
        length = shape[axis]
        if length == 1:
            continue
        if merged:
            inner_axis, inner_length = merged[-1]
            if all(strides[axis] == strides[inner_axis] * inner_length for strides in operands):
                merged[-1] = (inner_axis, inner_length * length)
                continue
        merged.append((axis, length))
    return tuple(reversed(merged))


def walked_axes(problem: Problem, is_split: bool) -> tuple[Axes, Axes]:
    """Leading axes that need a launch each, and those that the kernel walks; merged if they are too many."""
    if problem.traits.is_varlen:
        return (), ()
    if len(problem.batch) <= BATCH_AXES:
        return (), tuple(enumerate(problem.batch))
    written = partial_strides(problem, partial_of(problem, 1)) if is_split else problem.strides
    merged = merge_axes(problem.batch, [strides for strides in written if strides is not None])
    split = max(0, len(merged) - BATCH_AXES)
    return merged[:split], merged[split:]
