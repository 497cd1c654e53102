"""Random calls on the NumPy back end and on every row of the kernel table, and relations that hold between calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.plan.table import KERNELS, KernelSpec
from cuflash.problem.arrays import DTYPES, FLOAT_NAMES, INTEGER_NAMES
from cuflash.testing import (
    LAYOUTS,
    Cached,
    Case,
    Data,
    Outcome,
    Poisoned,
    check,
    expected_shape,
    make_data,
    results_of,
    run,
)

Shape = tuple[int, ...]

LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
HEAD_DIMS = (1, 2, 3, 7, 8, 9, 16, 24, 32, 40, 48, 64, 72, 80, 96, 128, 192, 256)
GPU_HEAD_DIMS = (8, 17, 40, 64, 128)
"""Few, as each bucket is compiled anew."""
SEQLENS = st.one_of(st.sampled_from(LENGTHS), st.integers(1, 200), st.integers(1, 200))
WORK = 40_000_000
"""Limit for the multiplications of one call: the float64 definition takes longest."""
SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


class Call(NamedTuple):
    """One random call; its arrays follow from the seed."""

    case: Case
    """Shapes with all axes, and options, as cuflash.testing judges them."""
    dtype: str
    shapes: Mapping[str, Shape]
    """Of q, k and v as they are passed: axes may be missing or 1 where they broadcast."""
    layouts: Mapping[str, str]
    """By argument name."""
    boundary_dtypes: tuple[str, ...]
    """Of cu_seqlens_q and, if it is passed, cu_seqlens_k."""
    poison: float | None
    """What stands in rows of k and v that nobody sees."""
    spread: float
    """Size of q."""
    mean: float
    """Of k and v."""
    value_spread: float
    seed: int


def _one_in(count: int, draw: Callable[[Any], Any]) -> bool:
    # Hypothesis prefers the ends of a range.
    return draw(st.integers(0, count - 1)) == count // 2


def _shrunk(shape: Shape, draw: Callable[[Any], Any]) -> Shape:
    """Leave out leading axes or make axes 1, such that the result still broadcasts to `shape`."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if _one_in(4, draw) else length for length in kept)


def _layouts(rank: int) -> tuple[str, ...]:
    if rank == 0:
        return ("contiguous", "odd_bytes")
    return LAYOUTS if rank > 1 else ("contiguous", "reversed", "every_second", "odd_bytes")


def _draw_layouts(draw: Callable[[Any], Any], ranks: Mapping[str, int], results: bool) -> dict[str, str]:
    layouts = {name: draw(st.sampled_from(("contiguous", *_layouts(rank)))) for name, rank in ranks.items()}
    if results:
        for name, rank in (("out", ranks["out"]), ("lse", ranks["out"] - 1)):
            layouts[name] = draw(st.sampled_from([x for x in _layouts(rank) if x != "broadcast"]))
    else:
        del layouts["out"]
    return layouts


def _head_dims(draw: Callable[[Any], Any], gpu: bool) -> tuple[int, int]:
    dims = st.sampled_from(GPU_HEAD_DIMS) if gpu else st.one_of(st.sampled_from(HEAD_DIMS), st.integers(1, 512))
    head_dim = draw(dims)
    return head_dim, draw(dims) if _one_in(3, draw) else head_dim


def _score_options(draw: Callable[[Any], Any], dtype: str, gpu: bool) -> dict[str, Any]:
    """Draw options that are no arrays and that both functions have."""
    options: dict[str, Any] = {"causal": draw(st.sampled_from((False, False, True, "bottom_right", "top_left")))}
    if _one_in(4, draw):
        side = st.sampled_from((None, 0, 1, 5, 16, 63, 64, 65, 150, 2**40))
        options["window"] = (draw(side), draw(side))
    if _one_in(4, draw):
        options["scale"] = draw(st.sampled_from((0, 1, -0.3, 2.5, 1e-30, np.float32(0.1))))
    if _one_in(4, draw):
        options["softcap"] = draw(st.sampled_from((0.5, 3.0, 50, 1e30)))
    if _one_in(4, draw):
        options["out_dtype"] = draw(st.sampled_from(FLOAT_NAMES))
    if _one_in(4, draw):
        # TF32 is allowed to err more on a GPU.
        options["precision"] = "tf32" if dtype == "float32" and not gpu and draw(st.booleans()) else "ieee"
    return options


