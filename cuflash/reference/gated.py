"""The gated delta rule in float64 NumPy, as plainly as possible: a part of `reference`."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]


def chunk_gated_output(
    q: ArrayLike,
    k: ArrayLike,
    v_new: ArrayLike,
    h: ArrayLike,
    log_g_cumsum: ArrayLike,
    cu_seqlens: ArrayLike,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
) -> Float64:
    """Compute the output of gated chunks, whose states are known, from its definition.

    Parameters
    ----------
    q, k : array_like, shape (total, H, K)
        Queries and keys of all sequences, one sequence behind the other.
    v_new : array_like, shape (total, Hv, V)
        Values. Head h of them belongs to head h // (Hv // H) of q and k.
    h : array_like, shape (num_chunks or more, Hv, K, V)
        State before each chunk, of the first sequence, then of the second, and so on.
    log_g_cumsum : array_like, shape (total, Hv)
        Natural logarithm of the decay, cumulated from the first token of a chunk to each of its tokens.
    cu_seqlens : array_like of int, shape (N + 1,)
        Sequence n has the tokens cu_seqlens[n] up to cu_seqlens[n + 1].
    scale : float, optional
        Factor of the output, by default K ** -0.5.
    chunk_size : int
        Tokens of a chunk; the last one of a sequence may have fewer.

    Returns
    -------
    out : ndarray of float64, shape (total, Hv, V)
        scale * (exp(c_i) q_i h + sum over j <= i of exp(c_i - c_j) (q_i . k_j) v_j) with c that of the chunk, where
        exp(-inf - -inf) is 1; 0 behind cu_seqlens[-1].
    """
    q, k, v_new, h, c = (np.asarray(x).astype(np.float64) for x in (q, k, v_new, h, log_g_cumsum))
    total, num_heads_v, head_dim_v = v_new.shape
    group_size = num_heads_v // max(q.shape[1], 1)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    boundaries = [int(boundary) for boundary in np.asarray(cu_seqlens)]
    out = np.zeros((total, num_heads_v, head_dim_v))
    row = 0
    for begin, end in pairwise(boundaries):
        for first in range(begin, end, chunk_size):
            last = min(first + chunk_size, end)
            for head in range(num_heads_v):
                for i in range(first, last):
                    query, gate, seen = q[i, head // group_size], c[i, head], slice(first, i + 1)
                    lost = np.zeros(i + 1 - first)
                    np.subtract(gate, c[seen, head], out=lost, where=c[seen, head] != gate)
                    weights = np.exp(lost) * (k[seen, head // group_size] @ query)
                    out[i, head] = np.exp(gate) * (query @ h[row, head]) + weights @ v_new[seen, head]
            row += 1
    return scale * out


def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_g: ArrayLike,
    beta: ArrayLike,
    *,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
) -> tuple[Float64, Float64]:
    """Compute the gated delta rule from its definition, token by token.

    Parameters
    ----------
    q, k : array_like, shape (B, T, H, K)
        Queries and keys.
    v : array_like, shape (B, T, Hv, V)
        Values. Head h of them belongs to head h // (Hv // H) of q and k.
    log_g : array_like, shape (B, T, Hv)
        Natural logarithm of each token's decay.
    beta : array_like, shape (B, T, Hv)
        How far each token's value replaces what the state holds for its key.
    scale : float, optional
        Factor of the output, by default K ** -0.5.
    initial_state : array_like, shape (N, Hv, K, V), optional
        States before the first token, by default 0.
    cu_seqlens : array_like of int, shape (N + 1,), optional
        Sequence n has the tokens cu_seqlens[n] up to cu_seqlens[n + 1], with B = 1; by default each batch is one.

    Returns
    -------
    out : ndarray of float64, shape (B, T, Hv, V)
        0 behind cu_seqlens[-1].
    final_state : ndarray of float64, shape (N, Hv, K, V)
        States behind the last token.
    """
    q, k, v, log_g, beta = (np.asarray(x).astype(np.float64) for x in (q, k, v, log_g, beta))
    batch, seqlen, num_heads_v, head_dim_v = v.shape
    group_size = num_heads_v // max(q.shape[2], 1)
    q, k = (np.repeat(x, group_size, axis=2) for x in (q, k))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if cu_seqlens is None:
        sequences = [(b, 0, seqlen) for b in range(batch)]
    else:
        boundaries = [int(boundary) for boundary in np.asarray(cu_seqlens)]
        sequences = [(0, begin, end) for begin, end in pairwise(boundaries)]
    out = np.zeros(v.shape)
    state = np.zeros((len(sequences), num_heads_v, q.shape[3], head_dim_v))
    if initial_state is not None:
        state[...] = np.asarray(initial_state).astype(np.float64)
    for s, (b, begin, end) in zip(state, sequences, strict=True):
        for t in range(begin, end):
            s *= np.exp(log_g[b, t])[:, np.newaxis, np.newaxis]
            held = (k[b, t, :, :, np.newaxis] * s).sum(axis=1)
            update = beta[b, t, :, np.newaxis] * (v[b, t] - held)
            s += k[b, t, :, :, np.newaxis] * update[:, np.newaxis, :]
            out[b, t] = scale * (q[b, t, :, :, np.newaxis] * s).sum(axis=1)
    return out, state
