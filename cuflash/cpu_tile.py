"""One tile of the NumPy back end: its arrays in the dtype of the computation, and its scores turned into logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .problem import Problem

FOLDABLE = (2.0**-20, 2.0**20)
"""Factors that may be multiplied into q, which is cheaper than into the scores; beyond, q might overflow."""

Array = np.ndarray[Any, Any]


class Sequence(NamedTuple):
    """The arrays of one batch element, heads first."""

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array | None
    bias: Array | None
    mask: Array | None
    alibi_slopes: Array | None
    sinks: Array | None
    offset: int
    bounds: dict[int, tuple[float, float]]
    """Per key head: the largest norm of a key and the largest |v|; filled when first needed."""


class Block(NamedTuple):
    """Query rows that one thread computes together: the same rows of some query heads, and the keys that they see."""

    sequence: Sequence
    heads_q: slice
    heads_kv: slice
    rows: slice
    keys: slice
    tile_keys: int
    """Tiles of keys begin at multiples of this."""
    may_bound: bool
    """Looking for a bound of the logits costs less than it saves."""
    cost: int
    """Multiplications, roughly."""


class Arithmetic(NamedTuple):
    """What is done to the scores."""

    dtype: np.dtype[Any]
    fold: float
    """Factor of q."""
    scale: float
    """Factor of the scores, where it is not folded into q."""
    divisor: float
    """1, or the softcap, where it is not folded into q."""
    softcap: float
    window_left: int | None
    window_right: int | None

    @classmethod
    def of(cls, problem: Problem) -> Arithmetic:
        """Arithmetic of a problem."""
        dtype = np.dtype(np.float64 if problem.dtype == "float64" else np.float32)
        factor = problem.scale / (problem.softcap or 1.0)
        folded = FOLDABLE[0] <= abs(factor) <= FOLDABLE[1]
        return cls(
            dtype,
            factor if folded else 1.0,
            1.0 if folded else problem.scale,
            1.0 if folded or not problem.softcap else problem.softcap,
            problem.softcap,
            problem.window_left,
            problem.window_right,
        )


class Scratch:
    """Memory of one thread, handed out by name and used again for the next tile."""

    def __init__(self) -> None:
        self._flat: dict[str, Array] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised contiguous array; it is valid until `name` is taken again."""
        size = 1
        for length in shape:
            size *= length
        flat = self._flat.get(name)
        if flat is None or flat.size < size:
            # Dropped first, so that the old and the new array never exist together.
            self._flat[name] = flat = None  # type: ignore[assignment]
            self._flat[name] = flat = np.empty(size, dtype)
        return flat[:size].reshape(shape)


def to_logits(logits: Array, block: Block, keys: slice, arithmetic: Arithmetic, scratch: Scratch) -> None:
    """Turn the scores of a tile (heads, rows, keys) into logits in place, -inf where hidden."""
    sequence, dtype = block.sequence, arithmetic.dtype
    if arithmetic.scale != 1.0:
        logits *= dtype.type(arithmetic.scale)
    if arithmetic.softcap:
        if arithmetic.divisor != 1.0:
            logits /= dtype.type(arithmetic.divisor)
        np.tanh(logits, out=logits)
        logits *= dtype.type(arithmetic.softcap)
    position = block.rows.start + sequence.offset
    hidden = None
    if sequence.bias is not None:
        bias = sequence.bias[block.heads_q, block.rows, keys]
        if bias.dtype.itemsize == 2:
            bias = operand(bias, "bias", dtype, scratch)
        hidden = np.equal(bias, -np.inf, out=scratch.take("hidden", logits.shape, np.dtype(bool)))
        np.add(logits, bias, out=logits, casting="same_kind")
        if bias.dtype.itemsize > dtype.itemsize:
            # What is finite in float64 hides nothing, even if float32 cannot hold it.
            np.clip(logits, np.finfo(dtype).min, np.finfo(dtype).max, out=logits)
    if sequence.alibi_slopes is not None:
        columns = np.arange(logits.shape[1] + logits.shape[2] - 1) + float(keys.start - position - logits.shape[1] + 1)
        slopes = sequence.alibi_slopes[block.heads_q].astype(np.float64)
        logits -= _by_diagonal((slopes[:, np.newaxis] * np.abs(columns)).astype(dtype), *logits.shape[1:])
    if hidden is not None and hidden.any():
        np.copyto(logits, -np.inf, where=hidden)
    if sequence.mask is not None:
        mask = sequence.mask[block.heads_q, block.rows, keys]
        hidden = np.logical_not(mask, out=scratch.take("hidden", logits.shape, mask.dtype))
        if hidden.any():
            np.copyto(logits, -np.inf, where=hidden)
    _hide_edges(logits, position, keys, arithmetic)


def _hide_edges(logits: Array, position: int, keys: slice, arithmetic: Arithmetic) -> None:
    """Hide what lies outside the window; touches only the columns that some row does not see."""
    num_rows = logits.shape[1]
    if arithmetic.window_right is not None:
        # Row i sees the columns up to i + edge.
        edge = position + arithmetic.window_right - keys.start
        first = max(0, edge + 1)
        width = logits.shape[2] - first
        if width > 0:
            diagonals = np.arange(1 - num_rows, width) > edge - first
            np.copyto(logits[..., first:], -np.inf, where=_by_diagonal(diagonals, num_rows, width))
    if arithmetic.window_left is not None:
        # Row i sees the columns from i + edge.
        edge = position - arithmetic.window_left - keys.start
        width = min(logits.shape[2], num_rows - 1 + edge)
        if width > 0:
            diagonals = np.arange(1 - num_rows, width) < edge
            np.copyto(logits[..., :width], -np.inf, where=_by_diagonal(diagonals, num_rows, width))


def _by_diagonal(diagonals: Array, num_rows: int, num_columns: int) -> Array:
    """View (..., rows + columns - 1) as (..., rows, columns), where [i, j] reads element j - i + rows - 1."""
    *outer, step = diagonals.strides
    shape = (*diagonals.shape[:-1], num_rows, num_columns)
    return np.ndarray(shape, diagonals.dtype, diagonals, (num_rows - 1) * step, (*outer, -step, step))


def operand(x: Array, name: str, dtype: np.dtype[Any], scratch: Scratch) -> Array:
    """Return x (heads, rows, columns) in the dtype of the computation, in a layout that BLAS reads without a copy."""
    itemsize = dtype.itemsize
    if (
        x.dtype == dtype
        and x.flags.aligned
        and x.strides[2] == itemsize
        and x.strides[1] >= x.shape[2] * itemsize
        and x.strides[1] % itemsize == 0
    ):
        return x
    copy = scratch.take(name, x.shape, dtype)
    widen_into(copy, x)
    return copy


def widen_into(target: Array, x: Array) -> None:
    """Copy x into a contiguous array of the dtype of the computation."""
    if x.dtype != np.float16 or target.dtype != np.float32 or not x.size:
        np.copyto(target, x)
        return
    # NumPy converts float16 one by one, 2 ns each. Shifted into place, its exponent is too small by 112.
    bits = target.view(np.int32)
    np.copyto(bits, x.view(np.int16))
    bits <<= 13
    bits &= np.int32(-0x7000_2000)
    target *= np.float32(2.0**112)
    if max(target.max(), -target.min()) >= 65536.0:
        np.copyto(target, x)
