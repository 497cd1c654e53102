"""Tiles of forward_mma.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.problem import Problem
from .tiles import TILE_MAP_BYTES, Device, Tile, blocks_in_shared_memory, occupying_first, round_up


def mma_bucket(head_dim: int) -> int:
    """Multiples of 16 up to 96, of 32 up to 256, then of 64."""
    return round_up(head_dim, 16 if head_dim <= 96 else 32 if head_dim <= 256 else 64)


def _warps_per_row(problem: Problem) -> int:
    """Warps that share their rows, and pass weights to each other: two where the output is too wide for one."""
    return 2 if mma_bucket(problem.head_dim_v) > 128 else 1


def mma_shared_memory(problem: Problem, tile: Tile) -> int:
    """Bytes of `SharedTiles` in forward_mma.cu."""
    bucket, bucket_v = mma_bucket(problem.head_dim), mma_bucket(problem.head_dim_v)
    elements = tile.block_m * (max(bucket, bucket_v) + 8) + tile.stages * tile.block_n * (bucket + bucket_v + 16)
    shared = _warps_per_row(problem) > 1
    elements += (tile.block_m if shared else 1) * (tile.block_n + 8)
    rows, output, _ = _mma_registers(problem, tile)
    arrays = _has_arrays(problem)
    few_registers = tile.stages == 1 or (arrays if shared else output >= (80 if arrays else 112))
    maxima = rows * 4 * (tile.num_threads // 32 if few_registers else 1)
    exchange = tile.num_threads * 4 if shared else 128
    return round_up(2 * elements + tile.block_m * 48 + maxima + exchange + TILE_MAP_BYTES + 24 + 52, 16)


# Registers and shared memory are the limit: an instruction that multiplies 16 keys is worth 6 clocks of a tensor core,
# and what a warp of 32 rows reads for it 5 clocks of shared memory (16 rows: 8). So warps have 32 rows, two blocks of
# four warps or one of eight fill a multiprocessor, and above head_dim_v 128 two warps share their rows. Measured on an
# H200 at 4096 keys, TFLOP/s full / causal: head_dim 64 128x64 336 / 315, 128x32 300 / 275, 64x64 316 / 272; head_dim
# 128 128x64 391 / 374, 128x32 347 / 330, 64x64 298 / 278; head_dim 256 128x64 350 / 332, 64x64 with one buffer 325 /
# 316, 128x64 with 16 rows to each warp 305 / 294.
_MMA_TILES = (
    Tile(128, 64, 128, 2), Tile(128, 32, 128, 2), Tile(128, 64, 256, 2), Tile(128, 32, 256, 2), Tile(64, 64, 128, 2),
    Tile(64, 64, 128), Tile(64, 32, 128, 2), Tile(64, 32, 256, 2), Tile(64, 32, 128), Tile(32, 64, 128, 2),
    Tile(32, 64, 64, 2), Tile(32, 32, 64), Tile(16, 64, 32, 2), Tile(16, 32, 64), Tile(16, 32, 32), Tile(16, 16, 32),
)  # fmt: skip


def _mma_registers(problem: Problem, tile: Tile) -> tuple[int, int, int]:
    """Rows of a warp, and registers per thread that hold its output and its scores."""
    bucket_v, share = mma_bucket(problem.head_dim_v), _warps_per_row(problem)
    rows = tile.block_m * 32 * share // tile.num_threads if tile.num_threads >= 32 * share else 0
    return rows, rows * bucket_v // share // 32, rows * tile.block_n // share // 32


def _has_arrays(problem: Problem) -> bool:
    """Whether an array is read for every logit."""
    return problem.bias is not None or problem.mask is not None


def _is_plain(problem: Problem) -> bool:
    """Whether logits are scores times a factor, and need no registers beside them."""
    p = problem
    return not _has_arrays(p) and p.alibi_slopes is None and p.softcap == 0


def _has_wide_bias(problem: Problem) -> bool:
    return problem.bias is not None and problem.bias.dtype == "float64"


def mma_tiles(problem: Problem, device: Device) -> list[Tile]:
    """Tiles that fit registers and shared memory, in the order of `occupying_first`.

    What fits the registers was found by compiling.
    """
    p = problem
    arrays = _has_arrays(p)
    newest = device.compute_capability >= 100
    bucket_v = mma_bucket(p.head_dim_v)
    square = mma_bucket(p.head_dim) == bucket_v
    one_feature = (p.alibi_slopes is None) or (p.softcap == 0)  # their short forms take no more registers
    one_array = (p.bias is None) != (p.mask is None) and p.alibi_slopes is None and p.softcap == 0
    few = (arrays and newest and not one_array) or _has_wide_bias(p) or (bucket_v == 224 and not square)
    widest_output = 96 if few else 128
    if arrays:
        most = 160 if one_array and not few else 96
    else:
        most = 192 if square and (_is_plain(p) or (one_feature and not newest)) else 144 if newest else 160
    fitting = []
    for tile in _MMA_TILES:
        rows, output, scores = _mma_registers(problem, tile)
        if (
            rows in (16, 32)
            and output <= widest_output
            and (output + scores <= most or scores <= 32)
            and mma_shared_memory(problem, tile) <= device.shared_memory_per_block
        ):
            fitting.append(tile)
    return occupying_first(fitting, lambda tile: mma_min_blocks(problem, tile, device))


def mma_min_blocks(problem: Problem, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    p = problem
    rows, output, scores = _mma_registers(p, tile)
    queries = rows * mma_bucket(p.head_dim) // 64
    held = output * 5 // 4 + scores
    if _has_arrays(p) and p.alibi_slopes is None and p.softcap == 0 and not _has_wide_bias(p):
        held += 32  # of the arrays, on their way
    else:
        held += (queries if queries <= 32 else 0) + (0 if _is_plain(p) else 32)
    registers = 128 if held <= 64 else 168 if held <= 120 else 255
    by_memory = blocks_in_shared_memory(device, mma_shared_memory(problem, tile))
    return max(1, min(by_memory, 65536 // (tile.num_threads * registers)))
