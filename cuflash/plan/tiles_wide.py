"""Tiles of precise_wide.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.problem import Traits
from .cost import Cost
from .features import Macros
from .tiles import TILE_KEYS_BYTES, Device, Tile, blocks_in_shared_memory, round_up, tile_map_bytes

_WARPS, _WARP_KEYS = 8, 16
"""Warps of a block, which share its rows, and the keys of a tile that are a warp's own."""
_PIECES_BYTES = 4 * _WARP_KEYS * 16 * 8
"""Of a warp's keys and values on their way."""


def head_dim_bucket(head_dim: int) -> int:
    """Multiples of 32: the warps of a scheduler have as many features as those of the others, or nearly."""
    return max(round_up(head_dim, 32), 64) if head_dim else 0


def macros(traits: Traits) -> Macros:
    """What only precise_wide.cu is told."""
    return (("WARPS_PER_ROW", _WARPS), ("KEY_SHARES", _WARPS))


def shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in precise_wide.cu."""
    weights = tile.block_n if traits.has_values else _WARP_KEYS
    numbers = tile.block_m * (head_dim_bucket(traits.head_dim) + weights + _WARPS)
    return round_up(8 * numbers + _WARPS * _PIECES_BYTES + tile_map_bytes(traits, tile) + TILE_KEYS_BYTES, 128)


def tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles that fit registers and shared memory."""
    candidates = [Tile(block_m, _WARPS * _WARP_KEYS, _WARPS * 32) for block_m in (32, 16)]
    return [tile for tile in candidates if shared_memory(traits, tile) <= device.shared_memory_per_block]


def _registers(traits: Traits, tile: Tile) -> int:
    """Registers that a thread takes, roughly: output, scores, operands on their way, and what is beside them."""
    pieces = -(-head_dim_bucket(traits.head_dim_v) // (16 * _WARPS)) if traits.has_values else 0
    return tile.block_m * (pieces + 2) + 66


def min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    by_memory = blocks_in_shared_memory(device, shared_memory(traits, tile))
    return max(1, min(by_memory, 2 if _registers(traits, tile) <= 128 else 1))


COST = Cost(
    product=3.91e-06,
    weight=1.66e-12,
    load=1.51e-05,
    tile=1.06,
    latency=1.72,
    latency_load=8.01e-09,
    copy=1.1e-05,
    exposed_copy=0.00591,
    block=1.37,
    block_load=0.127,
    merge=5.13,
    merge_split=0.117,
    merge_byte=8.32e-07,
    latency_weight=0.245,
)
COST_WITHOUT_VALUES = Cost(
    product=2.14e-06,
    weight=1.53e-19,
    load=3.55e-05,
    tile=0.407,
    latency=0.439,
    latency_load=6.23e-06,
    copy=0.00145,
    exposed_copy=0.0033,
    block=4.43,
    block_load=0.407,
    merge=2.92,
    merge_split=0.384,
    merge_byte=2.48e-05,
    latency_weight=0.0219,
)


def cost(traits: Traits) -> Cost:
    """Constants for the cost model: without values warps wait for nobody."""
    return COST if traits.has_values else COST_WITHOUT_VALUES