def _values(draw: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        "poison": draw(st.sampled_from((None, math.nan, math.inf, -math.inf))),
        "spread": draw(st.sampled_from((1.0, 1.0, 0.01, 6.0))),
        "mean": draw(st.sampled_from((0.0, 0.0, 1.0, -3.0))),
        "value_spread": draw(st.sampled_from((1.0, 1.0, 1e-6, 1e3))),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def _heads(draw: Callable[[Any], Any]) -> tuple[int, int]:
    num_heads_kv = 0 if _one_in(30, draw) else draw(st.integers(1, 3))
    return num_heads_kv * draw(st.sampled_from((1, 1, 2, 3, 4, 8))), num_heads_kv


@st.composite
def dense_calls(draw: Callable[[Any], Any], gpu: bool) -> Call:
    """Draw a call of `attention`."""
    dtype = draw(st.sampled_from(FLOAT_NAMES))
    lengths = st.just(0) if _one_in(30, draw) else st.sampled_from((1, 2, 2, 3))
    batch = tuple(draw(st.lists(lengths, max_size=4)))
    num_heads_q, num_heads_kv = _heads(draw)
    seqlen_q, seqlen_k, (head_dim, head_dim_v) = draw(SEQLENS), draw(SEQLENS), _head_dims(draw, gpu)
    if math.prod(batch) * num_heads_q * seqlen_q * seqlen_k * (head_dim + head_dim_v) > WORK:
        batch, num_heads_q = (1,) * len(batch), num_heads_q // max(num_heads_kv, 1)
        num_heads_kv = min(num_heads_kv, 1)

    leading = {name: _shrunk(batch, draw) for name in "qkv"}
    # Somebody must have the axes that the others leave out.
    leading[draw(st.sampled_from("qkv"))] = batch
    heads = {"q": num_heads_q, "k": num_heads_kv, "v": num_heads_kv}
    rows = {"q": (seqlen_q, head_dim), "k": (seqlen_k, head_dim), "v": (seqlen_k, head_dim_v)}
    shapes = {}
    for name in "qkv":
        without_heads = leading[name] == () and heads[name] == 1 and draw(st.booleans())
        shapes[name] = rows[name] if without_heads else (*leading[name], heads[name], *rows[name])
    is_2d = all(len(shape) == 2 for shape in shapes.values())

    options = _score_options(draw, dtype, gpu)
    scores = (*batch, num_heads_q, seqlen_q, seqlen_k)
    arrays: dict[str, tuple[Shape, str]] = {}
    if _one_in(4, draw):
        arrays["bias"] = _shrunk(scores, draw), draw(st.sampled_from(FLOAT_NAMES))
    if _one_in(4, draw):
        arrays["mask"] = _shrunk(scores, draw), "bool"
    for name in ("alibi_slopes", "sinks"):
        if _one_in(4, draw):
            arrays[name] = _shrunk(scores[:-2], draw), draw(st.sampled_from(FLOAT_NAMES))
    if isinstance(options["causal"], bool) and draw(st.booleans()):
        if draw(st.booleans()):
            arrays["query_offset"] = _shrunk(batch, draw), draw(st.sampled_from(INTEGER_NAMES))
        else:
            near = "alibi_slopes" in arrays
            options["query_offset"] = draw(st.sampled_from((0, -20, 50) if near else (0, -70, 5, 150, 2**40, -(2**40))))

    give_out = _one_in(3, draw)
    ranks = {name: len(shape) for name, shape in shapes.items()}
    ranks |= {name: len(shape) for name, (shape, _) in arrays.items()} | {"out": 2 if is_2d else len(batch) + 3}
    full_q = shapes["q"] if is_2d else (*batch, num_heads_q, seqlen_q, head_dim)
    full_k = shapes["k"] if is_2d else (*batch, num_heads_kv, seqlen_k, head_dim)
    case = Case("random", full_q, full_k, head_dim_v, options, arrays, give_out=give_out)
    return Call(case, dtype, shapes, _draw_layouts(draw, ranks, give_out), (), **_values(draw))


def lse_calls(gpu: bool) -> st.SearchStrategy[Call]:
    """Calls of `attention_lse`: those of `attention` without values, whose leading axes the queries have then."""

    def without_values(call: Call) -> Call:
        options = {name: value for name, value in call.case.options.items() if name != "out_dtype"}
        shapes = {**call.shapes, "q": call.case.shape_q, "v": (*call.shapes["v"][:-1], 0)}
        layout = call.layouts["q"] if len(shapes["q"]) == len(call.shapes["q"]) else "contiguous"
        return call._replace(
            case=call.case._replace(head_dim_v=0, options=options), shapes=shapes, layouts={**call.layouts, "q": layout}
        )

    return dense_calls(gpu).map(without_values)


@st.composite
def packed_calls(draw: Callable[[Any], Any], gpu: bool) -> Call:
    """Draw a call of `attention_varlen`."""
    dtype = draw(st.sampled_from(FLOAT_NAMES))
    num_heads_q, num_heads_kv = _heads(draw)
    head_dim, head_dim_v = _head_dims(draw, gpu)
    pairs = draw(st.lists(st.tuples(SEQLENS, SEQLENS), max_size=5))
    if num_heads_q * sum(n * m for n, m in pairs) * (head_dim + head_dim_v) > WORK:
        num_heads_q, num_heads_kv = num_heads_q // num_heads_kv, 1
    same = _one_in(4, draw)
    lengths = [[pair[side] for pair in pairs] for side in (0, 0 if same else 1)]
    boundaries = [tuple(accumulate(each, initial=0)) for each in lengths]
    tails = [draw(st.sampled_from((0, 0, 1, 40))) for _ in range(2)]
    total_q, total_k = (ends[-1] + tail for ends, tail in zip(boundaries, tails, strict=True))
    shapes = {"q": (total_q, num_heads_q, head_dim), "k": (total_k, num_heads_kv, head_dim)}
    shapes["v"] = (*shapes["k"][:-1], head_dim_v)

    options = _score_options(draw, dtype, gpu)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        if _one_in(4, draw):
            options[name] = draw(st.sampled_from((0, 1, 64, 10_000)))
    arrays: dict[str, tuple[Shape, str]] = {}
    for name in ("alibi_slopes", "sinks"):
        if _one_in(4, draw):
            arrays[name] = _shrunk((len(pairs), num_heads_q), draw), draw(st.sampled_from(FLOAT_NAMES))

    give_out = _one_in(3, draw)
    integers = [name for name in INTEGER_NAMES if np.iinfo(name).max >= max(total_q, total_k)]
    boundary_dtypes = tuple(draw(st.sampled_from(integers)) for _ in range(1 if same else 2))
    ranks = {"q": 3, "k": 3, "v": 3, "out": 3, "cu_seqlens_q": 1, "cu_seqlens_k": 1}
    ranks |= {name: len(shape) for name, (shape, _) in arrays.items()}
    ends = boundaries[0], boundaries[1]
    case = Case("random", shapes["q"], shapes["k"], head_dim_v, options, arrays, give_out=give_out, cu_seqlens=ends)
    return Call(case, dtype, shapes, _draw_layouts(draw, ranks, give_out), boundary_dtypes, **_values(draw))


@st.composite
def alike_calls(draw: Callable[[Any], Any]) -> Call:
    """Draw a call of `attention` that often differs from an earlier one in lengths or strides alone."""
    batch = draw(st.sampled_from(((), (2,), (1, 3), (1, 1, 2, 1, 1))))
    seqlen_q, seqlen_k = draw(SEQLENS), draw(SEQLENS)
    shapes = {"q": (*batch, 4, seqlen_q, 64), "k": (*batch, 2, seqlen_k, 64), "v": (*batch, 2, seqlen_k, 64)}
    options = draw(st.sampled_from(({"causal": False}, {"causal": True}, {"causal": "top_left", "window": (20, None)})))
    layouts = {name: draw(st.sampled_from(("contiguous", "contiguous", "swapped", *LAYOUTS))) for name in "qkv"}
    case = Case("random", shapes["q"], shapes["k"], 64, options)
    return Call(case, draw(st.sampled_from(("float16", "float32"))), shapes, layouts, (), **_values(draw))


@st.composite
def cached_cases(draw: Callable[[Any], Any], gpu: bool) -> tuple[Case, str]:
    """Draw a call of `attention_with_kv_cache`, and its dtype."""
    dtype = draw(st.sampled_from(FLOAT_NAMES))
    num_heads_q, num_heads_kv = _heads(draw)
    head_dim, head_dim_v = _head_dims(draw, gpu)
    batch = 0 if _one_in(30, draw) else draw(st.integers(1, 4))
    page_size = draw(st.sampled_from((0, 0, 1, 3, 16, 64)))
    capacity, seqlen_q = draw(SEQLENS), draw(st.one_of(st.sampled_from((1, 1, 2, 5)), SEQLENS))
    capacity = -(-capacity // page_size) * page_size if page_size else capacity
    lengths = draw(st.lists(st.integers(0, capacity + 3), min_size=batch, max_size=batch))
    num_new = draw(st.sampled_from((0, 1, seqlen_q, 20)))
    if batch * num_heads_q * seqlen_q * capacity * (head_dim + head_dim_v) > WORK:
        num_heads_q, num_heads_kv = num_heads_q // max(num_heads_kv, 1), min(num_heads_kv, 1)
    options = _score_options(draw, dtype, gpu)
    if _one_in(3, draw):
        options["num_splits"] = draw(st.integers(1, 5))
    scores = (batch, num_heads_q, seqlen_q, capacity)
    arrays: dict[str, tuple[Shape, str]] = {}
    for name, shape, dtypes in (
        ("bias", scores, FLOAT_NAMES), ("mask", scores, ("bool",)), ("alibi_slopes", scores[:2], FLOAT_NAMES),
        ("sinks", scores[:2], FLOAT_NAMES),
    ):  # fmt: skip
        if _one_in(5, draw):
            arrays[name] = _shrunk(shape, draw), draw(st.sampled_from(dtypes))
    layout = draw(st.sampled_from([name for name in LAYOUTS if name != "broadcast"]))
    known = lengths[0] if batch and draw(st.booleans()) else tuple(lengths)
    shape_q, shape_k = (batch, num_heads_q, seqlen_q, head_dim), (batch, num_heads_kv, capacity, head_dim)
    case = Case("random", shape_q, shape_k, head_dim_v, options, arrays, layout, give_out=_one_in(3, draw))
    return case._replace(cached=Cached(known, num_new, page_size)), dtype


def assert_cache_right_twice(call: tuple[Case, str], xp: Any, function: Any = None, *, rounds: bool = False) -> None:
    """The same as `assert_right_twice`."""
    case, dtype = call
    data = make_data(case, dtype)
    first, second = (run(case, data, xp, function) for _ in range(2))
    check(case, data, first, rounds_weights=rounds)
    assert first.out.tobytes() == second.out.tobytes() and first.lse.tobytes() == second.lse.tobytes(), "not repeatable"


def _data(call: Call) -> tuple[Data, Data]:
    """Return the arrays as the definition is to read them, and with poison where nobody looks."""
    rng = np.random.default_rng(call.seed)
    element = DTYPES[call.dtype]
    drawn = {
        "q": call.spread * rng.standard_normal(call.shapes["q"]),
        "k": call.mean + rng.standard_normal(call.shapes["k"]),
        "v": call.value_spread * (call.mean + rng.standard_normal(call.shapes["v"])),
    }
    arrays = {name: _as_stored(x.astype(element), call.layouts[name]) for name, x in drawn.items()}
    options = make_data(call.case, call.dtype, call.seed).options
    options = {name: _as_stored(x, call.layouts[name]) for name, x in options.items()}
    clean = Data(arrays["q"], arrays["k"], arrays["v"], options)
    if call.poison is None:
        return clean, clean
    seen = dict(zip("qkv", _seen(call, clean), strict=True))
    poisoned = {name: _poisoned(arrays[name], seen[name], call.layouts[name], call.poison) for name in "qkv"}
    return clean, Data(poisoned["q"], poisoned["k"], poisoned["v"], options)


def _as_stored(x: np.ndarray, layout: str) -> np.ndarray:
    """Repeat the first matrix, where the layout has stride 0 on all other axes."""
    if layout != "broadcast" or x.size == 0:
        return x
    return np.broadcast_to(x[(0,) * (x.ndim - 2)], x.shape)


def _seen(call: Call, data: Data) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which rows (*batch, heads, sequence) of q, k and v some result may depend on.

    A row of k may hold anything as soon as all queries hide it, a row of v only if its position hides it.
    """
    case = call.case
    if case.cu_seqlens is not None:
        row_q, row_k, row_v = (np.zeros(call.shapes[name][:2], bool) for name in "qkv")
        for (begin_q, end_q), (begin_k, end_k) in zip(*map(pairwise, case.cu_seqlens), strict=True):
            row_q[begin_q:end_q] = True
            seqlen_q, seqlen_k = end_q - begin_q, end_k - begin_k
            offset = 0 if case.options["causal"] == "top_left" else seqlen_k - seqlen_q
            row_k[begin_k:end_k] = np.any(_by_position(case, seqlen_q, seqlen_k, offset), axis=0, keepdims=True).T
        row_v[...] = row_k
        return row_q, row_k, row_v
    *batch, num_heads_q, seqlen_q, _ = case.shape_q if len(case.shape_q) > 2 else (1, *case.shape_q)
    *_, num_heads_kv, seqlen_k, _ = case.shape_k if len(case.shape_k) > 2 else (1, *case.shape_k)
    offset = data.options.get("query_offset", case.options.get("query_offset"))
    if offset is None:
        offset = 0 if case.options["causal"] == "top_left" else seqlen_k - seqlen_q
    # In 64 bits, as offsets may be unsigned.
    position = np.broadcast_to(np.asarray(offset).astype(np.int64), batch)[..., np.newaxis, np.newaxis, np.newaxis]
    visible = _by_position(case, seqlen_q, seqlen_k, position)
    seen_v = np.broadcast_to(visible.any(-2), (*batch, num_heads_kv, seqlen_k))
    visible = np.broadcast_to(visible, (*batch, num_heads_q, seqlen_q, seqlen_k))
    if "mask" in data.options:
        visible = visible & data.options["mask"]
    if "bias" in data.options:
        visible = visible & (data.options["bias"].astype(np.float64) != -np.inf)
    group_size = num_heads_q // max(num_heads_kv, 1)
    seen_k = np.any(np.any(visible, axis=-2).reshape(*batch, num_heads_kv, group_size, seqlen_k), axis=-2)
    return np.ones((*batch, num_heads_q, seqlen_q), bool), seen_k, seen_v


def _by_position(case: Case, seqlen_q: int, seqlen_k: int, offset: Any) -> np.ndarray:
    left, right = case.options.get("window", (None, None))
    distance = np.arange(seqlen_k) - (np.arange(seqlen_q)[:, np.newaxis] + offset)
    visible = np.ones(distance.shape, bool)
    if case.options["causal"]:
        visible &= distance <= 0
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def _poisoned(x: np.ndarray, seen: np.ndarray, layout: str, poison: float) -> np.ndarray:
    """Put poison into the rows of x that are not in `seen`, which has all leading axes."""
    if x.size == 0:
        return x
    if x.ndim == 2:
        seen = np.any(seen, axis=tuple(range(seen.ndim - 1)))
    else:
        seen = np.any(seen, axis=tuple(range(seen.ndim - x.ndim + 1)))
        repeated = tuple(axis for axis in range(seen.ndim) if layout == "broadcast" or x.shape[axis] == 1)
        seen = np.any(seen, axis=tuple(axis for axis in repeated if axis < seen.ndim - 1), keepdims=True)
    return np.where(seen[..., np.newaxis], x, x.dtype.type(poison))


def _run(call: Call, data: Data, xp: Any, function: Any = None) -> Outcome:
    """Make the call in poisoned memory; like cuflash.testing.run, with a layout for each array."""
    case = call.case

    def stored(name: str, x: np.ndarray) -> Poisoned:
        return Poisoned(xp, x.shape, x.dtype, call.layouts[name], x)

    inputs = {name: stored(name, x) for name, x in zip("qkv", data[:3], strict=True)}
    options = {name: stored(name, x) for name, x in data.options.items()}
    if case.cu_seqlens is not None:
        names = ("cu_seqlens_q", "cu_seqlens_k")
        for name, values, dtype in zip(names, case.cu_seqlens, call.boundary_dtypes, strict=False):
            inputs[name] = stored(name, np.asarray(values, dtype))
    results: dict[str, Poisoned] = {}
    if case.give_out:
        shape = expected_shape(case)
        lse_dtype = np.dtype(np.float64 if call.dtype == "float64" else np.float32)
        out_dtype = DTYPES[case.options.get("out_dtype", call.dtype)]
        results["out"] = Poisoned(xp, shape, out_dtype, call.layouts["out"])
        results["lse"] = Poisoned(xp, shape[:-1], lse_dtype, call.layouts["lse"])
    keywords = {name: x.array for name, x in (options | results).items()} | dict(case.options)
    arrays = [x.array for x in inputs.values()]
    out, lse = results_of(case, function or case.function, arrays, keywords)
    if out is None:
        out = xp.empty(expected_shape(case), DTYPES[call.dtype])
    elif results:
        assert out is results["out"].array
    clean = all(x.unchanged() for x in (inputs | options).values())
    clean &= all(x.unchanged(outside_only=True) for x in results.values())
    if results:
        assert lse is results["lse"].array
        out, lse = results["out"].values(), results["lse"].values()
    elif xp is not np:
        out, lse = out.get(), lse.get()
    return Outcome(out, lse, clean)


def assert_right_twice(call: Call, xp: Any, function: Any = None, spec: KernelSpec | None = None) -> None:
    """Compare with float64, then a second call with the first; `function` stands in for the one that the case names."""
    clean, poisoned = _data(call)
    first = _run(call, poisoned, xp, function)
    check(call.case, clean, first, rounds_weights=spec is not None and spec.rounds_weights)
    second = _run(call, poisoned, xp, function)
    assert first.out.tobytes() == second.out.tobytes() and first.lse.tobytes() == second.lse.tobytes(), "not repeatable"


@settings(SETTINGS, max_examples=500)
@given(dense_calls(gpu=False))
def test_dense_on_the_cpu(call: Call) -> None:
    assert_right_twice(call, np)


@settings(SETTINGS, max_examples=200)
@given(lse_calls(gpu=False))
def test_lse_on_the_cpu(call: Call) -> None:
    assert_right_twice(call, np)


@settings(SETTINGS, max_examples=250)
@given(packed_calls(gpu=False))
def test_packed_on_the_cpu(call: Call) -> None:
    assert_right_twice(call, np)


@settings(SETTINGS, max_examples=250)
@given(cached_cases(gpu=False))
def test_caches_on_the_cpu(call: tuple[Case, str]) -> None:
    assert_cache_right_twice(call, np)


def rows_of(operation: str) -> list[KernelSpec]:
    return [spec for spec in KERNELS if operation in spec.operations]


@pytest.mark.gpu
@pytest.mark.parametrize("spec", rows_of("attention_with_kv_cache"), ids=lambda spec: spec.name)
def test_caches_on_the_gpu(spec: KernelSpec) -> None:
    import cupy

    @settings(SETTINGS, max_examples=80)
    @given(cached_cases(gpu=True))
    def right(call: tuple[Case, str]) -> None:
        with cuflash.options(kernel=spec.name):
            try:
                assert_cache_right_twice(call, cupy, rounds=spec.rounds_weights)
            except ValueError as error:
                if "cannot serve this call" not in str(error):
                    raise

    right()


def _assert_right_twice_on_gpu(spec: KernelSpec, call: Call) -> None:
    import cupy

    with cuflash.options(kernel=spec.name):
        try:
            assert_right_twice(call, cupy, spec=spec)
        except ValueError as error:
            # A row may refuse; tests/kernels/test_forward.py knows when.
            if "cannot serve this call" not in str(error):
                raise


DRAWN = {
    "dense": ("attention", dense_calls(gpu=True), 100),
    "lse": ("attention_lse", lse_calls(gpu=True), 50),
    "alike": ("attention", alike_calls(), 300),
    "packed": ("attention_varlen", packed_calls(gpu=True), 50),
}
"""Operation, calls, and how many of them."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "calls", "max_examples"),
    [
        pytest.param(spec, calls, max_examples, id=f"{spec.name}-{name}")
        for name, (operation, calls, max_examples) in DRAWN.items()
        for spec in rows_of(operation)
    ],
)
def test_on_the_gpu(spec: KernelSpec, calls: st.SearchStrategy[Call], max_examples: int) -> None:
    @settings(SETTINGS, max_examples=max_examples)
    @given(calls)
    def right(call: Call) -> None:
        _assert_right_twice_on_gpu(spec, call)

    right()


BACK_ENDS = [pytest.param("numpy", id="cpu"), pytest.param("cupy", id="gpu", marks=pytest.mark.gpu)]
relations = pytest.mark.parametrize("back_end", BACK_ENDS)
dtypes = pytest.mark.parametrize("dtype", FLOAT_NAMES)


class Attend:
    """Calls with results as wide as the arithmetic: comparisons see its error, not the rounding of the result."""

    def __init__(self, back_end: str, dtype: str) -> None:
        self._xp = pytest.importorskip(back_end)
        self.dtype = DTYPES[dtype]
        self._wide = np.float64 if dtype == "float64" else np.float32
        # Kernels on tensor cores round weights, each call in its own way: outputs differ by as much.
        rounds = back_end == "cupy" and any(spec.rounds_weights for spec in KERNELS)
        units = {"float16": 2.0**-11, "bfloat16": 2.0**-8} if rounds else {}
        self._weight_rounding = 8 * units.get(dtype, 0.0)

    def __call__(self, *arrays: np.ndarray, function: Any = cuflash.attention, **options: Any) -> tuple[Any, Any]:
        moved = [self._xp.asarray(x) for x in arrays]
        options = {name: self._xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        results = function(*moved, return_lse=True, out_dtype=self._wide, **options)
        out, lse = (x if self._xp is np else x.get() for x in results)
        return out.astype(np.float64), lse.astype(np.float64)

    def draw(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(self.dtype)

    def assert_equal(self, a: tuple[Any, Any], b: tuple[Any, Any], scale: float = 1.0) -> None:
        """Compare outputs and lse; `scale` is the size of the values where they are not standard normal."""
        # Logits here stay below 20, so each may be off by 20 ulp.
        tolerance = 100 * float(np.finfo(self._wide).eps)
        for x, y, size, rounding in zip(a, b, (scale, 1.0), (self._weight_rounding, 0.0), strict=True):
            assert x.shape == y.shape
            assert (np.isneginf(x) == np.isneginf(y)).all()
            finite = np.isfinite(x)
            assert np.isfinite(y[finite]).all() and not np.isnan(x).any() and not np.isnan(y).any()
            allowed = tolerance + rounding
            np.testing.assert_allclose(x[finite], y[finite], rtol=allowed, atol=allowed * size)


@pytest.fixture
def attend(back_end: str, dtype: str) -> Attend:
    return Attend(back_end, dtype)


@pytest.fixture
def qkv(attend: Attend, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return attend.draw(rng, 3, 4, 90, 40), attend.draw(rng, 3, 2, 150, 40), attend.draw(rng, 3, 2, 150, 24)


@relations
@dtypes
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_order_of_the_keys_does_not_matter(attend: Attend, qkv: Any, rng: np.random.Generator, softcap: Any) -> None:
    q, k, v = qkv
    options = {"softcap": softcap, "sinks": np.array([0.5, -1, 3, 0])}
    mask, bias = rng.random((3, 1, 90, 150)) < 0.5, attend.draw(rng, 4, 1, 150)
    order = rng.permutation(150)
    whole = attend(q, k, v, mask=mask, bias=bias, **options)
    parts = (x[..., order, :] for x in (k, v))
    attend.assert_equal(whole, attend(q, *parts, mask=mask[..., order], bias=bias[..., order], **options))


@relations
@dtypes
@pytest.mark.parametrize("cut", [0, 1, 64, 77, 149])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "alibi"])
def test_halves_of_the_keys_merge(attend: Attend, qkv: Any, rng: np.random.Generator, cut: int, name: str) -> None:
    q, k, v = qkv
    choices: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (20, 9), "softcap": 3.0},
        "alibi": {"alibi_slopes": np.array([0.1, 0.03, 0, -0.05])},
    }
    options = choices[name]
    bias, sinks = attend.draw(rng, 90, 150), np.array([0.5, -1, 2, 0])
    whole = attend(q, k, v, bias=bias, sinks=sinks, query_offset=30, **options)
    halves = [
        attend(q, k[..., :cut, :], v[..., :cut, :], bias=bias[:, :cut], sinks=sinks, query_offset=30, **options),
        attend(q, k[..., cut:, :], v[..., cut:, :], bias=bias[:, cut:], query_offset=30 - cut, **options),
    ]
    lse = np.logaddexp(halves[0][1], halves[1][1])
    out = sum(np.exp(part_lse - lse)[..., np.newaxis] * part for part, part_lse in halves)
    attend.assert_equal(whole, (out, lse))


