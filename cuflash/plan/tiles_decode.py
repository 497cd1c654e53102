"""Tiles of forward_decode.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.problem import Traits
from .cost import Cost
from .tiles import TILE_KEYS_BYTES, Device, Tile, resident_blocks, round_up, tile_map_bytes


def head_dim_bucket(head_dim: int) -> int:
    """Multiples of 64: eight lanes load as many neighbouring features of a value."""
    return round_up(head_dim, 64)


def _pair(bucket_v: int) -> int:
    """Warps that share the features of a key."""
    return 2 if bucket_v > 192 else 1


def shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in forward_decode.cu."""
    bucket_v = head_dim_bucket(traits.head_dim_v)
    pair = _pair(bucket_v)
    team = tile.num_threads // (32 * pair)
    shares = team * 16 * (4 * (bucket_v + 8) + 8)
    pairs = 128 * tile.block_n * pair * (team if pair > 1 else 1)
    beside = 32 * head_dim_bucket(traits.head_dim) + 16 * 48 + tile_map_bytes(traits, tile) + TILE_KEYS_BYTES
    return round_up(shares + pairs + beside, 16)


# Memory is the limit, and what counts is how many bytes are on their way: 64 registers of each thread. Two blocks share
# a multiprocessor, so that one reads while the other begins or ends: 6 % more bytes a second than one of twice as many
# threads. By the features of a key and a value that a warp has, at most.
_DECODE_TILES = {256: Tile(16, 32, 128), 512: Tile(16, 16, 128)}

COST = Cost(
    product=7.25e-07,
    weight=4.4e-07,
    load=2.77e-06,
    tile=0.00988,
    latency=0.0437,
    latency_load=5.99e-06,
    copy=0.00738,
    exposed_copy=0.00041,
    block=5.25,
    block_load=0.0278,
    merge=2.95,
    merge_split=0.00165,
    merge_byte=2.33e-07,
    stream=4.3e-07,
)


def cost(traits: Traits) -> Cost:
    """Constants for the cost model."""
    return COST


def tiles(traits: Traits, device: Device) -> list[Tile]:
    """The tile, if it fits shared memory."""
    bucket_v = head_dim_bucket(traits.head_dim_v)
    features = (head_dim_bucket(traits.head_dim) + bucket_v) // _pair(bucket_v)
    if traits.page_table and _pair(bucket_v) > 1 and device.compute_capability >= 120:
        features += 64  # for sm_120 it would spill
    tile = next(tile for most, tile in _DECODE_TILES.items() if features <= most)
    return [tile] if shared_memory(traits, tile) <= device.shared_memory_per_block else []


def min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    return resident_blocks(device, tile, shared_memory(traits, tile), 255)
