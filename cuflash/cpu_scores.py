"""Scores of a tile of the NumPy back end, in the memory order in which NumPy is quick, and memory for them."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from .cpu_blocks import Array, Sequence

KEYS_PER_ROW = 8
"""With so many keys for each row, keys are the last axis of the scores in memory."""
FEW_ROWS = 64
"""Of a block: beginning with so many rows takes no longer than the calls that other orders need."""
FEW_SCORES = 256
"""Of a head: what is spent on beginning with rows or keys would be enough for copying as many twice."""
MANY_HEADS = 16
FEW_KEYS = 48
"""Beginning with a row of more keys is nothing beside copying them."""
MIN_COLUMN = 48
"""Queries of a head from which on BLAS is quicker if they lie in columns, and these are worth being made."""

BLAS_SUM = 512
"""Weights that BLAS may add up, in half of NumPy's time: one behind the other, so that the error grows with them."""


@lru_cache(maxsize=64)
def _ones(num_keys: int, dtype: np.dtype[Any]) -> Array:
    return np.ones(num_keys, dtype)


class Scratch:
    """Memory of one thread, handed out by name and used again for the next tile."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Of all memory that was handed out."""
        self._flat: dict[tuple[str, np.dtype[Any]], Array] = {}
        self._latest: dict[str, Array] = {}
        self._scores: tuple[Any, Scores | None] = None, None

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised contiguous array; it is valid until `name` is taken again."""
        latest = self._latest.get(name)
        if latest is not None and latest.shape == shape and latest.dtype == dtype:
            return latest
        size = prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.size < size:
            # Dropped first, so that the old and the new array never exist together.
            self._scores = None, None
            self._latest[name] = latest = self._flat[name, dtype] = flat = None  # type: ignore[assignment]
            self._flat[name, dtype] = flat = np.empty(size, dtype)
            self.num_bytes = sum(x.nbytes for x in self._flat.values())
        self._latest[name] = latest = flat[:size].reshape(shape)
        return latest

    def scores(self, layout: Layout, shape: tuple[int, ...], num_keys: int, dtype: np.dtype[Any]) -> Scores:
        """Return scores of rows (*lead, group, rows), uninitialised; they are valid until others are taken."""
        wanted = layout, shape, num_keys, dtype
        found, scores = self._scores
        if scores is None or found != wanted:
            scores = layout(self, shape, num_keys, dtype)
            self._scores = wanted, scores
        return scores


class Scores:
    """Scores of a tile, then its logits, then its weights. Which axis is the last in memory is for a subclass to say.

    NumPy is quick along the last axis and takes some 20 ns to begin with it, 100 ns for a maximum.
    """

    logits: Array
    """(*lead, group, rows, keys)"""

    def multiply(self, q: Array, k: Array) -> None:
        """Fill in the products of queries (*lead, group * rows, D) and keys (*lead, keys, D)."""
        np.matmul(q, k.swapaxes(-1, -2), out=self._matrix)

    def peak(self) -> Array:
        """Return the largest logit of each row, (heads, group * rows)."""
        raise NotImplementedError

    def weigh(self, shift: Array | None) -> None:
        """Turn logits into weights: exp(logit - shift of the row)."""
        raise NotImplementedError

    def sums(self) -> Array:
        """Return the sum of each row's weights, (heads, group * rows)."""
        raise NotImplementedError

    def scale(self, factor: Any) -> None:
        """Multiply all scores."""
        self._flat *= factor

    def divide(self, divisor: Array) -> None:
        """Divide the weights of each row, given (heads, group * rows)."""
        raise NotImplementedError

    def apply(self, v: Array, out: Array) -> None:
        """Multiply the weights by values (*lead, keys, Dv)."""
        # A product of matrices takes some 30 ns to begin with.
        multiply = np.multiply if v.shape[-2] == 1 else np.matmul
        multiply(self._matrix, v, out=out)

    _matrix: Array
    """(*lead, group * rows, keys)"""
    _flat: Array
    """All scores, in the order of the memory."""


class KeysLast(Scores):
    """For few rows and many keys."""

    def __init__(self, scratch: Scratch, shape: tuple[int, ...], num_keys: int, dtype: Any) -> None:
        height = shape[-2] * shape[-1]
        self._matrix = scratch.take("scores", (*shape[:-2], height, num_keys), dtype)
        self.logits = self._matrix.reshape(*shape, num_keys)
        self._flat = self._matrix.reshape(-1, height, num_keys)

    def peak(self) -> Array:
        return np.maximum.reduce(self._flat, axis=-1)

    def weigh(self, shift: Array | None) -> None:
        if shift is not None:
            self._flat -= shift[..., np.newaxis]
        np.exp(self._flat, out=self._flat)

    def sums(self) -> Array:
        return np.add.reduce(self._flat, axis=-1)

    def divide(self, divisor: Array) -> None:
        self._flat /= divisor[..., np.newaxis]