@relations
@dtypes
def test_a_batch_element_is_a_call_of_its_own(attend: Attend, qkv: Any, rng: np.random.Generator) -> None:
    offsets, slopes = np.array([-5, 20, 70]), rng.random((3, 4)) / 10
    bias, sinks = attend.draw(rng, 3, 1, 90, 1), attend.draw(rng, 3, 1)
    out, lse = attend(*qkv, causal=True, query_offset=offsets, alibi_slopes=slopes, bias=bias, sinks=sinks)
    for i in range(3):
        own = {"alibi_slopes": slopes[i], "bias": bias[i], "sinks": sinks[i]}
        alone = attend(*(x[i] for x in qkv), causal=True, query_offset=int(offsets[i]), **own)
        attend.assert_equal((out[i], lse[i]), alone)


@relations
@dtypes
@pytest.mark.parametrize("seqlen_q", [1, 5, 90])
def test_groups_are_repeated_heads(attend: Attend, qkv: Any, seqlen_q: int) -> None:
    q, k, v = qkv
    q = q[..., :seqlen_q, :]
    repeated = (np.repeat(x, 2, axis=-3) for x in (k, v))
    attend.assert_equal(attend(q, k, v, causal=True), attend(q, *repeated, causal=True))


@relations
@dtypes
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_packed_is_sequence_by_sequence(attend: Attend, rng: np.random.Generator, causal: Any) -> None:
    ends_q, ends_k = np.array([0, 30, 30, 97, 100], np.int32), np.array([0, 64, 70, 70, 180], np.int64)
    q, k, v = attend.draw(rng, 105, 4, 40), attend.draw(rng, 190, 2, 40), attend.draw(rng, 190, 2, 24)
    slopes, sinks = rng.random((4, 4)) / 10, attend.draw(rng, 4, 1)
    options: dict[str, Any] = {"causal": causal, "window": (50, 3), "softcap": 4.0}
    per_head = {"alibi_slopes": slopes, "sinks": sinks}
    out, lse = attend(q, k, v, ends_q, ends_k, function=cuflash.attention_varlen, **per_head, **options)
    for i in range(4):
        rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        parts = (x.swapaxes(0, 1) for x in (q[rows], k[keys], v[keys]))
        alone = attend(*parts, alibi_slopes=slopes[i], sinks=sinks[i], **options)
        attend.assert_equal((out[rows].swapaxes(0, 1), lse[rows].swapaxes(0, 1)), alone)
    assert (out[100:] == 0).all() and np.isneginf(lse[100:]).all()


