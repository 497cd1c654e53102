"""The graph of a checked call: how arrays are chunked, which tasks there are, and what they do."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from .. import states
from ..gpu.copies import use_device
from ..problem.arrays import DTYPES, inspect
from ..problem.problem import HEAD_ARRAYS, PAIR_ARRAYS, Problem
from ..problem.states import State
from ..settings import on_one_thread

FAN_IN = 8
"""States that a task merges. Which these are follows from places of chunks alone, as their order decides the bits."""

Lengths = tuple[int, ...]
"""Of the chunks along an axis."""


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
        self.names = tuple(name for name in operands if name != "sinks")
        """Of the arrays of each chunk of keys; sinks are let in behind the last one."""
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
        arrays = [(name, self._operands[name]) for name in self.names]
        starts = list(accumulate(chunks.keys, initial=0))
        positions = list(accumulate(chunks.queries, initial=problem.query_offset or 0))
        seen = [_chunks_seen(problem, rows, starts) for rows in pairwise(positions)]
        for place in product(*map(range, map(len, lengths))):
            *outer, head, row = place
            shape = [x[i] for x, i in zip(lengths, place, strict=True)]
            found = []
            for j in () if 0 in shape else seen[row]:
                of_keys = (*outer, chunks.kv_of[head], j, 0)
                places = {"q": (*place, 0), "k": of_keys, "v": of_keys} | dict.fromkeys(PAIR_ARRAYS, (*place, j))
                keys = [x.key(*places.get(name, place[:-1])) for name, x in arrays]
                found.append(self._add("attend", (*place, j), attend, positions[row] - starts[j], starts[j], *keys))
            if not found:
                nothing = partial(_no_keys, (*shape, problem.traits.head_dim_v), problem.traits.dtype)
                found = [self._add("no-keys", place, nothing, self._operands["q"].key(*place, 0))]
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


def results_of(problem: Problem, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Build the graph of a checked call; return the arrays that it computes.

    `options` are those that tasks take as the call has them.
    """
    traits = problem.traits
    chunks, heads = _choose_chunks(problem, *(arrays[name] for name in "qkv"))
    rows, of_keys = (*chunks.batch, chunks.heads_q, chunks.queries), (*chunks.batch, chunks.heads_kv, chunks.keys)
    features, features_v = (traits.head_dim,), (traits.head_dim_v,)
    targets = {"q": (*rows, features), "k": (*of_keys, features), "v": (*of_keys, features_v)}
    targets |= dict.fromkeys(PAIR_ARRAYS, (*rows, chunks.keys)) | dict.fromkeys(HEAD_ARRAYS, rows[:-1])
    operands = {name: _Operand(x, targets[name]) for name, x in arrays.items()}
    options = {"window": (problem.window_left, problem.window_right), "scale": problem.scale, **options}
    dtypes = [traits.out_dtype] if problem.strides.lse is None else [traits.out_dtype, traits.lse_dtype]
    inputs = [operand.array for operand in operands.values()]
    token = tokenize(list(operands), [x.name for x in inputs], options, problem.query_offset, dtypes)

    graph = _Graph(problem, chunks, operands, token)
    graph.fill(partial(_attend, graph.names, options, problem.seqlen_k), partial(_finish, dtypes, problem.is_2d))
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
    names: Sequence[str], options: dict[str, Any], num_keys: int, query_offset: int, start: int, *arrays: Any
) -> State:
    """Attention over one chunk of keys, of `num_keys` in all; `query_offset` counts from the first of them."""
    # Indexing makes a number, rather than an array without axes.
    given = zip(names, arrays, strict=True)
    named: dict[str, Any] = {name: np.asarray(x) if isinstance(x, np.generic) else x for name, x in given}
    # Chunks that have been on another worker are contiguous, others are not: the order in which BLAS adds might differ.
    named |= {name: named[name].ravel().reshape(named[name].shape) for name in "qkv"}
    with on_one_thread():
        return states.attend(**named, keys=(start, num_keys), query_offset=query_offset, **options)


def _no_keys(shape: Lengths, dtype: str, q: Any) -> State:
    """State of queries that see nothing, where the array `q` is."""
    device = inspect("q", q).device
    with use_device(device):
        return states.reset(states.empty_state(shape, dtype, device))


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
