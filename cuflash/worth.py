"""How large a tile is worth having for the lengths of a problem; the plan chooses the tile by it."""

from __future__ import annotations

from typing import NamedTuple

from .kernels import Device, KernelSpec
from .problem import Problem
from .splits import FAST_ENOUGH, splits_allowed

SMALLEST_USEFUL_TILE = 16
"""Rows below which a tile saves nothing: its keys are loaded all the same."""
LARGEST_TILE = 1024
TALL_TILE = 64
"""Rows from which on a taller tile saves so little that splitting the keys for it costs more, if there are few."""
SPLIT_TILE = 128
"""Rows of tiles that are worth splitting keys for, as soon as their parts fill the device."""
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


def worth_a_tile(
    problem: Problem, spec: KernelSpec, rows: int, group_size: int, num_planes: int, device: Device, num_keys: int
) -> TileWorth:
    """Size that a tile is worth having: not above the rows of one key head, and low enough for all multiprocessors.

    Tiles below `TALL_TILE` rows read keys and values so often that splitting the keys of taller ones is better; where
    there are keys enough to split those of `SPLIT_TILE` rows, that is better still (measured on an H200, 64 to 512
    queries of 8 and 16 heads: up to 39 % with 16384 keys, up to 24 % with 4096).

    Parameters
    ----------
    problem
        What is computed.
    spec
        The kernel.
    rows
        Queries of one head (for packed sequences: on average).
    group_size
        Query heads per key head.
    num_planes
        Query heads in all batches.
    device
        The GPU.
    num_keys
        Keys that a tile sees, at most; 0: not known.
    """
    rows_in_all, by_head = rows * num_planes, rows * group_size
    by_device = rows_in_all // device.num_multiprocessors
    wide = spec.latency_bound and problem.head_dim_v > WIDE_HEAD_DIM
    split = num_keys >= spec.splits_from
    most_splits = splits_allowed(num_keys) if split else 1
    tall_parts = -(-by_head // SPLIT_TILE) * (num_planes // group_size) * most_splits
    if spec.latency_bound and split and tall_parts >= FAST_ENOUGH * device.num_multiprocessors:
        by_device = max(by_device, SPLIT_TILE)
    elif by_device < TALL_TILE:
        rows_of_a_block = rows_in_all * most_splits // device.num_multiprocessors
        by_device = TALL_TILE if spec.latency_bound else min(TALL_TILE, rows_of_a_block)
        # Four warps with 16 rows each, of which two share theirs, take less time than with 32.
        if wide and not split and rows_in_all <= TALL_TILE // 2 * device.num_multiprocessors:
            by_device = TALL_TILE // 2
    if problem.op == "attention":
        by_head = 1 << max(by_head - 1, 0).bit_length()  # two tiles of half the height would be as many rows
    limit = min(by_head, by_device)
    # Where the output is wide, nothing is computed while one tall tile begins and another one ends, and there is more
    # of that the fewer keys they see.
    few_keys = VERY_FEW_KEYS if problem.window_right is None else FEW_KEYS
    if wide and 0 < num_keys <= few_keys:
        limit = min(limit, TALL_TILE)
    useful_rows = max(SMALLEST_USEFUL_TILE, min(LARGEST_TILE, 1 << limit.bit_length() - 1 if limit else 0))
    # Narrow tiles where a quarter of what wide ones compute would be for nothing.
    by_64, by_32 = (-(-num_keys // size) * size for size in (64, 32))
    useful_keys = 32 if 0 < 4 * by_32 <= 3 * by_64 else LARGEST_TILE
    return TileWorth(useful_rows, useful_keys, rows_in_all <= useful_rows * device.num_multiprocessors)
