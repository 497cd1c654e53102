"""How a problem is computed on a device: kernel, tile, splits, grid. Pure Python; needs no GPU.

A `Build` follows from the traits of a problem and is remembered; the lengths choose one of its tiles, and the splits.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ..problem.arrays import ITEMSIZE
from ..problem.checks import BOUNDARY
from ..problem.problem import Problem, Traits
from ..settings import Settings
from .axes import Axes, walked_axes
from .build import Build, Prediction, Program, build_of_rows, find_builds
from .cost import Choice, Lengths, heads_per_tile, lengths_of, walk_of
from .partial import Partial, partial_of
from .table import KERNELS, Device, KernelSpec, Tile
from .tiles import APPENDING, PREPARING, WARP, round_up

MAX_GRID = 2**31 - 1
"""Blocks of one launch."""
MAX_BLOCKS = 2**32 - 1
"""Of all launches of a call: kernels count tiles and splits by 32 bits."""
MAX_ROWS = 2**31 - 1
"""Queries of a head, or of a group that shares tiles: kernels count them by 32 bits."""
MAX_PAGED = 2**31 - 1
"""Pages of a cache, and keys that a batch has room for in them, likewise."""
CACHED_BYTES = 16 << 20
"""Keys and values that are read again and again: a third of an H200's L2 cache, two fifths of an A100's.

A tile of M rows does M operations for each byte of keys and values: 64 rows at 4.3 TB/s 275 TFLOP/s, less than the
tensor cores do. All heads at once have fewer turns, so that fewer multiprocessors wait for the last one.
"""


class Preparation(NamedTuple):
    """A launch that makes keys and values ready for all blocks of the one behind it."""

    program: Program
    num_blocks: int
    offset_k: int
    """Bytes of the workspace in front of what it makes of keys."""
    offset_v: int


class Append(NamedTuple):
    """A launch that appends keys and values to a cache, in front of all others."""

    program: Program
    num_blocks: int


class Plan(NamedTuple):
    """The choice for one problem on one device. Holds no pointers and prints as one line."""

    program: Program
    tile: Tile
    num_blocks: int
    """Tiles times splits, or as many as the device holds."""
    workspace: int
    """Bytes of scratch memory in global memory."""
    num_stops: int
    """Of blocks that go from tile to tile, of packed sequences at most; 0: each block has one tile."""
    in_pairs: bool
    """Whether each of these is a pair of tiles."""
    num_m_blocks: int
    group_size: int
    packed_heads: int
    planes_at_once: int
    """Heads of all batches whose tiles take turns, those that see the most keys first."""
    batch_axes: Axes
    """Axis and length of the leading axes that the kernel walks; more than four are merged where strides allow."""
    outer_axes: Axes
    """Axis and length of those beyond four: one launch for each of their indices."""
    num_splits: int
    """Blocks that share the keys of one tile; if more than one, their results are partial and get merged."""
    split_size: int
    """Keys of each of them, counted from key 0; 0: those that a tile sees are shared out."""
    even_splits: int
    """Splits among which a batch's keys are divided evenly, where each batch has a length of its own."""
    largest_split: int
    """Keys of one of these at most: longer batches use more of the splits that are launched. 0: there is no limit."""
    partial: Partial | None
    """Where the results of splits lie in the workspace."""
    preparation: Preparation | None
    append: Append | None

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.program.kernel

    def __str__(self) -> str:
        size = f" of {self.split_size} keys" if self.split_size else ""
        if self.largest_split:
            size = f" of at most {self.largest_split} keys"
        beside = [f"{self.num_splits} splits{size}"] if self.num_splits > 1 else []
        beside += [f"{self.workspace} bytes of workspace"] if self.workspace else []
        splits = f" ({', '.join(beside)})" if beside else ""
        return (
            f"{self.program.kernel} tile {self.tile}, {self.tile.num_threads} threads, {self.num_blocks} blocks"
            f"{splits}, {self.program.shared_memory} bytes of shared memory"
        )


def predict(problem: Problem, device: Device, settings: Settings) -> list[Prediction]:
    """Say what the time model expects of each tile that may serve the problem, the least first.

    Nothing if the caller chose the splits.
    """
    cache = problem.cache
    if cache is not None and (cache.num_splits, cache.split_size) != (None, None):
        return []
    outer_axes, _ = walked_axes(problem, False)
    return find_builds(problem.traits, device, settings).predict(lengths_of(problem), _may_prepare(problem, outer_axes))


def _may_prepare(problem: Problem, outer_axes: Axes) -> bool:
    """Whether a launch may make keys and values ready for another: of known lengths, and few axes."""
    return not (outer_axes or problem.traits.seqlens_k)


