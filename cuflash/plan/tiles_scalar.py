"""Tiles of forward_scalar.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.arrays import ITEMSIZE
from ..problem.problem import Traits
from .cost import Cost
from .tiles import TILE_KEYS_BYTES, Device, Tile, resident_blocks, round_up, tile_map_bytes


def head_dim_bucket(head_dim: int) -> int:
    """16, 32, 64, then multiples of 32 and, above 192, of 64."""
    if head_dim <= 64:
        return round_up(head_dim, 16 if head_dim <= 16 else 32)
    return round_up(head_dim, 32 if head_dim <= 192 else 64)


def _scalar_slice(bucket: int) -> int:
    return bucket if bucket <= 64 else 64 if bucket % 64 == 0 else 32


def _scalar_form(traits: Traits) -> tuple[int, int, int]:
    """Accumulator size and head dimensions, which decide what a tile takes."""
    itemsize = ITEMSIZE[traits.lse_dtype]
    return itemsize, head_dim_bucket(traits.head_dim), head_dim_bucket(traits.head_dim_v)


def shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in forward_scalar.cu."""
    itemsize, bucket, bucket_v = _scalar_form(traits)
    pad = 16 // itemsize
    q = tile.block_m * (bucket + pad)
    slices = 2 * tile.block_n * (max(_scalar_slice(bucket), _scalar_slice(bucket_v)) + pad)
    weights = (tile.block_m if bucket_v else 1) * (tile.block_n + pad)
    return round_up((q + slices + weights) * itemsize + tile_map_bytes(traits, tile) + TILE_KEYS_BYTES, 8)


# Threads hold block_m * 16 / num_threads rows each: 8 rows give the best ratio of arithmetic to shared-memory loads,
# until the output (rows x head_dim_v / 16 accumulators) no longer fits the registers beside the operands. Measured on
# an H200, TFLOP/s: float32 64x64 with 128 threads 33 (head_dim 64, 128), with 256 threads 29 (256, 512); float64 128x64
# 15.5 (64), 64x64 15.4 (128).
_SCALAR_TILES = {
    4: (
        Tile(64, 64, 128), Tile(64, 64, 256), Tile(32, 64, 128), Tile(32, 32, 64), Tile(16, 64, 128), Tile(16, 32, 64),
        Tile(8, 32, 32), Tile(4, 16, 32),
    ),
    8: (
        Tile(128, 64, 256), Tile(64, 64, 256), Tile(32, 64, 256), Tile(32, 32, 256), Tile(32, 32, 128),
        Tile(16, 64, 128), Tile(16, 32, 128), Tile(8, 32, 32), Tile(4, 16, 32),
    ),
}  # fmt: skip


COST = Cost(
    product=5.99e-06,
    weight=9.8e-05,
    load=2.51e-05,
    tile=0.21,
    latency=0.997,
    latency_load=0.00013,
    copy=0.0167,
    exposed_copy=1.02e-05,
    block=2.31,
    block_load=0.0944,
    merge=3.39,
    merge_split=0.0426,
    merge_byte=1.46e-07,
    start=0.0169,
)
COST_OF_DOUBLES = Cost(
    product=1.74e-05,
    weight=3.26e-06,
    load=9.27e-06,
    tile=0.175,
    latency=0.686,
    latency_load=0.000255,
    copy=3.25e-05,
    exposed_copy=0.0374,
    block=2.42,
    block_load=0.173,
    merge=4.16,
    merge_split=0.0446,
    merge_byte=2.76e-07,
)


def cost(traits: Traits) -> Cost:
    """Constants for the cost model."""
    return COST_OF_DOUBLES if traits.dtype == "float64" else COST


def tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles whose output fits the registers and whose operands fit the device's shared memory, tallest first."""
    itemsize, _, bucket_v = _scalar_form(traits)
    fitting: dict[str, Tile] = {}
    for tile in _SCALAR_TILES[itemsize]:
        rows = tile.block_m * 16 // tile.num_threads
        output_registers = rows * bucket_v // 16 * itemsize // 4
        limit = 64 if rows >= 8 else 128 if itemsize == 4 or (rows <= 2 and tile.block_n <= 32) else 112
        if output_registers <= limit and shared_memory(traits, tile) <= device.shared_memory_per_block:
            fitting.setdefault(str(tile), tile)
    return list(fitting.values())


def min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    itemsize, _, bucket_v = _scalar_form(traits)
    output_registers = tile.block_m * bucket_v // tile.num_threads * itemsize // 4
    registers = 168 if output_registers <= 32 else 255
    return resident_blocks(device, tile, shared_memory(traits, tile), registers)
