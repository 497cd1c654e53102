"""`cuflash.dask.attention` against the float64 definition, and what its graph is made of."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from cases import CASES, CASES_BY_NAME

import cuflash
from cuflash import reference
from cuflash.problem.arrays import DTYPES, FLOAT_NAMES
from cuflash.testing import Case, check, make_data, oracle, run

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
import_module("cuflash.dask")

FITTING = [
    case
    for case in CASES
    if case.cu_seqlens is None and case.cached is None and case.head_dim_v != 0 and not case.give_out
    if "query_offset" not in case.arrays
]
TOGETHER = ("causal-200x131", "heads-6-2-100x90", "bias-mask-odd", "sinks-float32", "alibi-float32", "window-5-7")
"""Cases that run in all dtypes; the others take turns."""


@pytest.fixture(autouse=True)
def one_after_the_other() -> Iterator[None]:
    """Tests that ask for no scheduler need no threads."""
    with dask.config.set(scheduler="synchronous"):
        yield


def cut(rng: np.random.Generator, length: int, most: int = 4) -> tuple[int, ...]:
    """Draw lengths of chunks, some of them 0."""
    edges = np.sort(rng.integers(0, length + 1, rng.integers(0, most)))
    return tuple(np.diff([0, *edges, length]).tolist())


def chunked(rng: np.random.Generator, x: np.ndarray, most: int = 4) -> Any:
    return da.from_array(x, chunks=tuple(cut(rng, length, most) for length in x.shape))


class Chunked:
    """`cuflash.attention` by way of Dask arrays in chunks that are drawn."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
        rng = self.rng
        q, k, v = (chunked(rng, x) for x in (q, k, v))
        for name in ("bias", "mask", "alibi_slopes", "sinks"):
            if name in options and rng.random() < 0.5:
                options[name] = chunked(rng, options[name])
        results = cuflash.dask.attention(q, k, v, **options)
        out, lse = results
        assert out.chunks == (*lse.chunks, v.shape[-1:]) and lse.chunks[-1] == q.chunks[-2]
        assert q.ndim == 2 or lse.chunks[-2] == q.chunks[-3]
        computed = dask.compute(*results)
        for x, values in zip(results, computed, strict=True):
            assert (x.shape, x.dtype) == (values.shape, values.dtype)
        return computed


def in_turn(case: Case) -> list[str]:
    return list(FLOAT_NAMES) if case.name in TOGETHER else [FLOAT_NAMES[crc32(case.name.encode()) % 4]]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, id=f"{case.name}-{dtype}") for case in FITTING for dtype in in_turn(case)],
)
def test_cases(case: Case, dtype: str) -> None:
    data = make_data(case, dtype)
    first, again = (run(case, data, np, Chunked(crc32(case.name.encode()))) for _ in range(2))
    check(case, data, first)
    assert first.out.tobytes() == again.out.tobytes() and first.lse.tobytes() == again.lse.tobytes()


def naive(q: Any, k: Any, v: Any) -> np.ndarray:
    """Compute the formula step by step in the dtype of the arrays."""
    scores = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)


def test_error_is_at_most_twice_that_of_the_formula(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((2, n, 32)).astype(np.float32) for n in (200, 3000, 3000))
    v += 1
    exact, _ = reference.attention(q, k, v)
    out = cuflash.dask.attention(*(da.from_array(x, chunks=(1, 70, 32)) for x in (q, k, v))).compute()
    assert abs(out - exact).max() <= 2 * abs(naive(q, k, v) - exact).max()


