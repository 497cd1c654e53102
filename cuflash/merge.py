"""`merge_attention_states`: the public function that merges attention over disjoint keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from .cpu.merge import merge_parts_on_host
from .gpu.merge_parts import merge_parts_on_gpu
from .log import DEBUG, is_enabled, log_call
from .plan.table import CPU_KERNEL
from .problem.arrays import HOST
from .problem.hints import explains_unknown_names
from .problem.parts import describe_parts
from .settings import settings

if TYPE_CHECKING:
    from .problem.signatures import AnyArray, NumpyArray, Pair


@overload
def merge_attention_states(
    outs: NumpyArray | Sequence[NumpyArray], lses: AnyArray | Sequence[AnyArray]
) -> tuple[NumpyArray, Any]: ...
@overload
def merge_attention_states(outs: AnyArray | Sequence[AnyArray], lses: AnyArray | Sequence[AnyArray]) -> Pair: ...
@explains_unknown_names
def merge_attention_states(outs: Any, lses: Any) -> Any:
    r"""Merge results of attention over disjoint sets of keys into that over all of them.

    With part :math:`s` giving ``outs[s]`` and ``lses[s]``, row by row [1]_ [2]_

    .. math:: \mathrm{lse} = \log \sum_s e^{\mathrm{lse}_s}, \qquad
              \mathrm{out} = \sum_s e^{\mathrm{lse}_s - \mathrm{lse}} \, \mathrm{out}_s .

    Any way of dividing the keys will do: caches on several devices, a shared prefix, a chunk at a time. With `causal`,
    a `window`, or slopes, which go by position, too, each part must be told where the queries stand among its own keys:
    for keys that begin at ``start`` pass ``query_offset=offset - start``, where ``offset`` is that of the whole call,
    by default ``Nk - Nq``. With as many queries as keys, or from the top left, that is ``causal=True,
    query_offset=-start``. Left out, the last query would stand at the last key of each part, which is a valid call too:
    no error can tell.

    .. warning::
       The first axis of an array counts the parts. ``merge_attention_states(out, lse)`` with the result of one call is
       silently a valid input that merges over its batches or heads: pass ``[out], [lse]``, sequences of the parts.

    Parameters
    ----------
    outs : array, shape (S, ..., Nq, Dv), or sequence of S arrays of shape (..., Nq, Dv)
        Normalised results, as `attention` returns them: float16, bfloat16, float32 or float64, at least one, all of one
        dtype and shape. Any strides. Neither stacked nor copied, however they are given.
    lses : array, shape (S, ..., Nq), or sequence of S arrays of shape (..., Nq)
        Their log-sum-exp, natural logarithm: float32, or float64 for outs of float64.

    Returns
    -------
    out : array, shape (..., Nq, Dv)
        Of the dtype of `outs`; it lies in memory in the axis order of the first one.
    lse : array, shape (..., Nq)
        Of the dtype of `lses`. A row that no part has a key for gives 0 and ``-inf``.

    Raises
    ------
    TypeError
        Not arrays, wrong or mixed dtypes, NumPy mixed with GPU arrays.
    ValueError
        No parts, different numbers of them, shapes or devices that differ. All errors name argument, got and expected,
        and are raised before anything is launched.

    See Also
    --------
    attention : With ``return_lse=True`` it returns what this function takes.

    Notes
    -----
    Parts are merged in their order, with NumPy in float64, on a GPU in float32 (float64 for float64): results are
    repeatable to the bit. A part with an lse of ``-inf`` has weight exactly 0, whatever its `out` holds; one of
    ``+inf`` (an infinite sink) leaves no weight to finite ones, and NaN makes its row NaN. A sink belongs to one of the
    parts only. Never synchronises. More than 16 GPU arrays that are not stacked are merged 16 at a time, through
    partial results in scratch memory.

    References
    ----------
    .. [1] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867.
    .. [2] T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference", 2023,
       https://pytorch.org/blog/flash-decoding/.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 100, 64), dtype=np.float32)
    >>> parts = [cuflash.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 30), slice(30, 100))]
    >>> out, lse = cuflash.merge_attention_states(*zip(*parts))
    >>> np.allclose(out, cuflash.attention(q, k, v), atol=1e-6)
    True

    Causal, with fewer queries than keys, which makes the offset of the whole call 60:

    >>> q, options = q[:, :40], {"causal": True, "return_lse": True}
    >>> slices = slice(0, 30), slice(30, 100)
    >>> parts = [cuflash.attention(q, k[:, s], v[:, s], query_offset=60 - s.start, **options) for s in slices]
    >>> out, lse = cuflash.merge_attention_states(*zip(*parts))
    >>> np.allclose(out, cuflash.attention(q, k, v, causal=True), atol=1e-5)
    True
    """
    parts = describe_parts(outs, lses)
    first, on_host = parts.outs[0], parts.outs[0].device == HOST
    if settings().log or is_enabled(DEBUG):
        shapes = {"outs": first.shape, "lses": first.shape[:-1]}
        problem = f"merge_attention_states {first.dtype}, {parts.num_parts} parts"
        log_call(problem, CPU_KERNEL if on_host else "merge", shapes)
    return merge_parts_on_host(parts) if on_host else merge_parts_on_gpu(parts)
