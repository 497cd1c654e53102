"""How partial results are merged: build, grid and argument struct of cuda_src/merge.cu. Pure Python; needs no GPU."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from ..plan.axes import BATCH_AXES, merge_axes
from ..plan.build import Program
from ..plan.tiles import WARP
from ..problem.arrays import ITEMSIZE, ArrayInfo
from ..problem.problem import Operand, alignment_of
from .arguments import DIVISOR, Fields, divisor, packer

ROW_AXES = BATCH_AXES + 2
MAX_PARTS = 16
"""Arrays of their own that one launch merges; parts stacked in one array may be any number."""
MAX_THREADS = 256
"""Of a block, which has fewer where multiprocessors would be left without one: what it loads has one way to each."""
SPREAD_OVER = 128
"""Multiprocessors that blocks are spread over."""
PARTS_PER_TURN = 8
"""Of a row, that a warp takes; of more, other warps of the block take the next ones at the same time."""
MAX_WIDTH = 512
"""Features that a row's lanes hold at a time."""


def fields(stacked: bool) -> Fields:
    """Name and `struct` format of every field of `MergeParams`, which is another one for stacked parts."""
    parts = 1 if stacked else MAX_PARTS
    return (
        ("outs", f"{parts}Q"),
        ("lses", f"{parts}Q"),
        ("out", "Q"),
        ("lse", "Q"),
        ("outs_strides", f"{parts * ROW_AXES}q"),
        ("lses_strides", f"{parts * ROW_AXES}q"),
        ("out_strides", f"{ROW_AXES}q"),
        ("lse_strides", f"{ROW_AXES}q"),
        ("outs_column_stride", f"{parts}q"),
        ("out_column_stride", "q"),
        ("outs_part_stride", "q"),
        ("lses_part_stride", "q"),
        ("lses_column_stride", "q"),
        ("lse_column_stride", "q"),
        ("shape", DIVISOR * ROW_AXES),
        ("num_rows", "q"),
        ("num_parts", "q"),
        ("warps_per_row", "q"),
        ("head_dim_v", "q"),
    )


_NUM_ADDRESSES = 4
_PACK_ADDRESSES, _PACK_VALUES = (
    {stacked: packer(fields(stacked)[which]) for stacked in (False, True)}
    for which in (slice(_NUM_ADDRESSES), slice(_NUM_ADDRESSES, None))
)


_pack_stacked = struct.Struct("=4Q").pack


class Merge(NamedTuple):
    """The launches that merge partial results. Holds no addresses."""

    program: Program
    num_blocks: int
    num_threads: int
    """Of a block."""
    stacked: bool
    pieces: tuple[tuple[bytes, tuple[int, ...]], ...]
    """For each launch the struct behind the addresses, and what to add to those: `outs`, `lses`, `out`, `lse`. None
    where there are no rows."""

    def arguments(self, outs: Sequence[int], lses: Sequence[int], out: int, lse: int) -> list[bytes]:
        """Pack the struct of each launch, given the addresses of the parts (stacked: of the first) and the results."""
        pack = _PACK_ADDRESSES[self.stacked]
        unused = (0,) * (0 if self.stacked else MAX_PARTS - len(outs))
        packed = []
        for rest, offsets in self.pieces:
            *at, to_out, to_lse = (p + o for p, o in zip((*outs, *lses, out, lse), offsets, strict=True))
            outs_at, lses_at = at[: len(outs)], at[len(outs) :]
            addresses = pack(outs=(*outs_at, *unused), lses=(*lses_at, *unused), out=to_out, lse=to_lse if lse else 0)
            packed.append(addresses + rest)
        return packed

    def arguments_of_stacked(self, outs: int, lses: int, out: int, lse: int) -> list[bytes]:
        """Do the same for stacked parts, in less time."""
        return [
            _pack_stacked(outs + to_outs, lses + to_lses, out + to_out, lse + to_lse if lse else 0) + rest
            for rest, (to_outs, to_lses, to_out, to_lse) in self.pieces
        ]


def operands_of(infos: Sequence[ArrayInfo]) -> list[Operand]:
    """Layout of arrays that are merged, or written."""
    return [Operand(x.dtype, x.strides, alignment_of(x.pointer, x.shape, x.strides)) for x in infos]


