"""Tiles of forward_points.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.arrays import ITEMSIZE
from ..problem.problem import Traits
from .cost import Cost
from .tiles import TILE_KEYS_BYTES, Device, Tile, resident_blocks, round_up, tile_map_bytes

_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)


def head_dim_bucket(head_dim: int) -> int:
    """Smaller steps than those of others: each feature of a point is a good part of the work."""
    return next((bucket for bucket in _BUCKETS if head_dim <= bucket), round_up(head_dim, 16))


def _itemsize(traits: Traits) -> int:
    return ITEMSIZE[traits.lse_dtype]


def shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in forward_points.cu."""
    features = head_dim_bucket(traits.head_dim) + head_dim_bucket(traits.head_dim_v)
    size = features * (tile.block_n * _itemsize(traits) + 16)
    return round_up(size + tile_map_bytes(traits, tile) + TILE_KEYS_BYTES, 16)


# Instructions are the limit, and what is read from shared memory comes close to it: of a key all lanes of a warp read
# the same, so that four queries of a thread (two in double precision) share a reading. Then a pair takes 5.5
# instructions in float32, of which the exponential's holds its unit for the time of 8, and 1.1 for each feature of key
# and value; in double precision 20 and 1.1 of its own unit.
# Tiles of few rows are for few queries: four and sixteen lanes share theirs.
_POINTS_TILES = {
    4: (
        Tile(512, 256, 128), Tile(256, 256, 128), Tile(128, 256, 128), Tile(32, 512, 128), Tile(8, 512, 128),
        Tile(32, 256, 128), Tile(8, 256, 128),
    ),
    8: (Tile(256, 128, 128), Tile(128, 128, 128), Tile(32, 256, 128), Tile(8, 256, 128), Tile(32, 128, 128)),
}  # fmt: skip


COST = Cost(
    product=5.75e-06,
    weight=3.3e-05,
    load=0.000184,
    tile=0.003,
    latency=2.3,
    latency_load=0.000683,
    copy=0.0121,
    exposed_copy=0.0118,
    block=2.82,
    block_load=0.255,
    merge=5.76,
    merge_split=0.137,
    merge_byte=2.24e-08,
)
COST_OF_DOUBLES = Cost(
    product=9.33e-06,
    weight=0.000191,
    load=0.000105,
    tile=0.00649,
    latency=1.04,
    latency_load=0.00221,
    copy=0.0108,
    exposed_copy=0.0106,
    block=7.13,
    block_load=0.201,
    merge=8.61,
    merge_split=0.146,
    merge_byte=6.15e-08,
)


def cost(traits: Traits) -> Cost:
    """Constants for the cost model."""
    return COST_OF_DOUBLES if traits.dtype == "float64" else COST


def _queries(tile: Tile) -> int:
    """Of a thread."""
    return max(1, tile.block_m // tile.num_threads)


def _registers(traits: Traits, tile: Tile) -> int:
    """Registers that a thread takes, roughly: query, output, reference and scores of its rows, and what is beside."""
    row = head_dim_bucket(traits.head_dim) + head_dim_bucket(traits.head_dim_v) + 14
    terms = 24 if traits.num_arrays + traits.num_terms else 0
    beside = 80 if _itemsize(traits) == 8 else 48 if tile.block_m >= tile.num_threads else 56
    return _queries(tile) * (row * _itemsize(traits) // 4 + terms) + beside


def tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles that fit registers and shared memory."""
    most = 4 if traits.num_arrays + traits.num_terms == 0 else 2
    most = most * 4 // _itemsize(traits)
    return [
        tile
        for tile in _POINTS_TILES[_itemsize(traits)]
        if _queries(tile) <= most and shared_memory(traits, tile) <= device.shared_memory_per_block
    ]


def min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    registers = min(round_up(_registers(traits, tile), 8), 255)
    return resident_blocks(device, tile, shared_memory(traits, tile), registers)
