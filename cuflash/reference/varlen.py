"""What attention of packed sequences means."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .dense import attention
from .gated import Float64


def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
) -> tuple[Float64, Float64]:
    """Compute softmax attention of packed sequences from its definition.

    Parameters
    ----------
    q : array_like, shape (total_q, Hq, D)
        Queries of all sequences, one sequence behind the other.
    k : array_like, shape (total_k, Hkv, D)
        Keys.
    v : array_like, shape (total_k, Hkv, Dv)
        Values.
    cu_seqlens_q : array_like of int, shape (batch + 1,)
        Sequence b has the queries cu_seqlens_q[b] up to cu_seqlens_q[b + 1].
    cu_seqlens_k : array_like of int, shape (batch + 1,), optional
        The same for the keys, by default cu_seqlens_q.
    causal, window, scale, softcap
        As in `attention`, applied to each sequence by itself.
    alibi_slopes, sinks : array_like, broadcast to (batch, Hq), optional
        As in `attention`.

    Returns
    -------
    out : ndarray of float64, shape (total_q, Hq, Dv)
        0 behind cu_seqlens_q[-1].
    lse : ndarray of float64, shape (total_q, Hq)
        -inf behind cu_seqlens_q[-1].
    """
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    boundaries_q = [int(boundary) for boundary in np.asarray(cu_seqlens_q)]
    boundaries_k = boundaries_q if cu_seqlens_k is None else [int(boundary) for boundary in np.asarray(cu_seqlens_k)]
    total_q, num_heads_q, _ = q.shape
    heads = (len(boundaries_q) - 1, num_heads_q)
    slopes = None if alibi_slopes is None else np.broadcast_to(np.asarray(alibi_slopes), heads)
    sink_logits = None if sinks is None else np.broadcast_to(np.asarray(sinks), heads)

    out = np.zeros((total_q, num_heads_q, v.shape[-1]))
    lse = np.full((total_q, num_heads_q), -np.inf)
    for b in range(heads[0]):
        queries = slice(boundaries_q[b], boundaries_q[b + 1])
        keys = slice(boundaries_k[b], boundaries_k[b + 1])
        sequence_out, sequence_lse = attention(
            q[queries].swapaxes(0, 1),
            k[keys].swapaxes(0, 1),
            v[keys].swapaxes(0, 1),
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            alibi_slopes=None if slopes is None else slopes[b],
            sinks=None if sink_logits is None else sink_logits[b],
        )
        out[queries] = sequence_out.swapaxes(0, 1)
        lse[queries] = sequence_lse.swapaxes(0, 1)
    return out, lse