def draw_options(rng: np.random.Generator, batch: tuple[int, ...], heads: int, n: int, m: int) -> dict[str, Any]:
    def some(*axes: int) -> tuple[int, ...]:
        """Shape that broadcasts to axes, with fewer of them or not."""
        shape = [length if rng.random() < 0.7 else 1 for length in axes]
        return tuple(shape[rng.integers(0, len(shape) + 1) :])

    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["causal"] = [True, "top_left", "bottom_right"][rng.integers(3)]
    if rng.random() < 0.3:
        options["window"] = tuple(None if rng.random() < 0.3 else int(rng.integers(0, 2 * m + 2)) for _ in range(2))
    if not isinstance(options.get("causal"), str) and rng.random() < 0.4:
        options["query_offset"] = int(rng.integers(-n - 5, m + 6))
    if rng.random() < 0.2:
        options["softcap"] = 2.0
    if rng.random() < 0.2:
        options["scale"] = float(rng.normal())
    if rng.random() < 0.3:
        options["bias"] = rng.standard_normal(some(*batch, heads, n, m))
        options["bias"][rng.random(options["bias"].shape) < 0.1] = -np.inf
    if rng.random() < 0.3:
        options["mask"] = rng.random(some(*batch, heads, n, m)) < 0.6
    if rng.random() < 0.3:
        options["alibi_slopes"] = rng.random(some(*batch, heads))
    if rng.random() < 0.3:
        options["sinks"] = rng.standard_normal(some(*batch, heads))
    return options


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed: int) -> None:
    rng = np.random.default_rng([7, seed])
    batch = tuple(rng.integers(1, 4, rng.integers(0, 3)).tolist())
    heads_kv, group = (int(x) for x in rng.integers(1, 5, 2))
    n, m = (int(x) for x in rng.integers(0, 60, 2))
    options = draw_options(rng, batch, heads_kv * group, n, m)
    axes = [[1 if rng.random() < 0.3 else length for length in batch] for _ in range(3)]
    batch = tuple(np.broadcast_shapes(*map(tuple, axes)))
    for name in ("bias", "mask", "alibi_slopes", "sinks"):
        inner = 3 if name in ("bias", "mask") else 1
        if name in options and options[name].ndim > inner:
            lead = options[name].shape[:-inner]
            first = tuple(
                slice(None) if x == y else slice(0, 1) for x, y in zip(lead, batch[-len(lead) :], strict=True)
            )
            options[name] = options[name][first]
    shapes = (heads_kv * group, n, 8), (heads_kv, m, 8), (heads_kv, m, 5)
    q, k, v = (rng.standard_normal((*a, *s)) for a, s in zip(axes, shapes, strict=True))
    expected, expected_lse = reference.attention(q, k, v, **options)
    out, lse = Chunked(seed)(q, k, v, return_lse=True, **options)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-14, atol=1e-13)


def test_keys_that_no_query_sees_may_hold_anything(rng: np.random.Generator) -> None:
    q, k, v = rng.standard_normal((3, 2, 50, 8))
    options = {"window": (5, 3), "query_offset": -20}
    chunks = (1, 7, 8)
    clean = cuflash.dask.attention(*(da.from_array(x, chunks=chunks) for x in (q, k, v)), **options).compute()
    k[:, 33:], v[:, 33:] = np.nan, np.inf
    again = cuflash.dask.attention(*(da.from_array(x, chunks=chunks) for x in (q, k, v)), **options).compute()
    assert clean.tobytes() == again.tobytes() and (clean[:, :17] == 0).all() and clean[:, 17:].all()


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_huge_logits_do_not_forget_how_many_keys_there_are(dtype: str, rng: np.random.Generator) -> None:
    """One chunk has a key, another one 30, all with logits of -1e9: weights are equal."""
    q, k = np.zeros((2, 5, 8), DTYPES[dtype]), np.zeros((2, 31, 8), DTYPES[dtype])
    v = rng.integers(-8, 8, (2, 31, 4)).astype(DTYPES[dtype])
    bias = da.full((31,), -1e9, chunks=31, dtype=np.float64)
    out, lse = cuflash.dask.attention(
        da.from_array(q), da.from_array(k, chunks=(2, (1, 30), 8)), v, bias=bias, return_lse=True
    )
    exact = np.broadcast_to(v.astype(np.float64).mean(1, keepdims=True), out.shape)
    np.testing.assert_allclose(out.compute().astype(np.float64), exact, rtol=1.01 * float(_ulp(dtype)), atol=1e-6)
    np.testing.assert_allclose(lse.compute(), -1e9, rtol=1e-7)


