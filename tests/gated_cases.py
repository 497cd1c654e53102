"""Calls of the gated delta rule for tests: draws, packed sequences, gates of all kinds, and the rule of errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_limits

from cuflash.testing import Poisoned

Arrays = dict[str, np.ndarray]
DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)]
LAYOUTS = ("contiguous", "swapped", "transposed", "reversed", "gaps", "every_second", "odd_bytes")
TOKENS = ("q", "k", "v", "log_g", "beta")
Heads = tuple[int, int, int, int]
"""Of q and k, of v; features of k, of v."""
Shape = tuple[int, int, int, int, int, int]
"""Batch, tokens, heads of q and k, heads of v, features of k, features of v."""


def computed_dtype(dtype: Any) -> Any:
    """Type of the computation."""
    return np.float64 if dtype == np.float64 else np.float32


def draw(shape: Shape, dtype: Any, seed: int = 0, num_states: int | None = None) -> Arrays:
    """Draw the arrays of a call, with keys of norm 1, and states under the name `initial_state`."""
    batch, seqlen, num_heads, num_heads_v, head_dim, head_dim_v = shape
    rng = np.random.default_rng([seed, *shape])
    q, k = rng.standard_normal((2, batch, seqlen, num_heads, head_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((batch, seqlen, num_heads_v, head_dim_v)) + 0.5
    rows = batch, seqlen, num_heads_v
    states = (batch if num_states is None else num_states), num_heads_v, head_dim, head_dim_v
    return {
        "q": q.astype(dtype),
        "k": k.astype(dtype),
        "v": v.astype(dtype),
        "log_g": -rng.exponential(0.1, rows).astype(computed_dtype(dtype)),
        "beta": rng.uniform(0, 1, rows).astype(computed_dtype(dtype)),
        "initial_state": rng.standard_normal(states).astype(computed_dtype(dtype)),
    }


def naive(
    arrays: Arrays, *, scale: float | None = None, cu_seqlens: Any = None, chunk_size: int = 64, rounded: Any = None
) -> list[tuple[Any, Any]]:
    """Compute both forms of the definition step by step, for the errors that these make; float64 in float32, too.

    With `rounded`, a type of 16 bits, the form in chunks alone, whose operands of products are rounded to it.
    """
    found = []
    if arrays["q"].dtype == np.float64:
        single = {name: x if name == "cu_seqlens" else x.astype(np.float32) for name, x in arrays.items()}
        found = naive(single, scale=scale, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    dtype = computed_dtype(arrays["q"].dtype)
    q, k, v, log_g, beta, initial = (arrays[name].astype(dtype) for name in (*TOKENS, "initial_state"))
    q, k = (np.repeat(x, v.shape[2] // max(q.shape[2], 1), axis=2) for x in (q, k))
    scale = dtype(q.shape[-1] ** -0.5 if scale is None else scale)
    if cu_seqlens is None:
        places = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    else:
        places = [(0, int(a), int(b)) for a, b in pairwise(cu_seqlens)]
    chunks = partial(_naive_chunks, chunk_size=chunk_size, rounded=rounded)
    for form in (_naive_recurrence, chunks) if rounded is None else (chunks,):
        out, state = np.zeros(v.shape, dtype), initial.copy()
        for s, (b, first, last) in zip(state, places, strict=True):
            tokens = (x[b, first:last].swapaxes(0, 1) for x in (q, k, v, log_g, beta))
            # Small systems are solved faster by one thread, and much faster beside other processes.
            with np.errstate(all="ignore"), threadpool_limits(1):
                out[b, first:last] = scale * form(*tokens, s).swapaxes(0, 1)
        found.append((out, state))
    return found


def _naive_recurrence(q: Any, k: Any, v: Any, log_g: Any, beta: Any, s: Any) -> Any:
    out = np.empty_like(v)
    for t in range(q.shape[1]):
        s *= np.exp(log_g[:, t, None, None])
        u = beta[:, t, None] * (v[:, t] - np.einsum("hk,hkv->hv", k[:, t], s))
        s += k[:, t, :, None] * u[:, None]
        out[:, t] = np.einsum("hk,hkv->hv", q[:, t], s)
    return out


def _naive_chunks(q: Any, k: Any, v: Any, log_g: Any, beta: Any, s: Any, chunk_size: int, rounded: Any) -> Any:
    def r(x: Any) -> Any:
        return x if rounded is None else x.astype(rounded).astype(x.dtype)

    out = np.empty_like(v)
    for first in range(0, q.shape[1], chunk_size):
        now = np.s_[:, first : first + chunk_size]
        gates, size = log_g[now], log_g[now].shape[1]
        decay = np.zeros((len(gates), size, size), v.dtype)
        for i in range(size):
            for j in range(i + 1):
                decay[:, i, j] = np.exp(gates[:, j + 1 : i + 1].sum(axis=1))
        before = np.exp(np.cumsum(gates, axis=1))[..., None]
        a = np.tril(k[now] @ k[now].swapaxes(1, 2) * decay * beta[now][..., None], -1) + np.eye(size, dtype=v.dtype)
        u = r(np.linalg.solve(a, beta[now][..., None] * v[now]))
        w = r(np.linalg.solve(a, beta[now][..., None] * before * k[now]))
        v_new = u - w @ r(s)
        weights = r(q[now] @ k[now].swapaxes(1, 2) * decay)
        out[now] = before * (q[now] @ r(s)) + weights @ r(v_new)
        s[...] = before[:, -1:] * s + k[now].swapaxes(1, 2) @ r(decay[:, -1, :, None] * v_new)
    return out


def naive_output(arrays: Arrays, *, scale: float | None = None, chunk_size: int = 64, rounded: Any = None) -> list[Any]:
    """Compute chunks from their states, for the errors that this makes; `rounded` and float64 as `naive` has them."""
    found = []
    if arrays["q"].dtype == np.float64:
        single = {name: x if name == "cu_seqlens" else x.astype(np.float32) for name, x in arrays.items()}
        found = naive_output(single, scale=scale, chunk_size=chunk_size)
    dtype = computed_dtype(arrays["q"].dtype)

    def r(x: Any) -> Any:
        return x if rounded is None else x.astype(rounded).astype(dtype)

    q, k, v, h, c = (arrays[name].astype(dtype) for name in ("q", "k", "v", "h", "log_g_cumsum"))
    q, k = (np.repeat(x, v.shape[1] // max(q.shape[1], 1), axis=1) for x in (q, k))
    out, row = np.zeros(v.shape, dtype), 0
    for first, last in pairwise(map(int, arrays["cu_seqlens"])):
        for begin in range(first, last, chunk_size):
            now = slice(begin, min(begin + chunk_size, last))
            queries, keys, values, gates = (x[now].swapaxes(0, 1) for x in (q, k, v, c))
            with np.errstate(all="ignore"):
                lost = gates[:, :, None] - gates[:, None]
                decay = np.tril(np.exp(np.where(gates[:, :, None] == gates[:, None], 0, lost)))
                rows = np.exp(gates)[..., None] * (queries @ r(h[row]))
                rows += r(queries @ keys.swapaxes(1, 2) * decay) @ values
            out[now] = rows.swapaxes(0, 1)
            row += 1
    return [*found, dtype(q.shape[-1] ** -0.5 if scale is None else scale) * out]


def assert_close(got: Any, exact: Any, plain: list[Any], what: str = "") -> None:
    """Bound = 2 x the larger error of the naive forms, for 16-bit results plus 1.1 x the rounding of the exact result.

    Those of float64 have a chance to make the same errors as the reference, and those of float32, scaled, to be lucky.
    The reference of float64 is off by as much as they are, which counts once more.
    """
    assert got.shape == exact.shape
    if not got.size:
        return
    eps = np.finfo(computed_dtype(got.dtype)).eps
    times = 3 if got.dtype == np.float64 else 2
    bound = times * max(np.abs(x - exact).max() * eps / np.finfo(x.dtype).eps for x in plain)
    bound += 8 * eps * max(np.abs(exact).max(), 1e-3)
    if got.dtype.itemsize == 2:
        bound += 1.1 * np.abs(exact.astype(got.dtype).astype(np.float64) - exact).max()
    error = np.abs(got.astype(np.float64) - exact).max()
    assert error <= bound, f"{what}: error {error:.2e}, allowed {bound:.2e}"


def poisoned(arrays: Arrays, layout: str) -> dict[str, Poisoned]:
    """Put arrays into memory that is NaN everywhere else; those with few axes lie densely where a layout needs more."""
    return {
        name: Poisoned(np, x.shape, x.dtype, "contiguous" if name == "cu_seqlens" else layout, x)
        for name, x in arrays.items()
    }


def without_rest(arrays: Arrays) -> Arrays:
    """Return arrays with 0 in rows behind the last sequence, which hold NaN."""
    if "cu_seqlens" not in arrays:
        return arrays
    last, zeroed = int(arrays["cu_seqlens"][-1]), dict(arrays)
    for name in TOKENS:
        zeroed[name] = arrays[name].copy()
        zeroed[name][:, last:] = 0
    return zeroed


BOUNDARIES = [
    [0, 63, 64, 128, 193, 193, 210],
    [0, 0, 0, 5],
    [0, 200],
    [0, *range(1, 9), 8, 40],
    [0, 0],
    [0],
]


def draw_packed(
    boundaries: list[int], dtype: Any, gap: int, integer: Any = np.int32, heads: Heads = (2, 4, 16, 24)
) -> Arrays:
    """Draw packed sequences with `gap` tokens behind them, which are NaN."""
    arrays = draw((1, boundaries[-1] + gap, *heads), dtype, num_states=len(boundaries) - 1)
    for name in TOKENS:
        arrays[name][:, boundaries[-1] :] = np.nan
    return arrays | {"cu_seqlens": np.array(boundaries, integer)}


def gates_of_kind(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw logarithms of decays, among them resets and strong ones."""
    rng = np.random.default_rng(7)
    usual = -rng.exponential(0.1, shape)
    some = rng.random(shape) < 0.2
    return {
        "none": np.zeros(shape),
        "-50": np.full(shape, -50.0),
        "reset each": np.full(shape, -np.inf),
        "reset some": np.where(some, -np.inf, usual),
        "reset or none": np.where(some, -np.inf, 0.0),
        "strong some": np.where(some, -rng.uniform(20, 90, shape), usual),
        "beyond all": np.where(some, -1e30, usual),
        "below exp": np.where(some, -110.0, usual),
    }[kind]