def plan_merge(
    rows: tuple[int, ...],
    width: int,
    outs: Sequence[Operand],
    lses: Sequence[Operand],
    out: Operand,
    lse: Operand | None,
    num_parts: int,
    part_strides: tuple[int, int] | None,
) -> Merge:
    """Work out how `num_parts` results of `rows` x `width` features are merged into `out` and `lse`.

    Parameters
    ----------
    outs, lses
        One operand of each for all parts if these are stacked, else up to `MAX_PARTS`. Where `lses`, or `lse`, has one
        axis more than `rows`, its elements are `PARTIAL_COLUMNS` of a sum and not a logarithm.
    part_strides
        Bytes from part to part, of `outs` and `lses`, if they are stacked.
    """
    stacked = part_strides is not None
    operands = [*outs, *lses, out, *([lse] if lse else [])]
    axes = merge_axes(rows, [x.strides for x in operands])
    outer, inner = axes[: max(0, len(axes) - ROW_AXES)], axes[max(0, len(axes) - ROW_AXES) :]
    padding, unused = ROW_AXES - len(inner), [0] * (0 if stacked else MAX_PARTS - len(outs))

    def walked(*arrays: Operand | None) -> list[int]:
        steps = []
        for x in arrays:
            steps += [0] * padding + [x.strides[axis] if x else 0 for axis, _ in inner]
        return steps

    shape = [1] * padding + [length for _, length in inner]
    num_rows = prod(shape)
    warps_per_row = 1
    while warps_per_row * PARTS_PER_TURN < num_parts and warps_per_row * WARP < MAX_THREADS:
        warps_per_row *= 2
    steps_apart = part_strides or (0, 0)
    packed = _PACK_VALUES[stacked](
        outs_strides=walked(*outs) + unused * ROW_AXES,
        lses_strides=walked(*lses) + unused * ROW_AXES,
        out_strides=walked(out),
        lse_strides=walked(lse),
        outs_column_stride=[x.strides[-1] for x in outs] + unused,
        out_column_stride=out.strides[-1],
        outs_part_stride=steps_apart[0],
        lses_part_stride=steps_apart[1],
        lses_column_stride=lses[0].strides[-1] if len(lses[0].strides) > len(rows) else 0,
        lse_column_stride=lse.strides[-1] if lse and len(lse.strides) > len(rows) else 0,
        shape=[x for length in shape for x in divisor(length)],
        num_rows=num_rows,
        num_parts=num_parts,
        warps_per_row=warps_per_row,
        head_dim_v=width,
    )
    pieces = []
    for index in product(*(range(length) for _, length in outer)) if num_rows else ():
        steps = [(i, axis) for i, (axis, _) in zip(index, outer, strict=True)]
        places = [sum([i * x.strides[axis] for i, axis in steps]) if x else 0 for x in (*outs, *lses, out, lse)]
        pieces.append((packed, tuple(places)))
    alignment = _alignment(width, outs, lses, out, lse, steps_apart)
    program, lanes = _build(width, outs[0].dtype, out.dtype, num_parts, stacked, alignment)
    num_threads = MAX_THREADS
    while num_threads > WARP * warps_per_row and num_rows * lanes * warps_per_row <= SPREAD_OVER * num_threads // 2:
        num_threads //= 2
    num_blocks = -(-num_rows * lanes * warps_per_row // num_threads)
    return Merge(program, num_blocks, num_threads, stacked, tuple(pieces))


@lru_cache(maxsize=1024)
def _build(
    width: int, dtype: str, out_dtype: str, num_parts: int, stacked: bool, alignment: int
) -> tuple[Program, int]:
    """What is compiled, and how many lanes a row has in it."""
    bucket = 16
    while bucket < min(width, MAX_WIDTH):
        bucket *= 2
    parts = min(PARTS_PER_TURN, 1 << max(num_parts - 1, 0).bit_length())
    macros = (
        ("DTYPE", f"CUFLASH_{dtype.upper()}"),
        ("OUT_DTYPE", f"CUFLASH_{out_dtype.upper()}"),
        ("HEAD_DIM_V", bucket),
        ("THREADS", MAX_THREADS),
        ("PARTS", parts),
        ("STACKED", int(stacked)),
        ("ALIGNMENT", alignment),
    )
    lanes = _lanes_per_row(bucket, parts, ITEMSIZE[dtype])
    # What warps hand on to the first one of those that share a row.
    return Program("merge", macros, MAX_THREADS * bucket // lanes * max(ITEMSIZE[dtype], 4)), lanes


def _lanes_per_row(bucket: int, parts: int, itemsize: int) -> int:
    """As cuda_src/merge/parts.cuh has them."""
    vectors = bucket * itemsize // 16
    return min(max(vectors * parts // PARTS_PER_TURN, min(parts, vectors)), WARP)


def _alignment(
    width: int,
    outs: Sequence[Operand],
    lses: Sequence[Operand],
    out: Operand,
    lse: Operand | None,
    part_strides: tuple[int, int],
) -> int:
    """16 if features can move in 16-byte vectors, 1 if an element lies on no boundary, else its size."""
    itemsize = ITEMSIZE[outs[0].dtype]
    arrays = [*outs, out, *lses, lse] if lse else [*outs, out, *lses]
    for x in arrays:
        size = ITEMSIZE[x.dtype]
        if x.alignment % size or (x.strides and x.strides[-1] % size):
            return 1
    if part_strides[0] % itemsize or part_strides[1] % ITEMSIZE[lses[0].dtype]:
        return 1
    for x in (*outs, out):
        if x.alignment != 16 or x.strides[-1] != ITEMSIZE[x.dtype]:
            return itemsize
    return 16 if part_strides[0] % 16 == 0 and width * itemsize % 16 == 0 else itemsize
