"""Keys of thin problems split over several blocks: into how many parts, and where the partial results lie."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from ..problem.arrays import ITEMSIZE, contiguous_strides
from ..problem.problem import Operand, Problem, alignment_of
from .pace import Pace, Walk, fewest_splits

MAX_SPLITS = 128
MIN_KEYS_PER_SPLIT = 256
"""A split that saves fewer is not worth its cost: a second launch (5 us on an H200) and, per row, 8 Dv bytes of partial
results, written and read. A block walks its keys in 19 ns each with forward_mma, 41 with forward_wmma (128x64) and 200
with forward_scalar (64x64): 256 keys are 5 us or more."""
MIN_KEYS_PER_PACED_SPLIT = 128
"""Where the cost of splits is weighed."""
FAST_ENOUGH = 0.85
"""Share of the best speed for which fewer splits are preferred: each one adds partial results."""
PARTIAL_COLUMNS = 3
"""Of a row in place of its lse: the largest logit, the sum of exponentials relative to that, and an offset that all
parts have in common (`store_sum` of cuda_src/common/store.cuh)."""
ENOUGH_THREADS = 256
"""Threads that keep a multiprocessor busy; with more of them blocks only share what there is."""


def choose_splits(walk: Walk, num_keys: int, from_keys: int, pace: Pace | None) -> int:
    """Parts into which the keys of each tile are split; 1 where blocks fill the device, or where keys are few.

    Where the pace is not known, s splits are ceil(num_blocks s / resident_blocks) waves of blocks that walk through
    ceil(num_tiles / s) tiles each. The fewest splits win that reach `FAST_ENOUGH` of the best speed.

    Parameters
    ----------
    walk
        Blocks and the tiles that they walk through.
    num_keys
        Keys that a block sees.
    from_keys
        Keys below which they are not split.
    pace
        Times of a tile.
    """
    most = min(splits_allowed(num_keys, from_keys, pace is not None), walk.num_tiles // 2)
    if most < 2 or not 0 < walk.num_blocks < walk.resident_blocks:
        return 1
    splits = _fewest_splits(walk, most) if pace is None else fewest_splits(walk, pace, most)
    return -(-walk.num_tiles // -(-walk.num_tiles // splits))  # without those that would be left with no tile


@lru_cache(maxsize=4096)
def _fewest_splits(walk: Walk, most: int) -> int:
    times = [
        -(-walk.num_blocks * splits // walk.resident_blocks) * -(-walk.num_tiles // splits)
        for splits in range(1, most + 1)
    ]
    return next(splits for splits, time in enumerate(times, 1) if FAST_ENOUGH * time <= min(times))


def splits_allowed(num_keys: int, from_keys: int, has_pace: bool) -> int:
    """Parts that the number of keys alone would allow, if they are split from so many on."""
    fewest = MIN_KEYS_PER_PACED_SPLIT if has_pace else MIN_KEYS_PER_SPLIT
    return max(1, min(MAX_SPLITS, num_keys // fewest)) if num_keys >= from_keys else 1


class VisibleKeys(NamedTuple):
    """Keys that tiles of neighbouring queries see by position."""

    most: int
    average: float
    """Of that number."""


def visible_keys(problem: Problem, seqlen_q: int, seqlen_k: int, offset: int | None, num_queries: int) -> VisibleKeys:
    """Keys that tiles of `num_queries` neighbouring queries see, an upper bound; `offset` None: anything."""
    left, right = problem.window_left, problem.window_right
    most, by_first = seqlen_k, seqlen_k
    if right is not None:
        if left is not None:
            most = min(most, left + right + num_queries)
        if offset is not None:
            most = min(most, seqlen_q + offset + right)
            by_first = offset + right + 1
    if left is not None and offset is not None:
        most = min(most, seqlen_k - offset + left)
    if most <= 0:
        return VisibleKeys(0, 1.0)
    # From query to query one key more, until there are most.
    missing = max(0, most - max(0, by_first))
    on_average = missing**2 / (2 * seqlen_q) if missing < seqlen_q else missing - seqlen_q / 2
    return VisibleKeys(most, 1 - on_average / most)


def result_axes(problem: Problem) -> tuple[int, ...]:
    """Lengths of the axes that the operands `out` and `lse` share."""
    if problem.op == "attention_varlen":
        return problem.seqlen_q, problem.num_heads_q
    return *problem.batch, problem.num_heads_q, problem.seqlen_q


class Partial(NamedTuple):
    """Where the results of a split lie in a workspace: packed, all `out` first, in the type of the computation."""

    out: Operand
    lse: Operand
    """With `PARTIAL_COLUMNS`."""
    strides: tuple[int, int]
    """Bytes from split to split of `out` and `lse`."""


@lru_cache(maxsize=1024)
def partial_layout(rows: tuple[int, ...], head_dim_v: int, dtype: str) -> Partial:
    """Layout of the partial results of `rows` x `head_dim_v`."""
    widths = head_dim_v, PARTIAL_COLUMNS
    out, lse = (_packed((*rows, width), dtype) for width in widths)
    out_step, lse_step = (prod(rows) * width * ITEMSIZE[dtype] for width in widths)
    return Partial(out, lse, (out_step, lse_step))


def _packed(shape: tuple[int, ...], dtype: str) -> Operand:
    strides = contiguous_strides(shape, ITEMSIZE[dtype])
    return Operand(dtype, strides, alignment_of(0, shape, strides))


def partial_of(problem: Problem) -> Partial:
    """Layout of a problem's partial results."""
    return partial_layout(result_axes(problem), problem.head_dim_v, problem.lse_dtype)


def partial_results(problem: Problem) -> Problem:
    """Return the problem whose `out` and `lse` are those of one split."""
    partial = partial_of(problem)
    return problem._replace(out_dtype=partial.out.dtype, out=partial.out, lse=partial.lse)


def split_strides(problem: Problem) -> tuple[int, int]:
    """Bytes from split to split of the partial `out` and `lse`."""
    return partial_of(problem).strides
