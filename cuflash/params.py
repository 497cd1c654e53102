"""The argument struct of the forward kernels: `AttentionParams` of cuda_src/common/params.cuh, field by field."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from .arrays import ITEMSIZE
from .problem import Operand, Problem

if TYPE_CHECKING:
    from .plan import Plan

BATCH_AXES = 4

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
_STRIDED = POINTERS[:10]
_STRIDES_NAMES = ("q", "k", "v", "out", "lse", "bias", "mask", "alibi", "sink", "query_offset")
_INT64 = (
    "num_batches",
    "num_sequences",
    "num_m_blocks",
    "first_block",
    "seqlen_q",
    "seqlen_k",
    "query_offset",
    "window_left",
    "window_right",
)
_INT32 = ("num_heads_q", "group_size", "packed_heads", "head_dim", "head_dim_v", "longest_first", "offset_from_lengths",
          "alibi_dtype", "sink_dtype", "query_offset_size", "cu_seqlens_q_size", "cu_seqlens_k_size")  # fmt: skip

FIELDS: tuple[tuple[str, str], ...] = (
    *((name, "Q") for name in POINTERS),
    *((f"{name}_strides", f"{BATCH_AXES + 3}q") for name in _STRIDES_NAMES),
    ("cu_seqlens_q_stride", "q"),
    ("cu_seqlens_k_stride", "q"),
    ("batch_shape", f"{BATCH_AXES}q"),
    *((name, "q") for name in _INT64),
    ("scale", "d"),
    ("softcap", "d"),
    *((name, "i") for name in _INT32),
)
"""Name and `struct` format of every field; tests/test_sources.py has the compiler confirm the offsets."""

pack_pointers = struct.Struct(f"={len(POINTERS)}Q").pack
"""The addresses come first in the struct, so that a call packs them alone and appends the rest as it was."""
_pack_rest = struct.Struct("=" + "".join(code for _, code in FIELDS[len(POINTERS) :])).pack
SIZE = struct.calcsize("=" + "".join(code for _, code in FIELDS))
BY_VALUE = np.dtype((np.void, SIZE))
"""A NumPy array of one such element is passed to a kernel by value."""

FLOAT_CODES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}
"""CUFLASH_FLOAT16 ... of cuda_src/common/config.cuh."""

OPEN_WINDOW = 2**61
_ZEROS = (0,) * BATCH_AXES
_NO_STRIDES = (0,) * (BATCH_AXES + 3)


def pack_after_pointers(problem: Problem, plan: Plan, first_block: int = 0) -> bytes:
    """Everything in the struct but the addresses."""
    axes = plan.batch_axes
    varlen = problem.op == "attention_varlen"
    values: list[float] = []
    for name, operand in zip(_STRIDED, problem.operands[: len(_STRIDED)], strict=True):
        if operand is None:
            values += _NO_STRIDES
        elif not varlen:
            steps = operand.strides
            values += _ZEROS[: BATCH_AXES - len(axes)]
            for axis, _ in axes:
                values.append(steps[axis])
            inner = steps[len(problem.batch) :]
            values += inner
            values += _ZEROS[: 3 - len(inner)]
        elif name in ("alibi_slopes", "sinks"):
            sequence, head = operand.strides
            values += (sequence, 0, 0, 0, head, 0, 0)
        else:
            row, head, *column = operand.strides
            values += (0, 0, 0, 0, head, row, *(column or (0,)))
    cu_q, cu_k = problem.cu_seqlens_q, problem.cu_seqlens_k
    values += (cu_q.strides[0] if cu_q else 0, cu_k.strides[0] if cu_k else 0)
    values += (1,) * (BATCH_AXES - len(axes))
    for _, length in axes:
        values.append(length)
    values += (
        plan.num_batches,
        problem.batch[0] if varlen else 0,
        plan.num_m_blocks,
        first_block,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.query_offset or 0,
        OPEN_WINDOW if problem.window_left is None else problem.window_left,
        OPEN_WINDOW if problem.window_right is None else problem.window_right,
        problem.scale,
        problem.softcap,
        problem.num_heads_q,
        plan.group_size,
        plan.packed_heads,
        problem.head_dim,
        problem.head_dim_v,
        plan.longest_first,
        varlen and problem.query_offset is None,
        FLOAT_CODES[problem.alibi_slopes.dtype] if problem.alibi_slopes else 0,
        FLOAT_CODES[problem.sinks.dtype] if problem.sinks else 0,
        _integer_size(problem.query_offsets),
        _integer_size(cu_q),
        _integer_size(cu_k),
    )
    return _pack_rest(*values)


def _integer_size(operand: Operand | None) -> int:
    """Bytes of an integer operand's elements, negative when they are signed."""
    if operand is None:
        return 0
    size = ITEMSIZE[operand.dtype]
    return size if operand.dtype[0] == "u" else -size
