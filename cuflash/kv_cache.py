"""`attention_with_kv_cache`: the public function for keys and values that are kept from call to call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

from .dispatch import execute, find
from .problem.arrays import MISSING, cupy_ndarray
from .problem.checks import hashable_window
from .problem.describe_cache import describe_kv_cache
from .problem.hints import check_options, explains_unknown_options
from .problem.signatures import Causal, FloatDtype, Precision, Real, Window

if TYPE_CHECKING:
    from .problem.signatures import AnyArray, CacheOptions, CacheResults, NumpyArray, Pair, Unpack, WithoutLse


# fmt: off
@overload
def attention_with_kv_cache(
    q: NumpyArray, k_cache: AnyArray, v_cache: AnyArray,
    *, seqlens_k: SupportsIndex | AnyArray, return_lse: Literal[False] = False, lse: None = None,
    **options: Unpack[CacheOptions],
) -> NumpyArray | WithoutLse: ...
@overload
def attention_with_kv_cache(
    q: NumpyArray, k_cache: AnyArray, v_cache: AnyArray,
    *, seqlens_k: SupportsIndex | AnyArray, return_lse: Literal[True], lse: AnyArray | None = None,
    **options: Unpack[CacheOptions],
) -> tuple[NumpyArray, Any]: ...
@overload
def attention_with_kv_cache(
    q: NumpyArray, k_cache: AnyArray, v_cache: AnyArray,
    *, seqlens_k: SupportsIndex | AnyArray, return_lse: bool = False, lse: AnyArray,
    **options: Unpack[CacheOptions],
) -> tuple[NumpyArray, Any]: ...
@overload
def attention_with_kv_cache(
    q: NumpyArray, k_cache: AnyArray, v_cache: AnyArray,
    *, seqlens_k: SupportsIndex | AnyArray, return_lse: bool, lse: None = None,
    **options: Unpack[CacheOptions],
) -> NumpyArray | WithoutLse | tuple[NumpyArray, Any]: ...
@overload
def attention_with_kv_cache(
    q: AnyArray, k_cache: AnyArray, v_cache: AnyArray,
    *, seqlens_k: SupportsIndex | AnyArray, return_lse: Literal[False] = False, lse: None = None,
    **options: Unpack[CacheResults],
) -> Any | WithoutLse: ...
@overload
def attention_with_kv_cache(
    q: AnyArray, k_cache: AnyArray, v_cache: AnyArray,
    *, seqlens_k: SupportsIndex | AnyArray, return_lse: Literal[True], lse: AnyArray | None = None,
    **options: Unpack[CacheResults],
) -> Pair: ...
@overload
def attention_with_kv_cache(
    q: AnyArray, k_cache: AnyArray, v_cache: AnyArray,
    *, seqlens_k: SupportsIndex | AnyArray, return_lse: bool = False, lse: AnyArray,
    **options: Unpack[CacheResults],
) -> Pair: ...
@overload
def attention_with_kv_cache(
    q: AnyArray, k_cache: AnyArray, v_cache: AnyArray,
    *, seqlens_k: SupportsIndex | AnyArray, return_lse: bool, lse: None = None,
    **options: Unpack[CacheResults],
) -> Any | WithoutLse | Pair: ...
# fmt: on
@explains_unknown_options
def attention_with_kv_cache(
    q: Any = MISSING,
    k_cache: Any = MISSING,
    v_cache: Any = MISSING,
    *more: Any,
    seqlens_k: SupportsIndex | Any = MISSING,
    k_new: Any = None,
    v_new: Any = None,
    page_table: Any = None,
    num_splits: SupportsIndex | None = None,
    split_size: SupportsIndex | None = None,
    causal: Causal = False,
    window: Window | None = None,
    scale: Real | None = None,
    bias: Any = None,
    mask: Any = None,
    softcap: Real | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    precision: Precision | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    out_dtype: FloatDtype | None = None,
    workspace: Any = None,
    **unknown: Any,
) -> Any:
    """Softmax attention to the keys and values of a cache, after new ones have been appended to it in place.

    Batch ``b`` attends to its first ``seqlens_k[b] + Nnew`` keys, or as many as there is room for. What the cache holds
    behind them may be anything, NaN included. On a GPU lengths and pages are read there: the host is never
    synchronised, and a captured call goes on while they grow.

    .. warning::
       Axes are ``(batch, heads, sequence, feature)``. A cache laid out as ``(batch, sequence, heads, feature)`` is
       silently a valid input with ``sequence`` heads: pass ``x.swapaxes(-3, -2)`` of each, which costs no copy.

    Parameters
    ----------
    q : array, shape (B, Hq, Nq, D)
        Queries: float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64. Any strides.
    k_cache : array, shape (B, Hkv, capacity, D), or (num_pages, Hkv, page_size, D) with `page_table`
        Keys, of the same dtype; ``Hq`` must be a multiple of ``Hkv``. Written if there is `k_new`.
    v_cache : array, shape (B, Hkv, capacity, Dv), or (num_pages, Hkv, page_size, Dv) with `page_table`
        Values, likewise. ``D`` and ``Dv`` are 1 to 512.
    seqlens_k : int or integer array, shape (B,)
        Keys that each batch has in the cache before the call, on the same device; not changed. More than the capacity
        count as that many. Below 0 they raise with NumPy, and as int; on a GPU they count as 0.
    k_new : array, shape (B, Hkv, Nnew, D), optional
        Keys that are written behind those of the cache, then attended to. What there is no room for is left out.
    v_new : array, shape (B, Hkv, Nnew, Dv), optional
        Values, likewise; both or none.
    page_table : integer array, shape (B, max_pages), optional
        Key ``j`` of batch ``b`` lies in row ``j % page_size`` of page ``page_table[b, j // page_size]``, and the
        capacity is ``max_pages * page_size``. Entries behind the keys in use may be anything. Others that name no page
        raise with NumPy; on a GPU the nearest page is read in place of it, and nothing is written there. Pages that are
        appended to must belong to one batch alone.
    num_splits : int, optional
        Into how many parts the keys of each batch are split, for as many blocks of a GPU; by default as many as help.
        No more than there are tiles of keys, and no more than 128. Results depend on it by rounding only; NumPy's do
        not.
    split_size : int, optional
        Split after so many keys, a multiple of 64, in place of `num_splits`. On a GPU a row then has the same bits
        whatever there is beside it: other queries, batches and heads, more room in the cache, and pages. So a prompt in
        parts gives what single steps give. Slower for many queries. (Not for float32, float64 and head_dim above 256
        with a window that is closed on the left, nor with another kernel that `options` insists on.)
    causal : bool or {"bottom_right", "top_left"}, optional
        As in `attention`: query ``i`` stands at key ``Nk - Nq + i``, with the length ``Nk`` of each batch.
    window : (left, right), optional
        As in `attention`.
    scale, softcap, precision
        As in `attention`.
    bias : float array that broadcasts to (B, Hq, Nq, capacity), optional
        Added to the scores, read in place; ``-inf`` hides. Where `seqlens_k` is an int, ``Nk`` columns will do.
    mask : bool array that broadcasts to (B, Hq, Nq, capacity), optional
        True = attend; likewise. ``v`` must be finite where it hides one of the ``Nk`` keys.
    alibi_slopes, sinks : float arrays that broadcast to (B, Hq), optional
        As in `attention`.
    return_lse : bool, optional
        Also return the log-sum-exp of the scores.
    out : array, shape (B, Hq, Nq, Dv), optional
        Written in place, any strides, and returned; must not overlap an input.
    lse : array, shape (B, Hq, Nq), optional
        Likewise for the log-sum-exp; implies ``return_lse``.
    out_dtype : dtype, optional
        float16, bfloat16, float32 or float64; default the dtype of `out`, or of `q`.
    workspace : uint8 array, optional
        As in `attention`: scratch memory of at least as many bytes as ``explain(...)`` names.

    Returns
    -------
    out : array, shape (B, Hq, Nq, Dv)
        NumPy for NumPy, else CuPy; new arrays lie in memory in the axis order of `q`.
    lse : array, shape (B, Hq, Nq)
        Only with `return_lse` or `lse`: natural logarithm, float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As in `attention`: argument, got and expected, before anything is launched or written.

    See Also
    --------
    attention : Keys and values of one call.
    merge_attention_states : A prefix that many sequences share, attended to once.

    Notes
    -----
    Pages are those of [1]_. Results are repeatable to the bit.

    References
    ----------
    .. [1] W. Kwon et al., "Efficient memory management for large language model serving with PagedAttention", 2023,
       arXiv:2309.06180.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> k_cache, v_cache = np.zeros((2, 3, 4, 100, 64), np.float32)
    >>> lengths = np.array([0, 5, 20])
    >>> q, k, v = rng.standard_normal((3, 3, 4, 7, 64), dtype=np.float32)
    >>> cuflash.attention_with_kv_cache(q, k_cache, v_cache, seqlens_k=lengths, k_new=k, v_new=v, causal=True).shape
    (3, 4, 7, 64)
    """
    if unknown or more:
        check_options("attention_with_kv_cache", unknown, more)
    key: Any = None
    launch: Any = None
    pointers: Any = None
    views = _views(seqlens_k, k_cache, v_cache, k_new, v_new, page_table)
    if views is not None:
        num_keys, lengths, k, v, new_k, new_v = views
        options = (
            "attention_with_kv_cache", num_splits, type(num_splits), split_size, type(split_size), causal, type(causal),
            scale, type(scale), softcap, type(softcap), precision, return_lse, type(return_lse), out_dtype,
            None if window is None else hashable_window(window), num_keys,
        )  # fmt: skip
        others = (out, lse, bias, mask, alibi_slopes, sinks, None, lengths, page_table, new_k, new_v)
        key, launch, pointers = find(q, k, v, others, options)
    if (
        launch is not None
        and (workspace is None or launch.takes(workspace, pointers))
        and ((out is None and lse is None and k_new is None) or launch.results_apart(pointers))
    ):
        return launch.run(pointers, out, lse, workspace)
    problem, infos = describe_kv_cache(
        q, k_cache, v_cache, seqlens_k=seqlens_k, k_new=k_new, v_new=v_new, page_table=page_table,
        num_splits=num_splits, split_size=split_size, causal=causal, window=window, scale=scale, bias=bias, mask=mask,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, precision=precision, return_lse=return_lse, out=out,
        lse=lse, out_dtype=out_dtype, workspace=workspace,
    )  # fmt: skip
    return execute(problem, infos, key, out, lse)


def _views(seqlens_k: Any, k_cache: Any, v_cache: Any, k_new: Any, v_new: Any, page_table: Any) -> Any:
    """Return the number of keys where it is known and the arrays don't show it, lengths that are an array, and the keys
    and values that a call reads and writes.

    None for calls that are always checked as a whole: those whose keys have a known length and are not CuPy's.
    """
    if type(seqlens_k) is not int:
        return None if not hasattr(seqlens_k, "shape") else (None, seqlens_k, k_cache, v_cache, k_new, v_new)
    known: Any = cupy_ndarray()
    if seqlens_k < 0:
        return None
    for array in (k_cache, v_cache, k_cache if k_new is None else k_new):
        if type(array) is not known or array.ndim != 4:
            return None
    if k_cache.shape[:3] != v_cache.shape[:3]:  # capacities, which nobody compares later
        return None
    capacity, num_new = k_cache.shape[2], 0 if k_new is None else k_new.shape[2]
    if page_table is not None:
        if type(page_table) is not known or page_table.ndim != 2:
            return None
        capacity *= page_table.shape[1]
    end = min(seqlens_k + num_new, capacity)
    if num_new > end - min(seqlens_k, capacity):
        return None
    return end, None, k_cache, v_cache, k_new, v_new
