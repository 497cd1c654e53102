"""Chunks of packed or batched tokens for NumPy arrays: which there are, their tokens, decays and triangular systems."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..problem.gated import GatedProblem

BLOCK = 8
"""Tokens whose triangular system is inverted; all sizes of chunks are multiples."""

Array = np.ndarray[Any, Any]


class Chunks(NamedTuple):
    """Chunks that are computed at once."""

    batch: Array
    """(chunks, 1)"""
    tokens: Array
    """(chunks, size): where each token lies; those behind the end of a chunk are some that may be read."""
    padding: Array | None
    """(chunks, size): which tokens lie behind the end; None if none does."""


class Heads(NamedTuple):
    """Heads that are computed together: of q and k, and of those of v that belong to each."""

    heads: slice
    group: slice


def sequences_of(problem: GatedProblem, arrays: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Return of each sequence in which batch it lies, its first token and its length."""
    if problem.traits.packed:
        boundaries = arrays["cu_seqlens"].astype(np.int64)
        return np.zeros(len(boundaries) - 1, np.int64), boundaries[:-1], np.diff(boundaries)
    batch = np.arange(problem.num_sequences)
    return batch, np.zeros_like(batch), np.full_like(batch, problem.seqlen)


def size_of_chunks(problem: GatedProblem, lengths: Array) -> int:
    """Tokens for which memory is needed: fewer than the call's where no sequence has as many."""
    return min(problem.traits.chunk_size, -(-int(lengths.max(initial=1)) // BLOCK) * BLOCK)


def make_chunks(batch: Array, first: Array, end: Array, size: int) -> Chunks:
    """Make chunks of at most `size` tokens from where each begins, and where its sequence ends."""
    tokens = first[:, np.newaxis] + np.arange(size)
    padding = tokens >= end[:, np.newaxis]
    if not padding.any():
        return Chunks(batch[:, np.newaxis], tokens, None)
    return Chunks(batch[:, np.newaxis], np.where(padding, first[:, np.newaxis], tokens), padding)


def _gather(x: Array, chunks: Chunks, into: Array, axis: int) -> None:
    """Fill in the tokens of chunks, and 0 for padding; tokens are axis `axis` of `into`."""
    into = np.moveaxis(into, axis, 1)
    into[...] = x[chunks.batch, chunks.tokens]
    if chunks.padding is not None:
        into[chunks.padding] = 0


def scatter(x: Array, chunks: Chunks, out: Array) -> None:
    """Write the tokens of chunks, which are axis -2 of `x`."""
    x = np.moveaxis(x, -2, 1)
    if chunks.padding is None:
        out[chunks.batch, chunks.tokens] = x
    else:
        there = ~chunks.padding
        out[np.broadcast_to(chunks.batch, there.shape)[there], chunks.tokens[there]] = x[there]


class Gathered:
    """The tokens of some chunks and heads, in the dtype of the computation, and gates in a dtype of their own."""

    def __init__(self, arrays: dict[str, Array], part: Heads, chunks: Chunks, dtype: Any, gates: Any) -> None:
        num_chunks, size = chunks.tokens.shape
        given = {name: arrays[name][:, :, part.heads] for name in ("q", "k")}
        given |= {name: arrays[name][of_tokens(part)] for name in ("v", "log_g", "beta") if name in arrays}
        heads, groups = given["v"].shape[2:4]
        rows = num_chunks, heads, groups, size
        self.both = np.empty((num_chunks, heads, 1, 2 * size, given["q"].shape[-1]), dtype)
        """Keys, and behind them queries, as both meet the same states and keys."""
        self.k, self.q = self.both[..., :size, :], self.both[..., size:, :]
        self.v = np.empty((*rows, given["v"].shape[-1]), dtype)
        self.log_g = np.empty(rows, gates)
        self.beta = np.empty(rows if "beta" in arrays else 0, dtype)
        for name, axis in (("q", -2), ("k", -2), ("v", -2), ("log_g", -1), ("beta", -1)):
            if name in given:
                into = getattr(self, name)
                _gather(given[name], chunks, into[:, :, 0] if name in ("q", "k") else into, axis)


def of_tokens(part: Heads) -> tuple[slice, ...]:
    return slice(None), slice(None), *part


def of_states(part: Heads) -> tuple[slice, ...]:
    return slice(None), *part


def cumulated(log_g: Array) -> tuple[Array, Array]:
    """Sum up gates along the last axis; return sums, and what rounding takes from them.

    Differences of such pairs are exact even where much has decayed before.
    """
    high = np.cumsum(log_g, axis=-1)
    before = np.zeros_like(high)
    before[..., 1:] = high[..., :-1]
    step = high - before
    return high, np.cumsum((before - (high - step)) + (log_g - step), axis=-1)


def decays_of(high: Array, low: Array | None = None, resets: Array | None = None) -> Array:
    """Return exp(c_i - c_j) for j <= i, else 0, of cumulated gates c; 0 if more resets lie before i than before j."""
    lost: Array = high[..., :, np.newaxis] - high[..., np.newaxis, :]
    if low is not None:
        lost += low[..., :, np.newaxis] - low[..., np.newaxis, :]
    size = high.shape[-1]
    np.copyto(lost, -np.inf, where=np.triu(np.ones((size, size), bool), 1))
    if resets is not None:
        np.copyto(lost, -np.inf, where=resets[..., :, np.newaxis] != resets[..., np.newaxis, :])
    np.exp(lost, out=lost)
    return lost


def inverses_of_blocks(a: Array) -> Array:
    """Invert the blocks on the diagonal of 1 + A, where A is what lies below the diagonal of `a`.

    Row by row, which is solving forward for the unit vectors. They are returned as (..., blocks, BLOCK, BLOCK).
    """
    *lead, size, _ = a.shape
    num_blocks = size // BLOCK
    every = np.arange(num_blocks)
    blocks = a.reshape(-1, num_blocks, BLOCK, num_blocks, BLOCK)[:, every, :, every]
    rows = np.ascontiguousarray(blocks.transpose(2, 3, 1, 0)).reshape(BLOCK, BLOCK, -1)
    inverse = np.zeros_like(rows)
    inverse[0, 0] = 1
    for i in range(1, BLOCK):
        inverse[i, :i] = -(rows[i, :i, np.newaxis] * inverse[:i, :i]).sum(axis=0)
        inverse[i, i] = 1
    found = inverse.reshape(BLOCK, BLOCK, -1, num_blocks).transpose(2, 3, 0, 1)
    return np.ascontiguousarray(found).reshape(*lead, num_blocks, BLOCK, BLOCK)


def solve(a: Array, inverses: Array, x: Array) -> None:
    """Replace x by (1 + A)^-1 x, where A is what lies below the diagonal of `a`.

    A block that is found is taken from all rows below it at once: sums over many blocks, where large numbers cancel
    each other, would be rounded independently in each row, and what follows multiplies such differences.
    """
    for block in range(inverses.shape[-3]):
        begin = block * BLOCK
        end = begin + BLOCK
        found = x[..., begin:end, :] = inverses[..., block, :, :] @ x[..., begin:end, :]
        if end < x.shape[-2]:
            x[..., end:, :] -= a[..., end:, begin:end] @ found
