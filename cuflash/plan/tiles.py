"""Devices and tiles: what the tables of tiles share, one module for each tier of kernels (`tiles_<name>.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import NamedTuple

from ..problem.gated import GatedTraits
from ..problem.problem import Traits


class Device(NamedTuple):
    """What the choice of a kernel needs to know of a GPU."""

    compute_capability: int
    """10 x major + minor."""
    shared_memory_per_block: int
    """Bytes that one block may use (the opt-in maximum)."""
    num_multiprocessors: int
    has_own_instructions: bool = True
    """Whether the compiler at hand has those of this architecture alone, as `wgmma` of sm_90a."""

    @property
    def arch(self) -> str:
        """Name of the architecture as compilers spell it."""
        return f"sm_{self.compute_capability}"


NO_BOUNDARY = "q, k, v or out have rows that begin on no 16-byte boundary"
OWN_INSTRUCTIONS = "the compiler at hand has not its instructions: NVRTC 12.9 and newer have"
"""Why a kernel can't serve a device without `has_own_instructions`."""

SHARED_MEMORY_KB = {
    70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 88: 99, 89: 99,
    90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99,
}  # fmt: skip
"""Of one block, by compute capability."""


def device_of(compute_capability: int) -> Device:
    """Describe a GPU by its compute capability alone, for plans without one at hand."""
    kilobytes = SHARED_MEMORY_KB.get(compute_capability, 48 if compute_capability < 70 else 99)
    return Device(compute_capability, kilobytes * 1024, 132 if compute_capability in (90, 100, 103) else 80)


class Tile(NamedTuple):
    """Rows and keys that a block works on at a time, and its threads."""

    block_m: int
    block_n: int
    num_threads: int
    stages: int = 1
    """Buffers for tiles of keys: with two, the next tile arrives while one is multiplied."""
    prepared: bool = False
    """Whether a launch before it makes ready all keys and values, in a workspace."""
    walks_on: bool = False
    """Whether blocks are persistent: as many as the GPU holds, which go on to tiles or pairs of tiles of rows."""
    passes_by: bool = False
    """Whether each warpgroup of 64 rows passes by tiles of keys that none of its own rows sees."""

    def __str__(self) -> str:
        stages = f"x{self.stages}" if self.stages > 1 else ""
        return f"{self.block_m}x{self.block_n}{stages}" + ("p" if self.prepared else "w" if self.walks_on else "")


REGISTERS = 65536
"""Of a multiprocessor."""


def blocks_in_shared_memory(device: Device, size: int) -> int:
    """How many blocks of `size` bytes a multiprocessor holds; each takes 1 KiB for itself."""
    return (device.shared_memory_per_block + 1024) // (size + 1024)


def resident_blocks(device: Device, tile: Tile, shared_memory: int, registers: int) -> int:
    """How many blocks of a tile a multiprocessor holds (occupancy), by the memory of each and a thread's registers."""
    by_memory = blocks_in_shared_memory(device, shared_memory)
    return max(1, min(by_memory, REGISTERS // (tile.num_threads * registers)))


def needs_vectors(traits: Traits, device: Device) -> str | None:
    """What kernels refuse that read nothing but vectors of 16 bytes."""
    return None if traits.alignment == 16 else NO_BOUNDARY


def no_tile(traits: Traits | GatedTraits, device: Device, tiles: Callable[[Device], Sized]) -> str:
    """Say why there are no tiles of a kernel for a device: `tiles` finds them."""
    roomy = device._replace(shared_memory_per_block=2**31 - 1)
    memory = f"{device.shared_memory_per_block} bytes of shared memory"
    what = memory if tiles(roomy) else f"the registers of a thread on {device.arch}"
    return f"no tile for head_dim {traits.head_dim}/{traits.head_dim_v} fits {what}"


def occupying_first(tiles: list[Tile], blocks: Callable[[Tile], int]) -> list[Tile]:
    """Sort tiles of which a multiprocessor holds `blocks`: those that give it eight warps come first, in their order.

    Tiles of 16 rows come last: one warp alone hides little. Of tiles with the same name the first is left.
    """

    def order(tile: Tile) -> tuple[bool, bool]:
        return tile.block_m == 16, tile.block_m > 16 and blocks(tile) * tile.num_threads < 256

    by_name: dict[str, Tile] = {}
    for tile in sorted(tiles, key=order):
        by_name.setdefault(str(tile), tile)
    return list(by_name.values())


WARP = 32
"""Threads that run together."""
APPENDING = Tile(16, 16, 128)
"""Threads of a block of the launch that appends keys to a cache, a warp for each; it has no tiles."""
PREPARING = Tile(128, 32, 256)
"""Keys that a block of a launch that makes them ready has, and its threads."""


def round_up(value: int, multiple: int) -> int:
    """Return the first multiple that is not below a value."""
    return -(-value // multiple) * multiple


def tile_map_bytes(traits: Traits, tile: Tile) -> int:
    """sizeof(TileMap) of rows.cuh."""
    return (16 + traits.page_table + tile.prepared + traits.has_row_offset) * 8


TILE_KEYS_BYTES = 4 * 8
"""sizeof(TileKeys) of mask.cuh."""
