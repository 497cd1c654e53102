"""What partial results are together."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .gated import Float64


def merge_attention_states(outs: ArrayLike, lses: ArrayLike) -> tuple[Float64, Float64]:
    """Merge partial results of softmax attention over disjoint keys from their definition.

    Parameters
    ----------
    outs : array_like, shape (S, ..., Nq, Dv)
        Output of each part; what it holds for a query that sees no key of the part doesn't count.
    lses : array_like, shape (S, ..., Nq)
        Natural logarithm of the denominator of each part.

    Returns
    -------
    out : ndarray of float64, shape (..., Nq, Dv)
        sum_s exp(lses[s] - lse) outs[s]; 0 where every lse is -inf.
    lse : ndarray of float64, shape (..., Nq)
        log(sum_s exp(lses[s])); NaN where one of them is.
    """
    outs, lses = (np.asarray(x).astype(np.float64) for x in (outs, lses))
    outs = np.where(np.isneginf(lses)[..., np.newaxis], 0.0, outs)
    peak = lses.max(axis=0)
    with np.errstate(invalid="ignore"):
        weights = np.where(lses == peak, 1.0, np.exp(lses - peak))
        total = weights.sum(axis=0)
        return ((weights / total)[..., np.newaxis] * outs).sum(axis=0), peak + np.log(total)
