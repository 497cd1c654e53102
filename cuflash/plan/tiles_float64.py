"""Tiles of precise_float64.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.problem import Traits
from .cost import Cost
from .tiles import TILE_KEYS_BYTES, Device, Tile, blocks_in_shared_memory, round_up, tile_map_bytes

FAST_FLOAT64 = (80, 90, 100)
"""Compute capabilities with tensor cores for float64; others multiply such numbers one by one."""


def float64_bucket(head_dim: int) -> int:
    """Multiples of 16: what an instruction sums over."""
    return round_up(head_dim, 16)


def float64_shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in precise_float64.cu."""
    bucket, bucket_v = float64_bucket(traits.head_dim), float64_bucket(traits.head_dim_v)
    numbers = tile.block_m * bucket + tile.block_n * (bucket + bucket_v + 4)
    return round_up(8 * numbers + tile_map_bytes(traits, tile) + TILE_KEYS_BYTES, 16)


_TILES = (
    Tile(128, 32, 256), Tile(64, 16, 128), Tile(64, 32, 128), Tile(128, 16, 256), Tile(128, 64, 256),
    Tile(32, 32, 64), Tile(16, 32, 32), Tile(16, 16, 32),
)  # fmt: skip


COST = Cost(
    product=6.31e-06,
    weight=1.95e-05,
    load=8.86e-06,
    tile=0.23,
    latency=0.369,
    latency_load=0.000204,
    copy=0.000114,
    exposed_copy=0.00441,
    block=5.82,
    block_load=0.0702,
    merge=3.96,
    merge_split=0.0279,
    merge_byte=5.61e-07,
    latency_weight=0.0752,
)
COST_WITHOUT_VALUES = Cost(
    product=3.66e-06,
    weight=0.000177,
    load=5.84e-06,
    tile=0.0391,
    latency=0.48,
    latency_load=0.000308,
    copy=0.00014,
    exposed_copy=0.00817,
    block=5.63,
    block_load=0.0555,
    merge=4.66,
    merge_split=0.215,
    merge_byte=4.96e-07,
    latency_weight=0.0454,
)


def float64_cost(traits: Traits) -> Cost:
    """Constants for the cost model: without values there is one copy to wait for in place of two."""
    return COST if traits.has_values else COST_WITHOUT_VALUES


def float64_tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles that fit registers and shared memory."""
    return [
        tile
        for tile in _TILES
        if float64_shared_memory(traits, tile) <= device.shared_memory_per_block and _registers(traits, tile) <= 255
    ]


def _registers(traits: Traits, tile: Tile) -> int:
    """Registers that a thread takes, roughly: output, scores, operands on their way, and what is beside them."""
    return float64_bucket(traits.head_dim_v) + tile.block_n + 80


def float64_min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    registers = 168 if _registers(traits, tile) <= 168 else 255
    by_memory = blocks_in_shared_memory(device, float64_shared_memory(traits, tile))
    return max(1, min(by_memory, 65536 // (tile.num_threads * registers)))