@relations
@dtypes
@pytest.mark.parametrize("offset", [-30, 0, 60, 200])
def test_causal_and_window_are_masks(attend: Attend, qkv: Any, offset: int) -> None:
    distance = np.arange(150) - (np.arange(90)[:, np.newaxis] + offset)
    masks = {
        (True, None): distance <= 0,
        (False, (40, 7)): (distance >= -40) & (distance <= 7),
        (True, (64, 64)): (distance >= -64) & (distance <= 0),
        (False, (None, 64)): distance <= 64,
    }
    for (causal, window), mask in masks.items():
        by_position = attend(*qkv, causal=causal, window=window, query_offset=offset)
        attend.assert_equal(by_position, attend(*qkv, mask=mask))
        attend.assert_equal(by_position, attend(*qkv, bias=np.where(mask, 0.0, -np.inf)))


@relations
@dtypes
def test_alibi_is_a_bias(attend: Attend, qkv: Any) -> None:
    slopes = np.array([0.1, 0.03, 0, -0.05])
    distance = np.abs(np.arange(150) - (np.arange(90)[:, np.newaxis] + 60))
    for options in ({}, {"causal": True}, {"window": (30, 30), "softcap": 2.0}):
        expected = attend(*qkv, bias=-slopes[:, np.newaxis, np.newaxis] * distance, **options)
        attend.assert_equal(attend(*qkv, alibi_slopes=slopes, **options), expected)


