"""Tiles of the kernels of the gated delta rule, and what they are compiled with, by kernel."""

from __future__ import annotations

from typing import NamedTuple

from ..problem.arrays import ITEMSIZE
from ..problem.gated import GatedTraits
from .features import Macros
from .tiles import NO_BOUNDARY, OWN_INSTRUCTIONS, REGISTERS, Device, blocks_in_shared_memory, round_up

CHUNK_BYTES = 32
"""sizeof(Chunk) of gated/chunk.cuh."""
ROW_TILE = 16
"""Rows of a block of gated_output.cu."""
OUTPUT_REGISTERS = 80
"""Of a thread of gated_output_mma.cu, roughly."""
MAX_HEADS = 4
"""Of v that a block of gated_output_mma.cu computes, and how many tokens' gates it holds for each thread."""
MIN_WAVES = 2
"""Of blocks that compute several heads: fewer would leave multiprocessors without work at the end."""
RECURRENT_THREADS = 256


class GatedTile(NamedTuple):
    """What a block computes."""

    tokens: int
    """Of a chunk, or 0 where blocks walk over tokens one by one."""
    width: int
    """Features of v."""
    num_threads: int
    stages: int = 1
    """How many chunks arrive while one is computed."""

    def __str__(self) -> str:
        return f"{self.tokens or 1}x{self.width}" + (f"x{self.stages}" if self.stages > 1 else "")


# cuda_src/gated_output_mma.cu


def mma_bucket(head_dim: int) -> int:
    return round_up(head_dim, 32 if head_dim <= 128 else 64)


