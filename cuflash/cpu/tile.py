"""One tile of the NumPy back end: its arrays in the dtype of the computation, and its scores turned into logits."""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np

from ..problem.problem import Problem
from .blocks import Array, Block
from .scores import Scratch

MODERATE = (2.0**-20, 2.0**20)
"""Factors that leave scores far inside of float32's range."""
LARGE_SOFTCAP = 2.0**64
"""From here on scores divided by the softcap may be subnormal numbers."""


class Arithmetic(NamedTuple):
    """What is done to the scores."""

    dtype: np.dtype[Any]
    scale: float
    """Factor of the scores; it has the division by the softcap in it, if it can."""
    divisor: float
    """The softcap, if the scale has not; else 1."""
    softcap: float
    window_left: int | None
    window_right: int | None

    @classmethod
    def of(cls, problem: Problem, dtype: np.dtype[Any]) -> Arithmetic:
        """Arithmetic of a problem in float32 or float64."""
        scale, softcap = problem.scale, problem.traits.softcap
        window = problem.window_left, problem.window_right
        factor = scale / (softcap or 1.0)
        if MODERATE[0] <= abs(factor) <= MODERATE[1] and softcap < LARGE_SOFTCAP:
            return cls(dtype, factor, 1.0, softcap, *window)
        return cls(dtype, scale, softcap or 1.0, softcap, *window)


def queries_of(block: Block, dtype: np.dtype[Any], scratch: Scratch) -> Array:
    """Return the queries of a block (*lead, group * rows, D), as `operand` does."""
    source = block.of_rows(block.sequence.q)
    *lead, group, rows, head_dim = source.shape
    return operand(source.reshape(*lead, group * rows, head_dim), "q", dtype, scratch)


def to_logits(logits: Array, block: Block, keys: slice, arithmetic: Arithmetic, scratch: Scratch) -> None:
    """Turn the scaled scores of a tile (*lead, group, rows, keys) into logits in place, -inf where hidden.

    What slope * distance adds to all pairs of a block alike is left out, as it might be all that float32 can hold.
    """
    sequence, dtype = block.sequence, arithmetic.dtype
    if arithmetic.softcap:
        _cap(logits, arithmetic)
    hidden = None
    if sequence.bias is not None:
        bias = _unrepeated(block.of_pairs(sequence.bias, keys))
        if bias.dtype.itemsize == 2:
            bias = operand(bias, "bias", dtype, scratch)
        hidden = bias == -np.inf
        np.add(logits, bias, out=logits, casting="same_kind")
    if sequence.alibi_slopes is not None:
        slopes = block.of_heads(sequence.alibi_slopes).astype(np.float64)
        position = block.position
        # Nearer to the keys by what all pairs have in common.
        position += block.distance if position < block.part.keys.start else -block.distance
        num_rows, num_keys = logits.shape[-2:]
        columns = np.arange(num_rows + num_keys - 1) + float(keys.start - position - num_rows + 1)
        penalty = (slopes[..., np.newaxis] * np.abs(columns)).astype(dtype)
        rows_last = abs(logits.strides[-2]) < abs(logits.strides[-1])
        pairs = logits.swapaxes(-1, -2) if rows_last else logits
        pairs -= _by_diagonal(penalty, num_rows, num_keys, rows_last)
    if hidden is not None and hidden.any():
        np.copyto(logits, -np.inf, where=hidden)
    if sequence.mask is not None:
        hidden = ~_unrepeated(block.of_pairs(sequence.mask, keys))
        if hidden.any():
            np.copyto(logits, -np.inf, where=hidden)
    for some, limits in edges_of(logits, block.position - keys.start, arithmetic.window_left, arithmetic.window_right):
        np.fmin(some, limits, out=some)


def _cap(logits: Array, arithmetic: Arithmetic) -> None:
    """Compute softcap * tanh(score / softcap) in place."""
    softcap = logits.dtype.type(arithmetic.softcap)
    if arithmetic.softcap >= LARGE_SOFTCAP:
        # tanh(x) = x to the last bit, but x may be too small to be divided.
        large = np.abs(logits) >= softcap * logits.dtype.type(2.0**-30)
        if large.any():
            np.copyto(logits, np.tanh(logits / softcap) * softcap, where=large)
        return
    if arithmetic.divisor != 1.0:
        logits /= logits.dtype.type(arithmetic.divisor)
    np.tanh(logits, out=logits)
    logits *= softcap


def _unrepeated(x: Array) -> Array:
    """Return a view with one element of each axis along which x only repeats."""
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.strides)]


