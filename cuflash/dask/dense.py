"""`attention` of Dask arrays: the public function, and its checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import dask.array as da

from ..problem.arrays import ArrayInfo, contiguous_strides, inspect
from ..problem.checks import parse_integer
from ..problem.describe import describe_attention
from ..problem.hints import check_options
from ..problem.signatures import Causal, FloatDtype, Precision, Real, Window
from .graph import results_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """What `attention` takes beside q, k, v and `return_lse`."""

    causal: Causal
    window: Window | None
    query_offset: int | None
    scale: Real | None
    bias: Any
    mask: Any
    softcap: Real | None
    alibi_slopes: Any
    sinks: Any
    precision: Precision | None
    out_dtype: FloatDtype | None


# fmt: off
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> da.Array: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[da.Array, da.Array]: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool, **options: Unpack[Options]
) -> da.Array | tuple[da.Array, da.Array]: ...
# fmt: on
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = False,
    window: Window | None = None,
    query_offset: int | None = None,
    scale: Real | None = None,
    bias: Any = None,
    mask: Any = None,
    softcap: Real | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    precision: Precision | None = None,
    return_lse: bool = False,
    out_dtype: FloatDtype | None = None,
    **unknown: Any,
) -> Any:
    r"""Attention of Dask arrays, lazily: `cuflash.attention` of arrays that need not fit in memory.

    Each chunk of queries meets each chunk of keys that it sees in a task of its own, and partial results are merged
    in a tree. Chunks of which `causal` or `window` hide all pairs meet in no task.

    Parameters
    ----------
    q : dask.array.Array, shape (..., Hq, Nq, D)
        Queries, as for `cuflash.attention`, in chunks of NumPy or CuPy arrays along any axes but the last. One that is
        chunked along features is rechunked.
    k : dask.array.Array, shape (..., Hkv, Nk, D)
        Keys. Their chunks along the sequence are those of the tasks; along heads and leading axes the chunks of the
        queries are, and `k` is rechunked where its own differ.
    v : dask.array.Array, shape (..., Hkv, Nk, Dv)
        Values; rechunked where their chunks differ from those of `k`.
    causal, window, scale, softcap, precision, return_lse, out_dtype : optional
        As for `cuflash.attention`. Positions are those in whole arrays, not in chunks.
    query_offset : int, optional
        Key position of query 0. Default ``Nk - Nq``: the last query stands at the last key.
    bias, mask : array that broadcasts to (..., Hq, Nq, Nk), optional
        As for `cuflash.attention`: a Dask, NumPy or CuPy array, read chunk by chunk and never expanded.
    alibi_slopes, sinks : array that broadcasts to (..., Hq), optional
        Likewise.

    Returns
    -------
    out : dask.array.Array, shape (..., Hq, Nq, Dv)
        With the chunks of `q` along leading axes, heads and queries, and one chunk of features. Nothing is computed
        until Dask is asked to.
    lse : dask.array.Array, shape (..., Hq, Nq)
        Only with `return_lse`. Compute both at once, by ``dask.compute(out, lse)``.

    Raises
    ------
    TypeError, ValueError
        As for `cuflash.attention`, now rather than when it is computed; also for chunks of unknown size, and where no
        array is one of Dask's.

    See Also
    --------
    cuflash.attention : The same for arrays in memory.

    Notes
    -----
    One of the arrays q, k and v may be NumPy's or CuPy's, or two: each is one chunk. Results are the same to the bit
    whichever scheduler computes them, and however often, as long as the chunks are the same and NumPy's library of
    products of matrices is. A task uses one thread, as Dask keeps all cores busy by many tasks, unless the variable
    CUFLASH_NUM_THREADS says more.

    Examples
    --------
    >>> import dask.array as da, numpy as np, cuflash.dask
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 1000, 16))
    >>> chunked = [da.from_array(x, chunks=(2, 300, 16)) for x in (q, k, v)]
    >>> out = cuflash.dask.attention(*chunked, causal=True)
    >>> out.chunks
    ((2, 2), (300, 300, 300, 100), (16,))
    >>> np.allclose(out.compute(), cuflash.attention(q, k, v, causal=True))
    True
    """
    named = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sinks": sinks}
    named = {name: x for name, x in named.items() if x is not None or name in "qkv"}
    check_options("attention", unknown, namesake=attention)
    for name in unknown:
        reason = ": its results are new Dask arrays" if name in ("out", "lse", "workspace") else ""
        raise TypeError(f"attention() of Dask arrays takes no {name}{reason}")
    if not any(isinstance(x, da.Array) or hasattr(x, "chunks") for x in named.values()):
        raise TypeError(f"q is {_kind(q)}, expected a Dask array; cuflash.attention takes NumPy and CuPy arrays")
    infos = {name: _inspect(name, x) for name, x in named.items()}
    problem, _ = describe_attention(
        **infos, causal=causal, window=window, query_offset=_parse_offset(query_offset), scale=scale, softcap=softcap,
        precision=precision, return_lse=return_lse, out_dtype=out_dtype,
    )  # fmt: skip
    # Arrays of other libraries on a GPU have become CuPy's.
    arrays = {name: x if isinstance(x, da.Array) else infos[name].array for name, x in named.items()}
    return results_of(problem, arrays, {"softcap": softcap, "precision": problem.traits.precision})


def _kind(x: Any) -> str:
    return f"a {type(x).__module__.split('.')[0]}.{type(x).__name__}".replace("builtins.", "")


def _parse_offset(query_offset: Any) -> int | None:
    shape = getattr(query_offset, "shape", ())
    if shape != ():
        raise TypeError(f"query_offset is an array of shape {shape}, expected an int that holds for all leading axes")
    return None if query_offset is None else parse_integer("query_offset", query_offset, "an int or None")


def _inspect(name: str, x: Any) -> ArrayInfo:
    """Read one argument, as `problem.arrays.inspect` does; chunks that have yet to be computed have no address."""
    if not isinstance(x, da.Array):
        if hasattr(x, "chunks"):
            hint = "x.data" if isinstance(getattr(x, "data", None), da.Array) else "dask.array.from_array(x)"
            raise TypeError(f"{name} is {_kind(x)}, expected a Dask array: pass {hint}")
        return inspect(name, x)
    if any(length != length for length in x.shape):
        raise ValueError(f"{name} has chunks of unknown size, expected known ones: {name}.compute_chunk_sizes() first")
    strides = contiguous_strides(x.shape, x.dtype.itemsize)
    return inspect(name, x._meta)._replace(array=None, shape=x.shape, strides=strides, pointer=0)
