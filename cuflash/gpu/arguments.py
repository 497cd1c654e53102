"""The argument struct of the forward kernels: `AttentionParams` of cuda_src/common/params.cuh, field by field."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np

from ..plan.axes import BATCH_AXES
from ..plan.partial import Partial, partial_strides
from ..plan.plan import Plan
from ..problem.arrays import ITEMSIZE
from ..problem.problem import ARRAYS, HEAD_ARRAYS, Cache, Problem, Strides
from .tensor_maps import tile_map

Fields = tuple[tuple[str, str], ...]
"""Names of a struct's fields with their `struct` formats."""

DIVISOR = "qQ"
"""`Divisor` of cuda_src/common/divide.cuh."""
POINTERS: Fields = tuple((name, "Q") for name in (*ARRAYS, "prepared_k", "prepared_v"))
"""The addresses come first, so that a repeated call packs them alone, in front of the rest as it was."""
OUTER_AXES = BATCH_AXES - 1
STRIDED = tuple(name for name in ARRAYS if not name.startswith("cu_seqlens"))
STRIDES: Fields = tuple((f"{name}_strides", "4q") for name in STRIDED)
"""The last of the leading axes, head, row, column."""
LENGTHS: Fields = (
    ("seqlen_q", "q"),
    ("seqlen_k", "q"),
    ("query_offset_value", "q"),
    ("num_m_blocks", DIVISOR),
    ("planes_at_once", DIVISOR),
    ("tiles_at_once", DIVISOR),
    ("num_stops", "q"),
    ("in_pairs", "q"),
    ("first_block", "q"),
)
SPLITS: Fields = (
    ("num_splits", DIVISOR),
    ("split_size", "q"),
    ("out_split_stride", "q"),
    ("lse_split_stride", "q"),
)
SEQUENCES: Fields = (
    ("cu_seqlens_q_stride", "q"),
    ("cu_seqlens_k_stride", "q"),
    ("num_sequences", "q"),
)
CACHED: Fields = (
    ("seqlen_new", DIVISOR),
    ("num_pages", "q"),
    ("page_size", DIVISOR),
    ("even_splits", DIVISOR),
    ("largest_split", "q"),
)
OTHERS: Fields = (
    ("batch_shape", DIVISOR),
    ("group_size", DIVISOR),
    ("packed_heads", DIVISOR),
    ("head_tiles", DIVISOR),
    ("num_batches", "q"),
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
    ("outer_shape", DIVISOR * OUTER_AXES),
)
"""What calls of the same kind with other lengths share where the same tile serves them: it is packed once for them."""
OUTER_STRIDES: Fields = (("outer_strides", f"{len(STRIDED) * OUTER_AXES}q"),)
"""Of each array, those of its leading axes but the last."""
VALUES: Fields = (*STRIDES, *LENGTHS, *SPLITS, *OTHERS, *SEQUENCES, *CACHED, *OUTER_STRIDES)
"""What stands behind the addresses."""
FIELDS: Fields = (*POINTERS, *VALUES)
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


_pack_lengths, _pack_splits, _pack_sequences, _pack_cached, _pack_others = map(
    packer, (LENGTHS, SPLITS, SEQUENCES, CACHED, OTHERS)
)
pack_pointers = struct.Struct("=" + "".join(code for _, code in POINTERS)).pack
ARGUMENT_BYTES = struct.calcsize("=" + "".join(code for _, code in FIELDS))
LARGEST = 4096
"""Bytes of arguments that a kernel can have."""

FLOAT_CODES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}
"""CUFLASH_FLOAT16 ... of cuda_src/common/config.cuh."""
OPEN_WINDOW = 2**61


@lru_cache(maxsize=4096)
def divisor(value: int) -> tuple[int, int]:
    """`Divisor` of a value, with its reciprocal in units of 2^-64."""
    return value, ((1 << 64) - 1) // max(value, 1)


class _Buffer:
    """Memory for arguments, and what CuPy needs to pass it by value."""

    def __init__(self) -> None:
        from cupy.cuda.function import CPointer

        array = np.empty(LARGEST, np.uint8)
        self.memory = array.data
        self.by_value = CPointer(array.ctypes.data), CPointer(array.ctypes.data + ARGUMENT_BYTES)


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


