"""Tiles of precise_decode.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.problem import Traits
from .cost import Cost
from .tiles import TILE_KEYS_BYTES, Device, Tile, blocks_in_shared_memory, round_up, tile_map_bytes

_TEAM = 4
"""Warps of a block, each with keys of its own."""
_VECTORS = 8
"""Of 16 bytes, that a lane has on their way of keys, and of values."""


def precise_decode_bucket(head_dim: int) -> int:
    """Powers of two from 32 on: what lanes divide among themselves."""
    return max(32, 1 << (head_dim - 1).bit_length())


def precise_decode_limits(traits: Traits, device: Device) -> str | None:
    """What else it refuses."""
    return None if traits.alignment == 16 else "rows of q, k, v and out must lie in vectors of 16 bytes"


def _itemsize(traits: Traits) -> int:
    return 8 if traits.dtype == "float64" else 4


def _vectors(traits: Traits, head_dim: int) -> int:
    """Vectors of 16 bytes of a key or value."""
    return precise_decode_bucket(head_dim) * _itemsize(traits) // 16


def _step(traits: Traits) -> int:
    """Keys that a warp takes at a time."""
    both = [_vectors(traits, head_dim) for head_dim in (traits.head_dim, traits.head_dim_v)]
    return max(_VECTORS * 32 // max(both), 32 // min(32, *both))


def precise_decode_shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in precise_decode.cu."""
    itemsize, rows = _itemsize(traits), tile.block_m
    side = max(32 // _vectors(traits, traits.head_dim_v), 1)
    weights = round_up(rows * (side * round_up(tile.block_n // side, 16 // itemsize) + 1) * itemsize, 16)
    numbers = rows * (precise_decode_bucket(traits.head_dim) + _TEAM * (precise_decode_bucket(traits.head_dim_v) + 2))
    beside = rows * 48 + tile_map_bytes(traits, tile) + TILE_KEYS_BYTES
    return round_up(round_up(numbers * itemsize, 8) + _TEAM * weights + beside, 16)


COST = Cost(
    product=7.25e-07,
    weight=4.4e-07,
    load=5.5e-06,
    tile=0.00988,
    latency=0.0437,
    latency_load=1.2e-05,
    copy=0.015,
    exposed_copy=0.0008,
    block=5.25,
    block_load=0.0278,
    merge=2.95,
    merge_split=0.00165,
    merge_byte=2.33e-07,
    stream=8.6e-07,
)
COST_OF_DOUBLES = COST._replace(stream=1.72e-06, load=1.1e-05, latency_load=2.4e-05, copy=0.03)


def precise_decode_cost(traits: Traits) -> Cost:
    """Constants for the cost model."""
    return COST_OF_DOUBLES if traits.dtype == "float64" else COST


def precise_decode_tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles whose rows fit the registers, most rows first."""
    tiles = [Tile(rows, _step(traits), 32 * _TEAM) for rows in (16, 8, 4, 2, 1)]
    return [
        tile
        for tile in tiles
        if _registers(traits, tile) <= 255 and precise_decode_shared_memory(traits, tile) <= device.shared_memory_per_block
    ]


def _registers(traits: Traits, tile: Tile) -> int:
    """Registers that a thread takes, roughly: output, keys and values on their way, sums, and what is beside them."""
    loads, output = 0, 0
    for head_dim in (traits.head_dim, traits.head_dim_v):
        vectors = _vectors(traits, head_dim)
        output = 4 * tile.block_m * max(vectors // 32, 1)
        loads += 4 * tile.block_n * max(vectors // 32, 1) // max(32 // vectors, 1)
    sums = min(32, tile.block_m * tile.block_n) * _itemsize(traits) // 4
    return output + loads + sums + 60


def precise_decode_min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    needed = _registers(traits, tile)
    registers = 128 if needed <= 128 else 168 if needed <= 168 else 255
    by_memory = blocks_in_shared_memory(device, precise_decode_shared_memory(traits, tile))
    return max(1, min(by_memory, 65536 // (tile.num_threads * registers)))
