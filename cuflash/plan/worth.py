"""How large a tile is worth having for the lengths of a problem; the plan chooses the tile by it."""

from __future__ import annotations

from typing import NamedTuple

from ..problem.problem import Problem
from .pace import Walk, pace_of, times_by_splits
from .splits import VisibleKeys, splits_allowed
from .table import Device, KernelSpec

SMALLEST_USEFUL_TILE = 16
"""Rows below which a tile saves nothing: its keys are loaded all the same."""
LARGEST_TILE = 1024
TALL_TILE = 64
"""Rows from which on a taller tile saves so little that splitting the keys for it may cost more."""
HEIGHTS = 128, 64, 32
"""Of tiles that are weighed by their pace. The lowest has four warps, which hide what they wait for, only where two of
them share their rows."""
KEYS_OF_A_TILE = 64
"""Of the same."""
FEW_KEYS = 1024
"""For which tall tiles, alone on a multiprocessor, begin and end too often (measured at head_dim 256, causal)."""
VERY_FEW_KEYS = 128
"""For which they do so in any case (measured at head_dim 160)."""
WIDE_HEAD_DIM = 128
"""Above which tall tiles have a multiprocessor for themselves."""


class TileWorth(NamedTuple):
    """Size that a tile is worth having."""

    rows: int
    keys: int
    alone: bool
    """Whether no two tiles will share a multiprocessor."""


class Rows(NamedTuple):
    """Queries of a problem, as tiles take them."""

    per_head: int
    """Packed sequences: on average."""
    group_size: int
    """Query heads per key head."""
    num_planes: int
    """Query heads in all batches."""

    @property
    def total(self) -> int:
        """Queries of all heads."""
        return self.per_head * self.num_planes

    def heads_per_tile(self, block_m: int) -> int:
        """Query heads that share a tile: all of a group where one head's rows do not fill it, else one."""
        return self.group_size if self.per_head < block_m else 1

    def num_tiles(self, block_m: int) -> int:
        """Tiles of so many rows."""
        packed_heads = self.heads_per_tile(block_m)
        return -(-self.per_head * packed_heads // block_m) * (self.num_planes // packed_heads)


def worth_a_tile(problem: Problem, spec: KernelSpec, rows: Rows, device: Device, keys: VisibleKeys) -> TileWorth:
    """Size that a tile is worth having: not above the rows of one key head, and low enough for all multiprocessors.

    Tiles below `TALL_TILE` rows read keys and values so often that splitting the keys of taller ones is better. How
    tall these are to be is weighed by their pace where a kernel has one.

    Parameters
    ----------
    problem
        What is computed.
    spec
        The kernel.
    rows
        The queries.
    device
        The GPU.
    keys
        What a tile sees; none: not known.
    """
    by_head, by_device = rows.per_head * rows.group_size, rows.total // device.num_multiprocessors
    wide = spec.latency_bound and problem.head_dim_v > WIDE_HEAD_DIM
    if problem.op == "attention":
        by_head = 1 << max(by_head - 1, 0).bit_length()  # two tiles of half the height would be as many rows
    fastest = _fastest_tile(problem, spec, rows, device, keys, by_head)
    if fastest is not None:
        limit = fastest
    else:
        if by_device < TALL_TILE:
            parts = splits_allowed(keys.most, spec.splits_from, has_pace=False)
            rows_of_a_block = rows.total * parts // device.num_multiprocessors
            by_device = TALL_TILE if spec.latency_bound else min(TALL_TILE, rows_of_a_block)
        limit = min(by_head, by_device)
        # Where the output is wide, nothing is computed while one tall tile begins and another one ends, and there is
        # more of that the fewer keys they see.
        if wide and 0 < keys.most <= (VERY_FEW_KEYS if problem.window_right is None else FEW_KEYS):
            limit = min(limit, TALL_TILE)
    useful_rows = max(SMALLEST_USEFUL_TILE, min(LARGEST_TILE, 1 << limit.bit_length() - 1 if limit else 0))
    # Narrow tiles where a quarter of what wide ones compute would be for nothing.
    by_64, by_32 = (-(-keys.most // size) * size for size in (64, 32))
    useful_keys = 32 if 0 < 4 * by_32 <= 3 * by_64 else LARGEST_TILE
    alone = rows.total <= useful_rows * device.num_multiprocessors or (wide and fastest is not None)
    return TileWorth(useful_rows, useful_keys, alone)


def _fastest_tile(
    problem: Problem, spec: KernelSpec, rows: Rows, device: Device, keys: VisibleKeys, tallest: int
) -> int | None:
    """Rows of the tile that takes the least time; None if tall ones are many anyway, or nothing is known."""
    wide = problem.head_dim_v > WIDE_HEAD_DIM
    resident = device.num_multiprocessors * (1 if wide else 2)
    if not spec.latency_bound or keys.most == 0 or rows.num_tiles(HEIGHTS[0]) > resident:
        return None
    most_splits = splits_allowed(keys.most, spec.splits_from, has_pace=True)
    times: dict[int, float] = {}
    for height in HEIGHTS if wide else HEIGHTS[:-1]:
        pace = pace_of(problem, height, KEYS_OF_A_TILE, rows.total, not wide)
        if height <= tallest and pace is not None:
            num_tiles = -(-keys.most // KEYS_OF_A_TILE)
            walk = Walk(rows.num_tiles(height), num_tiles, keys.average, device.num_multiprocessors, resident)
            times[height] = min(times_by_splits(walk, pace, most_splits))
    return min(times, key=times.__getitem__) if times else None
