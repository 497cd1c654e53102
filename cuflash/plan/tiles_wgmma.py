"""Tiles of forward_wgmma.cu, and what they take of a multiprocessor."""

from __future__ import annotations

from ..problem.arrays import ITEMSIZE
from ..problem.problem import FARTHEST_ROWS, Traits
from .cost import Cost
from .features import Macros
from .tiles import NO_BOUNDARY, OWN_INSTRUCTIONS, Device, Tile, blocks_in_shared_memory, round_up, tile_map_bytes

_BUCKETS = (32, 48, 64, 80, 96, 128, 192, 256)


def head_dim_bucket(head_dim: int) -> int:
    """32, 48, 64, 80, 96, 128, 192 or 256."""
    return next((bucket for bucket in _BUCKETS if head_dim <= bucket), 0)


def limits(traits: Traits, device: Device) -> str | None:
    """Say what else the kernel refuses."""
    if not device.has_own_instructions:
        return OWN_INSTRUCTIONS
    if traits.alignment < 16:
        return NO_BOUNDARY
    if not traits.keys_are_tiles:
        return f"k or v have rows that are not 0 to {FARTHEST_ROWS} bytes apart, in steps of 16: they are no tiles"
    if traits.bias == "float64" or traits.num_arrays + traits.page_table > 1:
        return "a float64 bias, or more than one of bias, mask and pages, needs more registers than are left"
    return None


def macros(traits: Traits) -> Macros:
    """What only forward_wgmma.cu is told."""
    return (("WARPGROUPS", 1),)


