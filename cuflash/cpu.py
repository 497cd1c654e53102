"""NumPy back end: tiled attention with the online softmax, in O(N) memory, on all cores.

The work is cut into blocks of heads and query rows (`cpu_blocks`); a block walks over the tiles of keys that it can see
and keeps, per row, the largest logit, the sum of weights and the weighted values. How it is cut depends on the problem
only, and each block is reduced in one fixed order by BLAS on one thread, so results do not depend on the number of
threads. Nothing is decided by the values of keys that a row does not see, so its bits do not depend on them.

Arithmetic is in float32 (float64 for float64): NumPy has no fast products of 16-bit arrays, so tiles are widened. Tiles
are joined in float64, so that the error does not grow with the number of keys. Rows whose logits float32 cannot hold
are computed again in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np

from .checks import clamp_offset
from .cpu_blocks import ARRAYS, BLOCK_ROWS, TILE_BYTES, Array, Block, Cuts, Sequence, blocks, cuts_of, sequence_of
from .cpu_bounds import bounded_rows, may_bound, thin_rows
from .cpu_direct import attend_directly, is_plain
from .cpu_scores import MIN_COLUMN, HeadsLast, RowsLast, Scratch, layout_of
from .cpu_tile import Arithmetic, load_queries, operand, to_logits
from .knobs import num_threads
from .problem import Problem
from .threads import run_on_threads

SCRATCH_BYTES = 48 * 2**20
"""Limit for the scratch memory of all threads together."""
THREAD_COST = 2**23
"""Multiplications (about 0.13 ms) for which another thread is worth waking."""
KEPT_BYTES = 2**23
"""Scratch memory that is kept for the next call: new memory costs a page fault for every 4 KiB."""
MAX_FREE = 8
_free: list[Scratch] = []
SAFE_LOGIT = 1e30
"""Logits below this stay finite in float32, with a bias, too."""

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
TINY = np.finfo(np.float32).tiny
LOWEST = {dtype: np.finfo(dtype).min for dtype in (FLOAT32, FLOAT64)}


def attention(problem: Problem, arrays: Mapping[str, Array | None]) -> list[Sequence]:
    """Compute `cuflash.attention` of checked NumPy arrays.

    Parameters
    ----------
    problem : Problem
        From `describe_attention`.
    arrays : mapping of str to ndarray or None
        Views broadcast to the problem's axes: q (*batch, Hq, Nq, D), k (*batch, Hkv, Nk, D), v (*batch, Hkv, Nk, Dv),
        out (*batch, Hq, Nq, Dv), lse (*batch, Hq, Nq), bias and mask (*batch, Hq, Nq, Nk), alibi_slopes and sinks
        (*batch, Hq), query_offsets (*batch). out and lse are written; lse and the options may be None.

    Returns
    -------
    list of Sequence
        What `compute` was given.
    """
    if not problem.num_heads_q:
        return []
    group_size = problem.num_heads_q // problem.num_heads_kv
    named = dict(arrays)
    offsets = named.pop("query_offsets", None)
    named = {name: named.get(name) for name in ARRAYS}
    sequences = []
    if offsets is None:
        sequences.append(sequence_of(named, group_size, problem.query_offset or 0))
    else:
        for index in np.ndindex(*problem.batch):
            part = {name: None if x is None else x[index] for name, x in named.items()}
            sequences.append(sequence_of(part, group_size, clamp_offset(int(offsets[index]))))
    compute(Task.of(problem), sequences)
    return sequences


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
    if not problem.num_heads_q:
        return
    group_size = problem.num_heads_q // problem.num_heads_kv
    boundaries_q, boundaries_k = (np.asarray(arrays[name]).tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    sequences = []
    for index in range(len(boundaries_q) - 1):
        rows, keys = (slice(x[index], x[index + 1]) for x in (boundaries_q, boundaries_k))
        part: dict[str, Array | None] = {}
        for name, which in (("q", rows), ("k", keys), ("v", keys), ("out", rows), ("lse", rows)):
            tokens = arrays.get(name)
            part[name] = None if tokens is None else tokens[which].swapaxes(0, 1)
        for name in ("alibi_slopes", "sinks"):
            per_head = arrays.get(name)
            part[name] = None if per_head is None else per_head[index]
        offset = problem.query_offset
        if offset is None:
            offset = (keys.stop - keys.start) - (rows.stop - rows.start)
        sequences.append(sequence_of(part, group_size, offset))
    compute(Task.of(problem), sequences)
    for name, nothing in (("out", 0.0), ("lse", -np.inf)):
        result = arrays.get(name)
        if result is not None:
            result[boundaries_q[-1] :] = nothing


class Task(NamedTuple):
    """A problem, and what follows from it for each of its calls."""

    problem: Problem
    arithmetic: Arithmetic
    is_plain: bool
    cuts: Cuts | None
    """Of its one sequence, if known."""

    @classmethod
    def of(cls, problem: Problem, sequence: Sequence | None = None) -> Task:
        """Task of a problem, or of calls with one sequence of the same shape."""
        dtype = FLOAT64 if problem.dtype == "float64" else FLOAT32
        cuts = None if sequence is None else cuts_of(problem, sequence, 1)
        return cls(problem, Arithmetic.of(problem, dtype), is_plain(problem), cuts)


def compute(task: Task, sequences: list[Sequence]) -> None:
    """Compute attention of sequences, each with its own place in the results."""
    # Asked first: a setting that is wrong raises before anything is written.
    limit = num_threads()
    queue = blocks(task.problem, sequences, task.cuts)
    useful = 1
    if len(queue) > 1 < limit:
        useful = min(limit, len(queue), 1 + sum([block.cost for block in queue]) // THREAD_COST)
    if useful > 1:
        useful = min(useful, max(1, SCRATCH_BYTES // _scratch_bytes(task.problem, queue[0].tile_keys)))
    run_on_threads(useful, queue, lambda blocks: _work(blocks, task))


def _scratch_bytes(problem: Problem, tile_keys: int) -> int:
    """Scratch memory of one thread, at most, except for what is computed again."""
    itemsize = 8 if problem.dtype == "float64" else 4
    features = problem.head_dim + problem.head_dim_v
    rows = BLOCK_ROWS * (features * itemsize + problem.head_dim_v * 8)
    # Scores, and for a bias or a mask its copy and what it hides.
    tiles = TILE_BYTES * (1 if problem.bias is None and problem.mask is None else 3)
    # Copies of keys and values, whether or not dtype and strides ask for them.
    keys = min(tile_keys, problem.seqlen_k) * features * itemsize
    return rows + tiles + keys


def _work(blocks: Iterator[Block], task: Task) -> None:
    """Compute blocks; runs in several threads at once."""
    problem, arithmetic, plain, _ = task
    try:
        scratch = _free.pop()
    except IndexError:
        scratch = Scratch()
    with np.errstate(all="ignore"):
        try:
            for block in blocks:
                if plain and block.is_direct:
                    again = attend_directly(block, arithmetic, scratch)
                    if again is not None:
                        _compute_in_float64(block, problem, scratch, again)
                else:
                    _compute_block(block, problem, arithmetic, scratch)
        finally:
            if scratch.num_bytes <= KEPT_BYTES and len(_free) < MAX_FREE:
                _free.append(scratch)


def _compute_block(block: Block, problem: Problem, arithmetic: Arithmetic, scratch: Scratch) -> None:
    """Compute and store the rows of a block; rows that do not come out well are computed again in another way."""
    result = _attend(block, arithmetic, scratch, may_bound(block, arithmetic))
    again = _overflowed(block, problem, result)
    _store(block, result)
    if result.bounded is not None:
        thin = thin_rows(block, arithmetic, result.bounded, result.total)
        if thin.any():
            result = _attend(block, arithmetic, scratch, False)
            beyond = _overflowed(block, problem, result)
            _store(block, result, thin)
            if beyond is not None:
                again = thin & beyond if again is None else np.where(thin, beyond, again)
    if again is not None and arithmetic.dtype == FLOAT32:
        _compute_in_float64(block, problem, scratch, again)


def _compute_in_float64(block: Block, problem: Problem, scratch: Scratch, which: Array) -> None:
    """Compute and store rows that float32 was too narrow for."""
    _store(block, _attend(block, Arithmetic.of(problem, FLOAT64), scratch, False), which)


class Softmax(NamedTuple):
    """What a block has reduced its keys to. The heads are those of the leading axes, rows those of the group."""

    peak: Array
    """(heads, rows): the largest logit, -inf for rows that see no key; 0 for bounded rows."""
    total: Array
    """(heads, rows): sum of exp(logit - peak), above 0 for rows that see a key, else 0."""
    values: Array
    """(heads, rows, Dv): sum of exp(logit - peak) v."""
    divided: bool = False
    """The values are divided by the total already."""
    stored: bool = False
    """The values are the output, in its place."""
    bounded: Array | None = None
    """(heads, rows): rows whose logits were not shifted, if any was looked for."""


def _attend(block: Block, arithmetic: Arithmetic, scratch: Scratch, try_bounds: bool) -> Softmax:
    """Reduce the keys that the rows of a block see."""
    sequence, dtype = block.sequence, arithmetic.dtype
    tiles = block.tiles()
    shape = block.of_rows(sequence.q).shape[:-1]
    rows = prod(shape[:-2]), shape[-2] * shape[-1]
    layout = layout_of(sequence, *rows, block.keys.stop - block.keys.start, len(tiles))
    product_shape = (*shape[:-2], rows[1], sequence.v.shape[-1])
    out = block.of_rows(sequence.out)
    in_place = layout is HeadsLast and out.dtype == dtype and out.flags.c_contiguous and sequence.sinks is None
    product = out.reshape(product_shape) if in_place else scratch.take("product", product_shape, dtype)
    values = product.reshape(*rows, -1)
    if not tiles:
        values[...] = 0.0
        return Softmax(np.full(rows, -np.inf), np.zeros(rows), values)
    source = block.of_rows(sequence.q)
    if layout is HeadsLast and source.dtype == dtype:
        # There are fewer scores to be scaled than elements of q.
        q = operand(source.reshape(*product_shape[:-1], -1), "q", dtype, scratch)
        arithmetic = arithmetic._replace(fold=1.0, scale=arithmetic.scale * arithmetic.fold)
    else:
        # BLAS is quicker with columns of queries, if these are long enough to be made.
        q = load_queries(block, arithmetic, layout is RowsLast and rows[1] >= MIN_COLUMN, scratch)
    bounded = bounded_rows(block, arithmetic, q, scratch) if try_bounds else None
    all_bounded = bounded is not None and bool(bounded.all())
    peak = total = before = np.zeros(rows, dtype)
    for tile in tiles:
        k = operand(block.of_keys(sequence.k, tile), "k", dtype, scratch)
        scores = scratch.scores(layout, shape, tile.stop - tile.start, dtype)
        scores.multiply(q, k)
        to_logits(scores.logits, block, tile, arithmetic, scratch)
        if all_bounded:
            scores.weigh(None)
        else:
            before, peak = peak, scores.peak()
            if tile is not tiles[0]:
                peak = np.maximum(peak, before)
            if bounded is not None:
                peak[bounded] = 0.0
            # Rows that have seen no key are shifted, too, but not by -inf.
            shift = np.maximum(peak, LOWEST[dtype])
            scores.weigh(shift)
        sums = scores.sums()
        v = operand(block.of_keys(sequence.v, tile), "v", dtype, scratch)
        divided = isinstance(scores, HeadsLast)
        if isinstance(scores, HeadsLast):
            scores.divide(np.maximum(sums, 1))
        scores.apply(v, product)
        if len(tiles) == 1:
            # There is nothing to join it with.
            return Softmax(peak, sums, values, divided, in_place, bounded)
        if tile is tiles[0]:
            total, values = sums.astype(np.float64), scratch.take("values", values.shape, FLOAT64)
            values[...] = product.reshape(values.shape)
            continue
        if not (all_bounded or np.array_equal(before, peak)):
            factor = np.exp(before.astype(np.float64) - shift)
            total *= factor
            values *= factor[..., np.newaxis]
        values += product.reshape(values.shape)
        total += sums
    return Softmax(peak, total, values, False, False, bounded)


def _overflowed(block: Block, problem: Problem, result: Softmax) -> Array | None:
    """Rows (heads, rows) for which float32 may have been too narrow, None if there are none."""
    flat = result.values.reshape(-1)
    # The quickest way to see that all are finite, unless some are huge.
    if np.minimum.reduce(result.total, axis=None) > 0 and isfinite(np.dot(flat, flat)):
        return None
    finite, seen = np.isfinite(result.values), result.total > 0
    # NaN is not above 0: what is left has a total of 0, because it sees no key or because its logits became -inf.
    good = finite.all(axis=-1) & (seen | (result.total == 0))
    if seen.all() and good.all():
        return None
    if good.all() and not _may_overflow(block, problem):
        return None
    return ~(good & seen)


def _may_overflow(block: Block, problem: Problem) -> bool:
    """Whether logits of a block may lie beyond float32, by the largest elements of its arrays."""
    sequence = block.sequence
    if sequence.bias is not None and sequence.bias.dtype == np.float64:
        return True
    q, k = block.of_rows(sequence.q), block.of_keys(sequence.k, block.keys)
    bound = max(abs(problem.scale), 1.0) * problem.head_dim * _largest(q) * _largest(k)
    if sequence.alibi_slopes is not None:
        farthest = block.distance + block.rows.stop - block.rows.start + block.keys.stop - block.keys.start
        bound += _largest(block.of_heads(sequence.alibi_slopes)) * farthest
    # Also where NaN, of keys that are hidden, says nothing.
    return not bound < SAFE_LOGIT


def _largest(x: Array) -> float:
    """Largest magnitude, NaN if there is one."""
    return float(np.max([x.max().astype(np.float64), -x.min().astype(np.float64)])) if x.size else 0.0


def _store(block: Block, result: Softmax, which: Array | None = None) -> None:
    """Let the sinks in, normalise, and write out and lse, of all rows or of those that are asked for."""
    sequence = block.sequence
    out = block.of_rows(sequence.out)
    shape = out.shape[:-1]
    peak, total, values = result.peak.reshape(shape), result.total.reshape(shape), result.values.reshape(*shape, -1)
    where: Any = True if which is None else which.reshape(shape)
    rows: Any = True if which is None else where[..., np.newaxis]
    # Rows without a key have values of 0.
    divisor: Array | None = None if result.divided else np.maximum(total, TINY)
    if sequence.lse is not None or sequence.sinks is not None:
        total, peak = total.astype(np.float64), peak.astype(np.float64)
        if sequence.alibi_slopes is not None and block.distance:
            peak -= (block.of_heads(sequence.alibi_slopes).astype(np.float64) * block.distance)[..., np.newaxis]
        lse = peak + np.log(total)
        if sequence.sinks is not None:
            sinks = block.of_heads(sequence.sinks).astype(np.float64)[..., np.newaxis]
            top = np.maximum(peak, sinks)
            # An infinite sink takes all the weight.
            share, sink = np.exp(peak - top), np.exp(np.where(sinks == top, 0.0, sinks - top))
            # In float64: a sink far above the logits makes it large. Whatever the sink is, rows without a key are 0.
            divisor = np.where(total == 0, 1.0, (total + sink / share) / (total if result.divided else 1.0))
            lse = np.where(total == 0, sinks, top + np.log(total * share + sink))
        if sequence.lse is not None:
            if which is not None or sequence.alibi_slopes is not None:
                # What is finite in float64 is no sign of a row without a key, even if float32 cannot hold it.
                limit = np.finfo(sequence.lse.dtype).max
                lse = np.where(total > 0, np.clip(lse, -limit, limit), lse)
            np.copyto(block.of_rows(sequence.lse), lse, where=where, casting="same_kind")
    if divisor is None and not result.stored:
        np.copyto(out, values, where=rows, casting="same_kind")
    elif divisor is not None:
        np.divide(values, divisor[..., np.newaxis], out=out, where=rows, casting="same_kind")