@relations
@dtypes
def test_a_sink_is_a_key_with_value_zero(attend: Attend, qkv: Any, rng: np.random.Generator) -> None:
    q, k, v = qkv
    sinks, mask = np.array([0.5, -20, 18, 0]), rng.random((90, 150)) < 0.1
    mask[::7] = False
    bias = np.zeros((4, 1, 151))
    bias[..., -1] = sinks[:, np.newaxis]
    more = (np.concatenate([x, np.zeros_like(x[..., :1, :])], axis=-2) for x in (k, v))
    expected = attend(q, *more, bias=bias, mask=np.concatenate([mask, np.ones((90, 1), bool)], axis=-1))
    attend.assert_equal(attend(q, k, v, sinks=sinks, mask=mask), expected)


@relations
@dtypes
def test_a_constant_bias_moves_only_the_lse(attend: Attend, qkv: Any) -> None:
    out, lse = attend(*qkv, causal=True)
    constants = np.array([8.0, -8, 16, -16])
    moved = attend(*qkv, causal=True, bias=constants[:, np.newaxis, np.newaxis])
    attend.assert_equal((out, lse + constants[:, np.newaxis]), moved)


@relations
@dtypes
def test_hugely_negative_logits_are_still_a_softmax(attend: Attend, qkv: Any) -> None:
    q, k, v = qkv
    out, lse = attend(q, k, v, bias=np.full((1, 1), -1e30, np.float32))
    mean = np.repeat(v.astype(np.float64).mean(-2, keepdims=True), 2, axis=-3)
    attend.assert_equal((out, lse), (np.broadcast_to(mean, out.shape), np.full(lse.shape, float(np.float32(-1e30)))))


