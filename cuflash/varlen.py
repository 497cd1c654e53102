"""`attention_varlen`: the public function for packed sequences of different lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

from .dispatch import execute, find
from .problem.arrays import MISSING
from .problem.checks import hashable_window
from .problem.describe import describe_varlen
from .problem.hints import check_options, explains_unknown_options
from .problem.signatures import Causal, FloatDtype, Precision, Real, Window

if TYPE_CHECKING:
    from .problem.signatures import AnyArray, NumpyArray, Pair, Unpack, VarlenOptions, VarlenResults, WithoutLse


# fmt: off
@overload
def attention_varlen(
    q: NumpyArray, k: AnyArray, v: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None,
    *, return_lse: Literal[False] = False, lse: None = None,
    **options: Unpack[VarlenOptions],
) -> NumpyArray | WithoutLse: ...
@overload
def attention_varlen(
    q: NumpyArray, k: AnyArray, v: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None,
    *, return_lse: Literal[True], lse: AnyArray | None = None,
    **options: Unpack[VarlenOptions],
) -> tuple[NumpyArray, Any]: ...
@overload
def attention_varlen(
    q: NumpyArray, k: AnyArray, v: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None,
    *, return_lse: bool = False, lse: AnyArray,
    **options: Unpack[VarlenOptions],
) -> tuple[NumpyArray, Any]: ...
@overload
def attention_varlen(
    q: NumpyArray, k: AnyArray, v: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None,
    *, return_lse: bool, lse: None = None,
    **options: Unpack[VarlenOptions],
) -> NumpyArray | WithoutLse | tuple[NumpyArray, Any]: ...
@overload
def attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None,
    *, return_lse: Literal[False] = False, lse: None = None,
    **options: Unpack[VarlenResults],
) -> Any | WithoutLse: ...
@overload
def attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None,
    *, return_lse: Literal[True], lse: AnyArray | None = None,
    **options: Unpack[VarlenResults],
) -> Pair: ...
@overload
def attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None,
    *, return_lse: bool = False, lse: AnyArray,
    **options: Unpack[VarlenResults],
) -> Pair: ...
@overload
def attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None,
    *, return_lse: bool, lse: None = None,
    **options: Unpack[VarlenResults],
) -> Any | WithoutLse | Pair: ...
# fmt: on
@explains_unknown_options
def attention_varlen(
    q: Any = MISSING,
    k: Any = MISSING,
    v: Any = MISSING,
    cu_seqlens_q: Any = MISSING,
    cu_seqlens_k: Any = None,
    *more: Any,
    causal: Causal = False,
    window: Window | None = None,
    scale: Real | None = None,
    softcap: Real | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    precision: Precision | None = None,
    max_seqlen_q: SupportsIndex | None = None,
    max_seqlen_k: SupportsIndex | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    out_dtype: FloatDtype | None = None,
    **unknown: Any,
) -> Any:
    """Softmax attention of many sequences packed one behind the other, each attending to its own keys.

    Sequence ``b`` has the queries ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]`` and the keys ``cu_seqlens_k[b] :
    cu_seqlens_k[b + 1]``. On a GPU the lengths are read there: the host is never synchronised.

    .. warning::
       Axes are ``(tokens, heads, feature)``, unlike those of `attention`.

    Parameters
    ----------
    q : array, shape (total_q, Hq, D)
        Queries: float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64. Any strides.
    k : array, shape (total_k, Hkv, D)
        Keys, of the same dtype; ``Hq`` must be a multiple of ``Hkv``.
    v : array, shape (total_k, Hkv, Dv)
        Values, of the same dtype. ``D`` and ``Dv`` are 1 to 512.
    cu_seqlens_q : integer array, shape (batch + 1,)
        Cumulated lengths of the queries, from 0, on the same device. Rows behind the last entry give 0 and
        ``-inf``.
    cu_seqlens_k : integer array, shape (batch + 1,), optional
        Likewise for the keys; default `cu_seqlens_q`. Malformed entries raise with NumPy; on a GPU they are clamped,
        and nothing outside the arrays is read or written.
    causal : bool or {"bottom_right", "top_left"}, optional
        As in `attention`, with the lengths of each sequence.
    window : (left, right), optional
        As in `attention`.
    scale, softcap, precision
        As in `attention`.
    alibi_slopes, sinks : float arrays that broadcast to (batch, Hq), optional
        As in `attention`.
    max_seqlen_q, max_seqlen_k : int, optional
        Hints for speed only; results do not depend on them.
    return_lse : bool, optional
        Also return the log-sum-exp of the scores.
    out : array, shape (total_q, Hq, Dv), optional
        Written in place, any strides, and returned; must not overlap an input.
    lse : array, shape (total_q, Hq), optional
        Likewise for the log-sum-exp; implies ``return_lse``.
    out_dtype : dtype, optional
        float16, bfloat16, float32 or float64; default the dtype of `out`, or of `q`.

    Returns
    -------
    out : array, shape (total_q, Hq, Dv)
        NumPy for NumPy, else CuPy.
    lse : array, shape (total_q, Hq)
        Only with `return_lse` or `lse`: natural logarithm, float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As in `attention`: argument, got and expected, before anything is launched or written.

    See Also
    --------
    attention : Dense arrays, with bias, mask and query offsets.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 12, 4, 16), dtype=np.float32)
    >>> cuflash.attention_varlen(q, k, v, np.array([0, 5, 12]), causal=True).shape
    (12, 4, 16)
    """
    if unknown or more:
        check_options("attention_varlen", unknown, more)
    options = (
        "attention_varlen", causal, type(causal), scale, type(scale), softcap, type(softcap), precision,
        return_lse, type(return_lse), out_dtype, None if window is None else hashable_window(window),
        max_seqlen_q, type(max_seqlen_q), max_seqlen_k, type(max_seqlen_k),
    )  # fmt: skip
    keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    others = (out, lse, None, None, alibi_slopes, sinks, None, None, None, None, None, cu_seqlens_q, keys)
    key, launch, pointers = find(q, k, v, others, options)
    if launch is not None and ((out is None and lse is None) or launch.results_apart(pointers)):
        return launch.run(pointers, out, lse)
    problem, infos = describe_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, window=window, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, precision=precision, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, return_lse=return_lse, out=out, lse=lse, out_dtype=out_dtype,
    )  # fmt: skip
    return execute(problem, infos, key, out, lse)
