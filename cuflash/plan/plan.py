"""How a problem is computed on a device: kernel, tile, grid, shared memory. Pure Python; needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ..problem.arrays import ITEMSIZE
from ..problem.problem import Problem, common_alignment
from ..settings import Settings
from .pace import Walk, pace_of
from .splits import (
    ENOUGH_THREADS,
    Partial,
    VisibleKeys,
    choose_splits,
    partial_layout,
    partial_of,
    partial_results,
    visible_keys,
)
from .table import CPU_KERNEL, KERNELS, Device, KernelSpec, Tile, kernel_names, softcap_degree
from .worth import TALL_TILE, Rows, TileWorth, worth_a_tile

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

Macros = tuple[tuple[str, str | int], ...]
Axes = tuple[tuple[int, int], ...]


class Build(NamedTuple):
    """What a kernel that is not in the table is compiled for."""

    kernel: str
    macros: Macros
    shared_memory: int


class Plan(NamedTuple):
    """The choice for one problem on one device. Holds no pointers and prints as one line."""

    kernel: str
    macros: Macros
    """What the kernel is compiled for, as names and values of CUFLASH_* macros: no lengths, no strides."""
    tile: Tile
    num_blocks: int
    """Tiles times splits."""
    shared_memory: int
    """Bytes per block."""
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
    worth: TileWorth
    outer_axes: Axes
    """Axis and length of those beyond four: one launch for each of their indices."""
    num_splits: int = 1
    """Blocks that share the keys of one tile; if more than one, their results are partial and get combined."""
    resident_blocks: int = 0
    """Blocks that keep the device busy; 0 for a kernel that writes no partial results."""

    def __str__(self) -> str:
        splits = f" ({self.num_splits} splits, {self.workspace} bytes of workspace)" if self.num_splits > 1 else ""
        return (
            f"{self.kernel} tile {self.tile}, {self.tile.num_threads} threads, {self.num_blocks} blocks{splits}, "
            f"{self.shared_memory} bytes of shared memory"
        )


def make_plan(problem: Problem, device: Device, settings: Settings, num_splits: int | None = None) -> Plan:
    """Choose kernel, tile and splits (None: as many as help).

    ValueError if `options(kernel=..., tile=...)` asks for what cannot serve the problem.
    """
    varlen = problem.op == "attention_varlen"
    batch, seqlen_q, num_heads_q = problem.batch, problem.seqlen_q, problem.num_heads_q
    group_size = num_heads_q // problem.num_heads_kv if num_heads_q else 1
    average_rows = seqlen_q // max(batch[0], 1) if varlen else seqlen_q
    rows = Rows(average_rows, group_size, num_heads_q * prod(batch))
    # Packed sequences are not split by themselves: the host does not know their lengths, and a captured call that is
    # given `out` has no `workspace` to be given too.
    keys = visible_keys(problem, seqlen_q, 0 if varlen else problem.seqlen_k, problem.query_offset, TALL_TILE)
    spec, key = _cached_kernel(problem, device, settings)
    worth = worth_a_tile(problem, spec, rows, device, keys)
    choice = _choose(problem, device, settings, spec, key, worth)
    resident_blocks = _resident_blocks(choice, device)
    if num_splits is None:
        num_splits = _choose_splits(problem, spec, device, rows, keys, choice.tile, resident_blocks)
    if num_splits > 1:
        partial, same_kernel = partial_results(problem), settings._replace(kernel=choice.kernel)
        choice = _choose(partial, device, same_kernel, *_cached_kernel(partial, device, same_kernel), worth)

    tile = choice.tile
    packed_heads = rows.heads_per_tile(tile.block_m)
    num_m_blocks = _num_m_blocks(problem, packed_heads, tile)
    outer_axes, batch_axes = _walked_axes(problem if num_splits == 1 else partial_results(problem))
    num_batches = prod(length for _, length in batch_axes)
    return Plan(
        choice.kernel,
        choice.macros,
        tile,
        num_m_blocks * (num_heads_q // packed_heads) * num_batches * num_splits,
        choice.shared_memory,
        _workspace(partial_of(problem), num_splits),
        num_batches,
        num_m_blocks,
        group_size,
        packed_heads,
        _planes_at_once(problem, spec, problem.seqlen_k, tile.block_m, group_size // packed_heads),
        batch_axes,
        worth,
        outer_axes,
        num_splits,
        resident_blocks,
    )


def _num_m_blocks(problem: Problem, packed_heads: int, tile: Tile) -> int:
    num_rows = problem.seqlen_q * packed_heads
    if problem.op == "attention_varlen":
        # Every sequence, and the tokens before and behind them all, may end in a partial tile.
        return num_rows // tile.block_m + min(problem.batch[0] + 2, problem.seqlen_q)
    return -(-num_rows // tile.block_m)


def _choose_splits(
    problem: Problem, spec: KernelSpec, device: Device, rows: Rows, keys: VisibleKeys, tile: Tile, resident_blocks: int
) -> int:
    """Parts into which the keys of a kernel's tiles are split."""
    multiprocessors = device.num_multiprocessors
    pace = None
    if spec.latency_bound:
        pace = pace_of(problem, tile.block_m, tile.block_n, rows.total, resident_blocks > multiprocessors)
    num_tiles, num_blocks = -(-keys.most // tile.block_n), rows.num_tiles(tile.block_m)
    walk = Walk(num_blocks, num_tiles, keys.average, multiprocessors, resident_blocks)
    return choose_splits(walk, keys.most, spec.splits_from, pace)


def _resident_blocks(choice: Choice, device: Device) -> int:
    if not choice.splits:
        return 0
    return min(choice.min_blocks, -(-ENOUGH_THREADS // choice.tile.num_threads)) * device.num_multiprocessors


def plan_other_lengths(
    problem: Problem, plan: Plan, device: Device, seqlen_q: int, seqlen_k: int, offset: int | None
) -> Plan | None:
    """Plan a dense problem with other lengths; None where that changes the build or what of lengths it rests on."""
    tile, packed_heads = plan.tile, plan.packed_heads
    rows = Rows(seqlen_q, plan.group_size, plan.num_batches * problem.num_heads_q)
    keys = visible_keys(problem, seqlen_q, seqlen_k, offset, TALL_TILE)
    spec = next(spec for spec in KERNELS if spec.name == plan.kernel)
    same_heads = packed_heads == rows.heads_per_tile(tile.block_m)
    if not same_heads or plan.worth != worth_a_tile(problem, spec, rows, device, keys):
        return None
    num_splits = _choose_splits(problem, spec, device, rows, keys, tile, plan.resident_blocks)
    if (num_splits == 1) != (plan.num_splits == 1):
        return None
    shape = (*problem.batch, problem.num_heads_q, seqlen_q)
    workspace = 0
    if num_splits > 1:
        workspace = _workspace(partial_layout(shape, problem.head_dim_v, problem.lse_dtype), num_splits)
    return plan._replace(
        num_blocks=rows.num_tiles(tile.block_m) * num_splits,
        num_m_blocks=-(-seqlen_q * packed_heads // tile.block_m),
        planes_at_once=_planes_at_once(problem, spec, seqlen_k, tile.block_m, plan.group_size // packed_heads),
        num_splits=num_splits,
        workspace=workspace,
    )


def _planes_at_once(problem: Problem, spec: KernelSpec, seqlen_k: int, block_m: int, planes_of_a_head: int) -> int:
    """Where later rows see more keys: all heads, or as many as have keys and values that stay in cache together.

    The latter for tiles that read keys faster than memory gives them.
    """
    if problem.window_right is None or problem.op == "attention_varlen":
        return 0
    if not spec.latency_bound or block_m > TALL_TILE:
        return max(problem.num_heads_q * prod(problem.batch), 1)
    num_bytes = seqlen_k * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]
    return max(1, CACHED_BYTES // max(num_bytes, 1)) * planes_of_a_head


def _workspace(partial: Partial, num_splits: int) -> int:
    return num_splits * sum(partial.strides) if num_splits > 1 else 0


class Choice(NamedTuple):
    """What does not depend on lengths beyond the tile height worth having."""

    kernel: str
    tile: Tile
    macros: Macros
    shared_memory: int
    min_blocks: int
    splits: bool
    """Whether the kernel can write partial results, whose type may be another than that of the inputs."""


_choices: dict[tuple, Choice] = {}
_specs: dict[tuple, KernelSpec] = {}


def _cached_kernel(problem: Problem, device: Device, settings: Settings) -> tuple[KernelSpec, tuple]:
    """Return what `choose_kernel` does, and a key for all that a choice depends on but `TileWorth`.

    The key must hold whatever a row's `refusal`, `tiles`, `shared_memory` and `min_blocks` look at.
    """
    p = problem
    key = (
        p.op, p.dtype, p.out_dtype, p.precision, p.head_dim, p.head_dim_v, p.num_heads_q, p.num_heads_kv,
        p.window_left is None, p.window_right is None, softcap_degree(p), p.bias and p.bias.dtype, p.mask is None,
        p.alibi_slopes is None, p.sinks is None, p.query_offsets is None, common_alignment(p), device, settings,
    )  # fmt: skip
    spec = _specs.get(key)
    if spec is None:
        if len(_specs) >= CACHE_SIZE:
            _specs.clear()
        spec = _specs[key] = choose_kernel(problem, device, settings)
    return spec, key


def _choose(
    problem: Problem, device: Device, settings: Settings, spec: KernelSpec, key: tuple, worth: TileWorth
) -> Choice:
    """Tile and build of a problem for a kernel; remembered, as they do not depend on its lengths beyond `worth`."""
    choice = _choices.get((key, worth))
    if choice is None:
        tile = _choose_tile(spec, problem, device, settings, worth)
        macros = _macros(spec, problem, tile, device, common_alignment(problem))
        if len(_choices) >= CACHE_SIZE:
            _choices.clear()
        shared_memory, min_blocks = spec.shared_memory(problem, tile), spec.min_blocks(problem, tile, device)
        choice = _choices[key, worth] = Choice(
            spec.name, tile, macros, shared_memory, min_blocks, "out_dtype" in spec.features
        )
    return choice


def choose_kernel(problem: Problem, device: Device, settings: Settings) -> KernelSpec:
    """First row of the table that accepts, or the one that the settings name."""
    if not settings.kernel:
        return next(spec for spec in KERNELS if spec.refusal(problem, device) is None)
    if settings.kernel == CPU_KERNEL:
        raise ValueError("kernel 'cpu' cannot serve this call: it computes NumPy arrays, these are on a GPU")
    for spec in KERNELS:
        if spec.name == settings.kernel:
            reason = spec.refusal(problem, device)
            if reason is not None:
                raise ValueError(f"kernel {spec.name!r} cannot serve this call: {reason}")
            return spec
    raise ValueError(f"kernel is {settings.kernel!r}, expected one of {', '.join(kernel_names())}")


def refusals(problem: Problem, device: Device) -> list[tuple[str, str | None]]:
    """Every row of the table with the reason why it does not serve the problem, None where it does."""
    return [(spec.name, spec.refusal(problem, device)) for spec in KERNELS]


def _choose_tile(spec: KernelSpec, problem: Problem, device: Device, settings: Settings, worth: TileWorth) -> Tile:
    tiles = spec.tiles(problem, device)
    if not settings.tile:
        first = next((tile for tile in tiles if tile.block_m <= worth.rows), tiles[0])
        alike = [tile for tile in tiles if tile.block_m == first.block_m]
        if worth.alone:  # shared memory is free: two buffers, and as wide as there is
            first = max((tile for tile in alike if tile.stages > 1), key=lambda tile: tile.block_n, default=first)
        if first.block_n <= worth.keys:
            return first
        return next((tile for tile in alike if tile.block_n <= worth.keys and tile.stages == first.stages), first)
    for tile in tiles:
        if str(tile) == settings.tile:
            return tile
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


def _walked_axes(problem: Problem) -> tuple[Axes, Axes]:
    """Leading axes that need a launch each, and those that the kernel walks; merged if they are too many."""
    if problem.op == "attention_varlen":
        return (), ()
    if len(problem.batch) <= BATCH_AXES:
        return (), tuple(enumerate(problem.batch))
    merged = merge_axes(problem.batch, [operand.strides for operand in problem.operands if operand is not None])
    split = max(0, len(merged) - BATCH_AXES)
    return merged[:split], merged[split:]


def _macros(spec: KernelSpec, problem: Problem, tile: Tile, device: Device, alignment: int) -> Macros:
    return (
        ("DTYPE", f"CUFLASH_{problem.dtype.upper()}"),
        ("OUT_DTYPE", f"CUFLASH_{problem.out_dtype.upper()}"),
        ("BIAS_DTYPE", f"CUFLASH_{problem.bias.dtype.upper()}" if problem.bias else 0),
        ("HEAD_DIM", spec.head_dim_bucket(problem.head_dim)),
        ("HEAD_DIM_V", spec.head_dim_bucket(problem.head_dim_v)),
        ("BLOCK_M", tile.block_m),
        ("BLOCK_N", tile.block_n),
        ("THREADS", tile.num_threads),
        ("STAGES", tile.stages),
        ("MIN_BLOCKS", spec.min_blocks(problem, tile, device)),
        ("MASK", int(problem.mask is not None)),
        ("ALIBI", int(problem.alibi_slopes is not None)),
        ("SOFTCAP", softcap_degree(problem) if spec.caps_by_polynomial else int(problem.softcap != 0)),
        ("VARLEN", int(problem.op == "attention_varlen")),
        ("ALIGNMENT", alignment),
    )
