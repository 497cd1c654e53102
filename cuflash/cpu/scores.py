"""Scores of a tile of the NumPy back end, in the memory order in which NumPy is quick, and memory for them."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, prod
from typing import Any

import numpy as np

from .blocks import Array, Sequence

KEYS_PER_ROW = 8
"""With more keys for each row of a head, keys are the last axis of the scores in memory."""
MANY_KEYS = 256
"""More keys than these are reduced in two steps; the error of longer sums would grow with them."""
FEW_RESULTS = 500
"""NumPy keeps the interpreter's lock while it multiplies stacks of matrices for so few results."""
LONG_PRODUCT = 2**16
"""Multiplications (about 10 us) for which others would wait for the lock."""
MAX_VIEWS = 64
"""Of a thread's memory, to be found again."""


class Scratch:
    """Memory of one thread, handed out by name and used again for the next tile."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Of all memory that was handed out."""
        self.views: dict[Any, Any] = {}
        """Objects that hold views of the memory, to be found again by what they depend on."""
        self._flat: dict[tuple[str, np.dtype[Any]], Array] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised contiguous array; it is valid until `name` is taken again."""
        size = prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.size < size:
            # Dropped first, so that the old and the new array never exist together.
            flat = None
            self.views.clear()
            self._flat.pop((name, dtype), None)
            self._flat[name, dtype] = flat = np.empty(size, dtype)
            self.num_bytes = sum(x.nbytes for x in self._flat.values())
        return flat[:size].reshape(shape)

    def scores(self, keys_last: bool, shape: tuple[int, ...], num_keys: int, dtype: np.dtype[Any]) -> Scores:
        """Return uninitialised scores of rows (*lead, group, rows); they are valid until others are taken."""
        kind = keys_last, shape, num_keys, dtype
        scores = self.views.get(kind)
        if scores is None:
            scores = Scores(*kind, self)
            self.keep(kind, scores)
        return scores

    def keep(self, kind: Any, views: Any) -> None:
        """Let views of the memory be found again."""
        if len(self.views) >= MAX_VIEWS:
            self.views.clear()
        self.views[kind] = views


class Scores:
    """Scores of a tile, then its logits, then its weights, of rows (*lead, group, rows) with `num_keys` keys.

    NumPy is quick along the last axis in memory, and takes some 20 ns to begin with it. So this is either that of the
    keys, or the rows of all heads, which BLAS reads and writes as well. Statistics of rows are kept in arrays that
    broadcast with the scores; `by_row` shows them as (*lead, group * rows).
    """

    def __init__(
        self, keys_last: bool, shape: tuple[int, ...], num_keys: int, dtype: np.dtype[Any], scratch: Scratch
    ) -> None:
        *lead, group, rows = shape
        height = group * rows
        self._keys_last = keys_last
        self._axis = -1 if keys_last else 0
        self.flat = scratch.take("scores", (*lead, height, num_keys) if keys_last else (num_keys, *lead, height), dtype)
        """In the order of the memory."""
        self._matrix = self.flat if keys_last else np.moveaxis(self.flat, 0, -1)
        """(*lead, group * rows, keys)"""
        split = self.flat.reshape((*shape, num_keys) if keys_last else (num_keys, *shape))
        self.logits: Array = split if keys_last else np.moveaxis(split, 0, -1)
        """(*lead, group, rows, keys)"""
        self._parts: tuple[Array, Array] | None = None
        """Keys that are reduced in two steps, and those that are left; along the last axis NumPy does it itself.

        Two steps are quicker, too: in the first NumPy begins once for all rows of `width` keys.
        """
        if not keys_last and num_keys > MANY_KEYS:
            width = 1 << num_keys.bit_length() // 2  # near the square root, so that both are short
            whole = num_keys - num_keys % width
            self._parts = self.flat[:whole].reshape(-1, width, *lead, height), self.flat[whole:]

    def multiply(self, q: Array, k: Array) -> None:
        """Fill in the products of queries (*lead, group * rows, D) and keys (*lead, keys, D)."""
        np.matmul(q, k.swapaxes(-1, -2), out=self._matrix)

    def all_finite(self) -> bool:
        """Whether all scores are certainly finite. The quickest way to see it, unless some are huge."""
        flat = self.flat.reshape(-1)
        return isfinite(np.dot(flat, flat))

    def rows_beyond(self, hide: Callable[[], None]) -> Array:
        """Find the rows (*lead, group * rows) with scores that are not finite, but for those that `hide` hides."""
        scores = self.flat.copy()
        self.flat.fill(0)
        hide()
        beyond = ~np.isfinite(scores) & ~np.isneginf(self.flat)
        np.copyto(self.flat, scores)
        return self.by_row(np.logical_or.reduce(beyond, axis=self._axis, keepdims=True))

    def peak(self) -> Array:
        """Return the largest logit of each row."""
        return self._reduce(np.maximum)

    def weigh(self, shift: Array) -> None:
        """Turn logits into weights: exp(logit - shift of the row)."""
        flat = self.flat
        np.subtract(flat, shift, out=flat)
        np.exp(flat, out=flat)

    def sums(self) -> Array:
        """Return the sum of each row's weights."""
        return self._reduce(np.add)

    def _reduce(self, function: np.ufunc) -> Array:
        if self._parts is None:
            reduced: Array = function.reduce(self.flat, self._axis, keepdims=True)
            return reduced
        parts, rest = self._parts
        reduced = function.reduce(function.reduce(parts, 0), 0, keepdims=True)
        if len(rest):
            function(reduced, function.reduce(rest, 0, keepdims=True), out=reduced)
        return reduced

    def apply(self, v: Array, out: Array) -> None:
        """Multiply the weights by values (*lead, keys, Dv)."""
        if out.size <= FEW_RESULTS and prod(v.shape[:-2]) * LONG_PRODUCT <= self.flat.size * v.shape[-1]:
            for head in np.ndindex(v.shape[:-2]):
                out[head] = np.dot(self._matrix[head], v[head])
            return
        # A product of matrices takes some 30 ns to begin with.
        multiply = np.multiply if v.shape[-2] == 1 else np.matmul
        multiply(self._matrix, v, out=out)

    def by_row(self, x: Array) -> Array:
        """View statistics as (*lead, group * rows)."""
        return x[..., 0] if self._keys_last else x[0]


def keys_last(sequence: Sequence, num_rows: int, num_keys: int) -> bool:
    """Choose the memory order of a block's tiles, given the rows and keys of a head."""
    # A bias or a mask, too, has its keys last.
    return sequence.bias is not None or sequence.mask is not None or num_keys > KEYS_PER_ROW * num_rows
