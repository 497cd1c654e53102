"""The argument struct of the forward kernels: `AttentionParams` of cuda_src/common/params.cuh, field by field."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ..plan.axes import BATCH_AXES, Axes
from ..plan.partial import partial_of, partial_results
from ..plan.plan import Plan
from ..problem.arrays import ITEMSIZE
from ..problem.problem import ARRAYS, HEAD_ARRAYS, Dtypes, Problem, Strides, Traits

Fields = tuple[tuple[str, str], ...]
"""Names of a struct's fields with their `struct` formats."""

DIVISOR = "qQ"
"""`Divisor` of cuda_src/common/divide.cuh."""
POINTERS: Fields = tuple((name, "Q") for name in (*ARRAYS, "prepared_k", "prepared_v"))
"""The addresses come first, so that a repeated call packs them alone, in front of the rest as it was."""
STRIDES: Fields = tuple(
    (f"{name}_strides", f"{BATCH_AXES + 3}q") for name in ARRAYS if not name.startswith("cu_seqlens")
)
"""Batch axes, head, row, column."""
LENGTHS: Fields = (
    ("seqlen_q", "q"),
    ("seqlen_k", "q"),
    ("seqlen_new", DIVISOR),
    ("query_offset_value", "q"),
    ("num_m_blocks", DIVISOR),
    ("planes_at_once", DIVISOR),
    ("tiles_at_once", DIVISOR),
    ("heads_continue", "q"),
    ("first_block", "q"),
    ("num_splits", DIVISOR),
    ("split_size", "q"),
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
    ("num_pages", "q"),
    ("page_size", DIVISOR),
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
    ("seqlens_k_size", "i"),
    ("page_table_size", "i"),
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
pack_pointers = struct.Struct("=" + "".join(code for _, code in POINTERS)).pack
LARGEST = 4096
"""Bytes of arguments that a kernel can have."""

FLOAT_CODES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}
"""CUFLASH_FLOAT16 ... of cuda_src/common/config.cuh."""
OPEN_WINDOW = 2**61


