"""Where the partial results lie that blocks write which share the keys of a tile."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from ..problem.arrays import ITEMSIZE, contiguous_strides
from ..problem.problem import Operand, Problem, Strides, Traits, alignment_of, result_axes

PARTIAL_COLUMNS = 3
"""Of a row in place of its lse: the largest logit, the sum of exponentials relative to that, and an offset that all
parts have in common (`store_sum` of cuda_src/common/store.cuh)."""


class Partial(NamedTuple):
    """Where the results of a split lie in a workspace: packed, all `out` first, in the type of the computation.

    Those of one split after the other; but each row's sums lie together, as lanes that merge them read them together.
    """

    out: Operand
    lse: Operand
    """With `PARTIAL_COLUMNS`."""
    strides: tuple[int, int]
    """Bytes from split to split of `out` and `lse`."""
    sizes: tuple[int, int]
    """Bytes of all splits."""


@lru_cache(maxsize=1024)
def partial_layout(rows: tuple[int, ...], head_dim_v: int, dtype: str, num_parts: int) -> Partial:
    """Layout of the partial results of `rows` x `head_dim_v`; of 0 features `out` takes no memory."""
    itemsize, num_rows, steps = ITEMSIZE[dtype], prod(rows), contiguous_strides(rows, 1)
    part_of_sums = PARTIAL_COLUMNS * itemsize
    row_of_sums = part_of_sums * num_parts
    out, lse = (
        Operand(dtype, (*[step * row for step in steps], itemsize), alignment_of(0, (num_rows, 1), (row, itemsize)))
        for row in (max(head_dim_v, 1) * itemsize, row_of_sums)
    )
    out_step = num_rows * head_dim_v * itemsize
    return Partial(out, lse, (out_step, part_of_sums), (out_step * num_parts, num_rows * row_of_sums))


def partial_of(problem: Problem, num_splits: int) -> Partial:
    """Layout of a problem's partial results."""
    return partial_layout(result_axes(problem), problem.traits.head_dim_v, problem.traits.lse_dtype, num_splits)


def partial_traits(traits: Traits) -> Traits:
    """Return the traits of a problem whose results are partial: packed, so that they move like the inputs."""
    out_dtype = traits.lse_dtype if traits.has_values else traits.out_dtype
    return traits._replace(out_dtype=out_dtype, result_alignment=16)


def partial_strides(problem: Problem, partial: Partial) -> Strides:
    """Strides of a problem whose `out` and `lse` are those of one split."""
    q, k, v, _, _, *others = problem.strides
    return Strides(q, k, v, partial.out.strides if problem.traits.has_values else None, partial.lse.strides, *others)
