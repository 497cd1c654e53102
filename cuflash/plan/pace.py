"""How long a thin problem takes by its tile and splits, where a kernel's pace is known: what a plan weighs them by.

Microseconds on an H200; other GPUs differ in all of them alike. They were fitted to 50 problems of one batch - 4 to 16
heads, 77 to 2048 queries, 1000 to 4096 keys, head_dim 64 to 256 - with every tile and up to 16 splits: the tiles and
splits chosen by them take 0.6 % longer than the best ones, on average, and 11 % at worst.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..problem.problem import Problem

COMBINE = 4.0
"""Of the second launch, which joins partial results."""
MEGABYTE = 0.65
"""Of partial results, written and read again."""
ENOUGH_FASTER = 0.98
"""Share of the time for which more splits are worth having."""

_RELATIVE = {128: (1.0, 1.45), 64: (0.74, 1.08), 32: (0.65, 0.65)}
"""By rows of a tile: its time if the block has a multiprocessor for itself, and if two of them share it."""


class Pace(NamedTuple):
    """Times of a tile."""

    block: float
    """Beside its keys: the block finds its tile, loads the first keys, stores."""
    alone: float
    """For as many keys as it has, in a block that has a multiprocessor for itself."""
    shared: float
    """The same for one of as many blocks as a multiprocessor holds."""
    partial: float
    """For the partial results of a split, of all tiles."""


def pace_of(problem: Problem, block_m: int, block_n: int, num_rows: int, share: bool) -> Pace | None:
    """Pace of a tile; None where it is not known.

    Parameters
    ----------
    problem
        What is computed.
    block_m, block_n
        Rows and keys of the tile.
    num_rows
        Queries of all heads.
    share
        Whether a multiprocessor holds two blocks.
    """
    if block_m not in _RELATIVE:
        return None
    by_width = (problem.head_dim + problem.head_dim_v) / 200
    alone, shared = ((0.43 + by_width) * block_n / 64 * relative for relative in _RELATIVE[block_m])
    partial = num_rows * problem.head_dim_v * 4e-6 * MEGABYTE
    return Pace(1 + by_width, alone, shared if share else alone, partial)


class Walk(NamedTuple):
    """What blocks have to do, without splits."""

    num_blocks: int
    num_tiles: int
    """Tiles of keys that a block walks through, at most."""
    average: float
    """Of that number, what blocks walk through on average; 1: it is the same for all."""
    num_multiprocessors: int
    resident_blocks: int
    """Blocks that all multiprocessors hold together."""


@lru_cache(maxsize=4096)
def times_by_splits(walk: Walk, pace: Pace, most: int) -> tuple[float, ...]:
    """Time with one split, two ... `most`; less where more would only make blocks wait for each other."""
    useful = max(1, 2 * walk.resident_blocks // max(walk.num_blocks, 1))
    return tuple(_time(walk, pace, splits) for splits in range(1, min(most, useful) + 1))


def _time(walk: Walk, pace: Pace, splits: int) -> float:
    blocks = walk.num_blocks * splits
    longest = -(-walk.num_tiles // splits)
    if blocks <= walk.num_multiprocessors:
        time = pace.block + longest * pace.alone
    else:
        # The longest block is alone in the end; those that are alike come in waves.
        tile = walk.average * pace.shared + (1 - walk.average) * pace.alone
        waves = -(-blocks // walk.resident_blocks) if walk.average == 1 else blocks / walk.resident_blocks
        time = max(pace.block + longest * tile, waves * (pace.block + longest * walk.average * pace.shared))
    return time + COMBINE + splits * pace.partial if splits > 1 else time


def fewest_splits(walk: Walk, pace: Pace, most: int) -> int:
    """Find the smallest number of splits for which a higher one is not worth having."""
    times = times_by_splits(walk, pace, most)
    return next(splits for splits, time in enumerate(times, 1) if ENOUGH_FASTER * time <= min(times))
