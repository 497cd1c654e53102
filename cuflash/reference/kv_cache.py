"""What attention with a KV cache means."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .dense import attention
from .gated import Float64


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
