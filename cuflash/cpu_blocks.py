"""How the NumPy back end cuts a problem into blocks: by shapes and options alone, never by values or threads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .problem import Problem

TILE_BYTES = 2**20
"""Limit for the scores, the queries, the keys and the values of a tile, which a cache holds."""
BLOCK_ROWS = 256
MIN_BLOCKS = 8
"""Blocks get smaller, down to `MIN_BLOCK_ROWS` of a head, where there would be fewer of them."""
MIN_BLOCK_ROWS = 64
MIN_BLOCK_COST = 2**24
"""Multiplications (about 0.25 ms) above which work is cut in two: for threads, and so that its Python is little."""
MAX_BLOCK_COST = 2**26
"""Beside this the Python of a block is nothing."""
NORMS_COST = 8
"""Scores per element of keys for which norms of all keys cost little."""

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
    norms: dict[Any, Array]
    """Filled by `cpu_bounds` when first needed."""


ARRAYS = Sequence._fields[:9]
"""Names of the arrays of a `Sequence`."""


class Block(NamedTuple):
    """Query rows that one thread computes together, and the keys that they see."""

    sequence: Sequence
    heads: tuple[slice, ...]
    """Of the leading axes."""
    group: slice
    rows: slice
    keys: slice
    tile_keys: int
    """Tiles of keys begin at multiples of this."""
    cost: int
    """Multiplications, roughly."""
    is_direct: bool
    """Whether the keys are one tile, and each row sees one of them, and bounds of the logits would not pay."""
    is_all: bool
    """Whether it is the only one, and sees all keys."""

    @property
    def position(self) -> int:
        """Key position of the first row."""
        return self.rows.start + self.sequence.offset

    @property
    def distance(self) -> int:
        """Of the rows to the keys, at least."""
        last = self.position + self.rows.stop - self.rows.start - 1
        return max(0, self.position - (self.keys.stop - 1), self.keys.start - last)

    def of_heads(self, x: Array) -> Array:
        """Part of an array (*lead, group)."""
        return x[(*self.heads, self.group)]

    def of_rows(self, x: Array) -> Array:
        """Part of an array (*lead, group, Nq, ...)."""
        return x if self.is_all else x[(*self.heads, self.group, self.rows)]

    def of_keys(self, x: Array, keys: slice) -> Array:
        """Part of an array (*lead, Nk, ...)."""
        return x if self.is_all and keys is self.keys else x[(*self.heads, keys)]

    def of_pairs(self, x: Array, keys: slice) -> Array:
        """Part of an array (*lead, group, Nq, Nk)."""
        return x[(*self.heads, self.group, self.rows, keys)]

    def tiles(self) -> list[slice]:
        """Cut the keys at multiples of the tile, so that a tile does not depend on where the others begin."""
        start, stop, step = self.keys.start, self.keys.stop, self.tile_keys
        if start >= stop:
            return []
        if stop <= step:
            return [self.keys]
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
    return Sequence(*map(named.get, ARRAYS), offset, {})  # type: ignore[call-arg, arg-type]


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
    lengths, inner = [1], 0
    for axis in range(len(shape) - 1, -1, -1):
        length = shape[axis]
        if length == 1:
            continue
        if lengths[-1] == 1:
            lengths[-1], inner = length, axis
        elif all(steps[axis] == steps[inner] * lengths[-1] for steps in strides):
            lengths[-1] *= length
        else:
            lengths.append(length)
            inner = axis
    return tuple(reversed(lengths))


class Cuts(NamedTuple):
    """Where a sequence is cut: each range of rows by each part of the heads by each part of a group is a block."""

    ranges: tuple[tuple[slice, slice, int, bool], ...]
    """Rows, the keys that they see, the cost of each head, `Block.is_direct`; the longest work first."""
    heads: tuple[tuple[slice, ...], ...]
    groups: tuple[slice, ...]
    tile_keys: int
    is_one: bool
    """Whether there is one block, which sees all keys."""


def cuts_of(problem: Problem, sequence: Sequence, num_sequences: int) -> Cuts:
    """Find where a sequence is cut, by its shapes alone."""
    tile_elements = TILE_BYTES // (8 if problem.dtype == "float64" else 4)
    widens = problem.dtype not in ("float32", "float64")
    options = problem.head_dim, problem.head_dim_v, problem.window_left, problem.window_right, tile_elements, widens
    shape = sequence.q.shape
    return cut(shape[:-3], shape[-3], shape[-2], sequence.k.shape[-2], sequence.offset, *options, num_sequences)


def blocks(problem: Problem, sequences: list[Sequence], known: Cuts | None = None) -> list[Block]:
    """Cut the work into blocks, the longest first; where to cut may be known, for one sequence."""
    found = []
    for sequence in sequences:
        cuts = known or cuts_of(problem, sequence, len(sequences))
        for rows, keys, cost, is_direct in cuts.ranges:
            for heads in cuts.heads:
                how = cuts.tile_keys, cost * prod(part.stop - part.start for part in heads), is_direct, cuts.is_one
                for group in cuts.groups:
                    found.append(Block(sequence, heads, group, rows, keys, *how))
    if len(sequences) > 1:
        found.sort(key=lambda block: -block.cost)
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
    tile_elements: int,
    widens: bool,
    num_sequences: int,
) -> Cuts:
    """Choose rows and heads of a block so that it is worth its Python, fits the caches, and there are enough."""
    num_heads = prod(lead)
    if not num_heads * group_size * seqlen_q:
        return Cuts((), (), (), 1, False)
    features, widest = head_dim + head_dim_v, max(head_dim, head_dim_v)
    row_limit = BLOCK_ROWS
    while row_limit > MIN_BLOCK_ROWS and _cost(row_limit, seqlen_k, features) > MIN_BLOCK_COST:
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
    whole = num_heads * _cost(rows, num_keys, features)
    # Two for two threads, more only if each of them is long beside its Python; threads are two, four, eight ...
    num_blocks = max(min(2, -(-whole // MIN_BLOCK_COST)), whole // (2 * MIN_BLOCK_COST))
    num_blocks = max(min(num_blocks, MIN_BLOCKS // (len(edges) - 1)), whole // MAX_BLOCK_COST, 1)
    heads_limit = max(1, min(heads_limit, -(-num_heads >> num_blocks.bit_length() - 1)))
    ranges: list[tuple[slice, slice, int, bool]] = []
    for first, stop in pairwise(edges):
        keys = _visible_keys(window_left, window_right, offset + first, offset + stop - 1, seqlen_k)
        cost = _cost(members * (stop - first), keys.stop - keys.start, features)
        first_sees = window_right is None or offset + first + window_right >= 0
        last_sees = window_left is None or offset + stop - 1 - window_left < seqlen_k
        is_direct = keys.start < keys.stop <= tile_keys and first_sees and last_sees
        if window_left is None and bounds_pay(group_size * seqlen_q, keys.stop - keys.start, head_dim, seqlen_k):
            is_direct = False
        ranges.append((slice(first, stop), keys, cost, is_direct))
    ranges.sort(key=lambda work: -work[2])
    groups = tuple(slice(*pair) for pair in pairwise(_even_cuts(group_size, members)))
    heads = tuple(_cut_axes(lead, heads_limit))
    is_one = len(ranges) == len(heads) == len(groups) == 1 and ranges[0][1] == slice(0, seqlen_k)
    return Cuts(tuple(ranges), heads, groups, tile_keys, is_one)


def bounds_pay(rows: int, keys: int, head_dim: int, seqlen_k: int) -> bool:
    """Whether finding norms of all keys costs little beside the scores of the rows of a head."""
    return rows * keys > NORMS_COST * head_dim * seqlen_k


def _cost(rows: int, keys: int, features: int) -> int:
    """Multiplications that take as long as one head of a block: reading keys, exponentials and calls count, too."""
    return 2**12 + (rows + 16) * keys * (features + 64)


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
