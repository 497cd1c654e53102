"""Results in float64 by `reference`, for the gate of `python -m cuflash bench`: some places of each result.

All of attention would need all N x N scores of all heads in float64. Evenly spaced rows of every head are computed,
each at another place in its tile, which finds what kernels get wrong. Of the gated delta rule, which is slow token by
token, it is some tokens here and there of every head, from where on all that was before is forgotten. That the rest is
finite costs one pass over the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from .. import reference
from ..settings import num_threads
from .caches import CacheCase
from .cases import Case
from .check import Exact, Part
from .gated import OUTPUT, RECURRENT, GatedCase
from .inputs import Inputs, to_host

ALLOWED = {"float16": 4e-4, "bfloat16": 3e-3, "float32": 2e-6, "float64": 4e-15}
"""Largest relative error. In 16 bits it is twice that of rounding the exact result, as kernels that feed tensor cores
round their weights as well."""
ALLOWED_GATED = ALLOWED | {"float16": 6e-4, "bfloat16": 5e-3}
"""Three times that of rounding: such kernels round states and updates, too."""
CHECKED_ROWS = 1024
"""Rows in all that are compared, where there are not so many heads that each gets `ROWS_PER_HEAD`."""
ROWS_PER_HEAD = 8
SCORES = 2**23
"""Scores in float64 that a thread has in memory at once: 64 MiB, a few times."""
HELPERS = 4
"""Threads at most that compute in float64: each has keys and values of its own in memory."""
SEQUENCES = 4
"""Of a cache, with all heads."""
PLACES = 64
"""Of the gated delta rule."""
TOKENS = 64
"""Tokens of a place at most."""
FORGOTTEN = -40.0
"""Sum of gates, behind which a state is less than the last digit of float64."""


def exact_result(inputs: Inputs) -> Exact:
    """Compute some places of a result with `reference`, on the host, from inputs of either back end."""
    if isinstance(inputs.case, CacheCase):  # most of a large cache is not looked at
        return _exact_cache(inputs.case, inputs.arrays)
    return _EXACT[type(inputs.case)](inputs.case, {name: to_host(x) for name, x in inputs.arrays.items()})


def sampled_rows(case: Case) -> list[slice]:
    """Rows of a head that are compared: the first one, and evenly spaced ones up to the last."""
    wanted = max(ROWS_PER_HEAD, CHECKED_ROWS // (case.batch * case.heads))
    # An even step would meet tiles, whose heights are powers of two, always at the same few rows.
    step = max(1, case.seqlen_q // wanted) | 1
    begin = (case.seqlen_q - 1) % step
    at_once = max(1, SCORES // max(case.seqlen_k, 1)) * step
    rows = [slice(i, min(i + at_once, case.seqlen_q), step) for i in range(begin, case.seqlen_q, at_once)]
    return [slice(0, 1), *rows] if begin else rows


def visible(case: Case, rows: slice, xp: Any) -> Any:
    """Which keys some queries of a case see by their position: a mask (queries, seqlen_k)."""
    left, right = (None, None) if case.window is None else case.window
    key, position = _positions(case, rows, xp)
    seen = xp.ones((len(position), case.seqlen_k), bool)
    if case.causal:
        seen &= key <= position
    if left is not None:
        seen &= key >= position - left
    if right is not None:
        seen &= key <= position + right
    return seen


def _positions(case: Case, rows: slice, xp: Any) -> tuple[Any, Any]:
    """Positions of the keys, (seqlen_k,), and those of some queries, (queries, 1): the last one at the last key."""
    return xp.arange(case.seqlen_k), (xp.arange(case.seqlen_q)[rows] + (case.seqlen_k - case.seqlen_q))[:, None]


def _exact_attention(case: Case, arrays: Mapping[str, np.ndarray]) -> Exact:
    rows, group_size = sampled_rows(case), case.heads // case.kv_heads
    q = arrays["q"].reshape(-1, group_size, case.seqlen_q, case.head_dim)
    k = arrays["k"].reshape(-1, case.seqlen_k, case.head_dim)
    v = arrays["v"].reshape(-1, case.seqlen_k, case.head_dim_v) if case.head_dim_v else k[..., :0]
    lengths = [len(range(case.seqlen_q)[some]) for some in rows]
    values = [np.empty((*q.shape[:2], length, *case.shape_out[3:])) for length in lengths]

    def compute(heads: slice, some: slice, result: np.ndarray) -> None:
        # The rows of a group see the same keys: to `reference`, which is told who sees what, they are one long head.
        mask = np.tile(visible(case, some, np), (group_size, 1))
        long = q[heads, :, some].reshape(-1, 1, len(mask), case.head_dim)
        added = _added(case, arrays, np.arange(len(q))[heads] % case.kv_heads, some)
        keys = (x[heads, np.newaxis] for x in (k, v))
        out, lse = reference.attention(long, *keys, mask=mask, bias=added, softcap=case.softcap)
        result[...] = (out if case.head_dim_v else lse).reshape(result.shape)

    # On shared cores the threads of BLAS wait for one another, many times as long as these products take.
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(min(num_threads(), HELPERS)) as pool:
        jobs = []
        for some, length, result in zip(rows, lengths, values, strict=True):
            at_once = max(1, SCORES // max(1, length * group_size * case.seqlen_k))
            for i in range(0, len(q), at_once):
                heads = slice(i, i + at_once)
                jobs.append(pool.submit(compute, heads, some, result[heads]))
        for job in jobs:
            job.result()
    parts = [
        Part("out", np.s_[:, :, some], result.reshape(case.batch, case.heads, *result.shape[2:]))
        for some, result in zip(rows, values, strict=True)
    ]
    return Exact(case, parts, {} if case.value_mean else ALLOWED)


def _added(case: Case, arrays: Mapping[str, np.ndarray], kv_heads: np.ndarray, rows: slice) -> np.ndarray | None:
    """What is added to the logits of some rows of all query heads that share some heads of keys, or None."""
    bias, slopes = (arrays.get(name) for name in ("bias", "alibi_slopes"))
    heads = (case.kv_heads, case.heads // case.kv_heads)
    if bias is None and slopes is None:
        return None
    key, position = _positions(case, rows, np)
    added = np.zeros((len(kv_heads), heads[1], len(position), case.seqlen_k))
    if bias is not None:
        added += bias.reshape(*heads, case.seqlen_q, case.seqlen_k)[kv_heads][:, :, rows]
    if slopes is not None:
        # `reference` takes slopes for rows that follow one another.
        added -= slopes.astype(np.float64).reshape(*heads, 1, 1)[kv_heads] * np.abs(position - key)
    return added.reshape(len(kv_heads), 1, -1, case.seqlen_k)


def _exact_cache(case: CacheCase, arrays: Mapping[str, Any]) -> Exact:
    batch = len(case.lengths)
    sequences = sorted({0, *range(batch - 1, -1, -max(1, batch // SEQUENCES))})
    parts = []
    for i in sequences:
        k, v = (case.keys_of(arrays, i, name) for name in ("k", "v"))
        parts.append(Part("out", (i,), reference.attention(to_host(arrays["q"][i]), k, v)[0]))
    return Exact(case, parts, ALLOWED)


def _exact_gated(case: GatedCase, arrays: Mapping[str, np.ndarray]) -> Exact:
    compute = _output_parts if case.op == OUTPUT else _rule_parts
    parts: list[Part] = []
    for i, token in enumerate(np.linspace(0, case.queries - 1, PLACES).astype(int).tolist()):
        parts += compute(case, arrays, token, i % case.heads_v)
    return Exact(case, parts, ALLOWED_GATED)


def _output_parts(case: GatedCase, arrays: Mapping[str, np.ndarray], token: int, head: int) -> Iterator[Part]:
    """The chunk of a token."""
    chunks = case.chunks
    row = max(i for i, (first, _) in enumerate(chunks) if first <= token)
    tokens, key_head = slice(*chunks[row]), head // (case.heads_v // case.heads)
    q, k = (arrays[name][tokens, key_head, np.newaxis] for name in ("q", "k"))
    v, gates = (arrays[name][tokens, head, np.newaxis] for name in ("v_new", "log_g_cumsum"))
    state, boundaries = arrays["h"][row, np.newaxis, head, np.newaxis], [0, len(q)]
    out = reference.chunk_gated_output(q, k, v, state, gates, boundaries, chunk_size=case.chunk_size)
    yield Part("out", (tokens, head), out[:, 0])


def _rule_parts(case: GatedCase, arrays: Mapping[str, np.ndarray], token: int, head: int) -> Iterator[Part]:
    """Some tokens from one on, and the state behind the last one of a sequence if it is a result."""
    boundaries = case.boundaries
    n = max(i for i, begin in enumerate(boundaries[:-1]) if begin <= token)
    begin, end = boundaries[n : n + 2]
    last = min(token + TOKENS, end)
    names = "q", "k", "v", "log_g", "beta"
    flat = [arrays[name].reshape(case.queries, *arrays[name].shape[2:]) for name in names]
    decays = np.cumsum(flat[3][begin : token + 1, head][::-1], dtype=np.float64)
    first = token - int(np.argmax(decays < FORGOTTEN)) if decays[-1] < FORGOTTEN else begin
    key_head, state = head // (case.heads_v // case.heads), None
    if case.op == RECURRENT and first == begin:
        state = arrays["state"][n, np.newaxis, head, np.newaxis]
    heads = key_head, key_head, head, head, head
    tokens = [x[np.newaxis, first:last, h, np.newaxis] for x, h in zip(flat, heads, strict=True)]
    q, k, v, log_g, beta = tokens
    out, final = reference.gated_delta_rule(q, k, v, log_g, beta, initial_state=state)
    place = (0, slice(token, last)) if case.packed else (n, slice(token - begin, last - begin))
    yield Part("out", (*place, head), out[0, token - first :, 0])
    if case.op == RECURRENT and last == end:
        yield Part("state", (n, head), final[0, 0])


_EXACT: dict[type, Callable[..., Exact]] = {Case: _exact_attention, GatedCase: _exact_gated}
"""By operation."""