@lru_cache(maxsize=4096)
def divisor(value: int) -> tuple[int, int]:
    """`Divisor` of a value: with its reciprocal in units of 2^-63, rounded up, where kernels multiply by that."""
    return value, -(-(1 << 63) // value) if 0 < value < 1 << 31 else 0


class _Buffer:
    """Memory for arguments, and what CuPy needs to pass it by value."""

    def __init__(self) -> None:
        from cupy.cuda.function import CPointer

        array = np.empty(LARGEST, np.uint8)
        self.memory = array.data
        self.by_value = (CPointer(array.ctypes.data),)


_free_buffers: list[_Buffer] = []


def start(function: Any, grid: tuple[int], block: tuple[int], shared_memory: int, packed: bytes) -> None:
    """Launch a kernel with a packed struct on the current stream of the current device."""
    # A buffer of this launch's own: other threads, and calls that interrupt this one, take another. It is copied.
    try:
        buffer = _free_buffers.pop()
    except IndexError:
        buffer = _Buffer()
    buffer.memory[: len(packed)] = packed
    function(grid, block, buffer.by_value, shared_memory)
    _free_buffers.append(buffer)


def pack_values(problem: Problem, plan: Plan, first_block: int = 0) -> bytes:
    """Pack what stands behind the addresses, for one launch of a plan."""
    strides, split_strides = problem.strides, (0, 0)
    if plan.num_splits > 1:
        split_strides = partial_of(problem).strides
        strides = partial_results(problem).strides
    varlen = problem.traits.op == "attention_varlen"
    num_m_blocks, planes_at_once = plan.num_m_blocks, plan.planes_at_once
    lengths = _pack_lengths(
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        seqlen_new=divisor(problem.cache.num_new if problem.cache else 0),
        query_offset_value=problem.query_offset or 0,
        num_m_blocks=divisor(num_m_blocks),
        planes_at_once=divisor(planes_at_once),
        tiles_at_once=divisor(planes_at_once * num_m_blocks),
        heads_continue=not varlen and plan.num_batches > 1 and _heads_continue(problem, plan, strides),
        first_block=first_block,
        num_splits=divisor(plan.num_splits),
        split_size=plan.split_size,
        out_split_stride=split_strides[0],
        lse_split_stride=split_strides[1],
    )
    others = _others(
        problem.traits,
        problem.dtypes,
        plan.batch_axes,
        (problem.num_heads_q, plan.group_size, plan.packed_heads),
        problem.window_left,
        problem.window_right,
        problem.scale,
        strides[_CU_SEQLENS],
        problem.batch[0] if varlen else 0,
        problem.bottom_right,
        (problem.cache.num_pages, problem.cache.page_size) if problem.cache else (0, 0),
    )
    packed = _varlen_strides(strides) if varlen else _dense_strides(strides, len(problem.batch), plan)
    return packed + lengths + others


@lru_cache(maxsize=1024)
def _others(
    traits: Traits,
    dtypes: Dtypes,
    batch_axes: Axes,
    heads: tuple[int, int, int],
    window_left: int | None,
    window_right: int | None,
    scale: float,
    cu_seqlens_strides: tuple[tuple[int, ...] | None, ...],
    num_sequences: int,
    offset_from_lengths: bool,
    pages: tuple[int, int],
) -> bytes:
    num_heads, group_size, packed_heads = heads
    cu_seqlens_q_stride, cu_seqlens_k_stride = (strides[0] if strides else 0 for strides in cu_seqlens_strides)
    return _pack_others(
        cu_seqlens_q_stride=cu_seqlens_q_stride,
        cu_seqlens_k_stride=cu_seqlens_k_stride,
        batch_shape=[
            *divisor(1) * (BATCH_AXES - len(batch_axes)),
            *(x for _, length in batch_axes for x in divisor(length)),
        ],
        group_size=divisor(group_size),
        packed_heads=divisor(packed_heads),
        head_tiles=divisor(num_heads // packed_heads),
        num_batches=prod(length for _, length in batch_axes),
        num_sequences=num_sequences,
        num_pages=pages[0],
        page_size=divisor(pages[1]),
        window_left=OPEN_WINDOW if window_left is None else window_left,
        window_right=OPEN_WINDOW if window_right is None else window_right,
        scale=scale,
        softcap=traits.softcap,
        scale_by_softcap=scale / traits.softcap if traits.softcap else 0.0,
        head_dim=traits.head_dim,
        head_dim_v=traits.head_dim_v,
        offset_from_lengths=offset_from_lengths,
        **{f"{name}_dtype": FLOAT_CODES.get(getattr(dtypes, name), 0) for name in HEAD_ARRAYS},
        query_offset_size=_integer_size(dtypes.query_offset),
        seqlens_k_size=_integer_size(dtypes.seqlens_k),
        page_table_size=_integer_size(dtypes.page_table),
        cu_seqlens_q_size=_integer_size(dtypes.cu_seqlens_q),
        cu_seqlens_k_size=_integer_size(dtypes.cu_seqlens_k),
    )


def _dense_strides(strides: Strides, num_batch: int, plan: Plan) -> bytes:
    axes = plan.batch_axes
    given = strides[:_NUM_STRIDED]
    pack = _packer_of_strides(tuple([steps and len(steps) for steps in given]), num_batch, len(axes))
    if len(axes) != num_batch:
        given = tuple([steps and (*(steps[axis] for axis, _ in axes), *steps[num_batch:]) for steps in given])
    return pack(*sum(filter(None, given), ()))


@lru_cache(maxsize=1024)
def _packer_of_strides(lengths: tuple[Any, ...], num_batch: int, num_axes: int) -> Callable[..., bytes]:
    """Make a function that packs the strides of dense arrays, given how many each has before its axes are merged.

    An array without strides is an offset for all batches, or not there.
    """
    before = 8 * (BATCH_AXES - num_axes)
    codes = []
    for length in lengths:
        steps = length - num_batch + num_axes if length else 0
        codes.append(f"{before}x{steps}q{_STEPS_SIZE - before - 8 * steps}x")
    return struct.Struct("=" + "".join(codes)).pack


def _varlen_strides(strides: Strides) -> bytes:
    """Strides of packed sequences, which have the heads behind the rows."""
    packed = bytearray(_STRIDES_SIZE)
    for name, place, given in zip(ARRAYS, _STRIDES_PLACES, strides, strict=False):
        if given is None:
            continue
        if name in HEAD_ARRAYS:
            sequence, head = given
            steps: tuple[int, ...] = sequence, 0, 0, 0, head
        else:
            row, head, *column = given
            steps = 0, 0, 0, 0, head, row, *column
        _PACK_STEPS[len(steps)](packed, place, *steps)
    return bytes(packed)


_STEPS_SIZE = struct.calcsize("=" + STRIDES[0][1])
_STRIDES_SIZE = _STEPS_SIZE * len(STRIDES)
_NUM_STRIDED = len(STRIDES)
_CU_SEQLENS = slice(_NUM_STRIDED, None)
_NEW = ARRAYS.index("k_new"), ARRAYS.index("v_new")
_WITH_KEY_HEADS = ARRAYS.index("k"), ARRAYS.index("v")
_STRIDES_PLACES = range(0, _STRIDES_SIZE, _STEPS_SIZE)
_PACK_STEPS = [struct.Struct(f"={count}q").pack_into for count in range(BATCH_AXES + 4)]


def _heads_continue(problem: Problem, plan: Plan, strides: Strides) -> bool:
    """Whether all arrays go on from the last head of a batch to the next batch as they do from head to head.

    False where the heads of all batches would not be counted by 32 bits, and where batches have lengths or pages.
    """
    if problem.traits.seqlens_k or problem.traits.page_table:
        return False
    num_batch, num_heads = len(problem.batch), problem.num_heads_q
    lengths = [(axis, length) for axis, length in reversed(plan.batch_axes) if length != 1]
    if plan.num_batches * num_heads >= 2**31:
        return False
    for i, steps in enumerate(strides):
        if steps and i not in _NEW:
            # `query_offset` has no heads.
            head = steps[num_batch] if len(steps) > num_batch else 0
            step = head * (problem.num_heads_kv if i in _WITH_KEY_HEADS else num_heads)
            for axis, length in lengths:
                if steps[axis] != step:
                    return False
                step *= length
    return True


def _integer_size(dtype: str) -> int:
    """Bytes of an integer type, negative when it is signed; 0 for none."""
    return 0 if not dtype else ITEMSIZE[dtype] if dtype[0] == "u" else -ITEMSIZE[dtype]
