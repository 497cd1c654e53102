"""The walk of one rank: its own keys first, then those of the rank before, and so on, while the next are on their way.

Each part of queries meets the parts of keys in a fixed order, beginning with its own: the bits of a row depend on where
parts begin and end, not on how many ranks hold them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..problem.arrays import HOST, ITEMSIZE
from ..problem.states import State
from ..states import attend, empty_state, merge, reset, rows_of
from .agree import Link
from .layout import Part, Segment, as_one, put_rows, rows_of_part, see_alike, seen_keys

SCRATCH_BYTES_ON_GPU, SCRATCH_BYTES_ON_HOST = 2**26, 2**22
"""Of the state of the queries that meet some keys at a time. On the host MPI gets to work in between."""
STATE_BYTES = 10**8
"""Of the state of all heads that walk at once: with more, heads walk in groups, whose keys and states take turns."""
MIN_ROWS = 128


class Keys(NamedTuple):
    """Keys and values that lie next to each other in a rank's arrays."""

    k: Any
    v: Any
    at: int
    """Row of the rank's arrays that they begin at."""


class Task(NamedTuple):
    """What one rank has to do."""

    q: Any
    """(*batch, Hq, Nq, D)"""
    k: Any
    """(*batch, Hkv, Nk, D), contiguous"""
    v: Any
    parts_q: list[list[Part]]
    """Of each rank."""
    parts_k: list[list[Part]]
    num_keys: int
    """Of all ranks."""
    offset: int
    """Key position of the first query of all."""
    window: tuple[int | None, int | None]
    pairs: dict[str, Any]
    """Bias and mask, with columns for the keys of all ranks."""
    options: dict[str, Any]
    by_order: bool
    """Whether how many keys a query sees is all there is to their places."""
    device: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Of the state of a row of one head."""
        size: int = self.v.shape[-1] * (8 if self.device == HOST else max(ITEMSIZE[self.dtype], 4))
        return size

    def of_heads(self, heads: slice, key_heads: slice) -> Task:
        """Return the task of some of the heads."""
        options = {name: of_heads(x, -1, heads) if hasattr(x, "ndim") else x for name, x in self.options.items()}
        return self._replace(
            q=self.q[..., heads, :, :],
            k=self.k[..., key_heads, :, :],
            v=self.v[..., key_heads, :, :],
            pairs={name: of_heads(x, -3, heads) for name, x in self.pairs.items()},
            options=options,
        )


def of_heads(x: Any, axis: int, heads: slice) -> Any:
    """Take some heads, on an axis counted from the end, of an array that may be the same for all of them."""
    if x is None or x.ndim < -axis or x.shape[axis] == 1:
        return x
    return x[(..., heads, *[slice(None)] * (-axis - 1))]


class Met(NamedTuple):
    """What queries have met so far."""

    state: State
    segments: set[Segment]
    """Those of the queries that have met any keys."""


def head_groups(task: Task) -> Iterator[tuple[slice, Task]]:
    """Cut the heads into groups that walk one after the other, so that memory does not grow with their number.

    By what a part has, which is the same however many ranks hold the parts, as bits may depend on it.
    """
    num_heads, num_key_heads = task.q.shape[-3], task.k.shape[-3]
    group_size = num_heads // max(num_key_heads, 1)
    num_rows = max(sum(segment.length for segment in part) for parts in task.parts_q for part in parts)
    per_head = prod(task.q.shape[:-3]) * group_size * num_rows * task.row_bytes
    num_groups = min(num_key_heads, -(-num_key_heads * per_head // STATE_BYTES))
    if num_groups <= 1:
        yield slice(0, num_heads), task
        return
    edges = [i * num_key_heads // num_groups for i in range(num_groups + 1)]
    for low, high in pairwise(edges):
        heads = slice(low * group_size, high * group_size)
        yield heads, task.of_heads(heads, slice(low, high))


def walk(task: Task, link: Link) -> State:
    """Attention of a rank's queries over the keys of all ranks."""
    shape = (*task.q.shape[:-1], task.v.shape[-1])
    met = Met(empty_state(shape, task.dtype, task.device), set())
    own = keys = Keys(task.k, task.v, 0)
    for step in range(link.size):
        source = (link.rank - step) % link.size
        exchange, arriving = _begin(task, link, step + 1) if step + 1 < link.size else (None, own)
        for part_q, part_k in _meetings(task, link, source, last=False):
            _meet(task, met, part_q, part_k, keys, exchange)
        if exchange is not None:
            exchange.wait()
            exchange = None  # with the copies that were sent, before the next ones are made
        keys = arriving
    for part_q, part_k in _meetings(task, link, link.rank, last=True):
        _meet(task, met, part_q, part_k, own, None)
    for part in task.parts_q[link.rank]:
        for segment in part:
            if segment not in met.segments:
                reset(rows_of(met.state, slice(segment.at, segment.at + segment.length)))
    return met.state


def _meetings(task: Task, link: Link, source: int, last: bool) -> Iterator[tuple[Part, Part]]:
    """Parts of one's queries and those of a rank's keys that they meet, in order.

    The order is from each part to the one before it, and from the first of all to the last: of one's own keys those
    behind the queries come `last`, when all others have been met.
    """
    parts_k = task.parts_k[source]
    for i, part_q in enumerate(task.parts_q[link.rank]):
        if not any(segment.length for segment in part_q):
            continue
        found = parts_k if source != link.rank else parts_k[i + 1 :] if last else parts_k[: i + 1]
        for part_k in reversed(found):
            yield part_q, part_k


