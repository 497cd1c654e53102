"""Tiles of forward_scalar.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.problem import Problem
from .tiles import TILE_KEYS_BYTES, TILE_MAP_BYTES, Device, Tile, blocks_in_shared_memory, round_up


def scalar_bucket(head_dim: int) -> int:
    """16, 32, 64, then multiples of 32 and, above 192, of 64."""
    if head_dim <= 64:
        return 16 if head_dim <= 16 else round_up(head_dim, 32)
    return round_up(head_dim, 32 if head_dim <= 192 else 64)


def _scalar_slice(bucket: int) -> int:
    return bucket if bucket <= 64 else 64 if bucket % 64 == 0 else 32


def _scalar_form(problem: Problem) -> tuple[int, int, int]:
    """Accumulator size and head dimensions, which decide what a tile takes."""
    itemsize = 8 if problem.dtype == "float64" else 4
    return itemsize, scalar_bucket(problem.head_dim), scalar_bucket(problem.head_dim_v)


def scalar_shared_memory(problem: Problem, tile: Tile) -> int:
    """Bytes of `SharedTiles` in forward_scalar.cu."""
    itemsize, bucket, bucket_v = _scalar_form(problem)
    pad = 16 // itemsize
    q = tile.block_m * (bucket + pad)
    slices = 2 * tile.block_n * (max(_scalar_slice(bucket), _scalar_slice(bucket_v)) + pad)
    weights = tile.block_m * (tile.block_n + pad)
    return round_up((q + slices + weights) * itemsize + TILE_MAP_BYTES + TILE_KEYS_BYTES, 16)


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


def scalar_tiles(problem: Problem, device: Device) -> list[Tile]:
    """Tiles whose output fits the registers and whose operands fit the device's shared memory, tallest first."""
    itemsize, _, bucket_v = _scalar_form(problem)
    fitting = []
    for tile in _SCALAR_TILES[itemsize]:
        rows = tile.block_m * 16 // tile.num_threads
        output_registers = rows * bucket_v // 16 * itemsize // 4
        limit = 64 if rows >= 8 else 128 if itemsize == 4 or (rows <= 2 and tile.block_n <= 32) else 112
        if output_registers <= limit and scalar_shared_memory(problem, tile) <= device.shared_memory_per_block:
            fitting.append(tile)
    return fitting


def scalar_min_blocks(problem: Problem, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    itemsize, _, bucket_v = _scalar_form(problem)
    output_registers = tile.block_m * bucket_v // tile.num_threads * itemsize // 4
    registers = 168 if output_registers <= 32 else 255
    by_memory = blocks_in_shared_memory(device, scalar_shared_memory(problem, tile))
    return max(1, min(by_memory, 65536 // (tile.num_threads * registers)))
