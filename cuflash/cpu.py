"""NumPy back end: tiled attention with the online softmax, in O(N) memory, on all cores.

The work is cut into blocks of query rows; a block walks over the tiles of keys that it can see and keeps, per row, the
largest logit, the sum of weights and the weighted values. How it is cut depends on the problem only, and each block is
reduced in one fixed order by BLAS on one thread, so results do not depend on the number of threads.

Arithmetic is in float32 (float64 for float64): NumPy has no fast products of 16-bit arrays, so tiles are widened. Tiles
are joined in float64, so that the error does not grow with the number of keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from .checks import clamp_offset
from .cpu_tile import Arithmetic, Array, Block, Scratch, Sequence, operand, to_logits, widen_into
from .knobs import num_threads
from .problem import Problem
from .threads import one_blas_thread, run_on_threads

TILE_ELEMENTS = 2**18
"""Limit for the scores, the keys and the values of a tile: 1 MiB in float32, which a second-level cache holds."""
BLOCK_ROWS = 256
MIN_BLOCKS = 16
"""Blocks get shorter, down to `MIN_BLOCK_ROWS`, where there would be fewer of them."""
MIN_BLOCK_ROWS = 64
GROUPED_SCORES = 2**17
"""Heads with few queries and keys share a block up to this many scores, so that NumPy calls do not dominate."""
SUM_LENGTH = 64
"""Weights that BLAS adds up in float32 before the sums are joined in float64."""
SCRATCH_BYTES = 48 * 2**20
"""Limit for the scratch memory of all threads together."""
THREAD_COST = 2**25
"""Multiplications (about 0.5 ms) for which another thread is worth waking."""

SAFE_LOGIT = 30.0
"""Logits within +-SAFE_LOGIT go through exp as they are: weights from 1e-13 to 1e13 lose nothing in float32."""
SAFE_VALUES = (1e-20, 1e15)
"""Largest |v| for which products with such weights neither overflow nor become subnormal."""


def attention(problem: Problem, arrays: Mapping[str, Array | None]) -> None:
    """Compute `cuflash.attention` of checked NumPy arrays.

    Parameters
    ----------
    problem : Problem
        From `describe_attention`.
    arrays : mapping of str to ndarray or None
        Views broadcast to the problem's axes: q (*batch, Hq, Nq, D), k (*batch, Hkv, Nk, D), v (*batch, Hkv, Nk, Dv),
        out (*batch, Hq, Nq, Dv), lse (*batch, Hq, Nq), bias and mask (*batch, Hq, Nq, Nk), alibi_slopes and sinks
        (*batch, Hq), query_offsets (*batch). out and lse are written; lse and the options may be None.
    """
    sequences = []
    names = ("q", "k", "v", "out", "lse", "bias", "mask", "alibi_slopes", "sinks")
    offsets = arrays.get("query_offsets")
    for index in np.ndindex(*problem.batch):
        part: dict[str, Any] = {name: None if (x := arrays.get(name)) is None else x[index] for name in names}
        offset = problem.query_offset if offsets is None else clamp_offset(int(offsets[index]))
        sequences.append(Sequence(**part, offset=offset or 0, bounds={}))
    _compute(problem, sequences)


def attention_varlen(problem: Problem, arrays: Mapping[str, Array | None]) -> None:
    """Compute `cuflash.attention_varlen` of checked NumPy arrays.

    Parameters
    ----------
    problem : Problem
        From `describe_varlen`.
    arrays : mapping of str to ndarray or None
        q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv), out (total_q, Hq, Dv), lse (total_q, Hq) or None,
        cu_seqlens_q and cu_seqlens_k (B + 1,), alibi_slopes and sinks (B, Hq) or None. out and lse are written.
    """
    boundaries_q, boundaries_k = (np.asarray(arrays[name]).tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    sequences = []
    for index in range(len(boundaries_q) - 1):
        rows, keys = (slice(x[index], x[index + 1]) for x in (boundaries_q, boundaries_k))
        part: dict[str, Any] = {}
        for name, which in (("q", rows), ("k", keys), ("v", keys), ("out", rows), ("lse", rows)):
            tokens = arrays.get(name)
            part[name] = None if tokens is None else tokens[which].swapaxes(0, 1)
        for name in ("alibi_slopes", "sinks"):
            per_head = arrays.get(name)
            part[name] = None if per_head is None else per_head[index]
        offset = problem.query_offset
        if offset is None:
            offset = (keys.stop - keys.start) - (rows.stop - rows.start)
        sequences.append(Sequence(**part, bias=None, mask=None, offset=offset, bounds={}))
    for name, nothing in (("out", 0.0), ("lse", -np.inf)):
        result = arrays.get(name)
        if result is not None:
            result[boundaries_q[-1] :] = nothing
    _compute(problem, sequences)


def _compute(problem: Problem, sequences: list[Sequence]) -> None:
    arithmetic = Arithmetic.of(problem)
    queue = deque(sorted(_blocks(problem, sequences), key=lambda block: -block.cost))
    if not queue:
        return
    affordable = max(1, SCRATCH_BYTES // _scratch_bytes(problem, arithmetic.dtype.itemsize))
    useful = 1 + sum(block.cost for block in queue) // THREAD_COST
    with one_blas_thread:
        run_on_threads(min(num_threads(), affordable, useful, len(queue)), lambda: _work(queue, arithmetic))


def _scratch_bytes(problem: Problem, itemsize: int) -> int:
    """Scratch memory of one thread, at most."""
    head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
    rows = BLOCK_ROWS * ((head_dim + head_dim_v) * itemsize + head_dim_v * 8)
    tiles = itemsize
    if problem.bias is not None or problem.mask is not None:
        tiles += 1 + itemsize
    features = max(head_dim, head_dim_v)
    # Copies of keys and values, whether or not dtype and strides ask for them.
    keys = TILE_ELEMENTS // max(BLOCK_ROWS, features) * (head_dim + head_dim_v) * itemsize
    return rows + tiles * TILE_ELEMENTS + keys


def _work(queue: deque[Block], arithmetic: Arithmetic) -> None:
    """Compute blocks until none is left; runs in several threads at once."""
    scratch = Scratch()
    with np.errstate(all="ignore"):
        try:
            while True:
                try:
                    block = queue.popleft()
                except IndexError:
                    break
                _attend(block, arithmetic, scratch)
        finally:
            # After an error or an interrupt the other threads need not go on.
            queue.clear()


def _blocks(problem: Problem, sequences: list[Sequence]) -> Iterator[Block]:
    """Cut the work into blocks, by nothing but shapes and options."""
    num_heads_kv = problem.num_heads_kv
    if not num_heads_kv or not problem.num_heads_q:
        return
    group_size = problem.num_heads_q // num_heads_kv
    features = max(problem.head_dim, problem.head_dim_v)
    row_limit = BLOCK_ROWS
    while row_limit > MIN_BLOCK_ROWS:
        tall = sum(-(-sequence.q.shape[1] * group_size // row_limit) for sequence in sequences)
        if tall * num_heads_kv >= MIN_BLOCKS:
            break
        row_limit //= 2
    members = min(group_size, row_limit)
    for sequence in sequences:
        seqlen_q, seqlen_k = sequence.q.shape[1], sequence.k.shape[1]
        heads_per_block = 1
        if group_size * seqlen_q <= row_limit:
            footprint = max(group_size * seqlen_q, features, MIN_BLOCK_ROWS) * max(seqlen_k, 1)
            heads_per_block = max(1, GROUPED_SCORES // footprint)
        num_row_blocks = -(-seqlen_q * members // row_limit)
        row_starts = [seqlen_q * i // num_row_blocks for i in range(num_row_blocks + 1)] if num_row_blocks else []
        for first_row, stop_row in pairwise(row_starts):
            height = max(members * (stop_row - first_row), features, MIN_BLOCK_ROWS)
            tile_keys = TILE_ELEMENTS >> (height - 1).bit_length()
            low, high = _visible_keys(problem, sequence.offset + first_row, sequence.offset + stop_row - 1, seqlen_k)
            for head in range(0, num_heads_kv, heads_per_block):
                heads_kv = slice(head, min(head + heads_per_block, num_heads_kv))
                for member in range(0, group_size, members):
                    stop = (heads_kv.stop - 1) * group_size + min(member + members, group_size)
                    heads_q = slice(head * group_size + member, stop)
                    rows = (stop_row - first_row) * (heads_q.stop - heads_q.start)
                    yield Block(
                        sequence,
                        heads_q,
                        heads_kv,
                        slice(first_row, stop_row),
                        slice(low, high),
                        tile_keys,
                        group_size * seqlen_q * (high - low) > 8 * features * seqlen_k,
                        (rows + 16) * (high - low) * (problem.head_dim + problem.head_dim_v + 64),
                    )


def _visible_keys(problem: Problem, first: int, last: int, seqlen_k: int) -> tuple[int, int]:
    """Range of the keys that queries at key positions `first` to `last` see."""
    low = 0 if problem.window_left is None else max(0, first - problem.window_left)
    high = seqlen_k if problem.window_right is None else min(seqlen_k, last + problem.window_right + 1)
    return low, max(low, high)


def _attend(block: Block, arithmetic: Arithmetic, scratch: Scratch) -> None:
    """Compute and store the rows of a block."""
    sequence, dtype = block.sequence, arithmetic.dtype
    source = sequence.q[block.heads_q, block.rows]
    num_heads, num_rows, head_dim = source.shape
    num_groups = block.heads_kv.stop - block.heads_kv.start
    rows = (num_groups, num_heads // num_groups * num_rows)
    values_shape = (*rows, sequence.v.shape[-1])
    q = scratch.take("q", source.shape, dtype)
    widen_into(q, source)
    if arithmetic.fold != 1.0:
        q *= dtype.type(arithmetic.fold)
    q = q.reshape(*rows, head_dim)

    bounded = _is_bounded(block, arithmetic, q, scratch)
    peak = np.full(rows, 0.0 if bounded else -np.inf, dtype)
    total = np.zeros(rows)
    product = scratch.take("product", values_shape, dtype)
    tiles = list(_tiles(block))
    # A single tile has nothing to be joined with.
    joined = len(tiles) > 1
    values = scratch.take("values", values_shape, np.dtype(np.float64)) if joined else product
    values[...] = 0.0
    for keys in tiles:
        k = operand(sequence.k[block.heads_kv, keys], "k", dtype, scratch)
        scores = scratch.take("scores", (*rows, k.shape[1]), dtype)
        np.matmul(q, k.swapaxes(1, 2), out=scores)
        to_logits(scores.reshape(num_heads, num_rows, -1), block, keys, arithmetic, scratch)
        if not bounded:
            peak = _shift_by_peak(scores, peak, total, values)
        weights = np.exp(scores, out=scores)
        v = operand(sequence.v[block.heads_kv, keys], "v", dtype, scratch)
        np.matmul(weights, v, out=product)
        if joined:
            values += product
        total += _row_sums(weights)
    _store(block, peak, total, values)


def _tiles(block: Block) -> Iterator[slice]:
    """Cut the visible keys at multiples of the tile, so that a tile does not depend on where the others begin."""
    start = block.keys.start
    while start < block.keys.stop:
        stop = min(start - start % block.tile_keys + block.tile_keys, block.keys.stop)
        yield slice(start, stop)
        start = stop


def _shift_by_peak(scores: Array, peak: Array, total: Array, values: Array) -> Array:
    """Subtract the largest logit so far, rescale what was summed before, and return that largest logit."""
    new_peak = np.maximum(peak, scores.max(axis=-1))
    shift = np.where(new_peak == -np.inf, scores.dtype.type(0), new_peak)
    scores -= shift[..., np.newaxis]
    if total.any() and not np.array_equal(new_peak, peak):
        factor = np.exp(peak.astype(np.float64) - shift)
        total *= factor
        values *= factor[..., np.newaxis]
    return new_peak


def _row_sums(weights: Array) -> Array:
    """Sum over keys in float64 of short sums: BLAS is quicker than `sum`, but its error grows with the length."""
    num_keys = weights.shape[-1]
    if num_keys % SUM_LENGTH:
        return weights.sum(axis=-1)
    short_sums = weights.reshape(-1, SUM_LENGTH) @ np.ones(SUM_LENGTH, weights.dtype)
    return short_sums.reshape(*weights.shape[:-1], -1).sum(axis=-1, dtype=np.float64)


def _store(block: Block, peak: Array, total: Array, values: Array) -> None:
    """Let the sinks in, normalise, and write out and lse."""
    sequence = block.sequence
    shape = (block.heads_q.stop - block.heads_q.start, block.rows.stop - block.rows.start)
    peak, total, values = peak.reshape(shape), total.reshape(shape), values.reshape(*shape, -1)
    factor: Array = np.ones(())
    if sequence.sinks is not None:
        sinks = sequence.sinks[block.heads_q].astype(np.float64)[:, np.newaxis]
        # Where logits are bounded the peak says nothing about rows that see no key.
        seen = np.where(total == 0.0, -np.inf, peak)
        top = np.maximum(seen, sinks)
        peak = np.where(top == -np.inf, 0.0, top)
        factor = np.exp(seen - peak)
        total = total * factor + np.exp(sinks - peak)
    factor = factor / np.where(total == 0.0, 1.0, total)
    values *= factor.astype(values.dtype)[..., np.newaxis]
    sequence.out[block.heads_q, block.rows] = values
    if sequence.lse is not None:
        sequence.lse[block.heads_q, block.rows] = peak + np.log(total)


def _is_bounded(block: Block, arithmetic: Arithmetic, q: Array, scratch: Scratch) -> bool:
    """Whether no logit needs a shift before exp: then neither the largest logit nor the subtraction is needed.

    |q.k| <= |q| |k| gives the bound. NaN anywhere, in rows that nobody sees too, makes it False.
    """
    sequence = block.sequence
    if not block.may_bound or sequence.bias is not None or sequence.alibi_slopes is not None:
        return False
    heads = range(block.heads_kv.start, block.heads_kv.stop)
    bounds = [_key_bounds(sequence, head, arithmetic.dtype, scratch) for head in heads]
    # The factor of q that is not in `q` yet; |softcap * tanh(x)| <= softcap * |x|.
    factor = abs(arithmetic.scale) / arithmetic.divisor * (arithmetic.softcap or 1.0)
    norm_q = float(np.sqrt(np.einsum("hnd,hnd->hn", q, q).max())) * factor
    return all(
        min(norm_q * norm_k, arithmetic.softcap or np.inf) <= SAFE_LOGIT and SAFE_VALUES[0] <= size_v <= SAFE_VALUES[1]
        for norm_k, size_v in bounds
    )


def _key_bounds(sequence: Sequence, head: int, dtype: np.dtype[Any], scratch: Scratch) -> tuple[float, float]:
    """Largest norm of a key and largest |v| of a key head. Two threads may both compute it; they find the same."""
    known = sequence.bounds.get(head)
    if known is not None:
        return known
    squares, sizes = [], []
    step = TILE_ELEMENTS // max(sequence.k.shape[-1], sequence.v.shape[-1], BLOCK_ROWS)
    for start in range(0, sequence.k.shape[1], step):
        keys = slice(start, start + step)
        k = operand(sequence.k[head : head + 1, keys], "k", dtype, scratch)
        v = operand(sequence.v[head : head + 1, keys], "v", dtype, scratch)
        squares.append(np.einsum("hnd,hnd->hn", k, k).max())
        sizes += [v.max(), -v.min()]
    sequence.bounds[head] = known = float(np.sqrt(np.max(squares))), float(np.max(sizes))
    return known
