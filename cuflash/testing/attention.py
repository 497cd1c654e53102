"""What is drawn for problems of attention, their runs in poisoned memory, and the rule by which a result is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import attention_lse, reference
from ..problem.arrays import DTYPES
from ..problem.describe import describe_attention, describe_attention_lse, describe_varlen
from ..problem.describe_cache import describe_kv_cache
from ..problem.problem import Problem
from .cases import Case, Data
from .memory import Poisoned


def make_data(case: Case, dtype: str, seed: int = 0) -> Data:
    """Draw the arrays of a case; the seed and the case's name decide them.

    Parameters
    ----------
    case : Case
    dtype : str
        Of q, k and v: "float16", "bfloat16", "float32" or "float64".
    seed : int, optional

    Returns
    -------
    Data
        Normal numbers, v around `Case.value_mean`; a bias is -inf here and there, a mask hides two pairs of five.
    """
    rng = np.random.default_rng([seed, *case.name.encode()])
    element = DTYPES[dtype]
    head_dim_v = case.shape_q[-1] if case.head_dim_v is None else case.head_dim_v
    q = rng.standard_normal(case.shape_q).astype(element)
    k = rng.standard_normal(case.shape_k).astype(element)
    v = (case.value_mean + rng.standard_normal((*case.shape_k[:-1], head_dim_v))).astype(element)
    if case.layout == "broadcast":
        q, k, v = (np.broadcast_to(x[(0,) * (x.ndim - 2)] if x.size else x, x.shape) for x in (q, k, v))
    options = {}
    for name, (shape, option_dtype) in case.arrays.items():
        if name == "mask":
            visible = np.asarray(rng.random(shape) < 0.6)
            if shape and shape[-1] > 70:
                visible[..., :66] &= rng.random((*shape[:-1], 1)) < 0.5  # whole leading tiles hidden from some queries
            values: np.ndarray = visible
        elif name == "query_offset":
            values = rng.integers(0 if option_dtype.startswith("u") else -20, 40, shape)
        elif name == "alibi_slopes":
            values = 2.0 ** -rng.uniform(0, 6, shape)
        else:
            values = rng.standard_normal(shape)
            if name == "bias":
                values = np.where(rng.random(shape) < 0.2, -np.inf, values)
        options[name] = np.asarray(values).astype(DTYPES[option_dtype])
    return Data(q, k, v, options)


class Outcome(NamedTuple):
    """What a call returned, as NumPy arrays, and whether it wrote only where it may."""

    out: np.ndarray
    """In the dtype of the call."""
    lse: np.ndarray
    """float32, or float64."""
    clean: bool
    """No input changed, nothing written outside the results."""


def run(case: Case, data: Data, xp: Any, function: Any = None) -> Outcome:
    """Call the case's function, or another one like it, with arrays in poisoned memory.

    Parameters
    ----------
    case : Case
    data : Data
        Of `make_data`, or in its shapes.
    xp : module
        ``numpy``, or ``cupy`` for arrays on its current device.
    function : callable, optional
        Called in place of `Case.function`, with the same arguments.

    Returns
    -------
    Outcome

    Raises
    ------
    AssertionError
        If results that are given are not those that are returned.
    """
    inputs = {name: Poisoned(xp, x.shape, x.dtype, case.layout, x) for name, x in zip("qkv", data[:3], strict=True)}
    left: dict[str, np.ndarray] = {}
    if case.cached is not None:
        placed, left = _placed_in_cache(case, data)
        inputs |= {name: Poisoned(xp, x.shape, x.dtype, _layout_of(case, x), x) for name, x in placed.items()}
    inputs |= {name: Poisoned(xp, x.shape, x.dtype, "contiguous", x) for name, x in data.options.items()}
    keywords = {name: inputs[name].array for name in data.options} | dict(case.options)
    if case.cached is not None:
        keywords |= {name: inputs[name].array for name in inputs if name not in ("q", "k", "v", *data.options)}
        keywords.setdefault("seqlens_k", case.cached.lengths)
    positional = [inputs[name].array for name in "qkv"]
    if case.cu_seqlens is not None:
        for name, values in zip(("cu_seqlens_q", "cu_seqlens_k"), case.cu_seqlens, strict=True):
            boundaries = np.asarray(values, np.int32)
            inputs[name] = Poisoned(xp, boundaries.shape, boundaries.dtype, "contiguous", boundaries)
            positional.append(inputs[name].array)
    results = {}
    if case.give_out:
        shape = expected_shape(case)
        out_dtype = np.dtype(keywords.get("out_dtype", data.q.dtype))
        lse_dtype = np.dtype(np.float64 if data.q.dtype == np.float64 else np.float32)
        results = {
            "out": Poisoned(xp, shape, out_dtype, case.layout),
            "lse": Poisoned(xp, shape[:-1], lse_dtype, case.layout if shape[-1] == 0 else "contiguous"),
        }
        keywords |= {name: result.array for name, result in results.items()}
    out, lse = results_of(case, function or case.function, positional, keywords)
    if out is None:
        out = xp.empty(expected_shape(case), data.q.dtype)
    elif results:
        assert out is results["out"].array
    if results:
        assert lse is results["lse"].array
    clean = all(x.unchanged() for name, x in inputs.items() if name not in left)
    clean &= all(
        inputs[name].bytes_now().tobytes() == Poisoned(np, x.shape, x.dtype, case.layout, x).bytes_now().tobytes()
        for name, x in left.items()
    )
    clean &= all(x.unchanged(outside_only=True) for x in results.values())
    if results:
        out, lse = results["out"].values(), results["lse"].values()
    elif xp is not np:
        out, lse = out.get(), lse.get()
    return Outcome(out, lse, clean)


def _placed_in_cache(case: Case, data: Data) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return arrays of a call with a cache, whose unused rows are NaN, and what the cache holds behind it."""
    assert case.cached is not None, "else there is none"
    cached, (batch, num_heads, capacity, _) = case.cached, data.k.shape
    begins = np.broadcast_to(np.minimum(cached.lengths, capacity), batch)
    ends = np.broadcast_to(cached.ends(capacity), batch)
    arrays: dict[str, np.ndarray] = {}
    if not isinstance(cached.lengths, int):
        arrays["seqlens_k"] = np.asarray(cached.lengths, np.int32)
    page_size, left = cached.page_size, {}
    per_batch = -(-capacity // page_size) if page_size else 0
    order = np.random.default_rng(0).permutation(batch * per_batch + 2)
    table = order[: batch * per_batch].reshape(batch, per_batch).astype(np.int32)
    for name, x in (("k", data.k), ("v", data.v)):
        shape = (len(order), num_heads, page_size, x.shape[-1]) if page_size else x.shape
        before, after = (np.full(shape, np.nan, x.dtype) for _ in range(2))
        new = np.full((batch, num_heads, cached.num_new, x.shape[-1]), np.nan, x.dtype)
        for b in range(batch):
            for cache, end in ((before, begins[b]), (after, ends[b])):
                if page_size:
                    pages, places = np.divmod(np.arange(end), page_size)
                    cache[table[b, pages], :, places] = x[b, :, :end].swapaxes(0, 1)
                else:
                    cache[b, :, :end] = x[b, :, :end]
            new[b, :, : ends[b] - begins[b]] = x[b, :, begins[b] : ends[b]]
        arrays[name], left[name] = before, after
        if cached.num_new:
            arrays[f"{name}_new"] = new
    if page_size:
        used = np.arange(per_batch) < -(-ends[:, np.newaxis] // page_size)
        arrays["page_table"] = np.where(used, table, -(2**31))  # entries that are not used may be anything
    return arrays, left


def _layout_of(case: Case, x: np.ndarray) -> str:
    """Layout of an array of a call with a cache: that of the case, but for lengths and pages."""
    return case.layout if x.ndim == 4 else "contiguous"


def results_of(case: Case, function: Any, positional: list[Any], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """Call a function of a case's kind with arguments that are at hand.

    Parameters
    ----------
    case : Case
        Says whether there are values.
    function : callable
        `Case.function`, or another one like it.
    positional : list of arrays
        Its positional arguments, v among them also where there are no values.
    keywords : dict
        Its other ones; `lse` is passed as `out` where the lse is all that is asked for.

    Returns
    -------
    out : array, or None where there are no values
    lse : array
    """
    if case.head_dim_v != 0:
        out, lse = function(*positional, return_lse=True, **keywords)
        return out, lse
    if "lse" in keywords:
        keywords["out"] = keywords.pop("lse")
    return None, function(*positional[:2], **keywords)


def expected_shape(case: Case) -> tuple[int, ...]:
    """Return the shape of `out`, with 0 features where there are no values.

    Parameters
    ----------
    case : Case

    Returns
    -------
    tuple of int
    """
    head_dim_v = case.shape_q[-1] if case.head_dim_v is None else case.head_dim_v
    if case.cu_seqlens is not None or len(case.shape_q) == len(case.shape_k) == 2:
        return (*case.shape_q[:-1], head_dim_v)
    batch = np.broadcast_shapes(case.shape_q[:-3], case.shape_k[:-3])
    return (*batch, *case.shape_q[-3:-1], head_dim_v)


def oracle(case: Case, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Compute a case by the formula.

    Parameters
    ----------
    case : Case
    data : Data

    Returns
    -------
    out : float64 array of `expected_shape`
    lse : float64 array, shape ``out.shape[:-1]``
        Natural logarithm; -inf in rows that see no key.
    """
    return _reference(case, data.q, data.k, data.v, data.options)


def _reference(
    case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray, arrays: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    skipped = ("precision", "out_dtype", "max_seqlen_q", "max_seqlen_k", "num_splits")
    options = {name: value for name, value in case.options.items() if name not in skipped} | dict(arrays)
    if case.cached is not None:
        ends = case.cached.ends(k.shape[-2])
        return reference.attention_with_kv_cache(q, k, v, seqlens_k=ends, **options)
    if case.cu_seqlens is None:
        return reference.attention(q, k, v, **options)
    return reference.attention_varlen(q, k, v, *map(np.asarray, case.cu_seqlens), **options)


def check(case: Case, data: Data, outcome: Outcome, *, rounds_weights: bool = False) -> None:
    """Apply the error rule; AssertionError says what is wrong.

    Zeros, infinities and NaN must be exact. Other outputs may be off by twice what one ulp in every logit and weight
    can do, plus the rounding of the result to its type. The sum over keys gets no allowance that grows with their
    number, except inside a tile, where equal values round the same way again and again.

    Parameters
    ----------
    case : Case
    data : Data
    outcome : Outcome
        What was called, with what, and what it returned.
    rounds_weights : bool, optional
        Whether the kernel rounds weights to the format that it multiplies (`KernelSpec.rounds_weights`): the weight of
        key j may then be off by u w_j, with u the format's rounding, and the output by
        ``u sum_j w_j |v_j| / sum_j w_j``. The bound is not smaller than that sum, as equal weights round the same way.
        With `precision="tf32"` such a kernel rounds q, k and v too, and in 16 bits it caps logits to 2^-15.

    Raises
    ------
    AssertionError
        With the element that is farthest off, what was expected, and within what.
    """
    expected, expected_lse = oracle(case, data)
    out = outcome.out.astype(np.float64)
    assert outcome.clean, "memory outside the results was written"
    assert out.shape == expected.shape == expected_shape(case), f"shape {out.shape}, expected {expected.shape}"
    assert outcome.lse.shape == out.shape[:-1]
    assert outcome.lse.dtype == (np.float64 if data.q.dtype == np.float64 else np.float32)
    nothing = np.isneginf(expected_lse)
    assert (np.isneginf(outcome.lse) == nothing).all(), "lse is -inf in the wrong rows"
    assert (out[nothing] == 0).all(), "rows that see no key must be 0"
    assert np.isfinite(out).all(), f"{np.count_nonzero(~np.isfinite(out))} outputs are not finite"
    if outcome.lse.size == 0:
        return
    accumulator = np.float64 if data.q.dtype == np.float64 else np.float32
    eps = float(np.finfo(accumulator).eps)
    score, logit = _largest_score(case, data), _largest_logit(case, data)
    relative = eps * (8 + 4 * logit + 0.5 * np.sqrt(case.shape_q[-1]) * (1 + max(score, logit)))
    magnitude = float(np.abs(data.v.astype(np.float64)).max(initial=0))
    rounding = _rounding(outcome.out.dtype)
    per_tile = eps * min(case.shape_k[_sequence_axis(case)], 256) / 6
    tolerance = relative * magnitude + (per_tile + 1.01 * rounding) * np.abs(expected) + _smallest(outcome.out.dtype)
    if rounds_weights:
        tf32 = case.options.get("precision") == "tf32"
        unit = 2.0**-11 if tf32 else _rounding(data.q.dtype)
        capped = data.q.dtype.itemsize == 2 and case.options.get("softcap")
        of_logits = 2 * unit * score if tf32 else 2.0**-15 if capped else 0.0  # q and k are off by one unit each
        tolerance += 2 * of_logits * magnitude + (1 + tf32) * unit * oracle(case, data._replace(v=np.abs(data.v)))[0]
        relative += of_logits
    if out.size:
        error = np.abs(out - expected)
        worst = np.unravel_index(np.argmax(error - tolerance), error.shape)
        report = f"out{worst} is {out[worst]}, expected {expected[worst]} within {tolerance[worst]:.2e}"
        assert (error <= tolerance).all(), report
    visible = ~nothing
    lse_error = np.abs(outcome.lse[visible] - expected_lse[visible])
    lse_tolerance = relative + 2 * eps * np.abs(expected_lse[visible])
    assert (lse_error <= lse_tolerance).all(), f"lse is off by {lse_error.max():.2e}, allowed {lse_tolerance.min():.2e}"


def _largest_score(case: Case, data: Data) -> float:
    """Bound on |scale q.k|: the scale of its absolute error, even where terms cancel and a softcap follows."""
    scale = case.options.get("scale")
    scale = case.shape_q[-1] ** -0.5 if scale is None else abs(float(scale))
    if data.q.size == 0 or data.k.size == 0:
        return 0.0
    norms = [float(np.sqrt((x.astype(np.float64) ** 2).sum(-1)).max()) for x in (data.q, data.k)]
    return scale * norms[0] * norms[1]


def _largest_logit(case: Case, data: Data) -> float:
    """Bound on what enters exp: the scale of its absolute error."""
    largest = _largest_score(case, data)
    if case.options.get("softcap"):
        largest = min(largest, float(case.options["softcap"]))
    if "bias" in data.options:
        bias = data.options["bias"].astype(np.float64)
        largest += float(np.abs(bias[np.isfinite(bias)]).max(initial=0))
    if "alibi_slopes" in data.options:
        axis = _sequence_axis(case)
        distance = case.shape_q[axis] + case.shape_k[axis] + 60  # offsets are below 60
        largest += float(np.abs(data.options["alibi_slopes"].astype(np.float64)).max(initial=0)) * distance
    if "sinks" in data.options:
        largest += float(np.abs(data.options["sinks"].astype(np.float64)).max(initial=0))
    return largest


def _sequence_axis(case: Case) -> int:
    return -2 if case.cu_seqlens is None else 0


def _rounding(dtype: np.dtype) -> float:
    """Largest relative error of rounding to a type."""
    return {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}[dtype.name]


def _smallest(dtype: np.dtype) -> float:
    """Absolute error of rounding below the normal range (float32 results flush to zero there)."""
    return {"float16": 2.0**-25, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}[dtype.name]


def describe(case: Case, dtype: str) -> Problem:
    """Say what a case's call means, from NumPy arrays in its layout: to plan with, not to compute.

    Parameters
    ----------
    case : Case
    dtype : str
        As in `make_data`.

    Returns
    -------
    Problem
        What `cuflash.explain` shows as `problem`.
    """
    data = make_data(case, dtype)
    positional: list[Any] = [Poisoned(np, x.shape, x.dtype, case.layout).array for x in data[:3]]
    options: dict[str, Any] = dict(case.options) | data.options
    if case.function is attention_lse:
        return describe_attention_lse(*positional[:2], **options)[0]
    if case.cached is not None:
        placed, _ = _placed_in_cache(case, data)
        options |= {name: Poisoned(np, x.shape, x.dtype, _layout_of(case, x), x).array for name, x in placed.items()}
        options.setdefault("seqlens_k", case.cached.lengths)
        return describe_kv_cache(positional[0], options.pop("k"), options.pop("v"), **options)[0]
    if case.cu_seqlens is None:
        return describe_attention(*positional, **options)[0]
    return describe_varlen(*positional, *(np.asarray(values, np.int32) for values in case.cu_seqlens), **options)[0]
