"""The gate of `python -m cuflash bench`: results against float64, in some rows of every head.

All rows would need all N x N scores of all heads in float64. `reference` computes evenly spaced rows of every head,
each at another place in its tile, which finds what kernels get wrong; that the rest is finite costs one pass over the
result.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from .. import reference
from ..problem.arrays import DTYPES
from ..settings import num_threads
from .cases import Case, Inputs

ALLOWED = {"float16": 4e-4, "bfloat16": 3e-3, "float32": 2e-6, "float64": 4e-15}
"""Largest relative error. In 16 bits it is twice that of rounding the exact result, as kernels that feed tensor cores
round their weights as well."""
ALLOWED_DRIFT = 1.1
"""Largest relative error for values with a mean, in units of that of rounding the exact result."""
CHECKED_ROWS = 1024
"""Rows in all that are compared, where there are not so many heads that each gets `ROWS_PER_HEAD`."""
ROWS_PER_HEAD = 8
SCORES = 2**23
"""Scores in float64 that a thread has in memory at once: 64 MiB, a few times."""
HELPERS = 4
"""Threads at most that compute in float64: each has keys and values of its own in memory."""


class Verdict(NamedTuple):
    """What the comparison with float64 found."""

    mse: float
    """Mean squared error."""
    relative_error: float
    """Norm of the error over the norm of the exact result."""
    rounding_error: float
    """Relative error of the exact result once it is rounded to the dtype of the case."""
    allowed: float
    finite: bool
    """Every element of the result, compared or not, is a number."""

    @property
    def good(self) -> bool:
        """Whether a speed may be printed."""
        return self.finite and self.relative_error <= self.allowed

    def __str__(self) -> str:
        finite = "" if self.finite else ", elements that are not finite"
        return f"relative error {self.relative_error:.1e}, allowed {self.allowed:.1e}{finite}"


def to_host(x: Any) -> np.ndarray:
    """Return a NumPy array of the same content."""
    return x.get() if hasattr(x, "get") else x


def poisoned(shape: tuple[int, ...], dtype: str, xp: Any) -> Any:
    """Allocate an array that is NaN everywhere: what a kernel leaves out shows."""
    memory = xp.full(prod(shape) * DTYPES[dtype].itemsize, 0xFF, np.uint8)
    return xp.ndarray(shape, DTYPES[dtype], memory.data)


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


class Exact(NamedTuple):
    """What results of a problem are compared with."""

    case: Case
    rows: list[slice]
    """Of every head, one after the other."""
    values: np.ndarray
    """Their results in float64: (batch, heads, all these rows, and head_dim_v if there are values)."""


def exact_result(inputs: Inputs) -> Exact:
    """Compute some rows of every head with `reference`, on the host, from inputs of either back end."""
    case, rows = inputs.case, sampled_rows(inputs.case)
    group_size = case.heads // case.kv_heads
    q = to_host(inputs.q).reshape(-1, group_size, case.seqlen_q, case.head_dim)
    k = to_host(inputs.k).reshape(-1, case.seqlen_k, case.head_dim)
    v = to_host(inputs.v).reshape(-1, case.seqlen_k, case.head_dim_v) if case.head_dim_v else k[..., :0]
    lengths = [len(range(case.seqlen_q)[some]) for some in rows]
    values = np.empty((*q.shape[:2], sum(lengths), *case.shape_out[3:]))

    def compute(heads: slice, some: slice, result: np.ndarray) -> None:
        # The rows of a group see the same keys: to `reference`, which is told who sees what, they are one long head.
        mask = np.tile(visible(case, some, np), (group_size, 1))
        long = q[heads, :, some].reshape(-1, 1, len(mask), case.head_dim)
        added = _added(inputs, np.arange(len(q))[heads] % case.kv_heads, some)
        keys = (x[heads, np.newaxis] for x in (k, v))
        out, lse = reference.attention(long, *keys, mask=mask, bias=added, softcap=case.softcap)
        result[...] = (out if case.head_dim_v else lse).reshape(result.shape)

    # On shared cores the threads of BLAS wait for one another, many times as long as these products take.
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(min(num_threads(), HELPERS)) as pool:
        jobs = []
        for some, length, end in zip(rows, lengths, np.cumsum(lengths), strict=True):
            at_once = max(1, SCORES // max(1, length * group_size * case.seqlen_k))
            for i in range(0, len(q), at_once):
                heads = slice(i, i + at_once)
                jobs.append(pool.submit(compute, heads, some, values[heads, :, end - length : end]))
        for job in jobs:
            job.result()
    return Exact(case, rows, values.reshape(case.batch, case.heads, sum(lengths), *case.shape_out[3:]))


def _added(inputs: Inputs, kv_heads: np.ndarray, rows: slice) -> np.ndarray | None:
    """What is added to the logits of some rows of all query heads that share some heads of keys, or None."""
    case = inputs.case
    heads = (case.kv_heads, case.heads // case.kv_heads)
    if inputs.bias is None and inputs.alibi_slopes is None:
        return None
    key, position = _positions(case, rows, np)
    added = np.zeros((len(kv_heads), heads[1], len(position), case.seqlen_k))
    if inputs.bias is not None:
        added += to_host(inputs.bias).reshape(*heads, case.seqlen_q, case.seqlen_k)[kv_heads][:, :, rows]
    if inputs.alibi_slopes is not None:
        # `reference` takes slopes for rows that follow one another.
        slopes = to_host(inputs.alibi_slopes).astype(np.float64).reshape(*heads, 1, 1)[kv_heads]
        added -= slopes * np.abs(position - key)
    return added.reshape(len(kv_heads), 1, -1, case.seqlen_k)


def check(exact: Exact, out: Any, xp: Any) -> Verdict:
    """Compare a result with float64.

    Parameters
    ----------
    exact : Exact
        Of the same problem.
    out : array, shape `Case.shape_out`
        Of the library `xp`; any float dtype.
    xp : module
        numpy or cupy.
    """
    case, rows, values = exact
    got = np.concatenate([to_host(out[:, :, some].astype(np.float64)) for some in rows], axis=2)
    rounded = values.astype(DTYPES[case.dtype_out]).astype(np.float64)
    norm = float(np.linalg.norm(values)) or 1.0  # nothing is visible: only zeros are right
    error, rounding_error = (float(np.linalg.norm(x - values)) / norm for x in (got, rounded))
    allowed = ALLOWED_DRIFT * rounding_error if case.value_mean else ALLOWED[case.dtype_out]
    mse = float(np.mean((got - values) ** 2)) if values.size else 0.0
    return Verdict(mse, error, rounding_error, allowed, _all_finite(out, xp))


def _all_finite(out: Any, xp: Any) -> bool:
    # Not every library has functions of bfloat16, but all convert it.
    return bool(xp.isfinite(out if out.dtype.itemsize > 2 else out.astype(np.float32)).all())
