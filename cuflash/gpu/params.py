"""The argument struct of the forward kernels: `AttentionParams` of cuda_src/common/params.cuh, field by field."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from math import prod

from ..plan.plan import BATCH_AXES, Plan
from ..plan.splits import split_strides
from ..problem.arrays import ITEMSIZE
from ..problem.problem import Operand, Problem

POINTERS = (
    "q",
    "k",
    "v",
    "out",
    "lse",
    "bias",
    "mask",
    "alibi_slopes",
    "sinks",
    "query_offsets",
    "cu_seqlens_q",
    "cu_seqlens_k",
)
_INT64 = ("num_batches", "num_sequences", "window_left", "window_right")
_INT32 = (
    "head_dim", "head_dim_v", "offset_from_lengths", "alibi_dtype", "sink_dtype", "query_offset_size",
    "cu_seqlens_q_size", "cu_seqlens_k_size",
)  # fmt: skip

DIVISOR = "qQ"
"""`Divisor` of cuda_src/common/divide.cuh."""
_STRIDES = f"{BATCH_AXES + 3}q"
_POINTER_FIELDS = tuple((name, "Q") for name in POINTERS)
_LENGTH_FIELDS = (
    *((f"{name}_strides", _STRIDES) for name in ("q", "k", "v", "out", "lse")),
    *((name, "q") for name in ("seqlen_q", "seqlen_k", "query_offset")),
    *((name, DIVISOR) for name in ("num_m_blocks", "planes_at_once", "tiles_at_once")),
    *((name, "q") for name in ("heads_continue", "first_block")),
    ("num_splits", DIVISOR),
    *((name, "q") for name in ("out_split_stride", "lse_split_stride")),
)
_FORM_FIELDS = (
    *((f"{name}_strides", _STRIDES) for name in ("bias", "mask", "alibi", "sink", "query_offset")),
    ("cu_seqlens_q_stride", "q"),
    ("cu_seqlens_k_stride", "q"),
    ("batch_shape", DIVISOR * BATCH_AXES),
    *((name, DIVISOR) for name in ("group_size", "packed_heads", "head_tiles")),
    *((name, "q") for name in _INT64),
    *((name, "d") for name in ("scale", "softcap", "scale_by_softcap")),
    *((name, "i") for name in _INT32),
)
FIELDS: tuple[tuple[str, str], ...] = (*_POINTER_FIELDS, *_LENGTH_FIELDS, *_FORM_FIELDS)
"""Name and `struct` format of every field; tests/kernels/test_sources.py has the compiler confirm the offsets."""


def _format(fields: tuple[tuple[str, str], ...]) -> str:
    return "=" + "".join(code for _, code in fields)


pack_pointers_into = struct.Struct(_format(_POINTER_FIELDS)).pack_into
"""The addresses come first in the struct, so that a call packs them alone, in front of the rest as it was."""
pack_lengths = struct.Struct(_format(_LENGTH_FIELDS)).pack
"""Then what depends on lengths, for which a new length packs it alone; then the rest."""
_pack_form = struct.Struct(_format(_FORM_FIELDS)).pack
POINTERS_SIZE = struct.calcsize(_format(_POINTER_FIELDS))
SIZE = struct.calcsize(_format(FIELDS))

FLOAT_CODES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}
"""CUFLASH_FLOAT16 ... of cuda_src/common/config.cuh."""

OPEN_WINDOW = 2**61
_ZEROS = (0,) * (BATCH_AXES + 3)


def divisor(value: int) -> tuple[int, int]:
    """`Divisor` of a value: with its reciprocal in units of 2^-63, rounded up, where kernels multiply by that."""
    return value, -(-(1 << 63) // value) if 0 < value < 1 << 31 else 0


def dense_strides(steps: tuple[int, ...], num_batch: int) -> tuple[int, ...]:
    """`Strides` of an array with up to four leading axes, of which each is one of the kernel's."""
    return (*_ZEROS[: BATCH_AXES - num_batch], *steps, *_ZEROS[: 3 + num_batch - len(steps)])


def _heads_continue(batch: Sequence[int], arrays: Iterable[tuple[tuple[int, ...], int]]) -> bool:
    """Whether all arrays go on from the last head of a batch to the next batch as they do from head to head.

    False where the heads of all batches would not be counted by 32 bits.

    Parameters
    ----------
    batch
        Lengths of the leading axes.
    arrays
        For each its strides along these axes and along its heads, and the number of the latter.
    """
    for strides, num_heads in arrays:
        if prod(batch) * num_heads >= 2**31:
            return False
        step = strides[-1] * num_heads
        for length, stride in zip(reversed(batch), strides[-2::-1], strict=True):
            if length != 1:
                if stride != step:
                    return False
                step *= length
    return True


def _problem_heads_continue(problem: Problem, plan: Plan) -> bool:
    if plan.num_batches == 1 or problem.op == "attention_varlen":
        return False
    first = BATCH_AXES - len(plan.batch_axes)
    return _heads_continue(
        [length for _, length in plan.batch_axes],
        (
            (
                _strides(problem, plan, name, operand)[first : BATCH_AXES + 1],
                problem.num_heads_kv if name in ("k", "v") else problem.num_heads_q,
            )
            for name, operand in zip(POINTERS, problem.operands, strict=False)
            if operand is not None
        ),
    )