class RowsLast(Scores):
    """For many rows.

    Some keys are taken together, so that what is last in memory gets longer. What is missing behind the last key is
    filled up with hidden ones.
    """

    def __init__(self, scratch: Scratch, shape: tuple[int, ...], num_keys: int, dtype: Any) -> None:
        lead, (group, rows) = shape[:-2], shape[-2:]
        height, num_heads = group * rows, prod(lead)
        self._fold = 1 << num_keys.bit_length() // 2
        padded = -(-num_keys // self._fold) * self._fold
        memory = scratch.take("scores", (*lead, padded, height), dtype)
        inside = memory[..., :num_keys, :]
        self._padding = memory[..., num_keys:, :]
        self._matrix = inside.swapaxes(-1, -2)
        self.logits = rows_first(inside.reshape(*lead, num_keys, group, rows))
        self._flat = memory.reshape(num_heads, padded // self._fold, self._fold * height)

    def peak(self) -> Array:
        self._padding.fill(-np.inf)
        return self._reduce(np.maximum)

    def weigh(self, shift: Array | None) -> None:
        if shift is None:
            self._padding.fill(-np.inf)
        else:
            self._flat -= self._repeated(shift)
        np.exp(self._flat, out=self._flat)

    def sums(self) -> Array:
        num_keys = self._matrix.shape[-1]
        if num_keys > BLAS_SUM:
            return self._reduce(np.add)
        return np.matmul(self._matrix, _ones(num_keys, self._matrix.dtype)).reshape(-1, self._matrix.shape[-2])

    def divide(self, divisor: Array) -> None:
        self._flat /= self._repeated(divisor)

    def _repeated(self, x: Array) -> Array:
        """Repeat what is given for each row for the keys that are taken together."""
        num_heads, height = x.shape
        repeated = np.empty((num_heads, self._fold, height), x.dtype)
        repeated[...] = x[:, np.newaxis]
        return repeated.reshape(num_heads, 1, -1)

    def _reduce(self, function: np.ufunc) -> Array:
        folded = function.reduce(self._flat, axis=1)
        return function.reduce(folded.reshape(len(folded), self._fold, -1), axis=1)


class HeadsLast(Scores):
    """For many heads with a handful of scores each, which are worth being copied there and back."""

    def __init__(self, scratch: Scratch, shape: tuple[int, ...], num_keys: int, dtype: Any) -> None:
        lead, (group, rows) = shape[:-2], shape[-2:]
        height, num_heads = group * rows, prod(lead)
        by_head = scratch.take("by head", (*lead, num_keys, height), dtype)
        self._matrix = by_head.swapaxes(-1, -2)
        self._by_head = by_head.reshape(num_heads, num_keys * height)
        self._flat = scratch.take("scores", (num_keys, height, num_heads), dtype)
        self._last = self._flat.reshape(num_keys * height, num_heads)
        axes = range(3, 3 + len(lead))
        self.logits = self._flat.reshape(num_keys, group, rows, *lead).transpose(*axes, 1, 2, 0)

    def multiply(self, q: Array, k: Array) -> None:
        super().multiply(q, k)
        np.copyto(self._last, self._by_head.T)

    def peak(self) -> Array:
        return np.maximum.reduce(self._flat, axis=0).T

    def weigh(self, shift: Array | None) -> None:
        if shift is not None:
            self._flat -= shift.T
        np.exp(self._flat, out=self._flat)

    def sums(self) -> Array:
        return np.add.reduce(self._flat, axis=0).T

    def divide(self, divisor: Array) -> None:
        self._flat /= divisor.T

    def apply(self, v: Array, out: Array) -> None:
        np.copyto(self._by_head, self._last.T)
        super().apply(v, out)


Layout = type[KeysLast] | type[RowsLast] | type[HeadsLast]


def layout_of(sequence: Sequence, num_heads: int, num_rows: int, num_keys: int, num_tiles: int) -> Layout:
    """Choose the memory order of a block's tiles."""
    if num_rows * num_keys <= FEW_SCORES and num_keys <= FEW_KEYS and num_heads >= MANY_HEADS and num_tiles <= 1:
        return HeadsLast
    # A bias or a mask, too, has its keys last.
    with_pairs = sequence.bias is not None or sequence.mask is not None
    few_rows = num_heads * num_rows <= FEW_ROWS or num_keys >= KEYS_PER_ROW * num_rows
    return KeysLast if with_pairs or few_rows else RowsLast


def rows_first(x: Array) -> Array:
    """View (..., columns, group, rows) as (..., group, rows, columns)."""
    last = x.ndim - 1
    return x.transpose(*range(last - 2), last - 1, last, last - 2)


def features_first(x: Array) -> Array:
    """View (..., group, rows, columns) as (..., columns, group, rows)."""
    last = x.ndim - 1
    return x.transpose(*range(last - 2), last, last - 2, last - 1)
