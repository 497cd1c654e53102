"""The gated delta rule for NumPy arrays.

Tokens are worked on in chunks. What a chunk needs of its own tokens is computed for many chunks at once; the states,
which pass from chunk to chunk, for many sequences and heads at once. Inside of a chunk the update of each token depends
on those before it, u_i = beta_i (v_i - exp(c_i) S^T k_i - sum_{j < i} exp(c_i - c_j) (k_i . k_j) u_j), a triangular
system that is solved forward, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ..problem.arrays import DTYPES, ArrayInfo, shapes_given
from ..problem.gated import GatedProblem
from ..settings import num_threads, settings
from .chunks import (
    Array,
    Gathered,
    Heads,
    cumulated,
    decays_of,
    inverses_of_blocks,
    make_chunks,
    of_states,
    of_tokens,
    scatter,
    sequences_of,
    size_of_chunks,
    solve,
)
from .execute import allocate, announce
from .threads import run_on_threads

STEP_COST = 2**22
"""Multiplications by states for a chunk of all heads and sequences that go together; beside it Python is little."""
WINDOW_SIZE = 2**20
"""Numbers in memory for chunks that are computed at once."""
STATE_SIZE = 2**17
"""Numbers of the states of a recurrent call that stay in a cache from token to token."""


def execute_gated_on_host(problem: GatedProblem, infos: dict[str, ArrayInfo], out: Any, final: bool) -> Any:
    """Compute a checked problem of NumPy arrays; `out` is the caller's own object, which is returned if given."""
    announce(problem, settings(), lambda: shapes_given(infos))
    traits = problem.traits
    dtype = DTYPES[traits.computed]
    result = allocate(infos["v"].shape, traits.dtype, problem.strides.out) if out is None else out
    arrays = {name: info.array for name, info in infos.items() if name not in ("out", "final_state")}
    # What is written goes past the methods of a caller's subclass of ndarray.
    arrays["out"] = result if out is None else infos["out"].array
    state = None
    if traits.op == "recurrent_gated_delta_rule":
        _recurrent(problem, {name: _with_groups(name, x, problem) for name, x in arrays.items()}, dtype)
        return result
    if final:
        assert problem.strides.final_state is not None
        shape = problem.num_sequences, problem.num_heads_v, traits.head_dim, traits.head_dim_v
        state = arrays["final_state"] = allocate(shape, traits.state_dtype, problem.strides.final_state)
    views = {name: _with_groups(name, x, problem) for name, x in arrays.items()}
    if traits.op == "chunk_gated_output":
        _chunk_output(problem, views, dtype)
    else:
        _delta_rule(problem, views, dtype)
    if traits.packed:
        arrays["out"][..., int(arrays["cu_seqlens"][-1]) :, :, :] = 0
    return (result, state) if final else result


def _with_groups(name: str, x: Array, problem: GatedProblem) -> Array:
    """Return a view with an axis of batches in front of tokens, and heads of v in groups of those of q and k."""
    if name == "cu_seqlens":
        return x
    if problem.traits.op == "chunk_gated_output" and name != "states":
        x = x[np.newaxis]
    if name in ("q", "k"):
        return x
    axis = 1 if name in ("states", "initial_state", "final_state") else 2
    groups = problem.num_heads, problem.num_heads_v // max(problem.num_heads, 1)
    return x.reshape(*x.shape[:axis], *groups, *x.shape[axis + 1 :])