def _meet(task: Task, met: Met, part_q: Part, part_k: Part, keys: Keys, exchange: Any) -> None:
    """Let queries attend to keys that are at hand, some rows at a time."""
    for queries, others in _together(task, met, part_q, part_k):
        is_first = queries[0] not in met.segments
        segment, (_, first_key, num_keys) = as_one(queries), as_one(others)
        columns = slice(first_key, first_key + num_keys)
        k, v = (_packed(rows_of_part(x, others, keys.at)) for x in (keys.k, keys.v))
        q, state = rows_of_part(task.q, queries), State(*(rows_of_part(x, queries) for x in met.state))
        for rows in _slabs(task, segment, is_first):
            at = slice(rows.at, rows.at + rows.length)
            of_pairs = slice(queries[0].at + at.start, queries[0].at + at.stop)
            into = rows_of(state, at)
            meet = partial(
                attend,
                _packed(q[..., at, :]),
                k,
                v,
                keys=(first_key, task.num_keys),
                window=task.window,
                query_offset=rows.start + task.offset - first_key,
                **{name: _of_pairs(x, of_pairs, columns) for name, x in task.pairs.items()},
                **task.options,
            )
            if is_first:
                meet(into=into)
            else:
                merge([into, meet()], into)
            if exchange is not None:
                exchange.progress()
        for whole, piece in zip(met.state, state, strict=True):
            put_rows(whole, queries, piece)
        met.segments.update(queries)


def _together(task: Task, met: Met, part_q: Part, part_k: Part) -> Iterator[tuple[Part, Part]]:
    """Segments of queries and keys that go in one launch: all that see each other if they can, else pairs of them."""
    pairs = [(q, seen_keys(q, k, task.offset, task.window)) for q in part_q for k in part_k]
    pairs = [(q, k) for q, k in pairs if k.length]
    queries, keys = (tuple(dict.fromkeys(segments)) for segments in zip(*pairs, strict=True)) if pairs else ((), ())
    can_join = task.by_order and len({segment in met.segments for segment in queries}) == 1
    if can_join and see_alike(queries, keys, task.offset, task.window[1]):
        yield queries, keys
    else:
        yield from (((q,), (k,)) for q, k in pairs)


def _slabs(task: Task, segment: Segment, is_first: bool) -> Iterator[Segment]:
    """Cut a segment of queries so that the state of a piece is small; by shapes alone, as bits may depend on it.

    What queries meet first they write where it stays: on a GPU, which fills best with all of them, they are one piece.
    """
    if is_first and task.device != HOST:
        yield segment
        return
    row_bytes = prod(task.q.shape[:-2]) * task.row_bytes
    scratch_bytes = SCRATCH_BYTES_ON_HOST if task.device == HOST else SCRATCH_BYTES_ON_GPU
    num_rows = max(MIN_ROWS, scratch_bytes // max(row_bytes, 1))
    for begin in range(0, segment.length, num_rows):
        yield Segment(segment.at + begin, segment.start + begin, min(num_rows, segment.length - begin))


def _of_pairs(x: Any, rows: slice, columns: slice) -> Any:
    """Rows and columns of a bias or a mask, which may be repeated along either."""
    if x.ndim > 1 and x.shape[-2] != 1:
        x = x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., columns]


def _packed(x: Any) -> Any:
    """Rows behind each other: the arrays of other ranks are, and bits may depend on how rows lie in memory."""
    rows_apart = x.shape[-1] * x.itemsize
    if x.strides[-2:] == (rows_apart, x.itemsize):
        return x
    return x.copy(order="C")


def _begin(task: Task, link: Link, step: int) -> tuple[Any, Keys]:
    """Begin to send one's keys to the rank `step` behind, and to receive those of the rank `step` before."""
    to, source = (link.rank + step) % link.size, (link.rank - step) % link.size
    rows = _wanted(task, to, link.rank)
    sends = [(contiguous(x[..., rows, :]), to) for x in (task.k, task.v)] if rows.start < rows.stop else []
    rows = _wanted(task, source=source, to=link.rank)
    k, v = (_empty_rows(x, rows.stop - rows.start, task.device) for x in (task.k, task.v))
    arriving = Keys(k, v, rows.start)
    receives = [(x, source) for x in arriving[:2]] if rows.start < rows.stop else []
    return link.exchange(sends, receives), arriving


def _wanted(task: Task, to: int, source: int) -> slice:
    """Rows of a rank's keys, from the first to the last that another one's queries see."""
    seen = [
        seen_keys(segment_q, segment_k, task.offset, task.window)
        for part_q in task.parts_q[to]
        for part_k in task.parts_k[source]
        for segment_q in part_q
        for segment_k in part_k
    ]
    seen = [rows for rows in seen if rows.length]
    return slice(min(rows.at for rows in seen), max(rows.at + rows.length for rows in seen)) if seen else slice(0, 0)


def contiguous(x: Any) -> Any:
    """Return an array, or a copy in C order."""
    return x if x.flags.c_contiguous else x.copy(order="C")


def _empty_rows(like: Any, num_rows: int, device: int) -> Any:
    shape = (*like.shape[:-2], num_rows, like.shape[-1])
    return np.empty(shape, like.dtype) if device == HOST else type(like)(shape, like.dtype)
