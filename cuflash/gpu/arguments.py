"""The argument struct of the forward kernels: `AttentionParams` of cuda_src/common/params.cuh, field by field."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

from ..plan.partial import partial_of
from ..plan.plan import BATCH_AXES, Axes, Plan
from ..problem.arrays import ITEMSIZE
from ..problem.problem import HEAD_ARRAYS, Operand, Operands, Problem, Traits

Fields = tuple[tuple[str, str], ...]
"""Names of a struct's fields with their `struct` formats."""

DIVISOR = "qQ"
"""`Divisor` of cuda_src/common/divide.cuh."""
POINTERS: Fields = tuple((name, "Q") for name in Operands._fields)
"""The addresses come first, so that a repeated call packs them alone, in front of the rest as it was."""
STRIDES: Fields = tuple(
    (f"{name}_strides", f"{BATCH_AXES + 3}q") for name in Operands._fields if not name.startswith("cu_seqlens")
)
"""Batch axes, head, row, column."""
LENGTHS: Fields = (
    ("seqlen_q", "q"),
    ("seqlen_k", "q"),
    ("query_offset_value", "q"),
    ("num_m_blocks", DIVISOR),
    ("planes_at_once", DIVISOR),
    ("tiles_at_once", DIVISOR),
    ("heads_continue", "q"),
    ("first_block", "q"),
    ("num_splits", DIVISOR),
    ("out_split_stride", "q"),
    ("lse_split_stride", "q"),
)
OTHERS: Fields = (
    ("cu_seqlens_q_stride", "q"),
    ("cu_seqlens_k_stride", "q"),
    ("batch_shape", DIVISOR * BATCH_AXES),
    ("group_size", DIVISOR),
    ("packed_heads", DIVISOR),
    ("head_tiles", DIVISOR),
    ("num_batches", "q"),
    ("num_sequences", "q"),
    ("window_left", "q"),
    ("window_right", "q"),
    ("scale", "d"),
    ("softcap", "d"),
    ("scale_by_softcap", "d"),
    ("head_dim", "i"),
    ("head_dim_v", "i"),
    ("offset_from_lengths", "i"),
    *((f"{name}_dtype", "i") for name in HEAD_ARRAYS),
    ("query_offset_size", "i"),
    ("cu_seqlens_q_size", "i"),
    ("cu_seqlens_k_size", "i"),
)
"""What calls of the same kind with other lengths share, in most cases: it is packed once for them."""
FIELDS: Fields = (*POINTERS, *STRIDES, *LENGTHS, *OTHERS)
"""Every field; tests have the compiler confirm names and offsets."""


def packer(fields: Fields) -> Callable[..., bytes]:
    """Make a function that packs a struct; it takes each field by its name, those of several numbers as a sequence."""
    form = struct.Struct("=" + "".join(code for _, code in fields))
    names = [name for name, _ in fields]
    values = [name if len(code) == 1 else f"*{name}" for name, code in fields]
    # A call by name costs half as much as a dictionary that is looked through.
    source = f"def pack(*, {', '.join(names)}):\n    return _pack({', '.join(values)})"
    scope: dict[str, Any] = {"_pack": form.pack}
    exec(source, scope)
    pack: Callable[..., bytes] = scope["pack"]
    return pack


_pack_lengths = packer(LENGTHS)
_pack_others = packer(OTHERS)
pack_pointers_into = struct.Struct("=" + "".join(code for _, code in POINTERS)).pack_into
POINTERS_SIZE = struct.calcsize("=" + "".join(code for _, code in POINTERS))
SIZE = struct.calcsize("=" + "".join(code for _, code in FIELDS))

FLOAT_CODES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}
"""CUFLASH_FLOAT16 ... of cuda_src/common/config.cuh."""
OPEN_WINDOW = 2**61


