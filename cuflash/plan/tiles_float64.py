"""Tiles of precise_float64.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.problem import Traits
from .cost import Cost
from .tiles import TILE_KEYS_BYTES, Device, Tile, resident_blocks, round_up, tile_map_bytes

FAST_FLOAT64 = (80, 90, 100)
"""Compute capabilities with tensor cores for float64; others multiply such numbers one by one."""


def head_dim_bucket(head_dim: int) -> int:
    """Multiples of 16: what an instruction sums over."""
    return round_up(head_dim, 16)


def shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in precise_float64.cu."""
    bucket, bucket_v = head_dim_bucket(traits.head_dim), head_dim_bucket(traits.head_dim_v)
    numbers = tile.block_m * bucket + tile.block_n * (bucket + bucket_v + 4)
    return round_up(8 * numbers + tile_map_bytes(traits, tile) + TILE_KEYS_BYTES, 16)


_TILES = (
    Tile(128, 32, 256), Tile(64, 16, 128), Tile(64, 32, 128), Tile(128, 16, 256), Tile(128, 64, 256),
    Tile(32, 32, 64), Tile(16, 32, 32), Tile(16, 16, 32),
)  # fmt: skip


COST = Cost(
    product=5.11e-06,
    weight=8.28e-06,
    load=2.94e-06,
    tile=0.236,
    latency=0.263,
    latency_load=0.000234,
    copy=0.000837,
    exposed_copy=0.00583,
    block=5.35,
    block_load=0.0612,
    merge=0.874,
    merge_split=0.0251,
    merge_byte=4.14e-07,
    latency_weight=0.0615,
)
COST_WITHOUT_VALUES = Cost(
    product=4.27e-06,
    weight=0.00012,
    load=8.25e-06,
    tile=0.0395,
    latency=0.389,
    latency_load=0.000249,
    copy=3.4e-05,
    exposed_copy=0.00499,
    block=4.41,
    block_load=0.0742,
    merge=3.31,
    merge_split=0.15,
    merge_byte=9.14e-07,
    latency_weight=0.0265,
)


def cost(traits: Traits) -> Cost:
    """Constants for the cost model: without values there is one copy to wait for in place of two."""
    return COST if traits.has_values else COST_WITHOUT_VALUES


def tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles that fit registers and shared memory."""
    return [
        tile
        for tile in _TILES
        if shared_memory(traits, tile) <= device.shared_memory_per_block and _registers(traits, tile) <= 255
    ]


def _registers(traits: Traits, tile: Tile) -> int:
    """Registers that a thread takes, roughly: output, scores, operands on their way, and what is beside them."""
    return head_dim_bucket(traits.head_dim_v) + tile.block_n + 80


def min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    registers = 168 if _registers(traits, tile) <= 168 else 255
    return resident_blocks(device, tile, shared_memory(traits, tile), registers)
