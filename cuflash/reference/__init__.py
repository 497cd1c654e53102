"""What every function of cuflash means, in float64 NumPy and as plainly as possible.

This is the definition that the kernels are tested against, not an implementation to use: it holds all pairs of a query
and a key in memory at once and checks nothing. Only the arguments that decide the values exist here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .gated import Float64
from .gated import chunk_gated_output as chunk_gated_output
from .gated import gated_delta_rule as gated_delta_rule


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    query_offset: ArrayLike | None = None,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
) -> tuple[Float64, Float64]:
    """Compute softmax attention from its definition.

    Parameters
    ----------
    q : array_like, shape (..., Hq, Nq, D)
        Queries of any float dtype; 2-D means one head. Not (..., N, H, D): that is read as N heads.
    k : array_like, shape (..., Hkv, Nk, D)
        Keys. Query head h reads key head h // (Hq // Hkv).
    v : array_like, shape (..., Hkv, Nk, Dv)
        Values. The leading axes of q, k and v broadcast.
    causal : {False, True, "bottom_right", "top_left"}
        Hide key j from query i if j > i + query_offset.
    window : (left, right), optional
        Hide key j unless i + query_offset - left <= j <= i + query_offset + right. None leaves a side open.
    query_offset : int or integer array over the leading axes, optional
        Key position of query 0; by default Nk - Nq, so that the last query stands at the last key.
    scale : float, optional
        Factor of the scores, by default D ** -0.5.
    bias : array_like, broadcasts to (..., Hq, Nq, Nk), optional
        Added to the logits; -inf hides a pair.
    mask : array_like of bool, broadcasts to (..., Hq, Nq, Nk), optional
        False hides a pair.
    softcap : float, optional
        Replace a score s by softcap * tanh(s / softcap).
    alibi_slopes : array_like, broadcasts to (..., Hq), optional
        Subtract ``slope * |i + query_offset - j|`` from the logits.
    sinks : array_like, broadcasts to (..., Hq), optional
        One more logit per head that enters the denominator only.

    Returns
    -------
    out : ndarray of float64, shape (..., Hq, Nq, Dv)
        0 for a query that sees no key.
    lse : ndarray of float64, shape (..., Hq, Nq)
        Natural logarithm of the denominator; -inf (or the sink) for a query that sees no key.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    is_2d = q.ndim == k.ndim == v.ndim == 2
    q, k, v = (x[np.newaxis] if x.ndim == 2 else x for x in (q, k, v))
    group_size = q.shape[-3] // max(k.shape[-3], 1)
    k, v = (np.repeat(x, group_size, axis=-3) for x in (k, v))
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads = (*batch, q.shape[-3])

    if query_offset is None:
        query_offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    # Farther than 2^60 from the keys an offset hides the same ones, and positions still fit 64 bits.
    offset = np.asarray(np.clip(np.asarray(query_offset, object), -(2**60), 2**60), np.int64)
    offset = np.broadcast_to(offset, batch)[..., np.newaxis, np.newaxis, np.newaxis]
    query_position = offset + np.arange(seqlen_q)[:, np.newaxis]  # (*batch, 1, Nq, 1)
    key_position = np.arange(seqlen_k)

    visible = np.ones((*heads, seqlen_q, seqlen_k), dtype=bool)
    left, right = (None, None) if window is None else window
    if causal:
        visible &= key_position <= query_position
    if left is not None:
        visible &= key_position >= query_position - left
    if right is not None:
        visible &= key_position <= query_position + right
    if mask is not None:
        visible &= np.asarray(mask)

    # Keys and values that no query sees may hold NaN or inf.
    with np.errstate(invalid="ignore", over="ignore"):
        logits = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.swapaxes(-1, -2))
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        if bias is not None:
            bias = np.asarray(bias).astype(np.float64)
            visible &= bias != -np.inf
            logits = logits + bias
    if alibi_slopes is not None:
        slopes = np.asarray(alibi_slopes).astype(np.float64)[..., np.newaxis, np.newaxis]
        logits = logits - slopes * np.abs(query_position - key_position)
    logits = np.where(visible, logits, -np.inf)
    v = np.where(np.any(visible, axis=-2, keepdims=True).swapaxes(-1, -2), v, 0.0)

    peak = logits.max(axis=-1, initial=-np.inf)
    sink: Float64 = np.full((), -np.inf)
    if sinks is not None:
        sink = np.asarray(sinks).astype(np.float64)[..., np.newaxis]
        peak = np.maximum(peak, sink)
    # Without any logit above -inf there is nothing to shift by, and -inf - -inf would be NaN.
    shift = np.where(peak == -np.inf, 0.0, peak)
    # A logit of +inf makes NaN of its row; a sink of +inf takes all the weight.
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(logits - shift[..., np.newaxis])
        denominator = weights.sum(axis=-1) + np.where(sink == np.inf, 1.0, np.exp(sink - shift))
        out = weights / np.where(denominator == 0.0, 1.0, denominator)[..., np.newaxis] @ v
        lse = shift + np.log(denominator)
    sees_nothing = np.logical_not(visible.any(axis=-1))
    out = np.where(sees_nothing[..., np.newaxis], 0.0, out)
    lse = np.where(sees_nothing, sink, lse)
    return (out[0], lse[0]) if is_2d else (out, lse)


