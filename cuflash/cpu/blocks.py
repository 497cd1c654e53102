"""How the NumPy back end cuts a problem into blocks: by shapes and options alone, never by values or threads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..plan.axes import merge_axes
from ..problem.problem import Problem

TILE_BYTES = 2**20
"""Limit for the scores, the queries, the keys and the values of a tile, which a cache holds."""
BLOCK_ROWS = 256
MIN_BLOCKS = 8
"""Blocks get smaller, down to `MIN_BLOCK_ROWS` of a head, where there would be fewer of them."""
MIN_BLOCK_ROWS = 64
MIN_BLOCK_COST = 3 * 2**23
"""Multiplications (about 0.4 ms) above which work is cut in two: for threads, and so that its Python is little."""
MAX_BLOCK_COST = 2**26
"""Beside this the Python of a block is nothing."""
MIN_PRODUCT = 512
"""Multiplications of a product below which threads would queue for a lock of OpenBLAS."""

Array = np.ndarray[Any, Any]


class Sequence(NamedTuple):
    """Arrays whose queries begin at one key position. In front are leading axes of key heads, as few as strides allow.

    A group is the query heads that read one key head.
    """

    q: Array
    """(*lead, group, Nq, D)"""
    k: Array
    """(*lead, Nk, D)"""
    v: Array
    """(*lead, Nk, Dv)"""
    out: Array
    """(*lead, group, Nq, Dv)"""
    lse: Array | None
    """(*lead, group, Nq)"""
    bias: Array | None
    """(*lead, group, Nq, Nk)"""
    mask: Array | None
    alibi_slopes: Array | None
    """(*lead, group)"""
    sinks: Array | None
    offset: int
    """Key position of the first query."""


ARRAYS = Sequence._fields[:9]
"""Names of the arrays of a `Sequence`."""


class Part(NamedTuple):
    """Query rows that one thread computes together, and the keys that they see."""

    heads: tuple[slice, ...]
    """Of the leading axes."""
    group: slice
    rows: slice
    keys: slice
    tile_keys: int
    """Tiles of keys begin at multiples of this."""
    cost: int
    """Multiplications, roughly, that another thread could do meanwhile."""
    is_direct: bool
    """Whether the keys are one tile, and each row sees one of them."""
    is_all: bool
    """Whether it is the only one, and sees all keys."""


class Block(NamedTuple):
    """A part of a sequence."""

    sequence: Sequence
    part: Part

    @property
    def position(self) -> int:
        """Key position of the first row."""
        first: int = self.part.rows.start
        return first + self.sequence.offset

    @property
    def distance(self) -> int:
        """Of the rows to the keys, at least."""
        _, _, rows, keys, *_ = self.part
        last = self.position + rows.stop - rows.start - 1
        distance: int = max(0, self.position - (keys.stop - 1), keys.start - last)
        return distance

    def of_heads(self, x: Array) -> Array:
        """Part of an array (*lead, group)."""
        return x[(*self.part.heads, self.part.group)]

    def of_rows(self, x: Array) -> Array:
        """Part of an array (*lead, group, Nq, ...)."""
        part = self.part
        return x if part.is_all else x[(*part.heads, part.group, part.rows)]

    def of_keys(self, x: Array, keys: slice) -> Array:
        """Part of an array (*lead, Nk, ...)."""
        part = self.part
        return x if part.is_all and keys is part.keys else x[(*part.heads, keys)]

    def of_pairs(self, x: Array, keys: slice) -> Array:
        """Part of an array (*lead, group, Nq, Nk)."""
        return x[(*self.part.heads, self.part.group, self.part.rows, keys)]

    def tiles(self) -> list[slice]:
        """Cut the keys at multiples of the tile, so that a tile does not depend on where the others begin."""
        keys, step = self.part.keys, self.part.tile_keys
        start, stop = keys.start, keys.stop
        if start >= stop:
            return []
        if stop <= step:
            return [keys]
        edges = [start, *range(start - start % step + step, stop, step), stop]
        return [slice(*pair) for pair in pairwise(edges)]


def sequence_of(arrays: dict[str, Array | None], group_size: int, offset: int) -> Sequence:
    """Give arrays (..., heads, ...) the axes of a `Sequence`: group apart, leading axes merged where strides allow."""
    named = {name: x for name, x in arrays.items() if x is not None}
    lead = named["k"].shape[:-2]
    num_axes = len(lead)
    if all(x.flags.c_contiguous for x in named.values()):
        merged: tuple[int, ...] = (prod(lead),)
    else:
        merged = _merged(named, lead, group_size)
    for name, x in named.items():
        group = () if name in ("k", "v") else (group_size,)
        named[name] = x.reshape(merged + group + x.shape[num_axes:])
    return Sequence(*map(named.get, ARRAYS), offset)  # type: ignore[call-arg, arg-type]


def _merged(named: dict[str, Array], lead: tuple[int, ...], group_size: int) -> tuple[int, ...]:
    num_axes = len(lead)
    # A key head is `group_size` query heads.
    strides = tuple(
        (*x.strides[: num_axes - 1], x.strides[num_axes - 1] * (1 if name in ("k", "v") else group_size))
        for name, x in named.items()
    )
    return merged_axes(lead, strides)


@lru_cache(maxsize=1024)
def merged_axes(shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Lengths of the fewest axes by which all arrays with these strides can be walked, at least one."""
    return tuple(length for _, length in merge_axes(shape, strides)) or (1,)


