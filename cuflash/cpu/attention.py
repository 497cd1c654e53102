"""NumPy back end: tiled attention with the online softmax, in O(N) memory, on all cores.

The work is cut into blocks of heads and query rows (`blocks`); a block walks over the tiles of keys that it can see
and keeps, per row, the largest logit, the sum of weights and the weighted values. How it is cut depends on the problem
only, and each block is reduced in one fixed order by BLAS on one thread, so results do not depend on the number of
threads. Nothing is decided by the values of keys that a row does not see, so its bits do not depend on them.

Arithmetic is in float32 (float64 for float64): NumPy has no fast products of 16-bit arrays, so tiles are widened. Tiles
are joined in float64, so that the error does not grow with the number of keys. Rows whose logits float32 cannot hold
are computed again in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np

from ..problem.arrays import ITEMSIZE
from ..problem.checks import clamp_offset
from ..problem.problem import HEAD_ARRAYS, Problem
from ..settings import num_threads
from .blocks import ARRAYS, BLOCK_ROWS, TILE_BYTES, Array, Block, Part, Sequence, blocks, parts_of, sequence_of
from .direct import attend_directly, is_plain
from .scores import Scratch, keys_last
from .threads import run_alone, run_on_threads, touching_first
from .tile import Arithmetic, operand, queries_of, to_logits

SCRATCH_BYTES = 48 * 2**20
"""Limit for the scratch memory of all threads together."""
THREAD_COST = 2**23
"""Multiplications (about 0.14 ms) for which a thread is worth waking."""
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
        (*batch, Hq), query_offset (*batch). out and lse are written; lse and the options may be None. For a state
        sums (*batch, Hq, Nq, 3) are in the place of lse, and out is float64, too.

    Returns
    -------
    list of Sequence
        What `compute` was given.
    """
    if not prod((*problem.batch, problem.num_heads_q)):
        return []
    group_size = problem.num_heads_q // problem.num_heads_kv
    named = dict(arrays)
    offsets = named.pop("query_offset", None)
    named = {name: named.get(name) for name in ARRAYS}
    sequences = []
    values = [problem.query_offset or 0] if offsets is None else [clamp_offset(x) for x in offsets.ravel().tolist()]
    if len(set(values)) == 1:
        sequences.append(sequence_of(named, group_size, values[0]))
    else:
        for index, offset in zip(np.ndindex(*problem.batch), values, strict=True):
            part = {name: None if x is None else x[index] for name, x in named.items()}
            sequences.append(sequence_of(part, group_size, offset))
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
        for name in HEAD_ARRAYS:
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
    parts: tuple[Part, ...] | None
    """Of its one sequence, if known."""

    @classmethod
    def of(cls, problem: Problem, sequence: Sequence | None = None) -> Task:
        """Task of a problem, or of calls with one sequence of the same shape."""
        dtype = FLOAT64 if problem.traits.dtype == "float64" else FLOAT32
        parts = None if sequence is None else parts_of(problem, sequence, 1)
        direct = is_plain(problem) and not writes_sums(problem)
        return cls(problem, Arithmetic.of(problem, dtype), direct, parts)


def writes_sums(problem: Problem) -> bool:
    """Whether the results are a `State`."""
    strides = problem.strides
    return strides.lse is not None and strides.out is not None and len(strides.lse) == len(strides.out)