def _parts(problem: GatedProblem, pairs: int) -> list[Heads]:
    """Cut the heads into parts of about `pairs` heads of v."""
    num_heads = problem.num_heads
    group_size = problem.num_heads_v // max(num_heads, 1)
    group = max(1, min(pairs, group_size))
    heads = max(1, pairs // max(group_size, 1))
    return [
        Heads(slice(h, h + heads), slice(g, g + group))
        for h, g in product(range(0, num_heads, heads), range(0, group_size, group))
    ]


def _pairs(problem: GatedProblem, size: int) -> int:
    """How many heads and sequences go together."""
    return max(1, STEP_COST // (size * problem.traits.head_dim * problem.traits.head_dim_v))


def _per_chunk(problem: GatedProblem, part: Heads, size: int) -> int:
    """Numbers in memory for a chunk of a part of the heads, about."""
    num_heads = len(range(problem.num_heads)[part.heads])
    group_size = len(range(problem.num_heads_v // problem.num_heads)[part.group])
    head_dim, head_dim_v = problem.traits.head_dim, problem.traits.head_dim_v
    return num_heads * (size * (2 * head_dim + 2 * size) + group_size * size * (3 * size + 3 * head_dim_v))


def _run(items: list[Any], work: Any) -> None:
    """Call `work` with each item, on as many threads as there may be; infinities and NaN are values here."""

    def some(given: Iterator[Any]) -> None:
        with np.errstate(all="ignore"):
            for item in given:
                work(*item)

    run_on_threads(num_threads(len(items)), items, some)


def _delta_rule(problem: GatedProblem, arrays: dict[str, Array], dtype: Any) -> None:
    batch, first, length = sequences_of(problem, arrays)
    size = size_of_chunks(problem, length)
    pairs = _pairs(problem, size)
    together = max(1, pairs // max(problem.num_heads_v, 1))
    # Long sequences first: those that still have chunks are then always the first ones of those that go together.
    order = np.argsort(-length, kind="stable")
    items = list(product((order[i : i + together] for i in range(0, len(order), together)), _parts(problem, pairs)))

    def work(chosen: Array, part: Heads) -> None:
        shape = arrays["v"][of_tokens(part)].shape
        state = np.zeros((len(chosen), *shape[2:4], problem.traits.head_dim, shape[4]), dtype)
        if "initial_state" in arrays:
            state[...] = arrays["initial_state"][of_states(part)][chosen]
        steps = -(-length[chosen] // size)
        num_steps = int(steps.max(initial=0))
        at_once = max(1, WINDOW_SIZE // (_per_chunk(problem, part, size) * len(chosen)))
        for begin in range(0, num_steps, at_once):
            some = np.arange(begin, min(begin + at_once, num_steps))
            active = (steps[:, np.newaxis] > some).sum(axis=0)
            sequences = chosen[np.concatenate([np.arange(count) for count in active])]
            start = first[sequences]
            where = start + np.repeat(some, active) * size
            chunks = make_chunks(batch[sequences], where, start + length[sequences], size)
            tokens = Gathered(arrays, part, chunks, dtype, dtype)
            out = _pass_states(tokens, active.tolist(), state)
            out *= problem.scale
            scatter(out, chunks, arrays["out"][of_tokens(part)])
        if "final_state" in arrays:
            arrays["final_state"][of_states(part)][chosen] = state

    _run(items, work)


def _pass_states(tokens: Gathered, active: list[int], state: Array) -> Array:
    """Return the output of chunks, without its scale, and move states on behind them.

    Chunks come step by step, in each one of the first `active[step]` sequences that `state` belongs to.
    """
    size, beta = tokens.v.shape[-2], tokens.beta[..., np.newaxis]
    resets = np.exp(tokens.log_g) == 0
    high, low = cumulated(np.where(resets, 0, tokens.log_g))
    decays = decays_of(high, low, np.cumsum(resets, axis=-1) if resets.any() else None)
    before = np.exp(high) * np.exp(low)
    before[np.logical_or.accumulate(resets, axis=-1)] = 0
    before, onward = before[..., np.newaxis], decays[..., -1, :, np.newaxis]
    scores = tokens.both @ tokens.k.swapaxes(-1, -2)
    a = scores[..., :size, :] * decays
    a *= beta
    inverses = inverses_of_blocks(a)
    weights = scores[..., size:, :] * decays
    out = np.empty_like(tokens.v)
    begin = 0
    for count in active:
        now, s = slice(begin, begin + count), state[:count]
        begin += count
        seen = tokens.both[now] @ s
        x = tokens.v[now]
        x -= np.multiply(seen[..., :size, :], before[now], out=seen[..., :size, :])
        x *= beta[now]
        solve(a[now], inverses[now], x)
        np.multiply(seen[..., size:, :], before[now], out=out[now])
        s *= before[now, ..., -1:, :]
        s += tokens.k[now].swapaxes(-1, -2) @ (onward[now] * x)
    out += weights @ tokens.v
    return out


def _chunk_output(problem: GatedProblem, arrays: dict[str, Array], dtype: Any) -> None:
    batch, first, length = sequences_of(problem, arrays)
    chunk_size = problem.traits.chunk_size
    size = size_of_chunks(problem, length)
    counts = -(-length // chunk_size)
    sequence = np.repeat(np.arange(len(counts)), counts)
    step = np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]
    start, end = first[sequence] + step * chunk_size, (first + length)[sequence]
    gates = np.promote_types(dtype, arrays["log_g"].dtype)
    items = [
        (slice(i, i + at_once), part)
        for part in _parts(problem, _pairs(problem, size))
        for at_once in [max(1, WINDOW_SIZE // _per_chunk(problem, part, size))]
        for i in range(0, len(sequence), at_once)
    ]

    def work(rows: slice, part: Heads) -> None:
        chunks = make_chunks(batch[sequence[rows]], start[rows], end[rows], size)
        tokens = Gathered(arrays, part, chunks, dtype, gates)
        c = np.maximum(tokens.log_g, np.finfo(gates).min)  # where two are -inf, their difference is 0
        h = arrays["states"][of_states(part)][: len(sequence)][rows].astype(dtype, copy=False)
        weights = tokens.q @ tokens.k.swapaxes(-1, -2) * decays_of(c).astype(dtype, copy=False)
        out = tokens.q @ h
        out *= np.exp(c).astype(dtype, copy=False)[..., np.newaxis]
        out += weights @ tokens.v
        out *= problem.scale
        scatter(out, chunks, arrays["out"][of_tokens(part)])

    _run(items, work)


def _recurrent(problem: GatedProblem, arrays: dict[str, Array], dtype: Any) -> None:
    traits = problem.traits
    pairs = max(1, STATE_SIZE // (traits.head_dim * traits.head_dim_v))
    together = max(1, pairs // max(problem.num_heads_v, 1))
    batches = [slice(i, i + together) for i in range(0, problem.num_sequences, together)]

    def work(batch: slice, part: Heads) -> None:
        q, k = (arrays[name][batch, :, part.heads, np.newaxis, np.newaxis] for name in ("q", "k"))
        v, log_g, beta, out = (arrays[name][of_tokens(part)][batch] for name in ("v", "log_g", "beta", "out"))
        given = arrays["initial_state"][of_states(part)][batch]
        state = np.ascontiguousarray(given)
        for t in range(problem.seqlen):
            key, query = k[:, t].astype(dtype), q[:, t].astype(dtype)
            state *= np.exp(log_g[:, t].astype(dtype))[..., np.newaxis, np.newaxis]
            update = v[:, t, ..., np.newaxis, :].astype(dtype)
            update -= key @ state
            update *= beta[:, t, ..., np.newaxis, np.newaxis].astype(dtype)
            state += key.swapaxes(-1, -2) * update
            found = query @ state
            found *= problem.scale
            out[:, t] = found[..., 0, :]
        if state is not given:
            given[...] = state

    _run(list(product(batches, _parts(problem, pairs))), work)
