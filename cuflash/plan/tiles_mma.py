"""Tiles of forward_mma.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.problem import Traits
from .cost import Cost
from .features import Macros
from .tiles import Device, Tile, occupying_first, resident_blocks, round_up, tile_map_bytes


def head_dim_bucket(head_dim: int) -> int:
    """Multiples of 16 up to 96, of 32 up to 256, then of 64."""
    return round_up(head_dim, 16 if head_dim <= 96 else 32 if head_dim <= 256 else 64)


def _warps_per_row(traits: Traits) -> int:
    """Warps that share their rows, and pass weights to each other: two where the output is too wide for one."""
    return 2 if head_dim_bucket(traits.head_dim_v) > 128 else 1


def macros(traits: Traits) -> Macros:
    """What only forward_mma.cu is told."""
    return (("WARPS_PER_ROW", _warps_per_row(traits)),)


def shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in forward_mma.cu."""
    bucket, bucket_v = head_dim_bucket(traits.head_dim), head_dim_bucket(traits.head_dim_v)
    elements = tile.block_m * (max(bucket, bucket_v) + 8) + tile.stages * tile.block_n * (bucket + bucket_v + 16)
    shared = _warps_per_row(traits) > 1
    elements += (tile.block_m if shared else 1) * (tile.block_n + 8)
    rows, _, _ = _mma_registers(traits, tile)
    maxima = rows * 4 * (tile.num_threads // 32)
    exchange = tile.num_threads * 4 if shared else 128
    return round_up(2 * elements + tile.block_m * 48 + maxima + exchange + tile_map_bytes(traits, tile) + 24 + 52, 16)


# Registers and shared memory are the limit: an instruction that multiplies 16 keys is worth 6 clocks of a tensor core,
# and what a warp of 32 rows reads for it 5 clocks of shared memory (16 rows: 8). So warps have 32 rows, two blocks of
# four warps or one of eight fill a multiprocessor, and above head_dim_v 128 two warps share their rows. Measured on an
# H200 at 4096 keys, TFLOP/s full / causal: head_dim 64 128x64 336 / 315, 128x32 300 / 275, 64x64 316 / 272; head_dim
# 128 128x64 391 / 374, 128x32 347 / 330, 64x64 298 / 278; head_dim 256 128x64 350 / 332, 64x64 with one buffer 325 /
# 316, 128x64 with 16 rows to each warp 305 / 294.
_MMA_TILES = (
    Tile(128, 64, 128, 2), Tile(128, 32, 128, 2), Tile(128, 64, 256, 2), Tile(128, 32, 256, 2), Tile(64, 64, 128, 2),
    Tile(64, 64, 128), Tile(64, 32, 128, 2), Tile(64, 32, 256, 2), Tile(64, 32, 128), Tile(32, 64, 128, 2),
    Tile(32, 64, 64, 2), Tile(32, 32, 64), Tile(16, 64, 32, 2), Tile(16, 32, 32), Tile(16, 16, 32),
)  # fmt: skip
_LAST_TILE = Tile(16, 32, 64)
"""Three to five times as slow as others at head_dim 256 (measured), and the only one above that in 99 KB."""


COST = Cost(
    product=4.64e-07,
    weight=1.76e-06,
    load=7.38e-06,
    tile=0.133,
    latency=0.499,
    latency_load=1.42e-05,
    copy=0.0021,
    exposed_copy=0.00226,
    block=3.93,
    block_load=0.0138,
    merge=3.04,
    merge_split=0.0424,
    merge_byte=2.11e-07,
    stream=4.82e-07,
    start=0.00529,
)
COST_OF_SHARED_ROWS = Cost(
    product=2.89e-07,
    weight=1.59e-05,
    load=1.83e-05,
    tile=0.245,
    latency=0.816,
    latency_load=7.41e-06,
    copy=0.000382,
    exposed_copy=0.00227,
    block=6.87,
    block_load=0.00904,
    merge=5.61,
    merge_split=0.0103,
    merge_byte=1.93e-07,
    stream=4.82e-07,
)


_OF_KEYS = "product", "weight", "load", "tile", "latency", "latency_load", "copy", "exposed_copy"
_IN_PAGES = 1.75
"""Tiles of keys in pages take so many times as long: whoever copies a row looks up its page, and waits for it."""


def cost(traits: Traits) -> Cost:
    """Constants for the cost model; those of two warps that share their rows are others."""
    constants = COST if _warps_per_row(traits) == 1 else COST_OF_SHARED_ROWS
    if not traits.page_table:
        return constants
    return constants._replace(**{name: _IN_PAGES * getattr(constants, name) for name in _OF_KEYS})


def _mma_registers(traits: Traits, tile: Tile) -> tuple[int, int, int]:
    """Rows of a warp, and registers per thread that hold its output and its scores."""
    bucket_v, share = head_dim_bucket(traits.head_dim_v), _warps_per_row(traits)
    rows = tile.block_m * 32 * share // tile.num_threads if tile.num_threads >= 32 * share else 0
    return rows, rows * bucket_v // share // 32, rows * tile.block_n // share // 32


def _has_wide_bias(traits: Traits) -> bool:
    return traits.bias == "float64"


def tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles that fit registers and shared memory, in the order of `occupying_first`.

    What fits the registers was found by compiling.
    """
    arrays = traits.num_arrays > 0
    newest = device.compute_capability >= 100
    bucket_v = head_dim_bucket(traits.head_dim_v)
    square = head_dim_bucket(traits.head_dim) == bucket_v
    # The short form of one term takes no more registers; storing in float32 does, beside it.
    one_term = traits.num_terms < 2 and traits.out_dtype == traits.dtype
    one_array = traits.num_arrays == 1 and traits.num_terms == 0
    few = (arrays and newest and not one_array) or _has_wide_bias(traits) or (bucket_v == 224 and not square)
    few |= arrays and traits.page_table
    widest_output = 96 if few else 128
    if arrays:
        most = 160 if one_array and not few else 96
    else:
        most = (
            160
            if traits.page_table
            else 192
            if square and (traits.num_terms == 0 or (one_term and not newest))
            else 144
            if newest
            else 160
        )

    def fits(tile: Tile) -> bool:
        rows, output, scores = _mma_registers(traits, tile)
        return (
            rows in (16, 32)
            and output <= widest_output
            and (output + scores <= most or scores <= 32)
            and shared_memory(traits, tile) <= device.shared_memory_per_block
        )

    fitting = list(filter(fits, _MMA_TILES))
    if not fitting and not traits.page_table:
        fitting = list(filter(fits, (_LAST_TILE,)))
    return occupying_first(fitting, lambda tile: min_blocks(traits, tile, device))


def min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    rows, output, scores = _mma_registers(traits, tile)
    queries = rows * head_dim_bucket(traits.head_dim) // 64
    held = output * 5 // 4 + scores
    plain = traits.num_arrays == traits.num_terms == 0
    if traits.num_arrays > 0 and traits.num_terms == 0 and not _has_wide_bias(traits):
        held += 32  # of the arrays, on their way
    else:
        held += (queries if queries <= 32 else 0) + (0 if plain else 32)
    registers = 128 if held <= 64 else 168 if held <= 120 else 255
    return resident_blocks(device, tile, shared_memory(traits, tile), registers)
