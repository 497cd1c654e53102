"""How a problem is computed on a device: kernel, tile, splits, grid. Pure Python; needs no GPU.

A `Build` follows from the traits of a problem and is remembered; the lengths choose one of its tiles, and the splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ..problem.arrays import ITEMSIZE
from ..problem.checks import BOUNDARY
from ..problem.problem import Problem, Traits
from ..settings import Settings
from .cost import (
    MAX_SPLITS,
    Choice,
    Cost,
    Lengths,
    Pace,
    cheapest,
    heads_per_tile,
    lengths_of,
    pace_of,
    rounded,
    walk_of,
)
from .features import Macros, feature_macros
from .partial import partial_of, partial_results, partial_traits
from .table import KERNELS, Device, KernelSpec, Tile, choose_row
from .tiles import APPENDING, PREPARING, WARP, round_up

MAX_GRID = 2**31 - 1
"""Blocks of one launch."""
BATCH_AXES = 4
"""Leading axes that a kernel walks."""
CACHED_BYTES = 16 << 20
"""Keys and values that are read again and again: a third of an H200's L2 cache, two fifths of an A100's.

A tile of M rows does M operations for each byte of keys and values: 64 rows at 4.3 TB/s 275 TFLOP/s, less than the
tensor cores do. All heads at once have fewer turns, so that fewer multiprocessors wait for the last one.
"""
CACHE_SIZE = 4096

Axes = tuple[tuple[int, int], ...]


class Program(NamedTuple):
    """What is compiled: a CUDA source and the macros it is compiled with, which hold no lengths and no strides."""

    kernel: str
    macros: Macros
    shared_memory: int
    """Bytes per block."""


class Build:
    """What follows from traits, device and settings: the kernel, its tiles and their programs.

    Attributes
    ----------
    spec : KernelSpec
    tiles : list of Tile
    programs : dict of (Tile, bool) to Program
        As they are asked for; the second says whether their results are partial.
    """

    def __init__(self, spec: KernelSpec, traits: Traits, device: Device, settings: Settings) -> None:
        self.spec = spec
        self.tiles = _allowed_tiles(spec, traits, device, settings)
        self._traits = traits
        self._device = device
        self._cost: Cost = self.spec.cost(traits)
        bucket = self.spec.head_dim_bucket
        features = bucket(traits.head_dim) + bucket(traits.head_dim_v)
        # Packed sequences are not split by themselves: the host does not know their lengths, and a captured call that
        # is given `out` has no `workspace` to be given too.
        splits = "out_dtype" in self.spec.features and traits.op != "attention_varlen"
        self._splittable = splittable = self.spec.tiles(partial_traits(traits), device) if splits else []
        self._paces: list[Pace] = [
            pace_of(
                self._cost,
                tile,
                features,
                self.spec.min_blocks(traits, tile, device),
                MAX_SPLITS if tile in splittable else 1,
                self.spec.prepared_row(traits),
            )
            for tile in self.tiles
        ]
        self._choices: dict[tuple[int | None, ...], Choice] = {}
        self._preparing: Program | None = None
        self._appending: Program | None = None
        self._programs: dict[tuple[Tile, bool], Program] = {}

    def choose(self, lengths: Lengths, prepares: bool = True) -> Choice:
        """Tile and splits that take the least time; remembered. No tile `prepares` where that can't be."""
        rounded_lengths = rounded(lengths)
        key = prepares, *rounded_lengths
        choice = self._choices.get(key)
        if choice is None:
            if len(self._choices) >= CACHE_SIZE:
                self._choices.clear()
            multiprocessors = self._device.num_multiprocessors
            choice = cheapest(
                self._paces, self._cost, Lengths(*rounded_lengths), self._traits.head_dim_v, multiprocessors, prepares
            )
            if choice.time == float("inf"):
                raise ValueError(
                    f"tile {str(self.tiles[0])!r} cannot serve this call: keys and values are made ready by another "
                    f"launch, which takes a workspace, known lengths and no more than {BATCH_AXES} leading axes"
                )
            self._choices[key] = choice
        return choice

    def splitting(self, tile: Tile, num_splits: int, seqlen_k: int) -> tuple[Tile, int]:
        """Return the tile, or one that keys can be split for, and how many splits there are at most of those wanted."""
        if num_splits == 1 or not self._splittable:
            return tile, 1
        tile = tile if tile in self._splittable else self._splittable[0]
        return tile, max(1, min(num_splits, -(-seqlen_k // tile.block_n), MAX_SPLITS))

    def program(self, tile: Tile, is_split: bool) -> Program:
        """What is compiled for a tile, whose results are partial if its keys are split; remembered."""
        program = self._programs.get((tile, is_split))
        if program is None:
            traits = partial_traits(self._traits) if is_split else self._traits
            macros = _macros(self.spec, traits, tile, self._device)
            program = Program(self.spec.name, macros, self.spec.shared_memory(traits, tile))
            self._programs[tile, is_split] = program
        return program

    def appending(self) -> Program:
        """What appends keys and values to a cache; remembered."""
        if self._appending is None:
            traits = self._traits
            lengths = ("SEQLENS_K", int(traits.seqlens_k)), ("PAGED", int(traits.page_table))
            macros = *_array_macros(self.spec, traits), *_tile_macros(APPENDING), *lengths
            self._appending = Program("append_keys", macros, 0)
        return self._appending

    def preparing(self) -> Program:
        """What makes keys and values ready for tiles that want that; remembered."""
        if self._preparing is None:
            spec, traits = self.spec.preparing, self._traits
            assert spec is not None, "else no tile wants that"
            macros = *_array_macros(self.spec, traits), *_tile_macros(PREPARING), *spec.macros(traits)
            self._preparing = Program(spec.name, macros, spec.shared_memory(traits))
        return self._preparing


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
    """Tiles times splits."""
    workspace: int
    """Bytes of scratch memory in global memory."""
    num_batches: int
    num_m_blocks: int
    group_size: int
    packed_heads: int
    planes_at_once: int
    """Heads of all batches whose tiles take turns, those that see the most keys first; 0: one head after another."""
    batch_axes: Axes
    """Axis and length of the leading axes that the kernel walks; more than four are merged where strides allow."""
    outer_axes: Axes
    """Axis and length of those beyond four: one launch for each of their indices."""
    num_splits: int
    """Blocks that share the keys of one tile; if more than one, their results are partial and get merged."""
    preparation: Preparation | None
    append: Append | None

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.program.kernel

    def __str__(self) -> str:
        beside = [f"{self.num_splits} splits"] if self.num_splits > 1 else []
        beside += [f"{self.workspace} bytes of workspace"] if self.workspace else []
        splits = f" ({', '.join(beside)})" if beside else ""
        return (
            f"{self.program.kernel} tile {self.tile}, {self.tile.num_threads} threads, {self.num_blocks} blocks"
            f"{splits}, {self.program.shared_memory} bytes of shared memory"
        )


_builds: dict[tuple[Traits, Device, Settings], list[Build]] = {}


def find_builds(traits: Traits, device: Device, settings: Settings) -> list[Build]:
    """Return what follows from the traits, remembered: a build, and others if their kernels may take less time.

    ValueError if `options(kernel=..., tile=...)` asks for what cannot serve them.
    """
    key = traits, device, settings
    builds = _builds.get(key)
    if builds is None:
        if len(_builds) >= CACHE_SIZE:
            _builds.clear()
        specs = [choose_row(KERNELS, traits, device, settings)]
        if not settings.kernel and not settings.tile:
            others = [spec for spec in KERNELS if spec.name in specs[0].yields_to]
            specs += [spec for spec in others if spec.refusal(traits, device) is None]
        builds = _builds[key] = [Build(spec, traits, device, settings) for spec in specs]
    return builds


def choose_build(builds: list[Build], lengths: Lengths, prepares: bool) -> tuple[Build, Choice]:
    """Return the build that takes the least time, and what it chooses; of equal ones the first."""
    chosen = builds[0], builds[0].choose(lengths, prepares)
    for build in builds[1:]:
        choice = build.choose(lengths, prepares)
        if choice.time < chosen[1].time:
            chosen = build, choice
    return chosen


def make_plan(
    problem: Problem, device: Device, settings: Settings, num_splits: int | None = None, prepares: bool = True
) -> Plan:
    """Choose kernel, tile and splits (None: as many as help); `prepares`: whether a launch may prepare another.

    ValueError if `options(kernel=..., tile=...)` asks for what cannot serve the problem.
    """
    lengths = lengths_of(problem)
    prepares = prepares and not (_walked_axes(problem, False)[0] or problem.traits.seqlens_k)
    build, choice = choose_build(find_builds(problem.traits, device, settings), lengths, prepares)
    tile = build.tiles[choice.tile_idx]
    if num_splits is None and problem.cache is not None and problem.cache.num_splits is not None:
        tile, num_splits = build.splitting(tile, problem.cache.num_splits, problem.seqlen_k)
    elif num_splits is None:
        num_splits = choice.num_splits
        if num_splits > 1:  # without those that would be left with no tile
            num_steps = max(walk_of(lengths, tile).num_steps, 1)
            num_splits = -(-num_steps // -(-num_steps // num_splits))
    is_split = num_splits > 1
    packed_heads = heads_per_tile(lengths, tile.block_m)
    num_m_blocks = _num_m_blocks(problem, packed_heads, tile)
    outer_axes, batch_axes = _walked_axes(problem, is_split)
    num_batches = 1
    for _, length in batch_axes:
        num_batches *= length
    workspace = num_splits * sum(partial_of(problem).strides) if is_split else 0
    preparation, workspace = _preparation(problem, build, tile, workspace)
    return Plan(
        build.program(tile, is_split),
        tile,
        num_m_blocks * (problem.num_heads_q // packed_heads) * num_batches * num_splits,
        workspace,
        num_batches,
        num_m_blocks,
        lengths.group_size,
        packed_heads,
        _planes_at_once(problem, lengths, build.spec, tile, packed_heads),
        batch_axes,
        outer_axes,
        num_splits,
        preparation,
        _append(problem, build),
    )


def _append(problem: Problem, build: Build) -> Append | None:
    """What appends new keys, if there are any."""
    if problem.cache is None:
        return None
    num_rows = 2 * prod(problem.batch) * problem.num_heads_kv * problem.cache.num_new
    num_blocks = -(-num_rows * WARP // APPENDING.num_threads)
    return Append(build.appending(), num_blocks) if num_blocks else None


def _preparation(problem: Problem, build: Build, tile: Tile, workspace: int) -> tuple[Preparation | None, int]:
    """What makes keys and values ready behind other things in a workspace, and how long that is with it."""
    num_planes = problem.num_heads_kv
    if problem.traits.op != "attention_varlen":
        num_planes *= prod(problem.batch)
    if not tile.prepared or not num_planes * problem.seqlen_k * problem.seqlen_q:
        return None, workspace
    row_k, row_v = build.spec.prepared_row(problem.traits)
    offset_k = round_up(workspace, BOUNDARY)
    offset_v = offset_k + num_planes * problem.seqlen_k * row_k
    num_blocks = num_planes * -(-problem.seqlen_k // PREPARING.block_n) * (2 if row_v else 1)
    end = offset_v + num_planes * problem.seqlen_k * row_v
    return Preparation(build.preparing(), num_blocks, offset_k, offset_v), end


def _num_m_blocks(problem: Problem, packed_heads: int, tile: Tile) -> int:
    num_rows = problem.seqlen_q * packed_heads
    if problem.traits.op == "attention_varlen":
        # Every sequence, and the tokens before and behind them all, may end in a partial tile.
        return num_rows // tile.block_m + min(problem.batch[0] + 2, problem.seqlen_q)
    return -(-num_rows // tile.block_m)


def _planes_at_once(problem: Problem, lengths: Lengths, spec: KernelSpec, tile: Tile, packed_heads: int) -> int:
    """Where later rows see more keys: all heads, or as many as have keys and values that stay in cache together.

    The latter for tiles that read keys faster than memory gives them.
    """
    traits = problem.traits
    if problem.window_right is None or traits.op == "attention_varlen":
        return 0
    if tile.block_m > spec.starved_rows:
        return max(lengths.num_planes, 1)
    num_bytes = problem.seqlen_k * (traits.head_dim + traits.head_dim_v) * ITEMSIZE[traits.dtype]
    return max(1, CACHED_BYTES // max(num_bytes, 1)) * (lengths.group_size // packed_heads)


def refusals(traits: Traits, device: Device) -> list[tuple[str, str | None]]:
    """Every row of the table with the reason why it does not serve such problems, None where it does."""
    return [(spec.name, spec.refusal(traits, device)) for spec in KERNELS]


def _allowed_tiles(spec: KernelSpec, traits: Traits, device: Device, settings: Settings) -> list[Tile]:
    """Tiles that fit, or the one that the settings name."""
    tiles = spec.tiles(traits, device)
    if not settings.tile:
        return tiles
    named = [tile for tile in tiles if str(tile) == settings.tile]
    if named:
        return named
    names = ", ".join(dict.fromkeys(map(str, tiles)))
    raise ValueError(f"tile {settings.tile!r} cannot serve this call: kernel {spec.name!r} has {names} for it")


def merge_axes(shape: tuple[int, ...], operands: Sequence[tuple[int, ...]]) -> Axes:
    """Merge neighbouring axes that every operand steps through as one, given its strides.

    Each result is the last axis of those it stands for and the product of their lengths; axes of length 1 are left out.
    """
    merged: list[tuple[int, int]] = []
    for axis in range(len(shape) - 1, -1, -1):
        length = shape[axis]
        if length == 1:
            continue
        if merged:
            inner_axis, inner_length = merged[-1]
            if all(strides[axis] == strides[inner_axis] * inner_length for strides in operands):
                merged[-1] = (inner_axis, inner_length * length)
                continue
        merged.append((axis, length))
    return tuple(reversed(merged))


def _walked_axes(problem: Problem, is_split: bool) -> tuple[Axes, Axes]:
    """Leading axes that need a launch each, and those that the kernel walks; merged if they are too many."""
    if problem.traits.op == "attention_varlen":
        return (), ()
    if len(problem.batch) <= BATCH_AXES:
        return (), tuple(enumerate(problem.batch))
    written = partial_results(problem) if is_split else problem
    merged = merge_axes(problem.batch, [strides for strides in written.strides if strides is not None])
    split = max(0, len(merged) - BATCH_AXES)
    return merged[:split], merged[split:]


def _array_macros(spec: KernelSpec, traits: Traits) -> Macros:
    return (
        ("DTYPE", f"CUFLASH_{traits.dtype.upper()}"),
        ("HEAD_DIM", spec.head_dim_bucket(traits.head_dim)),
        ("HEAD_DIM_V", spec.head_dim_bucket(traits.head_dim_v)),
        ("ALIGNMENT", traits.alignment),
    )


def _tile_macros(tile: Tile) -> Macros:
    return ("BLOCK_M", tile.block_m), ("BLOCK_N", tile.block_n), ("THREADS", tile.num_threads)


def _macros(spec: KernelSpec, traits: Traits, tile: Tile, device: Device) -> Macros:
    return (
        *_array_macros(spec, traits),
        ("OUT_DTYPE", f"CUFLASH_{traits.out_dtype.upper()}"),
        *_tile_macros(tile),
        ("STAGES", tile.stages),
        ("MIN_BLOCKS", spec.min_blocks(traits, tile, device)),
        *feature_macros(traits, spec.caps_by_polynomial),
        *spec.macros(traits),
        *((("PREPARED", 1),) if tile.prepared else ()),
    )
