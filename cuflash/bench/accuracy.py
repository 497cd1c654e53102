"""The error table: every kernel and every peer on every distribution of values, against a wider type.

What is exact is computed in float64 and, for float64, in NumPy's long double; where that is no wider than float64 (on
Windows, and on ARM under macOS) float64 is left out, and the result says so. Two measures, with P the exact weights:

- `rms`, ``sqrt(mean((got - exact)^2)) / sqrt(mean(exact^2))`` over the result. Where columns of the result have scales
  of their own it is computed for each column, and the worst counts, so that large columns hide nothing in small ones.
- `maximum`, the largest ``|got - exact|_id / sum_j P_ij |v_jd|``: what a sum of rounded terms can be held to in each
  element, also where terms cancel and the result is near zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from ..dense import attention
from ..explain import explain
from ..problem.arrays import DTYPES, FLOAT_NAMES
from .cases import Case
from .device import NumpyBackend
from .inputs import Inputs, poisoned, to_host
from .measure import Peer, Request, as_array, chosen, compile_ahead
from .report import NOT_FINITE

ACCURACY = "accuracy"
"""Name of the group that has no cases: the error table."""
QUERIES, KEYS = 64, 4096
HEAD_DIMS = {"gpu": (64, 128, 256), "numpy": (64, 128)}
COPIES = {"gpu": (1, 512), "numpy": (1,)}
"""How often kernels have the head in a call, one after the other; the larger error counts. The keys of a single head
are split among all blocks of a GPU, so that no sum is long; those of many heads are not."""
NAIVE = "naive"
"""Column of the formula as it is written down, in the dtype itself and on the same back end."""

WIDE_IS_WIDER = np.finfo(np.longdouble).nmant >= 63
"""Whether long double can judge float64."""
DECADES = {"float16": 2, "bfloat16": 6, "float32": 6, "float64": 6}
"""Scales go from 10^-d to 10^d: float16 ends at 65504, and what is below 6e-5 has fewer digits there."""
FAR_BELOW = {"float16": 1e-2, "bfloat16": 1e-12, "float32": 1e-12, "float64": 1e-12}

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""q, k and v of one head."""
Precision = Literal["ieee", "tf32"]
Change = Callable[[np.random.Generator, np.ndarray, np.ndarray, np.ndarray, str], Arrays]
"""Makes a distribution's q, k and v of those that are unit normal, for a dtype."""


class Distribution(NamedTuple):
    """A way to draw q, k and v."""

    meaning: str
    change: Change
    own_columns: bool = False
    """Columns of the result have scales of their own."""


def _powers(rng: np.random.Generator, low: float, high: float, *shape: int) -> np.ndarray:
    """Powers of ten with exponents between two numbers."""
    return 10.0 ** rng.uniform(low, high, shape)