def compute(task: Task, sequences: list[Sequence]) -> None:
    """Compute attention of sequences, each with its own place in the results."""
    if task.parts is None:
        queue = blocks(task.problem, sequences)
    else:
        queue = [Block(sequences[0], part) for part in task.parts]
    # Asked first: a setting that is wrong raises before anything is written.
    limit = num_threads(len(queue))
    useful = 1
    if limit > 1:
        useful = max(1, min(limit, sum([block.part.cost for block in queue]) // THREAD_COST))
    if useful > 1:
        useful = min(useful, max(1, SCRATCH_BYTES // _scratch_bytes(task.problem, queue[0].part.tile_keys)))
        run_on_threads(useful, queue, lambda blocks: _work(blocks, task))
    else:
        run_alone(touching_first(1, _work), queue, task)


def _scratch_bytes(problem: Problem, tile_keys: int) -> int:
    """Scratch memory of one thread, at most, except for what is computed again."""
    itemsize = ITEMSIZE[problem.traits.lse_dtype]
    features = problem.traits.head_dim + problem.traits.head_dim_v
    rows = BLOCK_ROWS * (features * itemsize + problem.traits.head_dim_v * 8)
    # Scores, and for a bias or a mask its copy and what it hides.
    tiles = TILE_BYTES * (1 if problem.strides.bias is None and problem.strides.mask is None else 3)
    # Copies of keys and values, whether or not dtype and strides ask for them.
    keys = min(tile_keys, problem.seqlen_k) * features * itemsize
    return rows + tiles + keys


def _work(blocks: Iterable[Block], task: Task) -> None:
    """Compute blocks; runs in several threads at once."""
    problem, arithmetic, plain, _ = task
    try:
        scratch = _free.pop()
    except IndexError:
        scratch = Scratch()
    with np.errstate(all="ignore"):
        try:
            for block in blocks:
                if plain and block.part.is_direct:
                    again = attend_directly(block, arithmetic, scratch)
                    if again is not None:
                        _compute_in_float64(block, problem, scratch, again)
                else:
                    _compute_block(block, problem, arithmetic, scratch)
        finally:
            if scratch.num_bytes <= KEPT_BYTES and len(_free) < MAX_FREE:
                _free.append(scratch)


def _compute_block(block: Block, problem: Problem, arithmetic: Arithmetic, scratch: Scratch) -> None:
    """Compute and store the rows of a block; rows that do not come out well are computed again in float64."""
    result = _attend(block, arithmetic, scratch)
    again = _overflowed(block, problem, result) if arithmetic.dtype == FLOAT32 else None
    _store(block, result)
    if again is not None:
        _compute_in_float64(block, problem, scratch, again)


def _compute_in_float64(block: Block, problem: Problem, scratch: Scratch, which: Array) -> None:
    """Compute and store rows that float32 was too narrow for."""
    _store(block, _attend(block, Arithmetic.of(problem, FLOAT64), scratch), which)


class Softmax(NamedTuple):
    """What a block has reduced its keys to. The rows are those of the group."""

    peak: Array
    """(*lead, rows): the largest logit, -inf for rows that see no key."""
    total: Array
    """(*lead, rows): sum of exp(logit - peak), above 0 for rows that see a key, else 0."""
    values: Array
    """(*lead, rows, Dv): sum of exp(logit - peak) v."""
    beyond: Array | None = None
    """(*lead, rows): whether float32 was too narrow for a score, if it was for any."""


def _attend(block: Block, arithmetic: Arithmetic, scratch: Scratch) -> Softmax:
    """Reduce the keys that the rows of a block see."""
    sequence, dtype = block.sequence, arithmetic.dtype
    tiles = block.tiles()
    shape = block.of_rows(sequence.q).shape[:-1]
    rows = (*shape[:-2], shape[-2] * shape[-1])
    values = scratch.take("product", (*rows, sequence.v.shape[-1]), dtype)
    if not tiles:
        values[...] = 0.0
        return Softmax(np.full(rows, -np.inf), np.zeros(rows), values)
    by_keys = keys_last(sequence, rows[-1], tiles[0].stop - tiles[0].start)
    product, q = values, queries_of(block, dtype, scratch)
    before: Any = -np.inf
    beyond: Array | None = None
    for tile in tiles:
        k = operand(block.of_keys(sequence.k, tile), "k", dtype, scratch)
        scores = scratch.scores(by_keys, shape, tile.stop - tile.start, dtype)
        scores.multiply(q, k)
        scores.flat *= dtype.type(arithmetic.scale)
        hide = partial(to_logits, scores.logits, block, tile, arithmetic, scratch)
        if dtype == FLOAT32 and not scores.all_finite():
            found = scores.rows_beyond(hide)
            beyond = found if beyond is None else beyond | found
        hide()
        peak = np.maximum(scores.peak(), before)
        # Rows that have seen no key are shifted, too, but not by -inf.
        shift = np.maximum(peak, LOWEST[dtype])
        scores.weigh(shift)
        sums = scores.by_row(scores.sums())
        scores.apply(operand(block.of_keys(sequence.v, tile), "v", dtype, scratch), product)
        if len(tiles) == 1:
            # There is nothing to join it with.
            return Softmax(scores.by_row(peak), sums, values, beyond)
        if tile is tiles[0]:
            total, values = sums.astype(np.float64), scratch.take("values", values.shape, FLOAT64)
            values[...] = product
        else:
            if not np.array_equal(before, peak):
                factor = scores.by_row(np.exp(before.astype(np.float64) - shift))
                total *= factor
                values *= factor[..., np.newaxis]
            values += product
            total += sums
        before = peak
    return Softmax(scores.by_row(peak), total, values, beyond)


def _overflowed(block: Block, problem: Problem, result: Softmax) -> Array | None:
    """Rows (*lead, rows) for which float32 may have been too narrow, None if there are none."""
    _, total, values, beyond = result
    # The quickest way to see that all are finite, unless some are huge.
    if beyond is None and np.minimum.reduce(total, axis=None) > 0 and isfinite(np.vdot(values, values)):
        return None
    # NaN is not above 0: what is left has a total of 0, because it sees no key or because its logits became -inf.
    bad = ~np.isfinite(values).all(axis=-1) | ~(total >= 0)
    if beyond is not None:
        bad |= beyond
    if bad.any() or ((total == 0).any() and _may_overflow(block, problem)):
        overflowed: Array = bad | (total == 0)
        return overflowed
    return None


def _may_overflow(block: Block, problem: Problem) -> bool:
    """Whether logits of a block may lie beyond float32, by the largest elements of its arrays."""
    sequence = block.sequence
    if sequence.bias is not None and sequence.bias.dtype == np.float64:
        return True
    rows, keys = block.part.rows, block.part.keys
    q, k = block.of_rows(sequence.q), block.of_keys(sequence.k, keys)
    bound = max(abs(problem.scale), 1.0) * problem.traits.head_dim * _largest(q) * _largest(k)
    if sequence.alibi_slopes is not None:
        farthest = block.distance + rows.stop - rows.start + keys.stop - keys.start
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
    if sequence.lse is not None and sequence.lse.ndim == out.ndim:
        sums = np.stack([_nearest(peak.astype(np.float64), block), total, np.zeros(shape)], axis=-1)
        np.copyto(block.of_rows(sequence.lse), sums, where=rows)
        np.copyto(out, values, where=rows)
        return
    # Rows without a key have values of 0.
    divisor = np.maximum(total, TINY)
    if sequence.lse is not None or sequence.sinks is not None:
        total, peak = total.astype(np.float64), peak.astype(np.float64)
        if sequence.alibi_slopes is not None and block.distance:
            peak -= (block.of_heads(sequence.alibi_slopes).astype(np.float64) * block.distance)[..., np.newaxis]
        sinks = None if sequence.sinks is None else block.of_heads(sequence.sinks).astype(np.float64)[..., np.newaxis]
        closed, lse = close_rows(total, peak, sinks)
        if sinks is not None:  # else the output is to the bit what it is without an lse
            divisor = closed
        if sequence.lse is not None:
            lse = bounded_lse(lse, sequence.lse.dtype)
            np.copyto(block.of_rows(sequence.lse), lse, where=where, casting="same_kind")
    np.divide(values, divisor[..., np.newaxis], out=out, where=rows, casting="same_kind")


def close_rows(total: Array, peak: Array, sinks: Array | None) -> tuple[Array, Array]:
    """Let sinks in; return what sums of weighted values are to be divided by, and the lse. All in float64."""
    if sinks is None:
        return np.maximum(total, TINY), np.where(total == 0, -np.inf, peak + np.log(total))
    top = np.maximum(peak, sinks)
    # An infinite sink takes all the weight.
    share, sink = np.exp(peak - top), np.exp(np.where(sinks == top, 0.0, sinks - top))
    # In float64: a sink far above the logits makes it large. Whatever the sink is, rows without a key are 0.
    divisor = np.where(total == 0, 1.0, total + sink / share)
    return divisor, np.where(total == 0, sinks, top + np.log(total * share + sink))


def bounded_lse(lse: Array, dtype: np.dtype[Any]) -> Array:
    """Bring an lse into the range of its type: what is finite in float64 is no sign of a row without a key."""
    limit = np.finfo(dtype).max
    bounded: Array = np.where(np.isfinite(lse), np.clip(lse, -limit, limit), lse)
    return bounded


def _nearest(peak: Array, block: Block) -> Array:
    """Return the largest logits, lower by ALiBi's share of the distance from the nearest of all keys alone."""
    sequence = block.sequence
    if sequence.alibi_slopes is None:
        return peak
    rows = block.part.rows
    positions = np.arange(rows.start, rows.stop) + sequence.offset
    nearest = np.abs(positions - np.clip(positions, 0, max(sequence.k.shape[-2] - 1, 0)))
    slopes = block.of_heads(sequence.alibi_slopes).astype(np.float64)[..., np.newaxis]
    lower: Array = peak - slopes * (block.distance - nearest)
    return lower
