"""Tiles of forward_wmma.cu, what they take of a multiprocessor, and what the kernel refuses."""

from __future__ import annotations

from ..problem.arrays import ITEMSIZE
from ..problem.problem import Traits
from .cost import Cost
from .tiles import TILE_KEYS_BYTES, Device, Tile, blocks_in_shared_memory, occupying_first, round_up, tile_map_bytes


def head_dim_bucket(head_dim: int) -> int:
    """Multiples of 16 up to 96, then of 32."""
    return round_up(head_dim, 16 if head_dim <= 96 else 32)


def shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in forward_wmma.cu."""
    bucket, bucket_v = head_dim_bucket(traits.head_dim), head_dim_bucket(traits.head_dim_v)
    itemsize = ITEMSIZE[traits.dtype]
    q_and_k = (tile.block_m + tile.block_n) * (bucket * itemsize + 16)
    v = tile.block_n * (bucket_v + 8) * itemsize
    scores = tile.block_m * (tile.block_n + 8) * 4
    factors = tile.block_m * 4
    return round_up(q_and_k + v + scores + factors + tile_map_bytes(traits, tile) + TILE_KEYS_BYTES + 24, 32)


def limits(traits: Traits, device: Device) -> str | None:
    """Refuse float32 that is to be float32, and formats that the device does not multiply."""
    if traits.dtype == "float32" and traits.precision != "tf32":
        return "multiplies float32 as tf32, and only under precision='tf32'"
    if traits.dtype != "float16" and device.compute_capability < 80:
        name = "tf32" if traits.dtype == "float32" else traits.dtype
        return f"multiplies {name} from sm_80 on, the device is {device.arch}"
    return None


# Wavefronts of shared memory are the limit (two thirds of their rate on an H200; the rest is latency, as there are but
# eight warps). Per 32 rows and 64 keys, in clocks of a multiprocessor: head_dim 64 multiplies for 192, reads K and V
# for 128 if a warp has 32 rows (256 with 16), passes scores and weights through for 192 and computes exp2 for 128;
# head_dim 128 multiplies for 384, reads for 320 and passes for 192. So warps have 32 rows where the output fits the
# registers, 16 elsewhere, and two blocks of four warps wait for less than one of eight. Measured, TFLOP/s: head_dim 64
# 128x64 210, 128x32 200, 64x64 190; head_dim 128 128x32 245, 64x64 197, 64x32 191; head_dim 256 64x32 219, 128x32 195.
_WMMA_TILES = (
    Tile(128, 64, 128), Tile(128, 32, 128), Tile(64, 64, 128), Tile(64, 32, 128), Tile(128, 64, 256),
    Tile(128, 32, 256), Tile(64, 16, 128), Tile(32, 64, 64), Tile(32, 32, 64), Tile(32, 16, 64), Tile(16, 64, 32),
    Tile(16, 32, 32), Tile(16, 16, 32),
)  # fmt: skip


COST = Cost(
    product=5.35e-07,
    weight=2.76e-06,
    load=3.87e-05,
    tile=0.124,
    latency=1.02,
    latency_load=1.03e-05,
    copy=5.53e-05,
    exposed_copy=0.000821,
    block=5.24,
    block_load=0.0227,
    merge=4.34,
    merge_split=0.0807,
    merge_byte=1.42e-07,
)
COST_OF_TF32 = Cost(
    product=2.38e-06,
    weight=1.89e-06,
    load=4.83e-05,
    tile=0.0425,
    latency=0.651,
    latency_load=0.000154,
    copy=5.09e-05,
    exposed_copy=0.00478,
    block=3.7,
    block_load=0.0321,
    merge=5.96,
    merge_split=0.113,
    merge_byte=6.51e-08,
)


def cost(traits: Traits) -> Cost:
    """Constants for the cost model."""
    return COST_OF_TF32 if traits.precision == "tf32" else COST


def _wmma_registers(traits: Traits, tile: Tile) -> tuple[int, int]:
    """Registers per thread that hold the output and the scores of a tile."""
    fragments = tile.block_m * 2 // tile.num_threads
    return fragments * head_dim_bucket(traits.head_dim_v) // 2, fragments * tile.block_n // 2


def tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles that fit registers and shared memory, in the order of `occupying_first`.

    What fits the registers beside the output was found by compiling; before sm_80 operands take more of them.
    """
    newer = device.compute_capability >= 80
    aligned = traits.alignment == 16
    arrays = traits.num_arrays > 0
    simple = traits.head_dim <= 128 and traits.dtype != "float32" and aligned
    simple &= device.compute_capability >= 90 or not arrays
    together = 96 if device.compute_capability < 75 else 160 if newer and simple else 128
    fitting = []
    for tile in _WMMA_TILES:
        output, scores = _wmma_registers(traits, tile)
        tall = tile.block_m == tile.num_threads
        widest = 64 if output <= (80 if newer else 64) else 32 if output <= 96 or (newer and aligned) else 16
        if traits.dtype == "float32":  # operands of twice the size
            widest = 64 if output <= 48 else 32 if output <= 80 else 16
        if (
            output <= 128
            and tile.block_n <= widest
            and not (tall and output + scores > together)
            and shared_memory(traits, tile) <= device.shared_memory_per_block
        ):
            fitting.append(tile)
    return occupying_first(fitting, lambda tile: blocks_in_shared_memory(device, shared_memory(traits, tile)))


def min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    output, scores = _wmma_registers(traits, tile)
    need = output * 5 // 4 + scores + (8 if max(traits.head_dim, traits.head_dim_v) > 96 else 0)
    need += 48 if traits.dtype == "float32" else 0
    warps = 16 if need <= 76 else 12 if need <= 112 else 8
    by_memory = blocks_in_shared_memory(device, shared_memory(traits, tile))
    return max(1, min(by_memory, warps * 32 // tile.num_threads))