def _score_rows(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> Arrays:
    # The largest query meets the largest key in logits of about 10.
    d = DECADES[dtype]
    return q * _powers(rng, -2 * d, 1 - d, len(q), 1), k * _powers(rng, -d, d, len(k), 1), v


def _score_columns(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> Arrays:
    factor = _powers(rng, -DECADES[dtype], DECADES[dtype], q.shape[1])
    return q * factor, k / factor, v


def _value_rows(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> Arrays:
    return q, k, v * _powers(rng, -DECADES[dtype], DECADES[dtype], len(v), 1)


def _value_columns(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> Arrays:
    return q, k, v * _powers(rng, -DECADES[dtype], DECADES[dtype], v.shape[1])


def _small_columns(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> Arrays:
    return q, k, v * np.where(np.arange(v.shape[1]) % 8 == 0, 1.0, FAR_BELOW[dtype])


def _dominating_key(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> Arrays:
    # Queries get a component of their own along one direction, in which the key is long.
    direction = np.full(q.shape[1], q.shape[1] ** -0.5)
    wanted = np.linspace(0, 4, len(q))[:, np.newaxis]
    k[len(k) // 2] = 10 * q.shape[1] ** 0.5 * direction
    return q + (wanted - q @ direction[:, np.newaxis]) * direction, k, v


DISTRIBUTIONS = {
    "normal": Distribution("unit normal", lambda rng, q, k, v, dtype: (q, k, v)),
    "uniform": Distribution(
        "uniform in [0, 1)", lambda rng, q, k, v, dtype: (rng.random(q.shape), rng.random(k.shape), rng.random(v.shape))
    ),
    "mean": Distribution("values around 100, with a deviation of 1", lambda rng, q, k, v, dtype: (q, k, v + 100)),
    "heavy tails": Distribution(
        "Student's t with 2 degrees of freedom",
        lambda rng, q, k, v, dtype: (
            rng.standard_t(2, q.shape),
            rng.standard_t(2, k.shape),
            rng.standard_t(2, v.shape),
        ),
    ),
    "score rows": Distribution(
        "each query and each key times a power of ten of its own, logits up to about 10", _score_rows
    ),
    "score columns": Distribution("each column of q times a power of ten, that of k over it", _score_columns),
    "value rows": Distribution("each value vector times a power of ten of its own", _value_rows),
    "value columns": Distribution("each column of v times a power of ten of its own", _value_columns, own_columns=True),
    "small columns": Distribution("seven of eight columns of v far below the others", _small_columns, own_columns=True),
    "wide logits": Distribution(
        "logits with a deviation of 30, so that those of a row span hundreds",
        lambda rng, q, k, v, dtype: (30 * q, k, v),
    ),
    "dominating key": Distribution("one key whose logit is 0 to 40 above the others", _dominating_key),
}
"""By name. Powers of ten are 10^-6 to 10^6, in float16 10^-2 to 10^2; "far below" is 1e-12, in float16 1e-2."""


def draw(name: str, dtype: str, queries: int, keys: int, head_dim: int) -> Arrays:
    """Draw q (queries, head_dim), k and v (keys, head_dim) of a distribution in a dtype: the same ones every time."""
    rng = np.random.default_rng([queries, keys, head_dim])
    q, k, v = (rng.standard_normal((length, head_dim)) for length in (queries, keys, keys))
    q, k, v = DISTRIBUTIONS[name].change(rng, q, k, v, dtype)
    return q.astype(DTYPES[dtype]), k.astype(DTYPES[dtype]), v.astype(DTYPES[dtype])


def naive(q: Any, k: Any, v: Any) -> Any:
    """Attention as the formula is written down, in the dtype and the library of its arguments, (queries, head_dim).

    NumPy's products of bfloat16 are float32; so is then all but the result.
    """
    scores = q @ k.T * q.dtype.type(q.shape[-1] ** -0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).astype(q.dtype, copy=False)


class Exact(NamedTuple):
    """What results are compared with, in the wider type, (queries, head_dim)."""

    values: np.ndarray
    sizes: np.ndarray
    """sum_j P_ij |v_jd|"""
    own_columns: bool


def exact_result(name: str, arrays: Arrays) -> Exact:
    """Compute attention of arrays of a distribution in long double if they are float64, else in float64."""
    wide = np.longdouble if arrays[0].dtype == np.float64 else np.float64
    q, k, v = (x.astype(wide) for x in arrays)
    values, sizes = np.split(naive(q, k, np.concatenate([v, abs(v)], axis=1)), 2, axis=1)
    return Exact(values, sizes, DISTRIBUTIONS[name].own_columns)


class Errors(NamedTuple):
    """How far a result is off, by the two measures of this module."""

    rms: float
    maximum: float


def errors(got: np.ndarray, exact: Exact) -> Errors:
    """Measure a result, (queries, head_dim) in any dtype; infinite or NaN where it is not finite."""
    with np.errstate(invalid="ignore"):
        off = abs(got.astype(exact.values.dtype) - exact.values)
    axis = 0 if exact.own_columns else None
    rms = np.sqrt((off**2).mean(axis) / (exact.values**2).mean(axis))
    return Errors(float(np.max(rms)), float(np.max(off / exact.sizes)))


def accuracy(backend: NumpyBackend, peers: Mapping[str, Peer], quick: bool = False) -> dict[str, Any]:
    """Measure the error table, as plain data for JSON.

    Parameters
    ----------
    backend : NumpyBackend
        Or `GpuBackend`.
    peers : mapping of str to Peer
        Other libraries. Those that are called naive are left out: `naive` is measured anyway.
    quick : bool
        The smallest head_dim only.
    """
    dims = HEAD_DIMS[backend.name][: 1 if quick else None]
    others = {name: prepare for name, prepare in peers.items() if not name.startswith(NAIVE)}
    if backend.name == "gpu":
        calls = product(FLOAT_NAMES, dims, COPIES[backend.name])
        compile_ahead([_case(dtype, head_dim, copies) for dtype, head_dim, copies in calls], Request("all"))
    rows = []
    skipped = [] if WIDE_IS_WIDER else ["float64: long double is no wider than float64 on this machine"]
    for dtype in FLOAT_NAMES:
        if dtype == "float64" and not WIDE_IS_WIDER:
            continue
        for name in DISTRIBUTIONS:
            for head_dim in dims:
                arrays = draw(name, dtype, QUERIES, KEYS, head_dim)
                exact = exact_result(name, arrays)
                results = [who | _measured(compute, exact) for who, compute in _ways(arrays, backend, others)]
                rows.append({"dtype": dtype, "distribution": name, "head_dim": head_dim, "results": results})
                backend.release()
    return {"queries": QUERIES, "keys": KEYS, "head_dims": list(dims), "rows": rows, "skipped": skipped}


def _case(dtype: str, head_dim: int, copies: int = 1) -> Case:
    """The problem that all distributions share."""
    return Case(ACCURACY, dtype, copies, 1, 1, QUERIES, KEYS, head_dim, head_dim)


def _ways(
    arrays: Arrays, backend: NumpyBackend, peers: Mapping[str, Peer]
) -> Iterator[tuple[dict[str, Any], Callable[[], list[np.ndarray]]]]:
    """All that can compute some arrays, kernels first: what a result says of it, and the function that does.

    Functions return results, (queries, head_dim), of which the worst counts.
    """
    case = _case(arrays[0].dtype.name, arrays[0].shape[-1])
    q, k, v = (backend.xp.asarray(x[np.newaxis, np.newaxis]) for x in arrays)
    inputs = Inputs(case, {"q": q, "k": k, "v": v})

    def compute(kernel: str, precision: Precision) -> list[np.ndarray]:
        return [repeated(kernel, precision, copies) for copies in COPIES[backend.name]]

    def repeated(kernel: str, precision: Precision, copies: int) -> np.ndarray:
        out = poisoned((copies, *case.shape_out[1:]), case.dtype, backend.xp)
        arrays = [backend.xp.broadcast_to(x, (copies, *x.shape[1:])) for x in (q, k, v)]
        with chosen(kernel, ""):
            attention(*arrays, precision=precision, out=out)
        return to_host(out[-1, 0])

    def ask(prepare: Peer) -> list[np.ndarray]:
        return [to_host(as_array(prepare(inputs)(), backend))[0, 0]]

    for kernel in Request("all").kernels(backend.name, case):
        precision = _served(kernel, inputs)
        if precision is not None:
            yield {"kernel": kernel, "precision": precision}, partial(compute, kernel, precision)
    yield {"peer": NAIVE}, lambda: [to_host(naive(q[0, 0], k[0, 0], v[0, 0]))]
    for name, prepare in peers.items():
        yield {"peer": name}, partial(ask, prepare)


def _served(kernel: str, inputs: Inputs) -> Precision | None:
    """The precision in which a kernel serves a problem, float32 rather as it is than as tf32, or None."""
    precisions: tuple[Precision, ...] = ("ieee", "tf32") if inputs.case.dtype == "float32" else ("ieee",)
    for precision in precisions:
        try:
            with chosen(kernel, ""):
                explain(attention, **inputs.arrays, precision=precision)
            return precision
        except ValueError:
            continue
    return None


def _measured(compute: Callable[[], list[np.ndarray]], exact: Exact) -> dict[str, Any]:
    try:
        with np.errstate(all="ignore"):
            each = [errors(got, exact) for got in compute()]
        found = Errors(*np.max(each, axis=0).tolist())  # NaN stays
    except Exception as refusal:  # a peer may refuse, and a library may lack products of a dtype
        first_line = next(iter(str(refusal).splitlines()), "")
        return {"refused": f"{type(refusal).__name__}: {first_line}"}
    return found._asdict() if np.isfinite(found).all() else {"refused": NOT_FINITE}