@lru_cache(maxsize=4096)
def divisor(value: int) -> tuple[int, int]:
    """`Divisor` of a value: with its reciprocal in units of 2^-63, rounded up, where kernels multiply by that."""
    return value, -(-(1 << 63) // value) if 0 < value < 1 << 31 else 0


def pack_values(problem: Problem, plan: Plan, first_block: int = 0) -> bytes:
    """Pack what stands behind the addresses, for one launch of a plan."""
    operands = problem.operands
    split_strides = (0, 0)
    if plan.num_splits > 1:
        partial = partial_of(problem)
        split_strides = partial.strides
        operands = operands._replace(out=partial.out, lse=partial.lse)
    varlen = problem.traits.op == "attention_varlen"
    strides = _varlen_strides(operands) if varlen else _dense_strides(operands, len(problem.batch), plan)
    lengths = _pack_lengths(
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        query_offset_value=problem.query_offset or 0,
        num_m_blocks=divisor(plan.num_m_blocks),
        planes_at_once=divisor(plan.planes_at_once),
        tiles_at_once=divisor(plan.planes_at_once * plan.num_m_blocks),
        heads_continue=not varlen and plan.num_batches > 1 and _heads_continue(problem, plan, operands),
        first_block=first_block,
        num_splits=divisor(plan.num_splits),
        out_split_stride=split_strides[0],
        lse_split_stride=split_strides[1],
    )
    window = problem.window_left, problem.window_right
    heads = problem.num_heads_q, plan.group_size, plan.packed_heads
    per_head = tuple([getattr(operands, name) for name in HEAD_ARRAYS])
    integers = operands.query_offset, operands.cu_seqlens_q, operands.cu_seqlens_k
    sequences = problem.batch[0] if varlen else 0
    return (
        strides
        + lengths
        + _others(
            problem.traits,
            plan.batch_axes,
            heads,
            window,
            problem.scale,
            per_head,
            integers,
            sequences,
            problem.bottom_right,
        )
    )


@lru_cache(maxsize=1024)
def _others(
    traits: Traits,
    batch_axes: Axes,
    heads: tuple[int, int, int],
    window: tuple[int | None, int | None],
    scale: float,
    per_head: tuple[Operand | None, ...],
    integers: tuple[Operand | None, ...],
    num_sequences: int,
    offset_from_lengths: bool,
) -> bytes:
    query_offset, cu_seqlens_q, cu_seqlens_k = integers
    num_heads, group_size, packed_heads = heads
    left, right = (OPEN_WINDOW if side is None else side for side in window)
    return _pack_others(
        cu_seqlens_q_stride=cu_seqlens_q.strides[0] if cu_seqlens_q else 0,
        cu_seqlens_k_stride=cu_seqlens_k.strides[0] if cu_seqlens_k else 0,
        batch_shape=[
            *divisor(1) * (BATCH_AXES - len(batch_axes)),
            *(x for _, length in batch_axes for x in divisor(length)),
        ],
        group_size=divisor(group_size),
        packed_heads=divisor(packed_heads),
        head_tiles=divisor(num_heads // packed_heads),
        num_batches=prod(length for _, length in batch_axes),
        num_sequences=num_sequences,
        window_left=left,
        window_right=right,
        scale=scale,
        softcap=traits.softcap,
        scale_by_softcap=scale / traits.softcap if traits.softcap else 0.0,
        head_dim=traits.head_dim,
        head_dim_v=traits.head_dim_v,
        offset_from_lengths=offset_from_lengths,
        **{f"{name}_dtype": _float_code(x) for name, x in zip(HEAD_ARRAYS, per_head, strict=True)},
        query_offset_size=_integer_size(query_offset),
        cu_seqlens_q_size=_integer_size(cu_seqlens_q),
        cu_seqlens_k_size=_integer_size(cu_seqlens_k),
    )


def _dense_strides(operands: Operands, num_batch: int, plan: Plan) -> bytes:
    axes = plan.batch_axes
    begin = 8 * (BATCH_AXES - len(axes))
    packed = bytearray(_STRIDES_SIZE)
    for place, operand in zip(_STRIDES_PLACES, operands, strict=False):
        if operand is not None:
            steps = operand.strides
            if len(axes) != num_batch:
                steps = *(steps[axis] for axis, _ in axes), *steps[num_batch:]
            _PACK_STEPS[len(steps)](packed, place + begin, *steps)
    return bytes(packed)


def _varlen_strides(operands: Operands) -> bytes:
    """Strides of packed sequences, which have the heads behind the rows."""
    packed = bytearray(_STRIDES_SIZE)
    for name, place, operand in zip(Operands._fields, _STRIDES_PLACES, operands, strict=False):
        if operand is None:
            continue
        if len(operand.strides) == 2 and name != "lse":  # for each sequence and head
            sequence, head = operand.strides
            steps: tuple[int, ...] = sequence, 0, 0, 0, head
        else:
            row, head, *column = operand.strides
            steps = 0, 0, 0, 0, head, row, *column
        _PACK_STEPS[len(steps)](packed, place, *steps)
    return bytes(packed)


_STEPS_SIZE = struct.calcsize("=" + STRIDES[0][1])
_STRIDES_SIZE = _STEPS_SIZE * len(STRIDES)
_STRIDES_PLACES = range(0, _STRIDES_SIZE, _STEPS_SIZE)
_PACK_STEPS = [struct.Struct(f"={count}q").pack_into for count in range(BATCH_AXES + 4)]


def _heads_continue(problem: Problem, plan: Plan, operands: Operands) -> bool:
    """Whether all arrays go on from the last head of a batch to the next batch as they do from head to head.

    False where the heads of all batches would not be counted by 32 bits.
    """
    num_batch = len(problem.batch)
    lengths = [(axis, length) for axis, length in reversed(plan.batch_axes) if length != 1]
    if plan.num_batches * problem.num_heads_q >= 2**31:
        return False
    for name, operand in zip(Operands._fields, operands, strict=True):
        if operand is None:
            continue
        strides = operand.strides
        # `query_offset` has no heads.
        head = strides[num_batch] if len(strides) > num_batch else 0
        step = head * (problem.num_heads_kv if name in ("k", "v") else problem.num_heads_q)
        for axis, length in lengths:
            if strides[axis] != step:
                return False
            step *= length
    return True


def _float_code(operand: Operand | None) -> int:
    return FLOAT_CODES[operand.dtype] if operand is not None else 0


def _integer_size(operand: Operand | None) -> int:
    """Bytes of an integer operand's elements, negative when they are signed."""
    if operand is None:
        return 0
    size = ITEMSIZE[operand.dtype]
    return size if operand.dtype[0] == "u" else -size
