"""`attention` and `attention_lse`: the public functions for dense arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import numpy as np

from .dispatch import execute, find
from .problem.arrays import MISSING
from .problem.checks import hashable_window
from .problem.describe import describe_attention, describe_attention_lse
from .problem.hints import check_options, explains_unknown_options
from .problem.signatures import Causal, FloatDtype, Precision, Real, Window

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .problem.signatures import AnyArray, DenseOptions, DenseResults, NumpyArray, Pair, Unpack, WithoutLse


# fmt: off
@overload
def attention(
    q: NumpyArray, k: AnyArray, v: AnyArray, *, return_lse: Literal[False] = False, lse: None = None,
    **options: Unpack[DenseOptions],
) -> NumpyArray | WithoutLse: ...
@overload
def attention(
    q: NumpyArray, k: AnyArray, v: AnyArray, *, return_lse: Literal[True], lse: AnyArray | None = None,
    **options: Unpack[DenseOptions],
) -> tuple[NumpyArray, Any]: ...
@overload
def attention(
    q: NumpyArray, k: AnyArray, v: AnyArray, *, return_lse: bool = False, lse: AnyArray,
    **options: Unpack[DenseOptions],
) -> tuple[NumpyArray, Any]: ...
@overload
def attention(
    q: NumpyArray, k: AnyArray, v: AnyArray, *, return_lse: bool, lse: None = None,
    **options: Unpack[DenseOptions],
) -> NumpyArray | WithoutLse | tuple[NumpyArray, Any]: ...
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, return_lse: Literal[False] = False, lse: None = None,
    **options: Unpack[DenseResults],
) -> Any | WithoutLse: ...
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, return_lse: Literal[True], lse: AnyArray | None = None,
    **options: Unpack[DenseResults],
) -> Pair: ...
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, return_lse: bool = False, lse: AnyArray,
    **options: Unpack[DenseResults],
) -> Pair: ...
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, return_lse: bool, lse: None = None,
    **options: Unpack[DenseResults],
) -> Any | WithoutLse | Pair: ...
# fmt: on
@explains_unknown_options
def attention(
    q: Any = MISSING,
    k: Any = MISSING,
    v: Any = MISSING,
    *more: Any,
    causal: Causal = False,
    window: Window | None = None,
    query_offset: SupportsIndex | Any = None,
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
    r"""Softmax attention, ``softmax(scale * q @ k.T + bias) @ v``, without ever storing the scores.

    NumPy arrays are computed on the CPU, CuPy arrays and GPU arrays of other libraries (through DLPack or
    ``__cuda_array_interface__``) on their GPU, on the current stream, without synchronisation.

    .. warning::
       Axes are ``(..., heads, sequence, feature)``. An array laid out as ``(batch, sequence, heads, feature)`` is
       silently a valid input with ``sequence`` heads: pass ``x.swapaxes(-3, -2)``, which costs no copy, and swap the
       result back.

    Parameters
    ----------
    q : array, shape (..., Hq, Nq, D)
        Queries: float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64. A 2-D array ``(Nq, D)`` is one head.
        Any strides.
    k : array, shape (..., Hkv, Nk, D)
        Keys, of the same dtype. ``Hq`` must be a multiple of ``Hkv``; query head ``h`` reads key head
        ``h // (Hq // Hkv)``. Leading axes broadcast as in ``np.matmul``, without a copy; head axes never broadcast.
    v : array, shape (..., Hkv, Nk, Dv)
        Values, of the same dtype. ``D`` and ``Dv`` are 1 to 512.
    causal : bool or {"bottom_right", "top_left"}, optional
        Hide key ``j`` from query ``i`` where ``j > i + query_offset``. The names also set the offset: ``Nk - Nq``, 0.
    window : (left, right), optional
        Hide key ``j`` unless ``p - left <= j <= p + right``, where ``p = i + query_offset``; None leaves a side open.
    query_offset : int or integer array that broadcasts to the leading axes, optional
        Key position of query 0. Default ``Nk - Nq``: the last query stands at the last key.
    scale : float, optional
        Factor on ``q @ k.T``; any real number up to 1e30 in magnitude (1e300 for float64), default ``D ** -0.5``.
    bias : float array that broadcasts to (..., Hq, Nq, Nk), optional
        Added to the scores, read in place, in float32 (float64 for float64); ``-inf`` hides.
    mask : bool array that broadcasts to (..., Hq, Nq, Nk), optional
        True = attend. A hidden pair has weight exactly 0, whatever ``k`` holds there; ``v`` must be finite. A padding
        mask of (B, Nk) goes in as ``mask[:, None, None, :]``: where B equals Nq, no error can tell.
    softcap : float, optional
        Replace the scaled score ``s`` by ``softcap * tanh(s / softcap)``, before bias and ALiBi.
    alibi_slopes : float array that broadcasts to (..., Hq), optional
        Subtract ``alibi_slopes[h] * abs(p - j)`` from the scores [3]_.
    sinks : float array that broadcasts to (..., Hq), optional
        One more logit per head that enlarges the denominator only; the lse includes it.
    precision : {None, "ieee", "tf32"}, optional
        "ieee": the error of the dtype itself. "tf32" (float32 only) allows TF32 tensor cores. None: "ieee", or "tf32"
        if the environment has ``CUPY_TF32=1`` when cuflash is imported.
    return_lse : bool, optional
        Also return the log-sum-exp of the scores.
    out : array, shape (..., Hq, Nq, Dv), optional
        Written in place, any strides, and returned; must not overlap an input.
    lse : array, shape (..., Hq, Nq), optional
        Likewise for the log-sum-exp; implies ``return_lse``.
    out_dtype : dtype, optional
        float16, bfloat16, float32 or float64; default the dtype of `out`, or of `q`.
    workspace : uint8 array, optional
        Scratch memory of at least as many bytes as ``explain(...)`` names, instead of an allocation per call. Calls
        with few queries and many keys use it, whose keys are split over several blocks of the GPU, and float32 with
        many queries, whose keys and values are made ready for tensor cores once. While a CUDA graph is captured, new
        results keep what is allocated alive; where `out` is given, split keys need a `workspace`, float32 does without.

    Returns
    -------
    out : array, shape (..., Hq, Nq, Dv)
        NumPy for NumPy, else CuPy; new arrays lie in memory in the axis order of `q`, as with ``np.empty_like``. A
        query that sees no key gives 0.
    lse : array, shape (..., Hq, Nq)
        Only with `return_lse` or `lse`: natural logarithm, float32 (float64 for float64); ``-inf``, or the sink, for a
        query that sees no key.

    Raises
    ------
    TypeError
        Not an array, wrong or mixed dtypes, NumPy mixed with GPU arrays, options of the wrong type.
    ValueError
        Shapes, strides, values or devices that do not fit together. Both name argument, got and expected, and are
        raised before anything is launched or written.

    See Also
    --------
    attention_varlen : Sequences of different lengths, packed.
    explain : Which kernel serves a call, and why.

    Notes
    -----
    The tiled computation with a running maximum and sum is that of [1]_ and [2]_. Results are repeatable to the bit.

    Weighted values are summed before they are divided, in float32 (float64 for float64): values within a factor of `Nk`
    of its largest number may overflow. So may ``q @ k.T`` before `scale`: of float64, and of all dtypes on a GPU.

    References
    ----------
    .. [1] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867.
    .. [2] T. Dao et al., "FlashAttention: Fast and memory-efficient exact attention with IO-awareness", 2022,
       arXiv:2205.14135.
    .. [3] O. Press et al., "Train short, test long: attention with linear biases", 2022, arXiv:2108.12409.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 100, 64), dtype=np.float32)
    >>> cuflash.attention(q, k, v, causal=True).shape
    (8, 100, 64)
    """
    if unknown or more:
        check_options("attention", unknown, more)
    offset_array, offset = None, query_offset
    if query_offset is not None and not isinstance(query_offset, (int, np.integer)):
        offset_array, offset = query_offset, None
    options = (
        "attention", causal, type(causal), scale, type(scale), offset, type(offset), softcap, type(softcap), precision,
        return_lse, type(return_lse), out_dtype, None if window is None else hashable_window(window),
    )  # fmt: skip
    others = None
    if not (out is lse is bias is mask is alibi_slopes is sinks is offset_array is None):
        others = (out, lse, bias, mask, alibi_slopes, sinks, offset_array)
    key, launch, pointers = find(q, k, v, others, options)
    if (
        launch is not None
        and (workspace is None or launch.takes(workspace, pointers))
        and ((out is None and lse is None) or launch.results_apart(pointers))
    ):
        return launch.run(pointers, out, lse, workspace)
    problem, infos = describe_attention(
        q, k, v, causal=causal, window=window, query_offset=query_offset, scale=scale, bias=bias, mask=mask,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, precision=precision, return_lse=return_lse, out=out,
        lse=lse, out_dtype=out_dtype, workspace=workspace,
    )  # fmt: skip
    return execute(problem, infos, key, out, lse)


# fmt: off
@overload
def attention_lse(
    q: NDArray[Any], k: AnyArray, *, out: None = None, **options: Unpack[DenseOptions],
) -> NDArray[Any]: ...
@overload
def attention_lse(
    q: NDArray[Any], k: AnyArray, *, out: NumpyArray, **options: Unpack[DenseOptions],
) -> NumpyArray: ...
@overload
def attention_lse(
    q: AnyArray, k: AnyArray, *, out: AnyArray | None = None, **options: Unpack[DenseOptions],
) -> Any: ...
# fmt: on
@explains_unknown_options
def attention_lse(
    q: Any = MISSING,
    k: Any = MISSING,
    *more: Any,
    causal: Causal = False,
    window: Window | None = None,
    query_offset: SupportsIndex | Any = None,
    scale: Real | None = None,
    bias: Any = None,
    mask: Any = None,
    softcap: Real | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    precision: Precision | None = None,
    out: Any = None,
    workspace: Any = None,
    **unknown: Any,
) -> Any:
    r"""Log-sum-exp of the scores, ``log(sum(exp(scale * q @ k.T + bias), axis=-1))``, without ever storing them.

    It is the second result of `attention`, at about half of its work: no values are read, no output is written. Kernel
    density estimates are such sums, with squared distances written as products and a bias, and so are the steps of
    Sinkhorn's algorithm [2]_.

    .. warning::
       Axes are ``(..., heads, sequence, feature)``. An array laid out as ``(batch, sequence, heads, feature)`` is
       silently a valid input with ``sequence`` heads: pass ``x.swapaxes(-3, -2)``, which costs no copy.

    Parameters
    ----------
    q : array, shape (..., Hq, Nq, D)
        Queries: float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64. A 2-D array ``(Nq, D)`` is one head.
        Any strides.
    k : array, shape (..., Hkv, Nk, D)
        Keys, of the same dtype. ``Hq`` must be a multiple of ``Hkv``; query head ``h`` reads key head
        ``h // (Hq // Hkv)``. Leading axes broadcast as in ``np.matmul``, without a copy; head axes never broadcast.
        ``D`` is 1 to 512.
    causal, window, query_offset, scale, bias, mask, softcap, alibi_slopes, sinks, precision
        As in `attention`.
    out : array, shape (..., Hq, Nq), optional
        Written in place, any strides, and returned; float32, or float64 for float64. Must not overlap an input.
    workspace : uint8 array, optional
        As in `attention`: scratch memory of at least as many bytes as ``explain(...)`` names.

    Returns
    -------
    lse : array, shape (..., Hq, Nq)
        Natural logarithm, float32 (float64 for float64); ``-inf``, or the sink, for a query that sees no key. NumPy
        for NumPy, else CuPy; a new array lies in memory in the axis order of `q`.

    Raises
    ------
    TypeError, ValueError
        As in `attention`: argument, got and expected, before anything is launched or written.

    See Also
    --------
    attention : With values, and with this as a second result.

    Notes
    -----
    The sum is taken with a running maximum [1]_. Results are repeatable to the bit.

    References
    ----------
    .. [1] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867.
    .. [2] M. Cuturi, "Sinkhorn distances: lightspeed computation of optimal transport", 2013, arXiv:1306.0895.

    Examples
    --------
    The logarithm of a sum of Gaussians around the points ``y``, at the points ``x``:

    >>> import numpy as np, cuflash
    >>> x, y = np.random.default_rng(0).standard_normal((2, 100, 3))
    >>> lse = cuflash.attention_lse(x, y, scale=1.0, bias=-(y**2).sum(-1) / 2)
    >>> (lse - (x**2).sum(-1) / 2).shape
    (100,)
    """
    if unknown or more:
        check_options("attention_lse", unknown, more)
    offset_array, offset = None, query_offset
    if query_offset is not None and not isinstance(query_offset, (int, np.integer)):
        offset_array, offset = query_offset, None
    options = (
        "attention_lse", causal, type(causal), scale, type(scale), offset, type(offset), softcap, type(softcap),
        precision, None if window is None else hashable_window(window),
    )  # fmt: skip
    others = None
    if not (out is bias is mask is alibi_slopes is sinks is offset_array is None):
        others = (None, out, bias, mask, alibi_slopes, sinks, offset_array)
    key, launch, pointers = find(q, k, None, others, options)
    if (
        launch is not None
        and (workspace is None or launch.takes(workspace, pointers))
        and (out is None or launch.results_apart(pointers))
    ):
        return launch.run(pointers, None, out, workspace)
    problem, infos = describe_attention_lse(
        q, k, causal=causal, window=window, query_offset=query_offset, scale=scale, bias=bias, mask=mask,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, precision=precision, out=out, workspace=workspace,
    )  # fmt: skip
    return execute(problem, infos, key, None, out)
