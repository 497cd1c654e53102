"""How a problem is computed on a device: kernel, tile, grid, shared memory. Pure Python; needs no GPU."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from .kernels import CPU_KERNEL, KERNELS, Device, KernelSpec, Tile, kernel_names
from .knobs import Settings
from .params import BATCH_AXES
from .problem import Problem, common_alignment

MAX_GRID = 2**31 - 1
"""Blocks of one launch."""
SMALLEST_USEFUL_TILE = 16
"""Rows below which a tile saves nothing: its keys are loaded all the same."""
LARGEST_TILE = 1024
CACHE_SIZE = 4096

Macros = tuple[tuple[str, str | int], ...]
Axes = tuple[tuple[int, int], ...]


class Plan(NamedTuple):
    """The choice for one problem on one device. Holds no pointers and prints as one line."""

    kernel: str
    macros: Macros
    """What the kernel is compiled for, as names and values of CUFLASH_* macros: no lengths, no strides."""
    tile: Tile
    num_blocks: int
    shared_memory: int
    """Bytes per block."""
    workspace: int
    """Bytes of scratch memory in global memory."""
    num_batches: int
    num_m_blocks: int
    group_size: int
    packed_heads: int
    longest_first: bool
    batch_axes: Axes
    """Axis and length of the leading axes that the kernel walks; more than four are merged where strides allow."""
    useful_rows: int
    """Tile height worth having for these lengths; the tile is chosen by it."""
    outer_axes: Axes
    """Axis and length of those beyond four: one launch for each of their indices."""

    def __str__(self) -> str:
        return (
            f"{self.kernel} tile {self.tile}, {self.tile.num_threads} threads, {self.num_blocks} blocks, "
            f"{self.shared_memory} bytes of shared memory"
        )


def make_plan(problem: Problem, device: Device, settings: Settings) -> Plan:
    """Choose kernel and tile; ValueError if `options(kernel=..., tile=...)` asks for what cannot serve the problem."""
    varlen = problem.op == "attention_varlen"
    batch, seqlen_q, num_heads_q = problem.batch, problem.seqlen_q, problem.num_heads_q
    group_size = num_heads_q // problem.num_heads_kv if num_heads_q else 1
    average_rows = seqlen_q // max(batch[0], 1) if varlen else seqlen_q
    num_planes = num_heads_q * prod(batch)
    useful_rows = rows_worth_a_tile(average_rows, group_size, num_planes, device)
    kernel, tile, macros, shared_memory = _choose(problem, device, settings, useful_rows)

    packed_heads = heads_per_tile(average_rows, group_size, tile)
    num_rows = seqlen_q * packed_heads
    batch_axes: Axes = ()
    outer_axes: Axes = ()
    num_batches = 1
    if varlen:
        # Every sequence, and the tokens before and behind them all, may end in a partial tile.
        num_m_blocks = num_rows // tile.block_m + min(batch[0] + 2, seqlen_q)
    else:
        num_m_blocks = -(-num_rows // tile.block_m)
        batch_axes = tuple(enumerate(batch))
        if len(batch) > BATCH_AXES:
            outer_axes, batch_axes = _merge_axes(problem)
        for _, length in batch_axes:
            num_batches *= length
    return Plan(
        kernel,
        macros,
        tile,
        num_m_blocks * (num_heads_q // packed_heads) * num_batches,
        shared_memory,
        0,
        num_batches,
        num_m_blocks,
        group_size,
        packed_heads,
        problem.window_right is not None and not varlen,
        batch_axes,
        useful_rows,
        outer_axes,
    )


def rows_worth_a_tile(rows: int, group_size: int, num_planes: int, device: Device) -> int:
    """Tile height worth having: not above the rows of one key head, and low enough to occupy every multiprocessor.

    Parameters
    ----------
    rows
        Queries of one head (for packed sequences: on average).
    group_size
        Query heads per key head.
    num_planes
        Query heads in all batches.
    device
        The GPU.
    """
    limit = min(rows * group_size, rows * num_planes // device.num_multiprocessors)
    return max(SMALLEST_USEFUL_TILE, min(LARGEST_TILE, 1 << limit.bit_length() - 1 if limit else 0))


def heads_per_tile(rows: int, group_size: int, tile: Tile) -> int:
    """Query heads that share a tile: all of a group where one head's rows do not fill it, else one."""
    return group_size if rows < tile.block_m else 1


class _Choice(NamedTuple):
    kernel: str
    tile: Tile
    macros: Macros
    shared_memory: int


_choices: dict[tuple, _Choice] = {}


def _choose(problem: Problem, device: Device, settings: Settings, useful_rows: int) -> _Choice:
    """Kernel, tile and build of a problem; remembered, as they do not depend on its lengths beyond `useful_rows`.

    The key must hold whatever a row's `refusal`, `tiles`, `shared_memory` and `min_blocks` look at.
    """
    p = problem
    alignment = common_alignment(p)
    key = (
        p.op, p.dtype, p.out_dtype, p.precision, p.head_dim, p.head_dim_v, p.num_heads_q, p.num_heads_kv,
        p.window_left is None, p.window_right is None, p.softcap == 0, p.bias and p.bias.dtype, p.mask is None,
        p.alibi_slopes is None, p.sinks is None, p.query_offsets is None, alignment, useful_rows, device, settings,
    )  # fmt: skip
    choice = _choices.get(key)
    if choice is None:
        spec = choose_kernel(p, device, settings)
        tile = _choose_tile(spec, p, device, settings, useful_rows)
        macros = _macros(spec, p, tile, device, alignment)
        if len(_choices) >= CACHE_SIZE:
            _choices.clear()
        choice = _choices[key] = _Choice(spec.name, tile, macros, spec.shared_memory(p, tile))
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


def _choose_tile(spec: KernelSpec, problem: Problem, device: Device, settings: Settings, useful_rows: int) -> Tile:
    tiles = spec.tiles(problem, device)
    if not settings.tile:
        return next((tile for tile in tiles if tile.block_m <= useful_rows), tiles[0])
    for tile in tiles:
        if str(tile) == settings.tile:
            return tile
    names = ", ".join(dict.fromkeys(map(str, tiles)))
    raise ValueError(f"tile {settings.tile!r} cannot serve this call: kernel {spec.name!r} has {names} for it")


def _merge_axes(problem: Problem) -> tuple[Axes, Axes]:
    """Merge neighbouring leading axes that every operand steps through as one; return (outer, inner) axes."""
    operands = [operand.strides for operand in problem.operands if operand is not None]
    merged: list[tuple[int, int]] = []
    for axis in range(len(problem.batch) - 1, -1, -1):
        length = problem.batch[axis]
        if length == 1:
            continue
        if merged:
            inner_axis, inner_length = merged[-1]
            if all(strides[axis] == strides[inner_axis] * inner_length for strides in operands):
                merged[-1] = (inner_axis, inner_length * length)
                continue
        merged.append((axis, length))
    merged.reverse()
    split = max(0, len(merged) - BATCH_AXES)
    return tuple(merged[:split]), tuple(merged[split:])


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
        ("MIN_BLOCKS", spec.min_blocks(problem, tile, device)),
        ("MASK", int(problem.mask is not None)),
        ("SOFTCAP", int(problem.softcap != 0)),
        ("VARLEN", int(problem.op == "attention_varlen")),
        ("ALIGNMENT", alignment),
    )
