"""What attention of dense arrays means."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .gated import Float64


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
