"""`attention_lse`: the public function for the log-sum-exp alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np

from .dispatch import execute, find
from .problem.checks import hashable_window
from .problem.describe import describe_attention_lse
from .problem.signatures import Causal, Precision, Real, Window, check_options, explains_unknown_options

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .problem.signatures import AnyArray, DenseOptions, NumpyArray, Unpack


# fmt: off
@overload
def attention_lse(
    q: NDArray[Any], k: AnyArray, *, out: None = None, **options: Unpack[DenseOptions],
) -> NDArray[np.floating[Any]]: ...
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
    q: Any,
    k: Any,
    *,
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
    if unknown:
        check_options("attention_lse", unknown)
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