def attention_lse(
    q: ArrayLike,
    k: ArrayLike,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    query_offset: ArrayLike | None = None,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
) -> Float64:
    """Compute the log-sum-exp of the scores from its definition.

    Parameters
    ----------
    q : array_like, shape (..., Hq, Nq, D)
        Queries of any float dtype; 2-D means one head.
    k : array_like, shape (..., Hkv, Nk, D)
        Keys.
    causal, window, query_offset, scale, bias, mask, softcap, alibi_slopes, sinks
        As in `attention`.

    Returns
    -------
    lse : ndarray of float64, shape (..., Hq, Nq)
        Natural logarithm; -inf (or the sink) for a query that sees no key.
    """
    no_values = np.asarray(k)[..., :0]
    return attention(
        q, k, no_values, causal=causal, window=window, query_offset=query_offset, scale=scale, bias=bias, mask=mask,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
    )[1]  # fmt: skip


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


def attention_with_kv_cache(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    *,
    seqlens_k: ArrayLike,
    k_new: ArrayLike | None = None,
    v_new: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    **options: Any,
) -> tuple[Float64, Float64]:
    """Compute attention with a KV cache from its definition, batch by batch; the cache stays as it is.

    Parameters
    ----------
    q : array_like, shape (B, Hq, Nq, D)
        Queries.
    k_cache, v_cache : array_like, shape (B, Hkv, capacity, D and Dv), or (pages, Hkv, page_size, D and Dv)
        Keys and values.
    seqlens_k : int or array_like of int, shape (B,)
        Keys in the cache; no more than it holds are counted.
    k_new, v_new : array_like, shape (B, Hkv, Nnew, D and Dv), optional
        Further keys and values; those that the cache has no room for are left out.
    page_table : array_like of int, shape (B, max_pages), optional
        Pages of each batch, in the order of its keys.
    bias, mask, alibi_slopes, sinks
        As in `attention`, with a column for each key that the cache has room for.
    **options
        Those of `attention` that are left.

    Returns
    -------
    out : ndarray of float64, shape (B, Hq, Nq, Dv)
    lse : ndarray of float64, shape (B, Hq, Nq)
    """
    q = np.asarray(q)
    batch, num_heads, seqlen_q, _ = q.shape
    keys, values = (_of_batches(cache, page_table) for cache in (k_cache, v_cache))
    capacity = keys.shape[2]
    out, lse = np.zeros((batch, num_heads, seqlen_q, values.shape[3])), np.zeros((batch, num_heads, seqlen_q))
    # As objects, which hold what does not fit the integers of an array.
    for b, length in enumerate(np.minimum(np.broadcast_to(np.asarray(seqlens_k, object), batch), capacity)):
        k, v = keys[b, :, :length], values[b, :, :length]
        if k_new is not None and v_new is not None:
            k, v = (np.concatenate([x, np.asarray(new)[b]], axis=1) for x, new in ((k, k_new), (v, v_new)))
        own = dict(options)
        for name, x in (("bias", bias), ("mask", mask)):
            if x is not None:
                shape = (batch, num_heads, seqlen_q, capacity if np.shape(x)[-1:] in ((), (1,)) else np.shape(x)[-1])
                own[name] = np.broadcast_to(np.asarray(x), shape)[b, ..., : min(k.shape[1], capacity)]
        for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if x is not None:
                own[name] = np.broadcast_to(np.asarray(x), (batch, num_heads))[b]
        out[b], lse[b] = attention(q[b], k[:, :capacity], v[:, :capacity], **own)
    return out, lse


def _of_batches(cache: ArrayLike, page_table: ArrayLike | None) -> NDArray[Any]:
    """Return the keys of each batch side by side; what entries of pages that there are not stand for is not used."""
    cache = np.asarray(cache)
    if page_table is None:
        return cache
    if not len(cache):
        cache = np.zeros((1, *cache.shape[1:]))
    pages: NDArray[Any] = cache[np.clip(np.asarray(page_table, object), 0, len(cache) - 1).astype(np.int64)]
    batch, max_pages, num_heads, page_size, features = pages.shape
    return pages.swapaxes(1, 2).reshape(batch, num_heads, max_pages * page_size, features)


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
