"""Tiles of precise_wgmma.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.problem import Traits
from .cost import Cost
from .features import Macros
from .tiles import OWN_INSTRUCTIONS, TILE_KEYS_BYTES, Device, Tile, round_up, tile_map_bytes
from .tiles_float32 import preparing_macros


def head_dim_bucket(head_dim: int) -> int:
    """0, 32, 64, 128 or 256: in between compilers run out of registers here and there."""
    return next((bucket for bucket in (0, 32, 64, 128, 256) if head_dim <= bucket), 0)


def macros(traits: Traits) -> Macros:
    """What only precise_wgmma.cu is told."""
    return ("WARPGROUPS", 1), *preparing_macros(traits)


def shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in precise_wgmma.cu."""
    bucket, bucket_v = head_dim_bucket(traits.head_dim), head_dim_bucket(traits.head_dim_v) or 64
    parts = 1 if traits.precision == "tf32" else 2
    panels, panels_v = (round_up(width, 64) // 64 * 128 for width in (bucket, bucket_v))
    size = round_up(tile.block_m * (2 * panels + 4), 1024)
    size += tile.stages * sum(round_up(tile.block_n * (parts * width + 16), 1024) for width in (panels, panels_v))
    size += tile.block_m * (24 + 32) + tile_map_bytes(traits, tile) + TILE_KEYS_BYTES + 16 + 4 * 8 * tile.stages
    return round_up(size, 1024)


def tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles that fit registers and shared memory."""
    widest = max(traits.head_dim, traits.head_dim_v)
    block_n = 64 if widest <= 128 else 32
    candidates = [Tile(128, block_n, 384, 2 if widest <= 128 else 1, prepared=True)]
    return [tile for tile in candidates if shared_memory(traits, tile) <= device.shared_memory_per_block]


def min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory and registers allow."""
    return 1


def limits(traits: Traits, device: Device) -> str | None:
    """Say what else the kernel refuses."""
    if not device.has_own_instructions:
        return OWN_INSTRUCTIONS
    if traits.precision == "tf32" and max(traits.head_dim, traits.head_dim_v) > 128:
        return "tf32 of head_dim above 128 takes more registers than there are"
    return None


COST = Cost(
    product=1.35e-06,
    weight=0.0,
    load=1.13e-06,
    tile=0.0486,
    latency=1.78,
    latency_load=0.0,
    copy=0.0,
    exposed_copy=0.000627,
    block=6.5,
    block_load=0.0551,
    merge=1.96,
    merge_split=0.0112,
    merge_byte=2.17e-07,
    prepare=6.28e-05,
    preparation=7.0,
    preparation_byte=3.78e-07,
)
COST_OF_TF32 = Cost(
    product=5.9e-07,
    weight=2.24e-06,
    load=9.78e-07,
    tile=0.0499,
    latency=1.27,
    latency_load=6.18e-06,
    copy=0.00113,
    exposed_copy=0.00984,
    block=5.85,
    block_load=0.0532,
    merge=2.16,
    merge_split=0.00933,
    merge_byte=3.42e-07,
    prepare=0.000102,
    preparation=6.08,
    preparation_byte=5.68e-07,
)


def cost(traits: Traits) -> Cost:
    """Constants for the cost model."""
    return COST_OF_TF32 if traits.precision == "tf32" else COST