@relations
@dtypes
def test_scale_and_query_are_one_factor(attend: Attend, qkv: Any) -> None:
    q, k, v = qkv
    attend.assert_equal(attend(q, k, v, scale=-0.125), attend(-2 * q, k, v, scale=0.0625))
    attend.assert_equal(attend(q, k, v, scale=0), attend(0 * q, k, v))


@relations
@dtypes
def test_equal_values_come_back(attend: Attend, qkv: Any) -> None:
    q, k, v = qkv
    out, lse = attend(q, k, np.full_like(v, 3.0), window=(10, 2), query_offset=-5)
    hidden = np.arange(90) < 3
    attend.assert_equal((out, lse), (np.where(hidden[:, np.newaxis], 0.0, np.full(out.shape, 3.0)), lse), scale=3.0)
    assert (np.isneginf(lse) == hidden).all()


@relations
@dtypes
@pytest.mark.parametrize("nothing", [math.nan, math.inf])
def test_only_queries_that_see_a_key_feel_it(
    attend: Attend, qkv: Any, rng: np.random.Generator, nothing: float
) -> None:
    q, k, v = qkv
    spoilt = k.copy()
    spoilt[..., 100, :] = nothing
    mask = rng.random((90, 150)) < 0.5
    distance = np.arange(150) - (np.arange(90)[:, np.newaxis] + 60)
    cases: list[tuple[dict[str, Any], np.ndarray]] = [
        ({"causal": True}, distance <= 0),
        ({"window": (20, 20)}, abs(distance) <= 20),
        ({"mask": mask}, mask),
    ]
    for options, visible in cases:
        unaware = ~visible[:, 100]
        assert unaware.any() and not unaware.all()
        (out, lse), (spoilt_out, spoilt_lse) = (attend(q, x, v, **options) for x in (k, spoilt))
        expected = out[..., unaware, :], lse[..., unaware]
        attend.assert_equal(expected, (spoilt_out[..., unaware, :], spoilt_lse[..., unaware]))