KINDS = ("none", "-50", "reset each", "reset some", "reset or none", "strong some", "beyond all", "below exp")


def draw_output(
    boundaries: list[int],
    dtype: Any,
    *,
    chunk_size: int = 64,
    gap: int = 0,
    surplus: int = 0,
    seed: int = 0,
    heads: Heads = (2, 4, 16, 24),
) -> Arrays:
    """Draw the arrays of `chunk_gated_output`; what it must not read is NaN."""
    total = boundaries[-1] + gap
    _, num_heads_v, head_dim, head_dim_v = heads
    arrays = draw((1, total, *heads), dtype, seed)
    lengths = np.diff(boundaries)
    num_chunks = int((-(-lengths // chunk_size)).sum())
    shape = num_chunks + surplus, num_heads_v, head_dim, head_dim_v
    h = np.random.default_rng(seed).standard_normal(shape).astype(computed_dtype(dtype))
    h[num_chunks:] = np.nan
    c = np.full((total, num_heads_v), np.nan)
    for first, last in pairwise(boundaries):
        for begin in range(first, last, chunk_size):
            now = slice(begin, min(begin + chunk_size, last))
            c[now] = np.cumsum(arrays["log_g"][0, now].astype(np.float64), axis=0)
    found = {"q": arrays["q"][0], "k": arrays["k"][0], "v": arrays["v"][0], "h": h}
    for name in ("q", "k", "v"):
        found[name][boundaries[-1] :] = np.nan
    return found | {"log_g_cumsum": c.astype(computed_dtype(dtype)), "cu_seqlens": np.array(boundaries)}


class Call(NamedTuple):
    """A call without checks of its result."""

    name: str
    op: str
    arrays: Arrays
    layout: str = "contiguous"
    options: Mapping[str, Any] = {}


def calls(dtype: Any) -> Iterator[Call]:
    """A few calls of each function, which between them go all ways through the kernels."""
    output, chunks, recurrent = "chunk_gated_output", "chunk_gated_delta_rule", "recurrent_gated_delta_rule"
    for boundaries in BOUNDARIES[:3]:
        yield Call(f"output-packed-{boundaries[-1]}", output, draw_output(boundaries, dtype, gap=3, surplus=2))
        final = {"output_final_state": True}
        yield Call(f"chunks-packed-{boundaries[-1]}", chunks, draw_packed(boundaries, dtype, 3), options=final)
    for heads in ((1, 2, 64, 64), (2, 2, 128, 136), (1, 3, 100, 7), (1, 1, 256, 256)):
        for layout in ("contiguous", "transposed", "odd_bytes"):
            name = f"{heads[2]}-{heads[3]}-{layout}"
            yield Call(f"output-{name}", output, draw_output([0, 65, 80], dtype, heads=heads), layout)
            yield Call(f"chunks-{name}", chunks, draw((1, 130, *heads), dtype), layout, {"output_final_state": True})
            yield Call(f"recurrent-{name}", recurrent, draw((2, 3, *heads), dtype), layout)
    for chunk_size in (16, 32, 128):
        arrays = draw_output([0, 17, 150], dtype, chunk_size=chunk_size)
        yield Call(f"output-chunks-{chunk_size}", output, arrays, options={"chunk_size": chunk_size})


def arguments_of(call: Call, xp: Any) -> dict[str, Any]:
    """Arrays of a call, on the CPU or a GPU, by the names of its arguments, and its options."""
    names = {"v": "v_new"} if "h" in call.arrays else {}
    if call.op == "recurrent_gated_delta_rule":
        names["initial_state"] = "state"
    placed = {
        names.get(name, name): Poisoned(xp, x.shape, x.dtype, "contiguous" if x.ndim == 1 else call.layout, x).array
        for name, x in call.arrays.items()
    }
    return placed | dict(call.options)