def _strides(problem: Problem, plan: Plan, name: str, operand: Operand | None) -> tuple[int, ...]:
    """`Strides` of any operand: batch axes, head, row, column."""
    if operand is None:
        return _ZEROS
    steps, num_batch = operand.strides, len(problem.batch)
    if problem.op == "attention_varlen":
        if name in ("alibi_slopes", "sinks"):
            sequence, head = steps
            return sequence, 0, 0, 0, head, 0, 0
        row, head, *column = steps
        return 0, 0, 0, 0, head, row, *(column or (0,))
    if len(plan.batch_axes) == num_batch:
        return dense_strides(steps, num_batch)
    walked = tuple(steps[axis] for axis, _ in plan.batch_axes)
    return dense_strides(walked + steps[num_batch:], len(walked))


def pack_form(problem: Problem, plan: Plan) -> bytes:
    """Pack what calls that differ only in lengths share."""
    values: list[float] = []
    for name, operand in zip(POINTERS[5:10], problem.operands[5:10], strict=True):
        values += _strides(problem, plan, name, operand)
    cu_q, cu_k = problem.cu_seqlens_q, problem.cu_seqlens_k
    varlen = problem.op == "attention_varlen"
    values += (
        cu_q.strides[0] if cu_q else 0,
        cu_k.strides[0] if cu_k else 0,
        *divisor(1) * (BATCH_AXES - len(plan.batch_axes)),
        *(x for _, length in plan.batch_axes for x in divisor(length)),
        *divisor(plan.group_size),
        *divisor(plan.packed_heads),
        *divisor(problem.num_heads_q // plan.packed_heads),
        plan.num_batches,
        problem.batch[0] if varlen else 0,
        OPEN_WINDOW if problem.window_left is None else problem.window_left,
        OPEN_WINDOW if problem.window_right is None else problem.window_right,
        problem.scale,
        problem.softcap,
        problem.scale / problem.softcap if problem.softcap else 0.0,
        problem.head_dim,
        problem.head_dim_v,
        varlen and problem.bottom_right,
        FLOAT_CODES[problem.alibi_slopes.dtype] if problem.alibi_slopes else 0,
        FLOAT_CODES[problem.sinks.dtype] if problem.sinks else 0,
        _integer_size(problem.query_offsets),
        _integer_size(cu_q),
        _integer_size(cu_k),
    )
    return _pack_form(*values)


def pack_problem_lengths(problem: Problem, plan: Plan, first_block: int) -> bytes:
    """Pack what depends on lengths, for one launch of a plan; with splits `problem` is that of partial results."""
    values: list[int] = []
    for name, operand in zip(POINTERS[:5], problem.operands[:5], strict=True):
        values += _strides(problem, plan, name, operand)
    offset = problem.query_offset or 0
    values += (problem.seqlen_q, problem.seqlen_k, offset, *_turns(plan))
    values += (_problem_heads_continue(problem, plan), first_block, *divisor(plan.num_splits))
    return pack_lengths(*values, *(split_strides(problem) if plan.num_splits > 1 else (0, 0)))


def _turns(plan: Plan) -> tuple[int, ...]:
    """In which order tiles are worked on."""
    tiles_at_once = plan.planes_at_once * plan.num_m_blocks
    return *divisor(plan.num_m_blocks), *divisor(plan.planes_at_once), *divisor(tiles_at_once)


def pack_other_lengths(
    problem: Problem,
    plan: Plan,
    seqlens: tuple[int, int],
    offset: int | None,
    strides: Sequence[tuple[int, ...]],
    split_strides: tuple[int, int],
) -> bytes:
    """Pack what depends on lengths for a dense problem without options, given its new `plan`.

    Parameters
    ----------
    problem
        With other lengths.
    plan
        For these lengths.
    seqlens, offset
        Queries and keys, and the position of the first query.
    strides
        Those of q, k, v, out and lse; () for no lse.
    split_strides
        Bytes from split to split of `out` and `lse`.
    """
    num_batch, heads_q, heads_kv = len(problem.batch), problem.num_heads_q, problem.num_heads_kv
    continues = plan.num_batches > 1 and _heads_continue(
        problem.batch,
        [
            (steps[: num_batch + 1], heads)
            for steps, heads in zip(strides, (heads_q, heads_kv, heads_kv, heads_q, heads_q), strict=True)
            if steps
        ],
    )
    values: list[int] = []
    for steps in strides:
        values += dense_strides(steps, num_batch if steps else 0)
    values += (*seqlens, offset or 0, *_turns(plan), continues, 0, *divisor(plan.num_splits))
    return pack_lengths(*values, *split_strides)


def _integer_size(operand: Operand | None) -> int:
    """Bytes of an integer operand's elements, negative when they are signed."""
    if operand is None:
        return 0
    size = ITEMSIZE[operand.dtype]
    return size if operand.dtype[0] == "u" else -size
