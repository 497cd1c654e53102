"""How a problem is computed on a device: kernel, tile, grid, shared memory. Pure Python; needs no GPU."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from .arrays import ITEMSIZE
from .kernels import CPU_KERNEL, KERNELS, Device, KernelSpec, Tile, kernel_names
from .knobs import Settings
from .params import BATCH_AXES
from .problem import Problem

MAX_GRID = 2**31 - 1
"""Blocks of one launch."""

Macros = tuple[tuple[str, str | int], ...]


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
    batch_axes: tuple[tuple[int, int], ...]
    """Axis and length of the leading axes that the kernel walks, merged where strides allow."""
    outer_axes: tuple[tuple[int, int], ...]
    """Axis and length of those beyond four: one launch for each of their indices."""

    def __str__(self) -> str:
        return (
            f"{self.kernel} tile {self.tile}, {self.tile.num_threads} threads, {self.num_blocks} blocks, "
            f"{self.shared_memory} bytes of shared memory"
        )


def make_plan(problem: Problem, device: Device, settings: Settings) -> Plan:
    """Choose kernel and tile; ValueError if `options(kernel=..., tile=...)` asks for what cannot serve the problem."""
    spec = choose_kernel(problem, device, settings)
    tile = _choose_tile(spec, problem, device, settings)
    group_size = problem.num_heads_q // max(problem.num_heads_kv, 1)
    varlen = problem.op == "attention_varlen"
    average_rows = problem.seqlen_q // max(problem.batch[0], 1) if varlen else problem.seqlen_q
    packed_heads = group_size if group_size > 1 and average_rows < tile.block_m else 1
    num_rows = problem.seqlen_q * packed_heads
    num_head_tiles = problem.num_heads_q // max(packed_heads, 1)
    if varlen:
        # Every sequence, and the tokens before and behind them all, may end in a partial tile.
        num_m_blocks = num_rows // tile.block_m + min(problem.batch[0] + 2, problem.seqlen_q)
        batch_axes: tuple[tuple[int, int], ...] = ()
        outer_axes: tuple[tuple[int, int], ...] = ()
        num_batches = 1
    else:
        num_m_blocks = -(-num_rows // tile.block_m)
        outer_axes, batch_axes = _merge_axes(problem)
        num_batches = prod(length for _, length in batch_axes)
    return Plan(
        spec.name,
        _macros(spec, problem, tile, device),
        tile,
        num_m_blocks * num_head_tiles * num_batches,
        spec.shared_memory(problem, tile),
        0,
        num_batches,
        num_m_blocks,
        max(group_size, 1),
        packed_heads,
        problem.window_right is not None and not varlen,
        batch_axes,
        outer_axes,
    )


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
    """Every row of the table with its refusal, None where it accepts."""
    return [(spec.name, spec.refusal(problem, device)) for spec in KERNELS]


def _choose_tile(spec: KernelSpec, problem: Problem, device: Device, settings: Settings) -> Tile:
    tiles = spec.tiles(problem, device)
    if not settings.tile:
        return tiles[0]
    for tile in tiles:
        if str(tile) == settings.tile:
            return tile
    names = ", ".join(dict.fromkeys(map(str, tiles)))
    raise ValueError(f"tile {settings.tile!r} cannot serve this call: kernel {spec.name!r} has {names} for it")


def _merge_axes(problem: Problem) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Merge neighbouring leading axes that every operand steps through as if they were one; return (outer, inner) axes."""
    batch = problem.batch
    if len(batch) == 1:
        return (), ((0, batch[0]),)
    operands = [operand.strides for operand in problem.operands if operand is not None]
    merged: list[tuple[int, int]] = []
    for axis in range(len(batch) - 1, -1, -1):
        length = batch[axis]
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


def _macros(spec: KernelSpec, problem: Problem, tile: Tile, device: Device) -> Macros:
    if not _elements_aligned(problem):
        alignment = 1
    else:
        alignment = 16 if spec.vector_loads(problem) else ITEMSIZE[problem.dtype]
    return _macro_tuple(
        problem.dtype,
        problem.out_dtype,
        problem.bias.dtype if problem.bias else "",
        spec.head_dim_bucket(problem.head_dim),
        spec.head_dim_bucket(problem.head_dim_v),
        tile,
        spec.min_blocks(problem, tile, device),
        problem.mask is not None,
        problem.softcap != 0,
        problem.op == "attention_varlen",
        alignment,
    )


def _elements_aligned(problem: Problem) -> bool:
    for operand in problem.operands:
        if operand is not None:
            itemsize = ITEMSIZE[operand.dtype]
            if operand.alignment % itemsize or (operand.strides and operand.strides[-1] % itemsize):
                return False
    return True


@lru_cache(maxsize=1024)
def _macro_tuple(
    dtype: str,
    out_dtype: str,
    bias_dtype: str,
    head_dim: int,
    head_dim_v: int,
    tile: Tile,
    min_blocks: int,
    mask: bool,
    softcap: bool,
    varlen: bool,
    alignment: int,
) -> Macros:
    return (
        ("DTYPE", f"CUFLASH_{dtype.upper()}"),
        ("OUT_DTYPE", f"CUFLASH_{out_dtype.upper()}"),
        ("BIAS_DTYPE", f"CUFLASH_{bias_dtype.upper()}" if bias_dtype else 0),
        ("HEAD_DIM", head_dim),
        ("HEAD_DIM_V", head_dim_v),
        ("BLOCK_M", tile.block_m),
        ("BLOCK_N", tile.block_n),
        ("THREADS", tile.num_threads),
        ("MIN_BLOCKS", min_blocks),
        ("MASK", int(mask)),
        ("SOFTCAP", int(softcap)),
        ("VARLEN", int(varlen)),
        ("ALIGNMENT", alignment),
    )
