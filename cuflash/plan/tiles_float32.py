"""Tiles of precise_float32.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from collections.abc import Callable

from ..problem.problem import Traits
from .cost import Cost
from .features import Macros
from .tiles import (
    PREPARING,
    REGISTERS,
    TILE_KEYS_BYTES,
    Device,
    Tile,
    resident_blocks,
    round_up,
    tile_map_bytes,
)

Bucket = Callable[[int], int]
"""Head dimension of the compiled kernel that serves a given one."""


def head_dim_bucket(head_dim: int) -> int:
    """Multiples of 32 up to 128, then of 128: in between compilers run out of registers here and there."""
    return round_up(head_dim, 32 if head_dim <= 128 else 128)


def _warps_per_row(traits: Traits) -> int:
    """Warps that share their rows, each with at most 256 features of the output."""
    return 1 if head_dim_bucket(traits.head_dim_v) <= 256 else 2


def preparing_macros(traits: Traits) -> Macros:
    """What prepare_pairs.cu is told."""
    return (("PRODUCTS", 1 if traits.precision == "tf32" else 3),)


def macros(traits: Traits) -> Macros:
    """What only precise_float32.cu is told, and what prepares for it."""
    return ("WARPS_PER_ROW", _warps_per_row(traits)), *preparing_macros(traits)


def _rows(num_rows: int, bucket: int) -> int:
    """Bytes of `PairRows` of precise/pairs.cuh."""
    return round_up(num_rows * (4 * bucket + 16 + 4), 16)


def _prepared_row(traits: Traits, bucket: int) -> int:
    """`prepared_bytes` of precise/prepared_rows.cuh."""
    return (2 if traits.precision == "tf32" else 4) * bucket + 16


def prepared_row(bucket_of: Bucket, traits: Traits) -> tuple[int, int]:
    """Bytes that a row of k and of v takes in a workspace, for a kernel with such buckets."""
    bucket, bucket_v = bucket_of(traits.head_dim), bucket_of(traits.head_dim_v)
    return _prepared_row(traits, bucket), _prepared_row(traits, bucket_v) if bucket_v else 0


def preparing_memory(bucket_of: Bucket, traits: Traits) -> int:
    """Bytes of `SharedTiles` in prepare_pairs.cu, for a kernel with such buckets."""
    return _rows(PREPARING.block_n, max(map(bucket_of, (traits.head_dim, traits.head_dim_v))))


def shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in precise_float32.cu."""
    bucket, bucket_v = head_dim_bucket(traits.head_dim), head_dim_bucket(traits.head_dim_v) or 16
    size = _rows(tile.block_m, bucket)
    if tile.prepared:
        size += tile.block_n * (_prepared_row(traits, bucket) + _prepared_row(traits, bucket_v) + 2 * 16)
    else:
        size += _rows(tile.block_n, max(bucket, bucket_v))
    size += tile.num_threads // 32 * 64 * tile.block_n if _warps_per_row(traits) > 1 else 32 * 4
    size += tile.block_m * (24 + 32)
    return round_up(size + tile_map_bytes(traits, tile) + TILE_KEYS_BYTES, 16)


def _prepared(*tiles: Tile) -> tuple[Tile, ...]:
    return tuple(tile._replace(prepared=True) for tile in tiles)


# Where keys and values are prepared, blocks have nothing to share but their queries, and low ones drift apart: one
# multiplies while another weighs. TFLOP/s on an H200, 4096 keys, head_dim 128: 64x64p 98, as 128x64p 93.
_NARROW = (
    Tile(64, 64, 128), Tile(64, 32, 128), Tile(32, 32, 64), Tile(16, 32, 32), Tile(16, 16, 32),
    *_prepared(Tile(64, 64, 128), Tile(64, 32, 128)),
)  # fmt: skip
_WIDE = (
    Tile(64, 32, 128), Tile(32, 16, 64), Tile(16, 16, 32),
    *_prepared(Tile(128, 32, 256), Tile(64, 32, 128)),
)  # fmt: skip
_SHARED = (
    Tile(64, 16, 256), Tile(32, 16, 128), Tile(16, 16, 64), *_prepared(Tile(64, 16, 256), Tile(32, 16, 128)),
)  # fmt: skip
"""Where two warps share their rows."""


COST = Cost(
    product=1.63e-06,
    weight=0,
    load=3.71e-05,
    tile=0.000728,
    latency=1.79,
    latency_load=0,
    copy=0,
    exposed_copy=0.0125,
    block=8.84,
    block_load=0.0201,
    merge=2.05,
    merge_split=0.0141,
    merge_byte=2.55e-07,
    prepare=0.000122,
    preparation=2.53,
    preparation_byte=4.86e-07,
)
COST_OF_TF32 = Cost(
    product=1.33e-07,
    weight=1.6e-05,
    load=2.86e-05,
    tile=0.0259,
    latency=1.22,
    latency_load=1.29e-06,
    copy=0.0015,
    exposed_copy=0.0111,
    block=7.85,
    block_load=0.0171,
    merge=2.72,
    merge_split=0.0177,
    merge_byte=1.2e-07,
    prepare=0.000104,
    preparation=3.83,
    preparation_byte=4.55e-07,
)


def cost(traits: Traits) -> Cost:
    """Constants for the cost model."""
    return COST_OF_TF32 if traits.precision == "tf32" else COST


def tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles that fit registers and shared memory."""
    candidates = _SHARED if _warps_per_row(traits) > 1 else _NARROW if traits.head_dim_v <= 128 else _WIDE
    return [
        tile
        for tile in candidates
        if shared_memory(traits, tile) <= device.shared_memory_per_block
        and _registers(traits, tile, device) <= min(255, REGISTERS // tile.num_threads)
    ]


def _registers(traits: Traits, tile: Tile, device: Device) -> int:
    """Registers that a thread takes, roughly: output, scores and sums, options, and what is beside them.

    Compilers for newer devices take some more, so that wide heads are left to another kernel there.
    """
    output = head_dim_bucket(traits.head_dim_v) // _warps_per_row(traits) * 5 // 8
    scores = tile.block_n * 3 // 2 if tile.prepared else tile.block_n * 5 // 4
    options = 12 * (traits.num_arrays + traits.num_terms)
    return output + scores + options + (30 if device.compute_capability <= 90 else 80)


def min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    needed = _registers(traits, tile, device)
    registers = 128 if needed <= 128 else 168 if needed <= 168 else 255
    return resident_blocks(device, tile, shared_memory(traits, tile), registers)
