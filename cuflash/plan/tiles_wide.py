"""Tiles of precise_wide.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.problem import Traits
from .cost import Cost
from .features import Macros
from .tiles import TILE_KEYS_BYTES, Device, Tile, blocks_in_shared_memory, round_up, tile_map_bytes


def wide_bucket(head_dim: int) -> int:
    return round_up(head_dim, 64)


def _warps(traits: Traits) -> int:
    return 8 if max(traits.head_dim, traits.head_dim_v) > 256 else wide_bucket(max(traits.head_dim, traits.head_dim_v)) // 64


def wide_shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in precise_wide.cu."""
    bucket, warps = wide_bucket(traits.head_dim), tile.num_threads // 32
    size = tile.block_m * bucket * 8 + warps * 4 * 2048 + warps * tile.block_m * 128 + warps * tile.block_m * 8
    return round_up(size + tile_map_bytes(traits) + TILE_KEYS_BYTES, 128)


def wide_tiles(traits: Traits, device: Device) -> list[Tile]:
    if not traits.has_values:
        return []
    w = _warps(traits)
    tiles = [Tile(m, 16 * w, 32 * w) for m in (32, 16)]
    return [tile for tile in tiles if w > 1 and wide_shared_memory(traits, tile) <= device.shared_memory_per_block]


def wide_min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    by_memory = blocks_in_shared_memory(device, wide_shared_memory(traits, tile))
    return max(1, min(by_memory, 65536 // (tile.num_threads * 255)))
