"""Tiles of forward_decode.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.problem import Traits
from .cost import Cost
from .tiles import TILE_KEYS_BYTES, Device, Tile, blocks_in_shared_memory, round_up, tile_map_bytes


def decode_bucket(head_dim: int) -> int:
    """Multiples of 64: eight lanes load as many neighbouring features of a value."""
    return round_up(head_dim, 64)


def decode_limits(traits: Traits, device: Device) -> str | None:
    """What else it refuses."""
    return None if traits.alignment == 16 else "rows of q, k, v and out must lie in vectors of 16 bytes"


def decode_shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in forward_decode.cu."""
    bucket_v = decode_bucket(traits.head_dim_v)
    pair = 2 if bucket_v > 192 else 1
    team = tile.num_threads // (32 * pair)
    shares = team // 2 * (64 * bucket_v + 512 * pair)
    pairs = 128 * tile.block_n * pair * (team if pair > 1 else 1)
    beside = 32 * decode_bucket(traits.head_dim) + 16 * 48 + tile_map_bytes(traits) + TILE_KEYS_BYTES
    return round_up(shares + pairs + beside, 16)


# Memory is the limit, and what counts is how many bytes are on their way: 64 registers of each thread.
_DECODE_TILES = {
    128: (Tile(16, 32, 256),),
    256: (Tile(16, 16, 256),),
    512: (Tile(16, 16, 256),),
}
"""By the features of a key and a value together, at most."""

COST = Cost(
    product=6.49e-07,
    weight=2.69e-06,
    load=2.27e-05,
    tile=0.00348,
    latency=0.00796,
    latency_load=1.04e-06,
    copy=0.000309,
    exposed_copy=0.000305,
    block=3.67,
    block_load=0.0214,
    merge=6.34,
    merge_split=0.0924,
    merge_byte=4.9e-07,
    stream=4.45e-07,
)


def decode_cost(traits: Traits) -> Cost:
    """Constants for the cost model."""
    return COST


def _features(traits: Traits) -> int:
    return decode_bucket(traits.head_dim) + decode_bucket(traits.head_dim_v)


def decode_tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles that fit shared memory."""
    tiles = next(tiles for most, tiles in _DECODE_TILES.items() if _features(traits) <= most)
    return [tile for tile in tiles if decode_shared_memory(traits, tile) <= device.shared_memory_per_block]


def decode_min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    by_memory = blocks_in_shared_memory(device, decode_shared_memory(traits, tile))
    return max(1, min(by_memory, 65536 // (tile.num_threads * 255)))
