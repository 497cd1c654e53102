"""Tiles of precise_decode.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.problem import Traits
from .cost import Cost
from .tiles import TILE_KEYS_BYTES, Device, Tile, resident_blocks, round_up, tile_map_bytes

_TEAM = 4
"""Warps of a block, each with keys of its own."""
_VECTORS = 8
"""Of 16 bytes, that a lane has on their way of keys, and of values."""


def head_dim_bucket(head_dim: int) -> int:
    """Powers of two from 32 on: what lanes divide among themselves."""
    return max(32, 1 << (head_dim - 1).bit_length())


def _vectors(head_dim: int) -> int:
    """Vectors of 16 bytes of a key or value."""
    return head_dim_bucket(head_dim) // 4


def _loads(head_dim: int, tile: Tile) -> int:
    """Vectors that a lane loads at a time; of short rows several lie side by side."""
    return tile.block_n * _vectors(head_dim) // 32


def _step(traits: Traits) -> int:
    """Keys that a warp takes at a time."""
    both = _vectors(traits.head_dim), _vectors(traits.head_dim_v)
    return max(_VECTORS * 32 // max(both), 32 // min(32, *both))


def shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in precise_decode.cu."""
    rows, bucket_v = tile.block_m, head_dim_bucket(traits.head_dim_v)
    side = max(32 // _vectors(traits.head_dim_v), 1)
    weights = round_up(rows * (side * round_up(tile.block_n // side, 4) + 1) * 4, 16)
    numbers = rows * (head_dim_bucket(traits.head_dim) + _TEAM * (bucket_v + 2))
    beside = rows * 48 + tile_map_bytes(traits, tile) + TILE_KEYS_BYTES
    return round_up(round_up(4 * numbers, 8) + _TEAM * weights + beside, 16)


COST = Cost(
    product=9.33e-06,
    weight=0,
    load=6.74e-06,
    tile=0.00332,
    latency=0.00329,
    latency_load=1.08e-05,
    copy=0.0119,
    exposed_copy=0.000239,
    block=6.47,
    block_load=0.00451,
    merge=2.46,
    merge_split=0.00474,
    merge_byte=8.08e-08,
    stream=8.6e-07,
)


def cost(traits: Traits) -> Cost:
    """Constants for the cost model."""
    return COST


def tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles whose rows fit the registers, most rows first. One row alone takes no less time than two."""
    candidates = [Tile(rows, _step(traits), 32 * _TEAM) for rows in (8, 4, 2)]
    return [
        tile
        for tile in candidates
        if _registers(traits, tile) <= 255 and shared_memory(traits, tile) <= device.shared_memory_per_block
    ]


def _registers(traits: Traits, tile: Tile) -> int:
    """Registers that a thread takes, roughly: output, keys and values on their way, sums, and what is beside them."""
    output = 4 * tile.block_m * max(_vectors(traits.head_dim_v) // 32, 1)
    keys, values = (_loads(head_dim, tile) for head_dim in (traits.head_dim, traits.head_dim_v))
    sums = min(32, tile.block_m * tile.block_n // max(32 // _vectors(traits.head_dim), 1))
    return output + 4 * (keys + values) + sums + 40 + 12 * (traits.num_arrays + traits.num_terms)


def min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    needed = _registers(traits, tile)
    registers = 128 if needed <= 128 else 168 if needed <= 168 else 255
    return resident_blocks(device, tile, shared_memory(traits, tile), registers)