def edges_of(logits: Array, first: int, left: int | None, right: int | None) -> list[tuple[Array, Array]]:
    """Find what lies outside the window; row i stands at column first + i.

    Returns
    -------
    list of (logits, limits)
        Columns that some row does not see, and -inf where it does not, else inf. `fmin` takes -inf rather than NaN,
        and is quicker than `copyto`.
    """
    num_rows, num_keys = logits.shape[-2:]
    rows_last = abs(logits.strides[-2]) < abs(logits.strides[-1])
    edges: list[tuple[Array, tuple[float, float]]] = []
    if right is not None:
        # Row i sees the columns up to i + edge.
        start = max(0, first + right + 1)
        if start < num_keys:
            edges.append((logits[..., start:], (-inf, first + right - start)))
    if left is not None:
        # Row i sees the columns from i + edge.
        width = min(num_keys, num_rows - 1 + first - left)
        if width > 0:
            edges.append((logits[..., :width], (first - left, inf)))
    return [
        (
            pairs.swapaxes(-1, -2) if rows_last else pairs,
            _limits(num_rows, pairs.shape[-1], *diagonals, logits.dtype, rows_last),
        )
        for pairs, diagonals in edges
    ]


@lru_cache(maxsize=256)
def _limits(num_rows: int, num_keys: int, low: float, high: float, dtype: np.dtype[Any], rows_last: bool) -> Array:
    """Limits of logits: none on the diagonals from `low` to `high`, -inf on the others."""
    diagonals = np.arange(1 - num_rows, num_keys)
    hidden = (diagonals < low) | (diagonals > high)
    limits = np.where(hidden, dtype.type(-np.inf), dtype.type(np.inf))
    return _by_diagonal(limits, num_rows, num_keys, rows_last)


def _by_diagonal(diagonals: Array, num_rows: int, num_keys: int, rows_last: bool) -> Array:
    """View (..., rows + keys - 1) as (..., rows, keys), where [i, j] reads element j - i + rows - 1.

    Or as (..., keys, rows); elements that are next to each other there are so in the array that is viewed.
    """
    if rows_last:
        num_rows, num_keys = num_keys, num_rows
        diagonals = diagonals[..., ::-1]
    diagonals = np.ascontiguousarray(diagonals)
    *outer, step = diagonals.strides
    shape = (*diagonals.shape[:-1], num_rows, num_keys)
    return np.ndarray(shape, diagonals.dtype, diagonals, (num_rows - 1) * step, (*outer, -step, step))


def operand(x: Array, name: str, dtype: np.dtype[Any], scratch: Scratch) -> Array:
    """Return x (..., rows, columns) in the dtype of the computation, in a layout that BLAS reads without a copy."""
    flags = x.flags
    if x.dtype == dtype and flags.aligned and (flags.c_contiguous or is_blas_matrix(x)):
        return x
    copy = scratch.take(name, x.shape, dtype)
    widen_into(copy, x)
    return copy


def is_blas_matrix(x: Array) -> bool:
    """Whether rows or columns (..., rows, columns) lie in memory as BLAS wants them: elements next to each other."""
    itemsize, (rows, columns), (row_step, column_step) = x.itemsize, x.shape[-2:], x.strides[-2:]
    return (column_step == itemsize and row_step >= columns * itemsize and row_step % itemsize == 0) or (
        row_step == itemsize and column_step >= rows * itemsize and column_step % itemsize == 0
    )


_SUBNORMAL = np.array([2.0**-149], np.float32)
_FLOAT16_EXPONENT = np.float32(2.0**112)
"""What float16 bits, shifted into the place of float32 ones, have to be multiplied by."""


def widen_into(target: Array, x: Array) -> None:
    """Copy x into an array of the dtype of the computation."""
    if x.dtype != np.float16 or target.dtype != np.float32 or not x.size:
        np.copyto(target, x)
        return
    if not (_SUBNORMAL * _FLOAT16_EXPONENT)[0]:
        # Another library has told this thread's processor to take subnormal numbers for 0.
        np.copyto(target, x)
        return
    # NumPy converts float16 one by one, 1.5 ns each. Shifted into place, its exponent is too small by 112.
    bits = target.view(np.int32)
    np.copyto(bits, x.view(np.int16))
    bits <<= 13
    bits &= np.int32(-0x7000_2000)
    target *= _FLOAT16_EXPONENT
    if max(target.max(), -target.min()) >= 65536.0:
        np.copyto(target, x)