_NO_SPLITS = _pack_splits(num_splits=divisor(1), split_size=0, out_split_stride=0, lse_split_stride=0)
_NO_SEQUENCES = _pack_sequences(cu_seqlens_q_stride=0, cu_seqlens_k_stride=0, num_sequences=0)
_NOT_CACHED = _pack_cached(
    seqlen_new=divisor(0), num_pages=0, page_size=divisor(0), even_splits=divisor(1), largest_split=0
)


class Packer:
    """Packs what stands behind the addresses. What neither lengths nor strides change is packed once.

    Parameters
    ----------
    like, plan
        A problem of the same kind, and a plan by which as many query heads share a tile, the same leading axes are
        walked, and keys are split or not.
    make_map
        Makes a map of tiles, `tile_map` if it is None.
    """

    def __init__(self, like: Problem, plan: Plan, make_map: Callable[[int, int, int], bytes] | None = None) -> None:
        self._make_map = make_map or tile_map
        traits, dtypes, axes, num_batch = like.traits, like.dtypes, plan.batch_axes, len(like.batch)
        self._varlen = traits.is_varlen
        if not self._varlen:
            strides = strides_of(like, plan)[:_NUM_STRIDED]
            # An array without strides is an offset for all batches, or not there.
            self._given = itemgetter(*[i for i, steps in enumerate(strides) if steps])
            self._num_batch = num_batch
            self._merged = [axis for axis, _ in axes] if len(axes) != num_batch else None
            merged = [len(steps) - num_batch + len(axes) if steps else 0 for steps in strides]
            self._num_outer = num_outer = max(len(axes) - 1, 0)
            self._pack_strides = _packer_of_strides(4, 0 if axes else 1, [max(n - num_outer, 0) for n in merged])
            self._pack_outer_strides = _packer_of_strides(
                OUTER_AXES, OUTER_AXES - num_outer, [num_outer if n else 0 for n in merged]
            )
        shape = [1] * (BATCH_AXES - len(axes)) + [length for _, length in axes]
        self._others = _pack_others(
            batch_shape=divisor(shape[-1]),
            group_size=divisor(plan.group_size),
            packed_heads=divisor(plan.packed_heads),
            head_tiles=divisor(like.num_heads_q // plan.packed_heads),
            num_batches=prod(length for _, length in axes),
            window_left=OPEN_WINDOW if like.window_left is None else like.window_left,
            window_right=OPEN_WINDOW if like.window_right is None else like.window_right,
            scale=like.scale,
            softcap=traits.softcap,
            scale_by_softcap=like.scale / traits.softcap if traits.softcap else 0.0,
            head_dim=traits.head_dim,
            head_dim_v=traits.head_dim_v,
            offset_from_lengths=like.bottom_right,
            **{f"{name}_dtype": FLOAT_CODES.get(getattr(dtypes, name), 0) for name in HEAD_ARRAYS},
            query_offset_size=_integer_size(dtypes.query_offset),
            seqlens_k_size=_integer_size(dtypes.seqlens_k),
            page_table_size=_integer_size(dtypes.page_table),
            cu_seqlens_q_size=_integer_size(dtypes.cu_seqlens_q),
            cu_seqlens_k_size=_integer_size(dtypes.cu_seqlens_k),
            outer_shape=[x for length in shape[:-1] for x in divisor(length)],
        )

    def __call__(self, problem: Problem, plan: Plan, first_block: int = 0) -> bytes:
        """Pack them for one launch of a plan."""
        strides, varlen, cache = strides_of(problem, plan), self._varlen, problem.cache
        num_m_blocks, planes_at_once = plan.num_m_blocks, plan.planes_at_once
        lengths = _pack_lengths(
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            query_offset_value=problem.query_offset or 0,
            num_m_blocks=divisor(num_m_blocks),
            planes_at_once=divisor(planes_at_once),
            tiles_at_once=divisor(planes_at_once * num_m_blocks),
            num_stops=plan.num_stops,
            in_pairs=plan.in_pairs,
            first_block=first_block,
        )
        steps, outer_steps = (_varlen_strides(strides), _NOT_OUTER) if varlen else self._dense_strides(strides)
        splits = _splits(plan, plan.partial) if plan.partial else _NO_SPLITS
        sequences = _sequences(problem) if varlen else _NO_SEQUENCES
        cached = _cached(cache, plan) if cache else _NOT_CACHED
        packed = steps + lengths + splits + self._others + sequences + cached + outer_steps
        return packed + self._maps(problem, plan) if plan.program.takes_maps else packed

    def _maps(self, problem: Problem, plan: Plan) -> bytes:
        """`KeyMaps` of cuda_src/wgmma/key_tiles.cuh."""
        traits, strides_k, strides_v = problem.traits, problem.strides.k, problem.strides.v
        assert strides_k and strides_v, "keys and values are given"
        row, num_keys = 0 if self._varlen else -2, plan.tile.block_n
        k = self._make_map(strides_k[row], traits.head_dim, num_keys)
        return k + self._make_map(strides_v[row], traits.head_dim_v, num_keys)

    def _dense_strides(self, strides: tuple[Any, ...]) -> tuple[bytes, bytes]:
        given, num_outer = self._given(strides), self._num_outer
        if self._merged is not None:
            given = [(*(steps[axis] for axis in self._merged), *steps[self._num_batch :]) for steps in given]
        if num_outer == 0:
            return self._pack_strides(*chain.from_iterable(given)), _NOT_OUTER
        outer = self._pack_outer_strides(*chain.from_iterable(steps[:num_outer] for steps in given))
        return self._pack_strides(*chain.from_iterable(steps[num_outer:] for steps in given)), outer


def strides_of(problem: Problem, plan: Plan) -> Strides:
    """Strides in the order of `ARRAYS`; of partial results if these are what is written."""
    return partial_strides(problem, plan.partial) if plan.partial else problem.strides


def _splits(plan: Plan, partial: Partial) -> bytes:
    out_stride, lse_stride = partial.strides
    return _pack_splits(
        num_splits=divisor(plan.num_splits),
        split_size=plan.split_size,
        out_split_stride=out_stride,
        lse_split_stride=lse_stride,
    )


def _sequences(problem: Problem) -> bytes:
    strides_q, strides_k = problem.strides.cu_seqlens_q, problem.strides.cu_seqlens_k
    assert strides_q and strides_k, "packed sequences have boundaries"
    return _pack_sequences(
        cu_seqlens_q_stride=strides_q[0], cu_seqlens_k_stride=strides_k[0], num_sequences=problem.batch[0]
    )


def _cached(cache: Cache, plan: Plan) -> bytes:
    return _pack_cached(
        seqlen_new=divisor(cache.num_new),
        num_pages=cache.num_pages,
        page_size=divisor(cache.page_size),
        even_splits=divisor(plan.even_splits),
        largest_split=plan.largest_split,
    )


def _packer_of_strides(width: int, before: int, counts: list[int]) -> Callable[..., bytes]:
    """Make a function that packs so many strides of each dense array, of `width` that there may be, behind zeros."""
    codes = [f"{8 * before}x{count}q{8 * (width - before - count)}x" if count else f"{8 * width}x" for count in counts]
    return struct.Struct("=" + "".join(codes)).pack


def _varlen_strides(strides: tuple[Any, ...]) -> bytes:
    """Strides of packed sequences, which have the heads behind the rows."""
    packed = bytearray(_STRIDES_SIZE)
    for name, place, given in zip(ARRAYS, _STRIDES_PLACES, strides, strict=False):
        if given is None:
            continue
        if name in HEAD_ARRAYS:
            sequence, head = given
            steps: tuple[int, ...] = sequence, head
        else:
            row, head, *column = given
            steps = 0, head, row, *column
        _PACK_STEPS[len(steps)](packed, place, *steps)
    return bytes(packed)


_STEPS_SIZE = struct.calcsize("=" + STRIDES[0][1])
_STRIDES_SIZE = _STEPS_SIZE * len(STRIDES)
_NUM_STRIDED = len(STRIDES)
_STRIDES_PLACES = range(0, _STRIDES_SIZE, _STEPS_SIZE)
_NOT_OUTER = bytes(struct.calcsize("=" + OUTER_STRIDES[0][1]))
_PACK_STEPS = [struct.Struct(f"={count}q").pack_into for count in range(5)]


def _integer_size(dtype: str) -> int:
    """Bytes of an integer type, negative when it is signed; 0 for none."""
    return 0 if not dtype else ITEMSIZE[dtype] if dtype[0] == "u" else -ITEMSIZE[dtype]