def output_mma_tiles(traits: GatedTraits, device: Device) -> list[GatedTile]:
    num_parts = 1 if traits.head_dim_v <= 128 else 2
    widths = (round_up(-(-traits.head_dim_v // num_parts), 32), 64, 32)
    tiles = [GatedTile(traits.chunk_size, width, 4 * traits.chunk_size) for width in widths]
    return [tile for tile in tiles if output_mma_shared_memory(traits, tile) <= device.shared_memory_per_block]


def output_mma_macros(traits: GatedTraits, tile: GatedTile, device: Device) -> Macros:
    return (
        ("HEAD_DIM", mma_bucket(traits.head_dim)),
        ("STATE_DTYPE", f"CUFLASH_{traits.state_dtype.upper()}"),
        ("VARLEN", 1),
        ("SWAPPED_STATES", int(traits.swapped_states)),
        ("MIN_BLOCKS", output_mma_held(traits, tile, device)),
    )


def output_mma_held(traits: GatedTraits, tile: GatedTile, device: Device) -> int:
    """Blocks of a multiprocessor."""
    held = blocks_in_shared_memory(device, output_mma_shared_memory(traits, tile))
    return max(1, min(held, REGISTERS // (OUTPUT_REGISTERS * tile.num_threads)))


def output_mma_shared_memory(traits: GatedTraits, tile: GatedTile) -> int:
    bucket, size = mma_bucket(traits.head_dim), ITEMSIZE[traits.dtype]
    rows, columns = (tile.width, bucket) if traits.swapped_states else (bucket, tile.width)
    elements = tile.tokens * (bucket + 8 + max(bucket, tile.width) + 8) + rows * (columns + 8)
    steps = tile.tokens // 16
    weights, decays = steps * (steps + 1) // 2 * 512, MAX_HEADS * 4 * tile.tokens
    return round_up(size * elements + weights + decays + CHUNK_BYTES + 8, 16)


# cuda_src/gated_output.cu


def output_tiles(traits: GatedTraits, device: Device) -> list[GatedTile]:
    return [GatedTile(traits.chunk_size, traits.head_dim_v, 128)]


def output_macros(traits: GatedTraits, tile: GatedTile, device: Device) -> Macros:
    return ("STATE_DTYPE", f"CUFLASH_{traits.state_dtype.upper()}"), ("VARLEN", 1)


def output_shared_memory(traits: GatedTraits, tile: GatedTile) -> int:
    tokens, size = tile.tokens, ITEMSIZE[traits.computed]
    elements = tokens + ROW_TILE * (tokens + 1) + (ROW_TILE + tokens) * 17 + 16 * 64
    return round_up(CHUNK_BYTES + size * elements, 8)


# cuda_src/gated_prepare.cu and cuda_src/gated_delta_mma.cu


def delta_tiles(traits: GatedTraits, device: Device) -> list[GatedTile]:
    """Return tiles that fit, each with as many chunks under way as do."""
    tiles = []
    for tokens in (64, 32) if traits.head_dim <= 192 else (32,):  # float16 would spill with 64
        for width in (16, 32, 64):
            made = [GatedTile(tokens, width, 2 * (width + tokens) + 64, stages) for stages in (2, 1)]
            fits = [tile for tile in made if delta_shared_memory(traits, tile) <= device.shared_memory_per_block]
            tiles += fits[:1] if width == 16 or width // 2 < traits.head_dim_v else []
    return tiles


def delta_macros(traits: GatedTraits, tile: GatedTile, device: Device) -> Macros:
    return ("HEAD_DIM", mma_bucket(traits.head_dim)), ("VARLEN", int(traits.packed)), ("STAGES", tile.stages)


def matrix_bytes(tokens: int) -> int:
    """Three times sizeof(Triangle) of gated/prepared.cuh."""
    steps = tokens // 16
    return 3 * steps * (steps + 1) // 2 * 512


def decay_bytes(tokens: int) -> int:
    """sizeof(TokenDecays) of gated/prepared.cuh."""
    return 12 * tokens


def delta_shared_memory(traits: GatedTraits, tile: GatedTile) -> int:
    bucket, size = mma_bucket(traits.head_dim), ITEMSIZE[traits.dtype]
    keys, values = size * tile.tokens * (bucket + 8), size * tile.tokens * (tile.width + 8)
    arriving = 2 * keys + values + matrix_bytes(tile.tokens) + decay_bytes(tile.tokens)
    handed_over = 2 * tile.width // 16 * (bucket + tile.tokens) // 16 * 512
    return (tile.stages + 1) * arriving + keys + decay_bytes(tile.tokens) + handed_over + 16


def delta_wgmma_limits(traits: GatedTraits, device: Device) -> str | None:
    if not device.has_own_instructions:
        return OWN_INSTRUCTIONS
    if min(traits.input_alignment, traits.result_alignment) < 16:
        return NO_BOUNDARY
    return None


def delta_wgmma_tiles(traits: GatedTraits, device: Device) -> list[GatedTile]:
    return [GatedTile(64, 64, 256, 2)]


def delta_wgmma_macros(traits: GatedTraits, tile: GatedTile, device: Device) -> Macros:
    return ("HEAD_DIM", round_up(traits.head_dim, 64)), ("VARLEN", int(traits.packed)), ("STAGES", tile.stages)


def delta_wgmma_shared_memory(traits: GatedTraits, tile: GatedTile) -> int:
    panels, matrices = 2 * 64 * round_up(traits.head_dim, 64), matrix_bytes(64)
    arriving = 2 * panels + 2 * 64 * (64 + 8) + matrices + decay_bytes(64)
    return round_up((tile.stages + 1) * arriving + matrices // 3 + 2 * 2 * 64 * (64 + 8) + 8, 1024)


# cuda_src/gated_recurrent.cu


def recurrent_bucket(head_dim: int) -> int:
    return round_up(head_dim, 32)


def recurrent_tiles(traits: GatedTraits, device: Device) -> list[GatedTile]:
    bucket, size = recurrent_bucket(traits.head_dim), ITEMSIZE[traits.computed]
    # A thread holds 256 bytes of the state, and neighbouring features in a vector of 16.
    columns = min(256 * RECURRENT_THREADS // 32 // (bucket * size), 16 // size)
    while columns > 1 and 16 * columns >= traits.head_dim_v:
        columns //= 2
    return [GatedTile(0, 32 * columns, RECURRENT_THREADS)]


def recurrent_macros(traits: GatedTraits, tile: GatedTile, device: Device) -> Macros:
    # Half of the registers are too few on older devices, and for float64 on no boundary of its own.
    alignment = min(traits.input_alignment, traits.result_alignment)
    shares = device.compute_capability >= 90 and (alignment, traits.computed) != (1, "float64")
    return (
        ("HEAD_DIM", recurrent_bucket(traits.head_dim)),
        ("VARLEN", int(traits.packed)),
        ("SWAPPED_STATES", int(traits.swapped_states)),
        ("MIN_BLOCKS", 2 if shares else 1),
    )


def recurrent_shared_memory(traits: GatedTraits, tile: GatedTile) -> int:
    sums = tile.num_threads // 32 * (2 * tile.width + 1)
    return ITEMSIZE[traits.computed] * (4 * recurrent_bucket(traits.head_dim) + sums)