def parts_of(problem: Problem, sequence: Sequence, num_sequences: int) -> tuple[Part, ...]:
    """Find where a sequence is cut, by its shapes alone; the longest parts come first."""
    traits = problem.traits
    wide, widens = traits.dtype == "float64", traits.dtype not in ("float32", "float64")
    window = problem.window_left, problem.window_right
    options = traits.head_dim, traits.head_dim_v, *window, wide, widens, TILE_BYTES
    shape = sequence.q.shape
    return cut(shape[:-3], shape[-3], shape[-2], sequence.k.shape[-2], sequence.offset, *options, num_sequences)


def blocks(problem: Problem, sequences: list[Sequence]) -> list[Block]:
    """Cut the work into blocks, the longest first."""
    found = [Block(x, part) for x in sequences for part in parts_of(problem, x, len(sequences))]
    if len(sequences) > 1:
        found.sort(key=lambda block: -block.part.cost)
    return found


@lru_cache(maxsize=256)
def cut(
    lead: tuple[int, ...],
    group_size: int,
    seqlen_q: int,
    seqlen_k: int,
    offset: int,
    head_dim: int,
    head_dim_v: int,
    window_left: int | None,
    window_right: int | None,
    wide: bool,
    widens: bool,
    tile_bytes: int,
    num_sequences: int,
) -> tuple[Part, ...]:
    """Choose rows and heads of a block so that it is worth its Python, fits the caches, and there are enough."""
    num_heads = prod(lead)
    if not num_heads * group_size * seqlen_q:
        return ()
    features, widest = head_dim + head_dim_v, max(head_dim, head_dim_v)
    tile_elements = tile_bytes // (8 if wide else 4)
    # The fewer rows, the fewer pairs are computed only to be hidden.
    row_limit = BLOCK_ROWS if window_left is window_right is None else BLOCK_ROWS // 2
    while row_limit > MIN_BLOCK_ROWS and _cost(row_limit, seqlen_k, features, wide, widens) > MIN_BLOCK_COST:
        if num_heads * -(-seqlen_q * group_size // row_limit) * num_sequences >= MIN_BLOCKS:
            break
        row_limit //= 2
    members = min(group_size, row_limit)
    edges = _even_cuts(seqlen_q, max(1, row_limit // members))
    length = edges[1]
    rows = members * length
    tile_keys = max(1, tile_elements >> (max(rows, widest // 2, MIN_BLOCK_ROWS // 2) - 1).bit_length())
    num_keys = seqlen_k
    if window_left is not None and window_right is not None:
        num_keys = min(seqlen_k, length + window_left + window_right)
    tile = min(num_keys, tile_keys)
    # Scores and queries stay in the cache; so do keys and values that are widened, which are read where they were put.
    footprint = max(rows * tile, rows * widest, tile * features if widens else 0)
    heads_limit = tile_elements // footprint
    whole = num_heads * _cost(rows, num_keys, features, wide, widens)
    # Two for two threads, more only if each of them is long beside its Python; threads are two, four, eight ...
    num_blocks = max(min(2, -(-whole // MIN_BLOCK_COST)), whole // (2 * MIN_BLOCK_COST))
    num_blocks = max(min(num_blocks, MIN_BLOCKS // (len(edges) - 1)), whole // MAX_BLOCK_COST, 1)
    heads_limit = max(1, min(heads_limit, -(-num_heads >> num_blocks.bit_length() - 1)))
    ranges: list[tuple[slice, slice, int, bool]] = []
    for first, stop in pairwise(edges):
        keys = _visible_keys(window_left, window_right, offset + first, offset + stop - 1, seqlen_k)
        cost = _cost(members * (stop - first), keys.stop - keys.start, features, wide, widens)
        first_sees = window_right is None or offset + first + window_right >= 0
        last_sees = window_left is None or offset + stop - 1 - window_left < seqlen_k
        is_direct = keys.start < keys.stop <= tile_keys and first_sees and last_sees
        ranges.append((slice(first, stop), keys, cost, is_direct))
    if rows * tile * widest < MIN_PRODUCT and min(rows, tile) > 1:
        ranges = [(where, keys, 0, is_direct) for where, keys, _, is_direct in ranges]
    ranges.sort(key=lambda work: -work[2])
    groups = [slice(*pair) for pair in pairwise(_even_cuts(group_size, members))]
    cut_heads = list(_cut_axes(lead, heads_limit))
    is_one = len(ranges) == len(cut_heads) == len(groups) == 1 and ranges[0][1] == slice(0, seqlen_k)
    return tuple(
        Part(heads, group, rows, keys, tile_keys, cost * prod(x.stop - x.start for x in heads), is_direct, is_one)
        for rows, keys, cost, is_direct in ranges
        for heads in cut_heads
        for group in groups
    )


def _cost(rows: int, keys: int, features: int, wide: bool, widens: bool) -> int:
    """Multiplications of BLAS, in float32, that take as long as one head of a block.

    A score costs as much as 64 of them beside its products, an element that is read 2 (threads share the memory), one
    that is widened 50.
    """
    reading = 50 if widens else 2
    return (2**12 + keys * ((rows + reading) * features + 64 * rows)) << wide


def _even_cuts(length: int, limit: int) -> list[int]:
    """Edges of the fewest parts of at most `limit`, the longest first."""
    num_parts = -(-length // limit)
    return [-(-length * i // num_parts) for i in range(num_parts + 1)]


def _cut_axes(lengths: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Cut leading axes into parts of at most `limit` heads, each a slice of one axis and all of the inner ones."""
    axis, inner = len(lengths) - 1, 1
    while axis > 0 and inner * lengths[axis] <= limit:
        inner *= lengths[axis]
        axis -= 1
    cuts = [slice(*pair) for pair in pairwise(_even_cuts(lengths[axis], max(1, limit // inner)))]
    whole = tuple(slice(0, length) for length in lengths[axis + 1 :])
    for outer in product(*(range(length) for length in lengths[:axis])):
        for cut in cuts:
            yield (*(slice(i, i + 1) for i in outer), cut, *whole)


def _visible_keys(left: int | None, right: int | None, first: int, last: int, seqlen_k: int) -> slice:
    """Range of the keys that queries at key positions `first` to `last` see."""
    low = 0 if left is None else max(0, first - left)
    high = seqlen_k if right is None else min(seqlen_k, last + right + 1)
    return slice(low, max(low, high))