def shared_memory(traits: Traits, tile: Tile) -> int:
    """Bytes of `SharedTiles` in forward_wgmma.cu."""
    panels, panels_v = (round_up(head_dim_bucket(head_dim), 64) for head_dim in (traits.head_dim, traits.head_dim_v))
    pitch = max(panels, head_dim_bucket(traits.head_dim_v)) + 8
    places = 2 if tile.walks_on else 1
    query_buffers = places if max(panels, panels_v) <= 128 else 1
    elements = query_buffers * tile.block_m * pitch + tile.stages * tile.block_n * (panels + panels_v)
    stages_output = tile.walks_on and query_buffers == 1 and ITEMSIZE[traits.out_dtype] == 2
    staged, maxima, exchange = 1024 * (tile.block_m // 16 if stages_output else 1), 4 * tile.block_m, 128
    barriers = 8 * (2 * places + 2 * query_buffers * tile.block_m // 64 + 4 * tile.stages + tile.block_m // 64)
    place = tile_map_bytes(traits, tile) + 32 + (48 if tile.passes_by else 0)
    beside = staged + tile.block_m * 48 + maxima + exchange + places * place + 20 + 52 + barriers
    return round_up(2 * elements + beside, 1024)


# A warpgroup has 64 rows. One that loads for itself shares a multiprocessor with up to three others, and one begins
# or ends while others multiply; one with a loader beside it is for 64 rows of many keys. Three multiply longer for what
# they load. On an H100 at 16384 keys, ms full / causal: head_dim 64, 32 heads, 192x128 4.3 / 2.2, 64x64 5.0 / 2.5; 96,
# 16 heads, 192x112 2.9 / 1.4, 128x128 3.2 / 1.6; 128, 16 heads, 192x80 3.4 / 1.75, 128x128 3.5 / 1.79. Where three walk
# on, two work while one begins or ends: us for 64 heads of 8192 queries and 64 keys, head_dim 128, 192x64w 88, 128x64w
# 102, 128x128w 153; three buffers let those that pass by keys be two tiles apart (windows of 256 keys 6 % faster). 64
# queries of 16 caches of 8192 keys of one head: 64x64 34.9, 64x128 33.7, 128x128 34.5.
_ROWS_192 = Tile(192, 128, 512, 2), Tile(192, 112, 512, 2), Tile(192, 96, 512, 2), Tile(192, 80, 512, 2)
_ROWS_128 = Tile(128, 128, 384, 2), Tile(128, 112, 384, 2), Tile(128, 96, 384, 2), Tile(128, 64, 384, 2)
# Their order matters: of those with as many threads the first that fits is kept.
_WGMMA_TILES = (
    *_ROWS_192, *_ROWS_128,
    *(tile._replace(walks_on=True) for tile in (*_ROWS_192, Tile(192, 64, 512, 3), *_ROWS_128)),
    Tile(64, 128, 256, 2), Tile(64, 96, 256, 2), Tile(64, 64, 256, 2), Tile(64, 64, 128, 2),
)  # fmt: skip

COST = Cost(
    product=2.37e-07,
    weight=2.52e-05,
    load=0,
    tile=0.0038,
    latency=0.476,
    latency_load=1.41e-05,
    copy=0,
    exposed_copy=0,
    block=4.44,
    block_load=0.00219,
    merge=3.76,
    merge_split=0.00441,
    merge_byte=1.1e-07,
    stream=4.45e-07,
    start=0.00305,
    next_tile=2.36,
    by_tiles=1.06,
    by_pairs=1.01,
)


def cost(traits: Traits) -> Cost:
    """Constants for the cost model."""
    return COST


def _array_bytes(traits: Traits) -> int:
    """Of bias and mask, of one logit."""
    return (ITEMSIZE[traits.bias] if traits.bias else 0) + traits.mask


def _most_held(traits: Traits, tile: Tile) -> int:
    """Registers of a thread for scores and output: what is left of 152 to 232 was found by compiling (NVRTC 13.0)."""
    if tile.block_m == 192:
        if max(head_dim_bucket(traits.head_dim), head_dim_bucket(traits.head_dim_v)) > 128:
            return 0
        taken = 8 if tile.walks_on else 12 * traits.page_table
        return 132 - taken - 8 * traits.alibi_slopes
    if tile.walks_on and traits.page_table:
        return 176 - 16 * traits.alibi_slopes
    return 192 if traits.num_arrays and not traits.num_terms else 184


def tiles(traits: Traits, device: Device) -> list[Tile]:
    """Tiles that fit registers and shared memory: of those alike but for it the one with the most keys.

    Those that walk on, and three warpgroups, leave no registers for a bias or a mask on its way.

    Of tiles that walk on those for few keys, too, each number with the most rows: one is most of a tile of rows.
    """
    bucket_v = head_dim_bucket(traits.head_dim_v)
    widest = max(head_dim_bucket(traits.head_dim), bucket_v)

    def fits(tile: Tile) -> bool:
        if tile.block_m == tile.block_n == 64 and (tile.num_threads == 256) != (traits.page_table and widest > 192):
            return False  # of so many features a block is late with pages that it looks up itself
        if traits.num_arrays and (tile.walks_on or tile.block_m == 192):
            return False
        # A thread holds a row's output, and scores of a tile twice: as floats, and rounded; bias or mask of a row.
        held = bucket_v // 2 + tile.block_n * 3 // 4 + tile.block_n * _array_bytes(traits) // 16
        return held <= _most_held(traits, tile) and shared_memory(traits, tile) <= device.shared_memory_per_block

    def passing(tile: Tile) -> Tile:
        """The tile as `kPassesBy` of wgmma/place.cuh has it."""
        return tile._replace(passes_by=tile.walks_on and tile.block_m == 192 and head_dim_bucket(traits.head_dim) > 64)

    kinds: dict[tuple[int, bool], Tile] = {}
    for tile in filter(fits, map(passing, _WGMMA_TILES)):
        is_for_few = tile.walks_on and tile.block_n <= 80
        kinds.setdefault((tile.block_n if is_for_few else tile.num_threads, tile.walks_on), tile)
    return list(kinds.values())


def min_blocks(traits: Traits, tile: Tile, device: Device) -> int:
    """One block has a multiprocessor for itself, or two to four if they are small.

    Four have 128 registers a thread. Of float32, which splits are, four are as fast as three (482 problems, H100).
    """
    if tile.block_m > 64:
        return 1
    are_small = head_dim_bucket(traits.head_dim_v) <= 64 and traits.out_dtype != "float32"
    has_few_terms = _array_bytes(traits) + traits.num_terms <= 2
    most = 2 if tile.num_threads > 128 else 4 if are_small and has_few_terms else 3
    return min(most, blocks_in_shared_memory(device, shared_memory(traits, tile)))
