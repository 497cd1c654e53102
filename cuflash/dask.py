"""`attention` of Dask arrays: a graph with one task for each chunk of queries and each chunk of keys that they see.

Not imported by `import cuflash`: programs that want it say ``import cuflash.dask``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import numpy as np

from . import states
from .problem.arrays import DTYPES, ArrayInfo, contiguous_strides, inspect
from .problem.checks import parse_integer
from .problem.describe import describe_attention
from .problem.problem import Problem
from .problem.signatures import Causal, FloatDtype, Precision, Real, Window, check_options
from .problem.states import State
from .settings import on_one_thread

try:
    import dask.array as da
    from dask.base import tokenize
    from dask.highlevelgraph import HighLevelGraph
except ImportError as error:
    raise ImportError("cuflash.dask needs Dask: pip install 'cuflash[distributed]'") from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention"]

FAN_IN = 8
"""States that a task merges. Which these are follows from places of chunks alone, as their order decides the bits."""

Lengths = tuple[int, ...]
"""Of the chunks along an axis."""


def __dir__() -> list[str]:
    return sorted(__all__)


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
    check_options("attention", unknown)
    for name in unknown:
        raise TypeError(f"attention() of Dask arrays takes no {name}: its results are new Dask arrays")
    if not any(isinstance(x, da.Array) or hasattr(x, "chunks") for x in named.values()):
        raise TypeError(f"q is {_kind(q)}, expected a Dask array; cuflash.attention takes NumPy and CuPy arrays")
    infos = {name: _inspect(name, x) for name, x in named.items()}
    problem, _ = describe_attention(
        **infos, causal=causal, window=window, query_offset=_parse_offset(query_offset), scale=scale, softcap=softcap,
        precision=precision, return_lse=return_lse, out_dtype=out_dtype,
    )  # fmt: skip
    # Arrays of other libraries on a GPU have become CuPy's.
    arrays = {name: x if isinstance(x, da.Array) else infos[name].array for name, x in named.items()}
    return _results(problem, arrays, None if problem.traits.softcap == 0 else softcap)


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


class _Chunks(NamedTuple):
    """Lengths of all chunks."""

    batch: tuple[Lengths, ...]
    heads_q: Lengths
    heads_kv: Lengths
    kv_of: tuple[int, ...]
    """Which chunk of key heads each chunk of query heads reads."""
    queries: Lengths
    keys: Lengths


def _chunks_of(x: Any) -> tuple[Lengths, ...]:
    """Those of a Dask array; another one is one chunk."""
    return x.chunks if isinstance(x, da.Array) else tuple((length,) for length in x.shape)


def _choose_chunks(problem: Problem, q: Any, k: Any, v: Any) -> tuple[_Chunks, Lengths]:
    """Return chunks in which heads fit together, and those of the heads of q as they are."""
    given = [_chunks_of(x) for x in (q, k, v)]
    queries, keys, values = given
    batch = []
    for axis, length in zip(range(-3 - len(problem.batch), -3), problem.batch, strict=True):
        # The first one that does not repeat along the axis.
        batch.append(next(x[axis] for x in given if len(x) >= -axis and sum(x[axis]) == length))
    heads = queries[-3] if len(queries) > 2 else (1,)
    fitting = _fitting_heads(heads, problem.num_heads_q, problem.num_heads_kv)
    return _Chunks(tuple(batch), *fitting, queries[-2], (keys if isinstance(k, da.Array) else values)[-2]), heads


def _fitting_heads(lengths: Lengths, num_heads_q: int, num_heads_kv: int) -> tuple[Lengths, Lengths, tuple[int, ...]]:
    """Cut chunks of query heads where they have whole groups and parts of groups.

    A group is the query heads that read one key head.

    Returns
    -------
    heads_q, heads_kv, kv_of
        As in `_Chunks`: each chunk of query heads reads exactly one of key heads.
    """
    size = max(1, num_heads_q // max(1, num_heads_kv))
    # Where a group is cut, it is apart from others.
    edges = sorted({edge for x in accumulate(lengths, initial=0) for edge in (x - x % size, x, x + -x % size)})
    reads = [(start // size, -(-stop // size)) for start, stop in pairwise(edges)]
    ranges = list(dict.fromkeys(reads))
    heads_q = tuple(stop - start for start, stop in pairwise(edges)) or (0,)
    heads_kv = tuple(stop - start for start, stop in ranges) or (num_heads_kv,)
    return heads_q, heads_kv, tuple(map(ranges.index, reads)) or (0,)


class _Operand:
    """An array in the chunks of the tasks."""

    def __init__(self, x: Any, targets: tuple[Lengths, ...]) -> None:
        targets = targets[len(targets) - x.ndim :]
        self._moves = [sum(target) == length for target, length in zip(targets, x.shape, strict=True)]
        chunks = tuple(target if moves else (1,) for target, moves in zip(targets, self._moves, strict=True))
        if not isinstance(x, da.Array):
            x = da.from_array(x, chunks=chunks)
        self.array = x if x.chunks == chunks else x.rechunk(chunks)
        self._name = self.array.name

    def key(self, *index: int) -> tuple[Any, ...]:
        """Key of the chunk at a place among the chunks of all axes that the array broadcasts to."""
        index = index[len(index) - len(self._moves) :]
        return (self._name, *[i if moves else 0 for i, moves in zip(index, self._moves, strict=True)])


class _Graph:
    """Tasks of a call, as they are put together."""

    def __init__(self, problem: Problem, chunks: _Chunks, operands: Mapping[str, _Operand], token: str) -> None:
        self._problem = problem
        self._chunks = chunks
        self._operands = operands
        self._token = token
        self.name = f"attention-finish-{token}"
        """In the keys of the last tasks, with the places of their chunks of queries."""
        self.tasks: dict[tuple[Any, ...], Any] = {}
        """A function and its arguments, by keys."""

    def fill(self, attend: Callable[..., State], finish: Callable[..., list[Any]]) -> None:
        """Enter all tasks."""
        sinks = self._operands.get("sinks")
        for place, found in self._states(attend):
            self._add("finish", place, finish, self._merged(place, found), sinks and sinks.key(*place[:-1]))

    def _add(self, kind: str, place: tuple[int, ...], *task: Any) -> tuple[Any, ...]:
        key = (f"attention-{kind}-{self._token}", *place)
        self.tasks[key] = task
        return key

    def _states(self, attend: Callable[..., State]) -> Iterator[tuple[tuple[int, ...], list[Any]]]:
        """Enter tasks that find states; give the place of each chunk of queries, with the keys of its states."""
        problem, chunks = self._problem, self._chunks
        lengths = (*chunks.batch, chunks.heads_q, chunks.queries)
        q, k, v = (self._operands[name] for name in "qkv")
        bias, mask, slopes = (self._operands.get(name) for name in ("bias", "mask", "alibi_slopes"))
        starts = list(accumulate(chunks.keys, initial=0))
        positions = list(accumulate(chunks.queries, initial=problem.query_offset or 0))
        seen = [_chunks_seen(problem, rows, starts) for rows in pairwise(positions)]
        for place in product(*map(range, map(len, lengths))):
            *outer, head, row = place
            shape = [x[i] for x, i in zip(lengths, place, strict=True)]
            of_keys = (*outer, chunks.kv_of[head])
            of_heads = slopes and slopes.key(*place[:-1])
            found = [
                self._add(
                    "attend", (*place, j), attend, q.key(*place, 0), k.key(*of_keys, j, 0), v.key(*of_keys, j, 0),
                    bias and bias.key(*place, j), mask and mask.key(*place, j), of_heads,
                    positions[row] - starts[j], starts[j],
                )
                for j in (() if 0 in shape else seen[row])
            ]  # fmt: skip
            if not found:
                nothing = partial(_no_keys, (*shape, problem.traits.head_dim_v), problem.traits.dtype)
                found = [self._add("no-keys", place, nothing, q.key(*place, 0))]
            yield place, found

    def _merged(self, place: tuple[int, ...], found: list[Any]) -> list[Any]:
        """Enter tasks that merge states, until the last one can take those that are left."""
        level = 0
        while len(found) > FAN_IN:
            groups = [found[start : start + FAN_IN] for start in range(0, len(found), FAN_IN)]
            found = [
                group[0] if len(group) == 1 else self._add("merge", (*place, level, i), states.merge, group)
                for i, group in enumerate(groups)
            ]
            level += 1
        return found


def _chunks_seen(problem: Problem, positions: tuple[int, int], starts: list[int]) -> list[int]:
    """Chunks of keys of which queries see any, whose positions go from the first to before the second."""
    left, right = problem.window_left, problem.window_right
    low = 0 if left is None else positions[0] - left
    high = starts[-1] if right is None else positions[1] + right
    return [i for i, (start, stop) in enumerate(pairwise(starts)) if max(start, low) < min(stop, high)]


def _results(problem: Problem, arrays: Mapping[str, Any], softcap: Any) -> Any:
    """Build the graph of a checked call; return the arrays that it computes."""
    traits = problem.traits
    chunks, heads = _choose_chunks(problem, *(arrays[name] for name in "qkv"))
    rows, of_keys = (*chunks.batch, chunks.heads_q, chunks.queries), (*chunks.batch, chunks.heads_kv, chunks.keys)
    features, features_v = (traits.head_dim,), (traits.head_dim_v,)
    targets = {
        "q": (*rows, features), "k": (*of_keys, features), "v": (*of_keys, features_v), "bias": (*rows, chunks.keys),
        "mask": (*rows, chunks.keys), "alibi_slopes": rows[:-1], "sinks": rows[:-1],
    }  # fmt: skip
    operands = {name: _Operand(x, targets[name]) for name, x in arrays.items()}
    window = problem.window_left, problem.window_right
    options = {"window": window, "scale": problem.scale, "softcap": softcap, "precision": traits.precision}
    dtypes = [traits.out_dtype] if problem.strides.lse is None else [traits.out_dtype, traits.lse_dtype]
    inputs = [operand.array for operand in operands.values()]
    token = tokenize(list(operands), [x.name for x in inputs], options, problem.query_offset, dtypes)

    graph = _Graph(problem, chunks, operands, token)
    graph.fill(partial(_attend, options, problem.seqlen_k), partial(_finish, dtypes, problem.is_2d))
    whole = HighLevelGraph.from_collections(graph.name, graph.tasks, inputs)
    results = []
    for i, (axes, dtype) in enumerate(zip(((*rows, features_v), rows), dtypes, strict=False)):
        name, take, layer = f"attention-{('out', 'lse')[i]}-{token}", operator.itemgetter(i), {}
        for place in product(*map(range, map(len, axes))):
            layer[(name, *place[problem.is_2d :])] = take, (graph.name, *place[: len(rows)])
        layers = HighLevelGraph(whole.layers | {name: layer}, whole.dependencies | {name: {graph.name}})
        x = da.Array(layers, name, axes[problem.is_2d :], dtype=DTYPES[dtype], meta=operands["q"].array._meta)
        # Where heads had to be cut, they come together again.
        results.append(x if chunks.heads_q == heads else x.rechunk({len(rows) - 2: heads}))
    return results[0] if len(results) == 1 else tuple(results)


def _attend(
    options: dict[str, Any], num_keys: int, q: Any, k: Any, v: Any, bias: Any, mask: Any, alibi_slopes: Any,
    query_offset: int, start: int,
) -> State:  # fmt: skip
    """Attention over one chunk of keys, of `num_keys` in all; `query_offset` counts from the first of them."""
    # Chunks that have been on another worker are contiguous, others are not: the order in which BLAS adds might differ.
    q, k, v = (x.ravel().reshape(x.shape) for x in (q, k, v))
    arrays = {"bias": bias, "mask": mask, "alibi_slopes": alibi_slopes}
    # Indexing makes a number, rather than an array without axes.
    given: Any = {name: np.asarray(x) if isinstance(x, np.generic) else x for name, x in arrays.items()}
    with on_one_thread():
        return states.attend(q, k, v, keys=(start, num_keys), query_offset=query_offset, **given, **options)


def _no_keys(shape: Lengths, dtype: str, q: Any) -> State:
    """State of queries that see nothing, where the array `q` is."""
    return states.forget(states.empty_state(shape, dtype, inspect("q", q).device))


def _finish(dtypes: Sequence[str], is_2d: bool, found: list[State], sinks: Any) -> list[Any]:
    """Merge states of all keys, let sinks in, and return the output and perhaps the lse."""
    state = found[0] if len(found) == 1 else states.merge(found)
    device: Any = getattr(state.out, "device", None)
    # The arrays of NumPy 2 have a device, too, but its name alone. Those of CuPy are not made where another one is.
    with device if hasattr(device, "__enter__") else nullcontext():
        out = np.empty_like(state.out, DTYPES[dtypes[0]])
        lse = np.empty_like(state.sums[..., 0], DTYPES[dtypes[1]]) if len(dtypes) > 1 else None
    states.finish(state, sinks, out, lse)
    results = [out] if lse is None else [out, lse]
    return [x[0] for x in results] if is_2d else results