def make_plan(
    problem: Problem, device: Device, settings: Settings, num_splits: int | None = None, prepares: bool = True
) -> Plan:
    """Choose kernel, tile and splits (None: as many as help); `prepares`: whether a launch may prepare another.

    ValueError if `options(kernel=..., tile=...)` asks for what cannot serve the problem.
    """
    lengths = lengths_of(problem)
    outer_axes, batch_axes = walked_axes(problem, False)
    prepares = prepares and _may_prepare(problem, outer_axes)
    if problem.cache is not None and problem.cache.split_size is not None:
        build = build_of_rows(problem.traits, device, settings)
        choice = Choice(0.0, 0, 1)
    else:
        build, choice = find_builds(problem.traits, device, settings).choose(lengths, prepares)
    tile, num_splits, split_size, largest_split = _splits(problem, build, choice, lengths, num_splits)
    is_split = num_splits > 1
    packed_heads = heads_per_tile(lengths, tile.block_m)
    num_m_blocks = _num_m_blocks(problem, packed_heads, tile)
    if is_split:
        outer_axes, batch_axes = walked_axes(problem, True)
    num_batches = 1
    for _, length in batch_axes:
        num_batches *= length
    num_planes = problem.num_heads_q // packed_heads * num_batches
    num_blocks, num_stops, in_pairs = num_m_blocks * num_planes * num_splits, 0, tile.walks_on and choice.in_pairs
    if tile.walks_on:
        num_stops = num_m_blocks * (-(-num_planes // 2) if in_pairs else num_planes)
        num_blocks = min(num_stops, build.resident_blocks(choice.tile_idx, is_split))
    if num_m_blocks * num_planes * num_splits > MAX_BLOCKS:
        raise ValueError(
            f"q has {num_m_blocks * num_planes} tiles of {tile.block_m} rows, times {num_splits} splits: expected at "
            f"most {MAX_BLOCKS} on a GPU"
        )
    _check_counts(problem, packed_heads)
    partial = partial_of(problem, num_splits) if is_split else None
    preparation, workspace = _preparation(problem, build, tile, sum(partial.sizes) if partial else 0)
    return Plan(
        build.program(tile, is_split),
        tile,
        num_blocks,
        workspace,
        num_stops,
        in_pairs,
        num_m_blocks,
        lengths.group_size,
        packed_heads,
        1 if num_stops else _planes_at_once(problem, lengths, build.spec, tile, packed_heads, num_planes),
        batch_axes,
        outer_axes,
        num_splits,
        split_size if is_split else 0,
        choice.num_splits,
        largest_split if is_split else 0,
        partial,
        preparation,
        _append(problem, build),
    )


def _splits(
    problem: Problem, build: Build, choice: Choice, lengths: Lengths, num_splits: int | None
) -> tuple[Tile, int, int, int]:
    """Return a tile, the number of splits, their size if that is fixed, and the most keys of one if that is limited."""
    tile, split_size, largest_split = build.tiles[choice.tile_idx], 0, 0
    if num_splits is None and problem.cache is not None:
        tile, num_splits, split_size, largest_split = _splits_of_cache(problem, build, choice, lengths)
    elif num_splits is None:
        num_splits = choice.num_splits
    if num_splits > 1 and not split_size and num_splits == choice.num_splits:  # without those left with no tile
        num_steps = max(walk_of(lengths, tile).num_steps, 1)
        num_splits = -(-num_steps // -(-num_steps // num_splits))
    if num_splits > 1 and tile.walks_on:
        tile, _ = build.splitting(tile, num_splits, problem.seqlen_k)
    return tile, num_splits, split_size, largest_split


KEYS_OF_A_SPLIT = 4096
"""Of a cache whose lengths the host does not know: what a block reads in twenty times what it takes to begin."""


def _splits_of_cache(problem: Problem, build: Build, choice: Choice, lengths: Lengths) -> tuple[Tile, int, int, int]:
    """Do the same for a cache.

    Where each batch has a length of its own, one of them may have most of the keys: then none is one block's alone, as
    long as the tiles of one batch are fewer than blocks that a GPU holds. Short ones are shared as equal ones would be.
    """
    cache, seqlen_k, tile, num_splits = problem.cache, problem.seqlen_k, build.tiles[choice.tile_idx], choice.num_splits
    assert cache is not None, "else it has no splits of its own"
    if cache.num_splits is not None:
        return *build.splitting(tile, cache.num_splits, seqlen_k), 0, 0
    if cache.split_size is not None:
        return tile, max(1, -(-seqlen_k // cache.split_size)), cache.split_size, 0
    if not problem.traits.seqlens_k:
        return tile, num_splits, 0, 0
    packed_heads = heads_per_tile(lengths, tile.block_m)
    num_tiles = problem.num_heads_q // packed_heads * _num_m_blocks(problem, packed_heads, tile)
    enough = build.resident_blocks(choice.tile_idx, True) // max(num_tiles, 1)
    tile, num_splits = build.splitting(tile, max(num_splits, min(enough, -(-seqlen_k // KEYS_OF_A_SPLIT))), seqlen_k)
    return tile, num_splits, 0, round_up(max(KEYS_OF_A_SPLIT, -(-seqlen_k // num_splits)), tile.block_n)


def _check_counts(problem: Problem, packed_heads: int) -> None:
    """Raise ValueError for more rows, pages or keys in pages than kernels count."""
    if problem.seqlen_q * packed_heads > MAX_ROWS:
        raise ValueError(f"q has {problem.seqlen_q} queries, expected at most {MAX_ROWS // packed_heads} on a GPU")
    if problem.cache is None:
        return
    num_pages, room = problem.cache.num_pages, problem.cache.page_size * problem.cache.max_pages
    if num_pages > MAX_PAGED:
        raise ValueError(f"k_cache has {num_pages} pages, expected at most {MAX_PAGED} on a GPU")
    if room > MAX_PAGED:
        raise ValueError(f"page_table has room for {room} keys of a batch, expected at most {MAX_PAGED} on a GPU")


def _append(problem: Problem, build: Build) -> Append | None:
    """What appends new keys, if there are any."""
    if problem.cache is None:
        return None
    num_rows = 2 * prod(problem.batch) * problem.num_heads_kv * problem.cache.num_new
    num_blocks = -(-num_rows * WARP // APPENDING.num_threads)
    if num_blocks > MAX_GRID:
        most = MAX_GRID * (APPENDING.num_threads // WARP) // 2
        raise ValueError(f"k_new has {num_rows // 2} keys in all heads and batches, expected at most {most} on a GPU")
    return Append(build.appending(), num_blocks) if num_blocks else None


def _preparation(problem: Problem, build: Build, tile: Tile, workspace: int) -> tuple[Preparation | None, int]:
    """What makes keys and values ready behind other things in a workspace, and how long that is with it."""
    if not tile.prepared:
        return None, workspace
    num_planes = problem.num_heads_kv
    if not problem.traits.is_varlen:
        num_planes *= prod(problem.batch)
    if not num_planes * problem.seqlen_k * problem.seqlen_q:
        return None, workspace
    row_k, row_v = build.spec.prepared_row(problem.traits)
    offset_k = round_up(workspace, BOUNDARY)
    offset_v = offset_k + num_planes * problem.seqlen_k * row_k
    num_blocks = num_planes * -(-problem.seqlen_k // PREPARING.block_n) * (2 if row_v else 1)
    end = offset_v + num_planes * problem.seqlen_k * row_v
    return Preparation(build.preparing(), num_blocks, offset_k, offset_v), end


def _num_m_blocks(problem: Problem, packed_heads: int, tile: Tile) -> int:
    num_rows = problem.seqlen_q * packed_heads
    if problem.traits.is_varlen:
        # Every sequence, and the tokens before and behind them all, may end in a partial tile.
        return num_rows // tile.block_m + min(problem.batch[0] + 2, problem.seqlen_q)
    return -(-num_rows // tile.block_m)


def _planes_at_once(
    problem: Problem, lengths: Lengths, spec: KernelSpec, tile: Tile, packed_heads: int, num_planes: int
) -> int:
    """Where later rows see more keys: all heads, or as many as have keys and values that stay in cache together.

    The latter for tiles that read keys faster than memory gives them, in turns that are nearly equal. Of packed
    sequences that is all there is.
    """
    traits = problem.traits
    if not traits.is_varlen and (problem.window_right is None or problem.seqlen_q * packed_heads <= tile.block_m):
        return 1
    if tile.block_m > spec.starved_rows:
        return max(num_planes, 1)
    num_bytes = lengths.all_keys * (traits.head_dim + traits.head_dim_v) * ITEMSIZE[traits.dtype]
    sharing = lengths.group_size // packed_heads  # planes that read the same keys
    num_turns = -(-num_planes // (sharing * max(1, CACHED_BYTES // max(num_bytes, 1))))
    return max(1, -(-num_planes // (sharing * max(num_turns, 1)))) * sharing


def refusals(traits: Traits, device: Device) -> list[tuple[str, str | None]]:
    """Every row of the table with the reason why it does not serve such problems, None where it does."""
    return [(spec.name, spec.refusal(traits, device)) for spec in KERNELS]
