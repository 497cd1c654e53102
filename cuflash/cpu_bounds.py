"""Rows of the NumPy back end whose logits are so small that exp needs no shift: no maximum, no subtraction.

Whether that is so is decided for each row by itself, from the keys that it sees: bits must not depend on other ones.
"""

from __future__ import annotations

import numpy as np

from .cpu_blocks import Array, Block, bounds_pay
from .cpu_scores import Scratch
from .cpu_tile import Arithmetic, operand

SAFE_LOGIT = 30.0
"""Weights from 1e-13 to 1e13 neither overflow nor vanish."""
MIN_WEIGHT = 2.0**-4
"""Mean weight of a row below which products with small values would lose digits that they need not."""
CHUNK_ELEMENTS = 2**16


def may_bound(block: Block, arithmetic: Arithmetic) -> bool:
    """Whether looking for small logits is possible, and costs less than it saves; by shapes and options alone."""
    sequence = block.sequence
    if sequence.bias is not None or sequence.mask is not None or sequence.alibi_slopes is not None:
        return False
    if arithmetic.window_left is not None:
        return False
    *_, group, seqlen_q, head_dim = sequence.q.shape
    num_keys = block.keys.stop - block.keys.start
    return bounds_pay(group * seqlen_q, num_keys, head_dim, sequence.k.shape[-2])


def bounded_rows(block: Block, arithmetic: Arithmetic, q: Array, scratch: Scratch) -> Array:
    """Return which rows (heads, group * rows) may go without a shift, given scaled queries (*lead, group * rows, D).

    |q.k| <= |q| |k|. A row that sees one key is none of them: its weight has to be 1 exactly.
    """
    last = _last_keys(block, arithmetic)
    norms = _norms_until(block, arithmetic, scratch)
    # What of the scale is not in q yet; |softcap * tanh(x)| <= softcap * |x|.
    factor = abs(arithmetic.scale) / arithmetic.divisor * (arithmetic.softcap or 1.0)
    by_feature = q.swapaxes(-1, -2)
    norm_q = np.sqrt(np.add.reduce(by_feature * by_feature, axis=-2)).reshape(-1, q.shape[-2])
    group = q.shape[-2] // len(last)
    norm_k = np.tile(norms[:, np.maximum(last, 0)], group)
    bound = np.minimum(norm_q.astype(np.float64) * norm_k * factor, arithmetic.softcap or np.inf)
    return (bound <= SAFE_LOGIT) & np.tile(last > 0, group)


def thin_rows(block: Block, arithmetic: Arithmetic, bounded: Array, total: Array) -> Array:
    """Return which of the rows without a shift are better computed with one."""
    last = _last_keys(block, arithmetic)
    return bounded & (total < MIN_WEIGHT * np.tile(last + 1, total.shape[-1] // len(last)))


def _last_keys(block: Block, arithmetic: Arithmetic) -> Array:
    """Index of the last key that each row sees, below 0 if there is none; the first one is key 0."""
    num_rows, last = block.rows.stop - block.rows.start, block.sequence.k.shape[-2] - 1
    if arithmetic.window_right is None:
        return np.full(num_rows, last)
    first = block.position + arithmetic.window_right
    return np.clip(np.arange(num_rows) + max(-num_rows, min(first, last)), -1, last)


def _norms_until(block: Block, arithmetic: Arithmetic, scratch: Scratch) -> Array:
    """Return the largest norm among the keys up to each one, (heads, Nk). Two threads may both compute it."""
    known = block.sequence.norms
    which = tuple((part.start, part.stop) for part in block.heads)
    norms = known.get(which)
    if norms is None:
        keys = block.sequence.k[block.heads]
        step = max(1, CHUNK_ELEMENTS // keys.shape[-1])
        squares = []
        for start in range(0, keys.shape[-2], step):
            k = operand(keys[..., start : start + step, :], "k", arithmetic.dtype, scratch)
            squares.append(np.einsum("...nd,...nd->...n", k, k).reshape(-1, k.shape[-2]))
        norms = known[which] = np.sqrt(np.maximum.accumulate(np.concatenate(squares, axis=-1), axis=-1))
    return norms
