"""Blocks of the NumPy back end that see one tile of keys and ask for nothing but a window: no more than the formula.

Most calls are of this kind, and short, so that each call of NumPy counts. Every row sees a key: its largest logit is
finite unless float32 (float64) is too narrow for the logits.
"""

from __future__ import annotations

from math import isfinite

import numpy as np

from ..problem.problem import Problem
from .blocks import Array, Block
from .scores import Scratch, keys_last
from .tile import MODERATE, Arithmetic, edges_of, is_blas_matrix, operand


def is_plain(problem: Problem) -> bool:
    """Whether a problem asks for nothing but a window, and perhaps the lse."""
    traits = problem.traits
    has_moderate_scale = MODERATE[0] <= abs(problem.scale) <= MODERATE[1]
    return traits.num_arrays == traits.num_terms == traits.sinks == 0 and has_moderate_scale


def attend_directly(block: Block, arithmetic: Arithmetic, scratch: Scratch) -> Array | None:
    """Compute and store the rows of a block, except for those that float32 was too narrow for.

    Returns
    -------
    ndarray or None
        Which rows (*lead, group * rows) these are; None if there are none.
    """
    sequence, part = block
    keys = part.keys
    q = block.of_rows(sequence.q)
    first = sequence.offset + part.rows.start - keys.start
    kind = q.shape, sequence.v.shape[-1], keys.stop - keys.start, first, arithmetic
    prepared: _Prepared | None = scratch.views.get(kind)
    if prepared is None:
        prepared = _Prepared(block, *kind, scratch)
        scratch.keep(kind, prepared)
    k, v = block.of_keys(sequence.k, keys), block.of_keys(sequence.v, keys)
    lse = None if sequence.lse is None else block.of_rows(sequence.lse)
    return prepared.attend(q, k, v, block.of_rows(sequence.out), lse, scratch)


class _Prepared:
    """Memory for blocks of one kind, and what is the same for each of them."""

    def __init__(
        self,
        block: Block,
        shape: tuple[int, ...],
        head_dim_v: int,
        num_keys: int,
        first: int,
        arithmetic: Arithmetic,
        scratch: Scratch,
    ) -> None:
        dtype = self._dtype = arithmetic.dtype
        *lead, group, rows, head_dim = shape
        height = group * rows
        self._scores = scratch.scores(keys_last(block.sequence, height, num_keys), shape[:-1], num_keys, dtype)
        self._edges = edges_of(self._scores.logits, first, arithmetic.window_left, arithmetic.window_right)
        self._scale = np.array(arithmetic.scale, dtype)  # quicker than a scalar
        self._rows_of_q = (*lead, height, head_dim)
        self._rows_of_out = (*lead, height, head_dim_v)
        # Whichever are fewer are divided.
        self._means = num_keys <= 2 * head_dim_v

    def attend(self, q: Array, k: Array, v: Array, out: Array, lse: Array | None, scratch: Scratch) -> Array | None:
        scores, dtype = self._scores, self._dtype
        k, v = operand(k, "k", dtype, scratch), operand(v, "v", dtype, scratch)
        scores.multiply(operand(q.reshape(self._rows_of_q), "q", dtype, scratch), k)
        flat = scores.flat
        np.multiply(flat, self._scale, out=flat)
        bad: Array | None = None
        if dtype.itemsize == 4 and not scores.all_finite():
            bad = scores.rows_beyond(self._hide)
        self._hide()
        peak = scores.peak()
        scores.weigh(peak)
        total = scores.sums()
        if self._means:
            np.divide(flat, total, out=flat)
        in_place = _as_rows(out, self._rows_of_out) if out.dtype == dtype else None
        product = scratch.take("product", self._rows_of_out, dtype) if in_place is None else in_place
        scores.apply(v, product)
        # A sum is finite only if all of it is; one that is not may also be of large numbers.
        if dtype.itemsize == 4 and not isfinite(np.add.reduce(product, axis=None)):
            overflowed = ~np.logical_and.reduce(np.isfinite(product), axis=-1)
            bad = overflowed if bad is None else bad | overflowed
        if not self._means:
            np.divide(product, scores.by_row(total)[..., np.newaxis], out=product)
        if in_place is None:
            np.copyto(out, product.reshape(out.shape), casting="same_kind")
        if lse is not None:
            logs = np.log(scores.by_row(total).astype(np.float64)) + scores.by_row(peak)
            np.copyto(lse, logs.reshape(lse.shape), casting="same_kind")
        return bad if bad is not None and bad.any() else None

    def _hide(self) -> None:
        for logits, limits in self._edges:
            np.fmin(logits, limits, out=logits)


def _as_rows(x: Array, shape: tuple[int, ...]) -> Array | None:
    """View (*lead, group, rows, columns) as (*lead, group * rows, columns), if there is a view that BLAS can write."""
    if x.flags.c_contiguous:
        return x.reshape(shape)
    (group, rows), (group_step, row_step) = x.shape[-3:-1], x.strides[-3:-1]
    if group > 1 and rows > 1 and group_step != rows * row_step:
        return None
    view = x.reshape(shape)
    return view if is_blas_matrix(view) else None