def _ulp(dtype: str) -> float:
    return {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-23, "float64": 2**-50}[dtype]


def test_arrays_of_numpy_are_one_chunk(rng: np.random.Generator) -> None:
    q, k, v = rng.standard_normal((3, 40, 8))
    expected = cuflash.attention(q, k, v)
    for lazy in range(1, 8):
        arrays = [da.from_array(x, chunks=(7, 3)) if lazy >> i & 1 else x for i, x in enumerate((q, k, v))]
        out = cuflash.dask.attention(*arrays)
        assert out.chunks == (arrays[0].chunks[0] if lazy & 1 else (40,), (8,))
        np.testing.assert_allclose(out.compute(), expected, atol=1e-14)


def kinds(*arrays: Any) -> Counter[str]:
    """Count the tasks of a graph by what they do."""
    keys = {key for x in arrays for key in x.__dask_graph__()}
    return Counter(name.split("-")[1] for key in keys if (name := key[0]).startswith("attention-"))


def zeros(num_chunks: int, length: int = 10) -> Any:
    return da.zeros((num_chunks * length, 8), chunks=(length, 8))


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ({}, 20 * 20),
        ({"causal": True}, 20 * 21 // 2),
        ({"causal": "top_left"}, 20 * 21 // 2),
        ({"window": (10, 0)}, 20 + 19),
        ({"window": (11, 0)}, 20 + 19 + 18),
        ({"window": (0, 0)}, 20),
        ({"window": (None, 9)}, 20 * 21 // 2 + 19),
        ({"causal": True, "query_offset": 1}, 20 * 21 // 2 + 19),
        ({"causal": True, "query_offset": -1}, 20 * 21 // 2),
        ({"causal": True, "query_offset": -10}, 20 * 19 // 2),
        ({"causal": True, "query_offset": -200}, 0),
        ({"causal": True, "query_offset": 2**70}, 400),
        ({"window": (3, 3), "query_offset": 2**70}, 0),
    ],
)
def test_chunks_that_see_nothing_of_each_other_make_no_task(options: dict[str, Any], tasks: int) -> None:
    x = zeros(20)
    found = kinds(*cuflash.dask.attention(x, x, x, return_lse=True, **options))
    assert found["attend"] == tasks
    assert found["finish"] == found["out"] == found["lse"] == 20


def test_merges_are_a_tree() -> None:
    q, k = zeros(1), zeros(100)
    found = kinds(cuflash.dask.attention(q, k, k))
    assert found == {"attend": 100, "merge": 13 + 2, "finish": 1, "out": 1}
    assert "merge" not in kinds(cuflash.dask.attention(q, zeros(8), zeros(8)))


def test_chunks_of_no_query_or_no_key_make_no_task() -> None:
    q = da.zeros((20, 8), chunks=((0, 10, 0, 10), 8))
    k = da.zeros((30, 8), chunks=((0, 30, 0), 8))
    assert kinds(cuflash.dask.attention(q, k, k))["attend"] == 2
    assert "attend" not in kinds(cuflash.dask.attention(q, k[:0], k[:0]))


def test_only_what_is_needed_is_computed() -> None:
    """A chunk of a causal result depends on the keys that it sees, and others are not read."""
    read: list[int] = []

    def record(x: np.ndarray, block_info: Any = None) -> np.ndarray:
        read.append(block_info[0]["chunk-location"][0])
        return x

    q = zeros(6)
    k = q.map_blocks(record, dtype=q.dtype, meta=q._meta)
    cuflash.dask.attention(q, k, q, causal=True)[25].compute()
    assert sorted(set(read)) == [0, 1, 2]


@pytest.mark.parametrize("heads", [(1,) * 8, (8,), (3, 5), (1, 2, 5), (4, 4), (0, 5, 0, 3), (6, 2)])
@pytest.mark.parametrize("heads_kv", [1, 2, 4, 8])
def test_chunks_of_heads_that_cut_groups(heads: tuple[int, ...], heads_kv: int, rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((2, h, 10, 4)) for h in (8, heads_kv, heads_kv))
    lazy = [chunked(rng, k), chunked(rng, v)]
    sinks = rng.standard_normal(8)
    out, lse = cuflash.dask.attention(
        da.from_array(q, chunks=(1, heads, 5, 4)), *lazy, causal=True, sinks=sinks, return_lse=True
    )
    assert out.chunks == ((1, 1), heads, (5, 5), (4,)) and lse.chunks == out.chunks[:3]
    expected, expected_lse = reference.attention(q, k, v, causal=True, sinks=sinks)
    np.testing.assert_allclose(out.compute(), expected, atol=1e-14)
    np.testing.assert_allclose(lse.compute(), expected_lse, atol=1e-14)


def test_options_may_be_numbers_of_a_chunk(rng: np.random.Generator) -> None:
    """Indexing a chunk leaves no axes, and NumPy makes a number of it."""
    x = rng.standard_normal((20, 8))
    q = da.from_array(x, chunks=(7, 8))
    slope = da.from_array(np.array([0.5, 1.0]))[1]
    out = cuflash.dask.attention(q, q, q, alibi_slopes=slope, sinks=slope, bias=slope, mask=slope > 0)
    expected, _ = reference.attention(x, x, x, alibi_slopes=np.ones(1), sinks=np.ones(1), bias=np.ones(1))
    np.testing.assert_allclose(out.compute(), expected, atol=1e-14)


def test_names_follow_from_the_call() -> None:
    x, y = zeros(3), da.ones((30, 8), chunks=(10, 8))
    assert cuflash.dask.attention(x, x, x).name == cuflash.dask.attention(x, x, x, scale=8**-0.5).name
    calls: list[tuple[Any, Any, dict[str, Any]]] = [
        (x, x, {}), (x, y, {}), (y, x, {}), (x, x, {"causal": True}), (x, x, {"causal": "top_left", "window": (3, 0)}),
        (x, x, {"scale": 1}), (x, x, {"softcap": 1}), (x, x, {"query_offset": 1}), (x, x, {"out_dtype": "float32"}),
        (x, x, {"bias": np.ones(1)}), (x, x, {"bias": np.zeros(1)}), (x, x, {"sinks": np.ones(1)}),
        (x, x, {"alibi_slopes": np.ones(1)}), (x, x, {"mask": np.ones(1, bool)}),
    ]  # fmt: skip
    assert len({cuflash.dask.attention(a, b, b, **options).name for a, b, options in calls}) == len(calls)


def test_bits_do_not_depend_on_how_chunks_lie_in_memory(rng: np.random.Generator) -> None:
    """They lie otherwise after they were sent to a worker, and BLAS multiplies few rows in another order then."""
    q = da.from_array(rng.standard_normal((2, 1, 64)))
    k, v = (da.from_array(rng.standard_normal((2, 64, 3000)), chunks=(2, 64, 1000)).swapaxes(1, 2) for _ in range(2))
    packed = [x.map_blocks(np.ascontiguousarray) for x in (k, v)]
    out, again = (cuflash.dask.attention(q, *arrays).compute() for arrays in ((k, v), packed))
    assert out.tobytes() == again.tobytes()


def test_inputs_are_left_alone(rng: np.random.Generator) -> None:
    arrays = rng.standard_normal((3, 40, 8))
    before = arrays.copy()
    cuflash.dask.attention(*(da.from_array(x, chunks=(3, 8)) for x in arrays)).compute()
    assert (arrays == before).all()


def test_settings_hold_for_tasks(rng: np.random.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    x = da.from_array(rng.standard_normal((2, 20, 8)), chunks=(1, 10, 8))
    lazy = cuflash.dask.attention(x, x, x)
    with cuflash.options(kernel="forward_mma"), pytest.raises(ValueError, match="kernel 'forward_mma' cannot serve"):
        lazy.compute()
    with cuflash.options(log=True):
        lazy.compute()
    assert capsys.readouterr().err.count("attention") == 2 * 2 * 2  # heads, chunks of queries, of keys


@pytest.mark.alone
def test_graph_of_ten_thousand_tasks_is_built_within_a_second() -> None:
    q, k = zeros(100), zeros(100)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        out = cuflash.dask.attention(q, k, k)
        assert len(out.__dask_graph__()) > 10_000
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0, seconds


X = zeros(2)
ERRORS: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
    (TypeError, r"q is a numpy\.ndarray, .*Dask.*cuflash\.attention takes NumPy", (np.ones((2, 8)),) * 3, {}),
    (TypeError, "q is a list, expected", ([[1.0] * 8], X, X), {}),
    (TypeError, "k has dtype float32 but q has float64", (X, X.astype("f4"), X), {}),
    (TypeError, "q has dtype int64, expected float16", (X.astype(int), X.astype(int), X.astype(int)), {}),
    (TypeError, "q has dtype complex128, expected", (X.astype(complex), X, X), {}),
    (TypeError, "expected a NumPy or CuPy array", (X, X, None), {}),
    (ValueError, "k has head_dim 4 but q has 8", (X, X[:, :4], X), {}),
    (ValueError, r"v has 10 keys \(axis -2\) but k has 20", (X, X, X[:10]), {}),
    (ValueError, "q has head_dim 600, expected 1 to 512", (da.zeros((3, 600)),) * 3, {}),
    (ValueError, r"q has shape \(20,\), expected", (X[:, 0], X, X), {}),
    (ValueError, "q has 3 heads, expected a multiple of the 2", (da.zeros((3, 5, 8)), *[da.zeros((2, 5, 8))] * 2), {}),
    (ValueError, "k has leading axes", (da.zeros((3, 1, 5, 8)), *[da.zeros((2, 1, 5, 8))] * 2), {}),
    (ValueError, "k has chunks of unknown size, .*compute_chunk_sizes", (X, X[X[:, 0] == 0], X), {}),
    (ValueError, "bias has chunks of unknown size", (X, X, X), {"bias": X[:, 0][X[:, 0] == 0]}),
    (TypeError, r"query_offset is an array of shape \(2,\), expected an int", (X, X, X), {"query_offset": np.ones(2)}),
    (TypeError, "query_offset is an array of shape", (X, X, X), {"query_offset": X}),
    (TypeError, "query_offset is 1.5", (X, X, X), {"query_offset": 1.5}),
    (TypeError, "query_offset is True", (X, X, X), {"query_offset": True}),
    (ValueError, "names a query offset", (X, X, X), {"query_offset": 1, "causal": "top_left"}),
    (ValueError, "causal is 'left'", (X, X, X), {"causal": "left"}),
    (TypeError, "causal is 1", (X, X, X), {"causal": 1}),
    (ValueError, r"window\[0\] \(left\) is -1", (X, X, X), {"window": (-1, 0)}),
    (TypeError, "window is 3", (X, X, X), {"window": 3}),
    (ValueError, "scale is nan", (X, X, X), {"scale": math.nan}),
    (ValueError, "softcap is 0.0", (X, X, X), {"softcap": 0}),
    (TypeError, "mask has dtype float64, expected bool", (X, X, X), {"mask": da.zeros(20)}),
    (ValueError, r"bias has shape \(19,\), expected one that broadcasts", (X, X, X), {"bias": np.zeros(19)}),
    (ValueError, r"sinks has shape \(2,\)", (X, X, X), {"sinks": np.zeros(2)}),
    (ValueError, r"alibi_slopes has shape \(2,\)", (X, X, X), {"alibi_slopes": da.zeros(2)}),
    (ValueError, "precision is 'fast'", (X, X, X), {"precision": "fast"}),
    (TypeError, "out_dtype is int32", (X, X, X), {"out_dtype": "int32"}),
    (TypeError, "return_lse is 1", (X, X, X), {"return_lse": 1}),
    (TypeError, "of Dask arrays takes no out", (X, X, X), {"out": np.zeros((20, 8))}),
]


@pytest.mark.parametrize(("kind", "message", "arrays", "options"), ERRORS, ids=[error[1] for error in ERRORS])
def test_errors_are_raised_when_the_graph_is_built(
    kind: type[Exception], message: str, arrays: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=message):
        cuflash.dask.attention(*arrays, **options)


@pytest.mark.parametrize(("data", "hint"), [(None, r"dask\.array\.from_array\(x\)"), (X, r"x\.data")])
def test_what_has_chunks_and_is_no_dask_array(data: Any, hint: str) -> None:
    """A dataset of h5py or Zarr, and an array of xarray."""
    dataset = SimpleNamespace(shape=(20, 8), dtype=np.dtype(float), chunks=None, data=data)
    with pytest.raises(TypeError, match=rf"k is a types\.SimpleNamespace, expected a Dask array: pass {hint}"):
        cuflash.dask.attention(X, dataset, X)


def test_masked_chunks_are_refused() -> None:
    masked = da.ma.masked_array(X, X > 1)
    with pytest.raises(TypeError, match=r"q is a numpy\.ma\.MaskedArray"):
        cuflash.dask.attention(masked, X, X)


def test_dask_is_imported_by_those_who_ask_for_it() -> None:
    code = """
import sys, cuflash
assert "dask" not in sys.modules and "cuflash.dask" not in sys.modules
import cuflash.dask
assert dir(cuflash.dask) == ["attention"] and "dask.array" in sys.modules and "distributed" not in sys.modules
sys.modules["dask.array"] = None
del sys.modules["cuflash.dask"]
try:
    import cuflash.dask
except ImportError as error:
    assert str(error) == "cuflash.dask needs Dask: pip install 'cuflash[distributed]'"
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_examples_of_the_docstring() -> None:
    import doctest

    finder = doctest.DocTestFinder()
    for test in finder.find(cuflash.dask.attention, "attention", globs={}):
        assert test.examples and not doctest.DocTestRunner().run(test).failed


def test_a_task_uses_one_thread(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """As Dask fills the cores, unless the variable says more."""
    from cuflash.cpu import attention as cpu

    asked: list[int] = []
    monkeypatch.setattr(cpu, "num_threads", lambda useful: asked.append(found(useful)) or asked[-1])
    from cuflash.settings import num_threads as found

    q = da.from_array(rng.standard_normal((8, 500, 64)), chunks=(4, 250, 64))
    out = cuflash.dask.attention(q, q, q)
    out.compute()
    assert asked == [1] * 8
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "2")
    asked.clear()
    out.compute()
    assert asked == [2] * 8


def test_result_is_that_of_the_oracle_where_the_case_is_one_chunk() -> None:
    case = CASES_BY_NAME["causal-65x63"]
    data = make_data(case, "float64")
    out = cuflash.dask.attention(*(da.from_array(x, chunks=-1) for x in data[:3]), **case.options)
    np.testing.assert_allclose(out.compute(), oracle(case, data)[0], atol=1e-13)


def test_attention_in_memory_says_who_takes_dask_arrays() -> None:
    q = da.ones((2, 10, 8), chunks=5)
    with pytest.raises(TypeError, match=r"q is a dask\.Array, .*cuflash\.dask\.attention takes those of Dask"):
        cuflash.attention(q, q, q)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": True}, "unexpected keyword argument 'is_causal'; cuflash calls it causal"),
        ({"out": np.ones(3)}, "attention() of Dask arrays takes no out: its results are new Dask arrays"),
        ({"workspace": None}, "attention() of Dask arrays takes no workspace"),
        ({"scales": 1.0}, "unexpected keyword argument 'scales'; did you mean scale?"),
        ({"foo": 1}, "expected one of alibi_slopes, bias, causal, mask, out_dtype, precision, query_offset, "),
    ],
)
def test_options_that_there_are_not(options: dict[str, Any], message: str) -> None:
    q = da.ones((2, 10, 8), chunks=5)
    with pytest.raises(TypeError) as raised:
        cuflash.dask.attention(q, q, q, **options)
    assert message in str(raised.value)
