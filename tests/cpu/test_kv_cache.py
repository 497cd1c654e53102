"""Attention with a KV cache of the NumPy back end against the float64 definition, and what it leaves in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy.special import logsumexp, softmax

import cuflash
from cuflash import reference
from cuflash.cpu import attention as cpu
from cuflash.cpu import blocks as cpu_blocks
from cuflash.cpu import cache as cpu_cache
from cuflash.testing import LAYOUTS, Poisoned

from .test_cpu import DTYPES, dtypes
from .test_cpu import _naive as naive

Arrays = dict[str, Any]
PAGE_SIZES = (0, 1, 16, 64, 7)
"""0: no pages."""
GARBAGE = (-7, 2**30, -(2**31), 10**6)
CACHES, NEW = ("k_cache", "v_cache"), ("k_new", "v_new")
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
page_sizes = pytest.mark.parametrize("page_size", PAGE_SIZES)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give small problems many blocks and tiles, in several threads, and pages that are copied batch by batch."""
    for name, value in {"TILE_BYTES": 2**12, "BLOCK_ROWS": 32, "MIN_BLOCK_ROWS": 8, "MIN_BLOCK_COST": 2**15}.items():
        monkeypatch.setattr(cpu_blocks, name, value)
    monkeypatch.setattr(cpu, "THREAD_COST", 2**14)
    monkeypatch.setattr(cpu_cache, "GATHERED_BYTES", 2**13)
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "3")
    cpu_blocks.cut.cache_clear()
    yield
    cpu_blocks.cut.cache_clear()


def draw(
    dtype: Any,
    lengths: tuple[int, ...],
    *,
    heads: tuple[int, int] = (4, 2),
    seqlen_q: int = 3,
    capacity: int = 40,
    features: tuple[int, int] = (16, 12),
    num_new: int | None = None,
    page_size: int = 0,
    seed: int = 0,
) -> Arrays:
    """Draw the arrays of a call: rows behind the lengths and pages that no batch has are NaN.

    Entries of the table that are not used hold no page. Pages may have room for more keys than `capacity`.
    """
    rng, batch = np.random.default_rng([seed, capacity, *lengths]), len(lengths)
    arrays: Arrays = {"q": rng.standard_normal((batch, heads[0], seqlen_q, features[0])).astype(dtype)}
    per_batch = -(-capacity // page_size) if page_size else 0
    order = rng.permutation(batch * per_batch + 2)
    table = order[: batch * per_batch].reshape(batch, per_batch).astype(np.int32)
    for name, size in zip(CACHES, features, strict=True):
        keys = rng.standard_normal((batch, heads[1], capacity, size)).astype(dtype)
        for b, length in enumerate(lengths):
            keys[b, :, length:] = np.nan
        if page_size:
            pages = np.full((len(order), heads[1], page_size, size), np.nan, dtype)
            for b, j in np.ndindex(batch, capacity):
                pages[table[b, j // page_size], :, j % page_size] = keys[b, :, j]
            keys = pages
        arrays[name] = keys
    if num_new is not None:
        for name, size in zip(NEW, features, strict=True):
            arrays[name] = rng.standard_normal((batch, heads[1], num_new, size)).astype(dtype)
    arrays["seqlens_k"] = np.asarray(lengths, np.int32)
    if page_size:
        for b, length in enumerate(lengths):
            unused = table[b, -(-min(length + (num_new or 0), capacity) // page_size) :]
            unused[:] = np.resize(GARBAGE, unused.size)
        arrays["page_table"] = table
    return arrays


def capacity_of(arrays: Arrays) -> int:
    rows: int = arrays["k_cache"].shape[2]
    return rows * arrays["page_table"].shape[1] if "page_table" in arrays else rows


def lengths_of(arrays: Arrays) -> list[int]:
    """Keys of each batch before the call, however many there is room for."""
    given = arrays["seqlens_k"]
    return [int(x) for x in given] if np.ndim(given) else [int(given)] * len(arrays["q"])


def ends_of(arrays: Arrays) -> list[int]:
    """Keys of each batch behind the call."""
    num_new = arrays["k_new"].shape[2] if "k_new" in arrays else 0
    return [min(length + num_new, capacity_of(arrays)) for length in lengths_of(arrays)]


def place(arrays: Arrays, batch: int, key: int) -> tuple[Any, ...]:
    """Where a cache holds a key."""
    if "page_table" not in arrays:
        return batch, slice(None), key
    page_size = arrays["k_cache"].shape[2]
    return int(arrays["page_table"][batch, key // page_size]), slice(None), key % page_size


def appended(arrays: Arrays) -> Arrays:
    """What the caches hold behind the call, row by row."""
    caches = {name: arrays[name].copy() for name in CACHES}
    for name, new_name in zip(CACHES, NEW, strict=True):
        for b, length in enumerate(lengths_of(arrays)):
            for i in range(arrays[new_name].shape[2] if new_name in arrays else 0):
                if length + i < capacity_of(arrays):
                    caches[name][place(arrays, b, length + i)] = arrays[new_name][b, :, i]
    return caches


def keys_of(arrays: Arrays, name: str, batch: int) -> Any:
    """Keys or values that a batch attends to, one by one."""
    cache, end = appended(arrays)[name], ends_of(arrays)[batch]
    rows = [cache[place(arrays, batch, j)] for j in range(end)]
    return np.stack(rows, 1) if rows else np.zeros((cache.shape[1], 0, cache.shape[3]), cache.dtype)


def of_batch(arrays: Arrays, options: dict[str, Any], batch: int) -> dict[str, Any]:
    """Options of one batch, with a column for each of its keys."""
    batches, num_heads, seqlen_q, _ = arrays["q"].shape
    own, end = dict(options), ends_of(arrays)[batch]
    for name in ("bias", "mask"):
        if name in own:
            x = np.asarray(own[name])
            columns = x.shape[-1] if x.shape[-1:] > (1,) else capacity_of(arrays)
            own[name] = np.broadcast_to(x, (batches, num_heads, seqlen_q, columns))[batch, ..., :end]
    for name in ("alibi_slopes", "sinks"):
        if name in own:
            own[name] = np.broadcast_to(own[name], (batches, num_heads))[batch]
    return own


def assert_close(got: Any, exact: Any, plain: Any) -> None:
    """Bound = 2 x the error of a naive computation in float32, plus 1.1 x the rounding of the exact result.

    For float64 the error of the naive computation is scaled.
    """
    computed, exact, plain = got[1].dtype, *([np.asarray(x) for x in pair] for pair in (exact, plain))
    seen = exact[1] > -np.inf
    np.testing.assert_array_equal(got[1] == -np.inf, ~seen)
    np.testing.assert_array_equal(got[0][~seen].astype(np.float64), 0.0)
    eps = np.finfo(computed).eps
    for found, right, simple in zip(got, exact, plain, strict=True):
        assert found.shape == right.shape
        found, right, simple = found[seen], right[seen], simple[seen]
        if found.size:
            bound = 2 * np.abs(simple - right).max() * eps / np.finfo(np.float32).eps
            bound += 8 * eps * max(np.abs(right).max(), 1e-3)
            bound += 1.1 * np.abs(right.astype(found.dtype).astype(np.float64) - right).max()
            error = np.abs(found.astype(np.float64) - right).max()
            assert error <= bound, f"error {error:.2e}, allowed {bound:.2e}"


def call(
    arrays: Arrays, layouts: str | dict[str, str] = "contiguous", *, results: str | None = None, **options: Any
) -> tuple[Any, Any]:
    """Call the function with arrays in NaN, and check that it writes what it should: nothing but new rows, and results.

    `layouts` are of all arrays with 4 axes, or of those that are named. `results` is the layout of given ones.
    """
    placed, given = {}, {}
    for name, x in (arrays | options).items():
        given[name] = x
        if isinstance(x, np.ndarray):
            layout = layouts if isinstance(layouts, str) else layouts.get(name, "contiguous")
            layout = layout if x.ndim == 4 and name not in options else "contiguous"
            placed[name] = Poisoned(np, x.shape, x.dtype, layout, x)
            given[name] = placed[name].array
    q, v = arrays["q"], arrays["v_cache"]
    computed = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    written = {}
    if results is not None:
        written["out"] = Poisoned(np, (*q.shape[:3], v.shape[3]), np.dtype(options.get("out_dtype", q.dtype)), results)
        written["lse"] = Poisoned(np, q.shape[:3], computed, results if q.shape[2] != 1 else "contiguous")
    positional = [given.pop(name) for name in ("q", *CACHES)]
    out, lse = cuflash.attention_with_kv_cache(
        *positional, **given, return_lse=True, **{name: x.array for name, x in written.items()}
    )
    if written:
        assert out is written["out"].array and lse is written["lse"].array
        assert all(x.unchanged(outside_only=True) for x in written.values())
    assert out.dtype == options.get("out_dtype", q.dtype) and lse.dtype == computed
    for name, cache in appended(arrays).items():
        right = Poisoned(np, cache.shape, cache.dtype, _layout_of(layouts, name), cache)
        assert placed[name].bytes_now().tobytes() == right.bytes_now().tobytes(), f"{name} holds something else"
    assert all(x.unchanged() for name, x in placed.items() if name not in CACHES), "an input was changed"
    return out, lse


def _layout_of(layouts: str | dict[str, str], name: str) -> str:
    return layouts if isinstance(layouts, str) else layouts.get(name, "contiguous")


def check(
    arrays: Arrays, layouts: str | dict[str, str] = "contiguous", *, results: str | None = None, **options: Any
) -> tuple[Any, Any]:
    """Call the function and compare it with the definition, and its cache with what it should hold."""
    got = call(arrays, layouts, results=results, **options)
    known = {name: x for name, x in options.items() if name not in ("out_dtype", "num_splits", "workspace")}
    plain = [
        naive(x, *(keys_of(arrays, name, b) for name in CACHES), **of_batch(arrays, known, b))
        for b, x in enumerate(arrays["q"])
    ]
    assert_close(
        got,
        reference.attention_with_kv_cache(**arrays, **known),
        [np.reshape([x[i] for x in plain], got[i].shape) for i in range(2)],
    )
    return got


def same(first: Any, second: Any) -> bool:
    """Whether results, or caches, are equal to the bit."""
    return all(a.tobytes() == b.tobytes() and a.shape == b.shape for a, b in zip(first, second, strict=True))


# Against the definition


@dtypes
@page_sizes
@pytest.mark.parametrize("num_new", [None, 0, 1, 5, 60])
def test_lengths(page_size: int, num_new: int | None, dtype: Any) -> None:
    """Of them are 0, 1, some, and full; there is no room for 60."""
    arrays = draw(dtype, (0, 1, 17, 40), num_new=num_new, page_size=page_size)
    check(arrays, causal=True)
    check(arrays)


@page_sizes
@pytest.mark.parametrize("length", [0, 1, 33, 39, 40])
def test_equal_lengths(page_size: int, length: int) -> None:
    for num_new in (None, 3):
        arrays = draw(np.float32, (length,) * 3, num_new=num_new, page_size=page_size)
        whole = check(arrays, causal=True)
        for as_int in (length, np.int8(length), np.uint64(length)):
            assert same(check(arrays | {"seqlens_k": as_int}, causal=True), whole)


@page_sizes
def test_lengths_above_the_capacity(page_size: int) -> None:
    """They count as full: nothing is appended."""
    for num_new in (None, 4):
        arrays = draw(np.float32, (40, 40, 7), capacity=40 if page_size != 7 else 42, page_size=page_size)
        capacity = capacity_of(arrays)
        arrays = draw(np.float32, (capacity, capacity, 7), capacity=capacity, num_new=num_new, page_size=page_size)
        expected = check(arrays)
        for beyond in (capacity + 1, 2**31 - 1, 2**63 - 1):
            many = np.array([beyond, capacity, 7], np.int64)
            assert same(check(arrays | {"seqlens_k": many}), expected)
    arrays = draw(np.float32, (40, 40), num_new=4)
    expected = check(arrays)
    for beyond in (41, 2**31, 2**70):
        assert same(check(arrays | {"seqlens_k": beyond}), expected)


@dtypes
@pytest.mark.parametrize("seqlen_q", [1, 3, 70])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 2), (6, 1)], ids=str)
def test_queries_and_heads(heads: tuple[int, int], seqlen_q: int, dtype: Any) -> None:
    for page_size in (0, 16):
        arrays = draw(dtype, (0, 100, 37), heads=heads, seqlen_q=seqlen_q, capacity=100, num_new=1, page_size=page_size)
        check(arrays, causal=True)


@dtypes
@pytest.mark.parametrize("features", [(1, 1), (1, 5), (64, 64), (192, 128), (512, 1)], ids=str)
def test_features(features: tuple[int, int], dtype: Any) -> None:
    for page_size in (0, 7):
        check(draw(dtype, (30, 3), features=features, num_new=2, page_size=page_size), causal=True)


@pytest.mark.parametrize("integer", INTEGERS)
def test_integers(integer: Any) -> None:
    """Sums of lengths do not wrap around, and neither need arrays of integers be contiguous."""
    most = min(np.iinfo(integer).max, 280)
    arrays = draw(np.float32, (most, most - 3, 0), capacity=300, num_new=30, page_size=0, features=(4, 4))
    expected = check(arrays)
    arrays["seqlens_k"] = arrays["seqlens_k"].astype(integer)
    assert same(check(arrays), expected)
    spread = np.repeat(arrays["seqlens_k"], 2)[::-2]
    del arrays["seqlens_k"]
    turned = {name: np.ascontiguousarray(x[::-1]) for name, x in arrays.items()}
    out = cuflash.attention_with_kv_cache(**turned, seqlens_k=spread)
    assert same([out[::-1]], expected[:1])
    paged = draw(np.float32, (most, most - 3, 0), capacity=300, num_new=30, page_size=100, features=(4, 4))
    expected = check(paged)
    table = np.where((paged["page_table"] >= 0) & (paged["page_table"] < 11), paged["page_table"], 120)
    assert same(check(paged | {"page_table": table.astype(integer)}), expected)
    assert same(check(paged | {"page_table": np.asfortranarray(table.astype(integer))}), expected)


def test_tables_of_bytes_with_more_pages_than_bytes_name() -> None:
    arrays = draw(np.float32, (30, 3), page_size=1, capacity=200, features=(4, 4))
    table = arrays["page_table"]
    used = [list(table[b, :end]) for b, end in enumerate(ends_of(arrays))]
    order = np.array([*used[0], *used[1], *set(range(402)).difference(*used)])
    arrays |= {name: arrays[name][order] for name in CACHES}
    table = np.full(table.shape, 255, np.uint8)
    table[0, :30], table[1, :3] = np.arange(30), np.arange(30, 33)
    check(arrays | {"page_table": table})


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": "bottom_right"},
    {"causal": "top_left"},
    {"window": (3, 4)},
    {"window": (0, 0)},
    {"window": (None, 2)},
    {"causal": True, "window": (5, None)},
    {"causal": "top_left", "window": (2, None)},
    {"scale": -0.7},
    {"scale": 0.0},
    {"softcap": 1.5, "causal": True},
    {"bias": (4, 3, 4, 40)},
    {"bias": (40,), "causal": True},
    {"bias": (4, 1)},
    {"bias": (4, 1, 1, 40), "softcap": 2.0},
    {"mask": (4, 3, 4, 40)},
    {"mask": (4, 1, 1, 40)},
    {"mask": (3, 1, 1), "causal": True},
    {"mask": ()},
    {"mask": (4, 40), "bias": (3, 1, 40), "window": (20, 0)},
    {"alibi_slopes": (4, 3)},
    {"alibi_slopes": (3,), "causal": "top_left"},
    {"sinks": (4, 3), "causal": True},
    {"sinks": (1,), "mask": (4, 1, 1, 40)},
    {"num_splits": 3, "causal": True},
    {"workspace": (64,)},
]


def drawn(options: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Replace shapes in `OPTIONS` by arrays."""
    rng, made = np.random.default_rng(0), dict(options)
    for name in ("bias", "mask", "alibi_slopes", "sinks", "workspace"):
        if name in options:
            x = rng.standard_normal(options[name])
            if name == "bias":
                x = np.where(rng.random(x.shape) < 0.2, -np.inf, x)
            kinds = {"mask": bool, "workspace": np.uint8}
            made[name] = np.asarray(x > -0.3 if name == "mask" else x).astype(kinds.get(name, dtype))
    return made


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.usefixtures("small_parts")
def test_options(options: dict[str, Any], dtype: Any) -> None:
    for lengths in ((0, 1, 17, 40), (29,) * 4):
        for page_size in (0, 8):
            arrays = draw(dtype, lengths, heads=(3, 1), seqlen_q=4, num_new=3, page_size=page_size)
            check(arrays, **drawn(options, dtype))


@pytest.mark.parametrize("page_size", [0, 8])
def test_columns(page_size: int) -> None:
    """Of keys that there are not, columns may hold anything; where the length is known they may be left out."""
    arrays = draw(np.float32, (20, 20), num_new=3, page_size=page_size)
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((2, 4, 3, 40)).astype(np.float32)
    mask = rng.random((2, 1, 3, 40)) < 0.6
    bias[..., 23:] = np.nan
    few = {"bias": bias[..., :23].copy(), "mask": mask[..., :23].copy()}
    expected = check(arrays | {"seqlens_k": 20}, **few, causal=True)
    assert same(check(arrays, bias=bias, mask=mask, causal=True), expected)
    assert same(check(arrays | {"seqlens_k": 20}, bias=bias, mask=mask, causal=True), expected)
    assert same(check(arrays | {"seqlens_k": 20}, bias=few["bias"], mask=mask, causal=True), expected)
    with pytest.raises(ValueError, match="bias has shape"):
        check(arrays, **few)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_layouts(layout: str, dtype: Any) -> None:
    """Of each array alone, and of all; a cache has stride 0 only where it is read, see below."""
    for page_size in (0, 7):
        for num_new in (None, 3):
            arrays = draw(dtype, (0, 5, 20), capacity=28, num_new=num_new, page_size=page_size)
            inputs = [name for name in ("q", *NEW) if name in arrays]
            if layout == "broadcast":
                arrays |= {name: np.broadcast_to(arrays[name][:1, :1], arrays[name].shape) for name in inputs}
            else:
                check(arrays, layout, causal=True, results=layout)
                inputs += CACHES
            for name in inputs:
                check(arrays, {name: layout}, causal=True)


def test_repeated_keys() -> None:
    """A cache that is only read may have stride 0."""
    arrays = draw(np.float32, (20, 20, 20), capacity=28)
    arrays |= {name: np.broadcast_to(arrays[name][:1, :1], arrays[name].shape) for name in CACHES}
    dense = {name: x.copy() for name, x in arrays.items()}
    check(arrays, dict.fromkeys(CACHES, "broadcast"))
    assert same(
        [cuflash.attention_with_kv_cache(**arrays, causal=True)],
        [cuflash.attention_with_kv_cache(**dense, causal=True)],
    )


# Against other definitions


@dtypes
def test_decoding_from_scratch(dtype: Any) -> None:
    """One query for each sequence, computed head by head."""
    arrays = draw(dtype, (0, 9, 31), heads=(6, 2), seqlen_q=1, num_new=1, features=(8, 5))
    out, lse = call(arrays, causal=True)
    for b, h in np.ndindex(3, 6):
        end = (0, 9, 31)[b] + 1
        rows = []
        for cache, new in zip(CACHES, NEW, strict=True):
            old = arrays[cache][b, h // 3, : end - 1].astype(np.float64)
            rows.append(np.concatenate([old, arrays[new][b, h // 3].astype(np.float64)]))
        scores = rows[0] @ arrays["q"][b, h, 0].astype(np.float64) / np.sqrt(8)
        tolerance = 4 * float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(out[b, h, 0].astype(np.float64), softmax(scores) @ rows[1], tolerance, tolerance)
        np.testing.assert_allclose(lse[b, h, 0], logsumexp(scores), 1e-5, 1e-6)


def test_pages_from_scratch() -> None:
    """A chunk of a prompt with everything that makes a logit, one query and key at a time."""
    rng = np.random.default_rng(0)
    k_pages, v_pages = rng.standard_normal((2, 6, 1, 3, 4))
    table = np.array([[4, 1, 99], [5, 0, 2]])
    lengths, q = [2, 5], rng.standard_normal((2, 2, 3, 4))
    k_new, v_new = rng.standard_normal((2, 2, 1, 3, 4))
    slopes, sinks, bias = rng.random(2), rng.standard_normal((2, 2)), rng.standard_normal((2, 1, 9))
    mask = rng.random((2, 1, 3, 9)) < 0.8
    k_after, v_after = k_pages.copy(), v_pages.copy()
    out, lse = cuflash.attention_with_kv_cache(
        q, k_after, v_after, seqlens_k=np.array(lengths), k_new=k_new, v_new=v_new, page_table=table, causal=True,
        window=(4, None), scale=0.7, softcap=3.0, alibi_slopes=slopes, sinks=sinks, bias=bias, mask=mask,
        return_lse=True,
    )  # fmt: skip
    touched = set()
    for b, i in np.ndindex(2, 3):
        j = lengths[b] + i
        row = table[b, j // 3], 0, j % 3
        np.testing.assert_array_equal([k_after[row], v_after[row]], [k_new[b, 0, i], v_new[b, 0, i]])
        touched.add(row)
    for row in np.ndindex(6, 1, 3):
        if row not in touched:
            np.testing.assert_array_equal([k_after[row], v_after[row]], [k_pages[row], v_pages[row]])
    for b, h, i in np.ndindex(2, 2, 3):
        position, logits, values = lengths[b] + i, [sinks[b, h]], [np.zeros(4)]
        for j in range(max(0, position - 4), position + 1):
            row = table[b, j // 3], 0, j % 3
            if mask[b, 0, i, j]:
                score = 3.0 * np.tanh(0.7 * (q[b, h, i] @ k_after[row]) / 3.0)
                logits.append(score + bias[h, 0, j] - slopes[h] * (position - j))
                values.append(v_after[row])
        np.testing.assert_allclose(out[b, h, i], softmax(logits) @ np.array(values), 1e-12, 1e-14)
        np.testing.assert_allclose(lse[b, h, i], logsumexp(logits), 1e-12)


# Relations


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.usefixtures("small_parts")
def test_twice_the_same_bits(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = draw(np.float32, (100, 3, 300), seqlen_q=50, capacity=300, num_new=20, page_size=page_size)
    expected = call(arrays, causal=True)
    for threads in ("1", "3", "3"):
        monkeypatch.setenv("CUFLASH_NUM_THREADS", threads)
        assert same(call(arrays, causal=True), expected)


@dtypes
@pytest.mark.parametrize("lengths", [(0, 1, 50, 90), (50,) * 4], ids=str)
def test_pages_change_no_bit(lengths: tuple[int, ...], dtype: Any) -> None:
    contiguous = draw(dtype, lengths, seqlen_q=9, capacity=96, num_new=4)
    expected = call(contiguous, causal=True)
    rng = np.random.default_rng(1)
    for page_size in (1, 16, 32, 96):
        max_pages = 96 // page_size
        table = rng.permutation(4 * max_pages).reshape(4, max_pages)
        arrays = dict(contiguous, page_table=table)
        for name in CACHES:
            _, num_heads, _, size = contiguous[name].shape
            pages = contiguous[name].reshape(4, num_heads, max_pages, page_size, size).swapaxes(1, 2)
            arrays[name] = np.empty((4 * max_pages, num_heads, page_size, size), dtype)
            arrays[name][table] = pages
        assert same(call(arrays, causal=True), expected)


def test_batches_that_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = draw(np.float32, (0, 9, 31, 40), num_new=2, page_size=8)
    expected = call(arrays, causal=True)
    computed: list[int] = []
    compute = cpu_cache.compute

    def counted(task: Any, sequences: Any) -> None:
        computed.append(len(sequences))
        compute(task, sequences)

    monkeypatch.setattr(cpu_cache, "compute", counted)
    page = 8 * 2 * 28 * 4  # there are 1, 2, 5 and 5 of them, and the first one is not copied
    for num_bytes, together in ((0, [2, 1, 1]), (6 * page, [2, 1, 1]), (7 * page, [3, 1]), (2**20, [4])):
        monkeypatch.setattr(cpu_cache, "GATHERED_BYTES", num_bytes)
        computed.clear()
        assert same(call(arrays, causal=True), expected) and computed == together


@dtypes
@page_sizes
def test_appending_by_hand(page_size: int, dtype: Any) -> None:
    arrays = draw(dtype, (0, 5, 38), num_new=5, page_size=page_size)
    expected = call(arrays, causal=True)
    by_hand = {name: x for name, x in arrays.items() if name not in NEW} | appended(arrays)
    by_hand["seqlens_k"] = np.array(ends_of(arrays), np.int64)
    assert same(call(by_hand, causal=True), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("page_size", [0, 7])
@pytest.mark.parametrize("as_array", [False, True])
def test_step_by_step(page_size: int, as_array: bool, dtype: Any) -> None:
    """A prompt in one call, in parts, and then key by key: as if all were one causal call."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 30, 16)).astype(dtype) for n in (4, 2, 2))
    expected, expected_lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    arrays = draw(dtype, (0, 0), capacity=30, features=(16, 16), num_new=30, page_size=page_size)
    options = {name: arrays[name] for name in ("page_table",) if name in arrays}
    caches = [np.full_like(arrays[name], np.nan) for name in CACHES]
    lengths = np.zeros(2, np.int32)
    for first, last in [(0, 11), (11, 14), (14, 15), *((i, i + 1) for i in range(15, 30))]:
        now = np.s_[:, :, first:last]
        out, lse = cuflash.attention_with_kv_cache(
            q[now], *caches, seqlens_k=lengths if as_array else first, k_new=k[now], v_new=v[now], causal=True,
            return_lse=True, **options,
        )  # fmt: skip
        lengths += last - first
        eps = float(np.finfo(dtype).eps)
        np.testing.assert_allclose(out.astype(np.float64), expected[now].astype(np.float64), 2 * eps, 8 * eps)
        np.testing.assert_allclose(lse, expected_lse[now], rtol=1e-5)


def test_full_caches_are_plain_attention() -> None:
    arrays = draw(np.float32, (40, 40), seqlen_q=20)
    for causal in (False, True, "top_left"):
        out = cuflash.attention_with_kv_cache(**arrays, causal=causal)
        expected = cuflash.attention(arrays["q"], arrays["k_cache"], arrays["v_cache"], causal=causal)
        np.testing.assert_array_equal(out, expected)


def test_batches_do_not_see_each_other() -> None:
    arrays = draw(np.float32, (0, 9, 31, 40), num_new=2, page_size=8)
    expected, expected_lse = call(arrays, causal=True)
    for b in range(4):
        own = {name: x if name in CACHES else x[b : b + 1] for name, x in arrays.items()}
        out, lse = call(own, causal=True)
        np.testing.assert_allclose(out[0], expected[b], atol=1e-6)
        np.testing.assert_allclose(lse[0], expected_lse[b], atol=1e-6)


def test_pages_that_are_shared() -> None:
    """Of a common prefix, which nobody writes to."""
    arrays = draw(np.float32, (16, 16), num_new=3, page_size=8)
    arrays["page_table"][1, :2] = arrays["page_table"][0, :2]
    check(arrays, causal=True)
    alone = {name: x[:1] if name in ("q", *NEW) else x for name, x in arrays.items()}
    alone |= {name: arrays[name][:1] for name in ("seqlens_k", "page_table")}
    for name in ("q", *NEW):
        arrays[name][1] = arrays[name][0]
    out, _ = check(arrays, causal=True)
    np.testing.assert_array_equal(out[0], out[1])
    np.testing.assert_allclose(out[:1], call(alone, causal=True)[0], atol=1e-6)


# Results


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "broadcast"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_given_results(page_size: int, layout: str) -> None:
    arrays = draw(np.float32, (0, 9, 40), num_new=1, page_size=page_size)
    expected = check(arrays, causal=True)
    assert same(check(arrays, results=layout, causal=True), expected)
    alone = np.empty_like(expected[1])
    given = {name: x.copy() for name, x in arrays.items()}
    out, lse = cuflash.attention_with_kv_cache(**given, lse=alone, causal=True)
    assert lse is alone and same((out, lse), expected)


@dtypes
def test_dtypes_of_results(dtype: Any) -> None:
    for out_dtype in DTYPES:
        arrays = draw(dtype, (0, 9, 40), num_new=1)
        check(arrays, out_dtype=out_dtype)
        check(arrays, out_dtype=out_dtype, results="gaps")
        given = np.zeros((3, 4, 3, 12), out_dtype)
        assert cuflash.attention_with_kv_cache(**{name: x.copy() for name, x in arrays.items()}, out=given) is given
        np.testing.assert_array_equal(given, check(arrays, out_dtype=out_dtype)[0])


def test_without_the_lse() -> None:
    arrays = draw(np.float32, (0, 9, 40), num_new=1)
    expected, _ = call(arrays)
    for flag in (False, np.False_):
        given = {name: x.copy() for name, x in arrays.items()}
        np.testing.assert_array_equal(cuflash.attention_with_kv_cache(**given, return_lse=flag), expected)


def test_results_lie_as_queries_do() -> None:
    arrays = draw(np.float32, (0, 9, 40))
    arrays["q"] = np.ascontiguousarray(arrays["q"].swapaxes(1, 2)).swapaxes(1, 2)
    out, lse = cuflash.attention_with_kv_cache(**arrays, return_lse=True)
    assert out.swapaxes(1, 2).flags.c_contiguous and lse.swapaxes(1, 2).flags.c_contiguous


def test_subclasses_are_written_past_their_methods() -> None:
    class Refusing(np.ndarray):
        def __setitem__(self, *_: Any) -> None:
            raise AssertionError("must not be called")

        def reshape(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("must not be called")

    for page_size in (0, 8):
        arrays = draw(np.float32, (0, 9, 40), num_new=1, page_size=page_size)
        expected, _ = call(arrays)
        caches = {name: arrays[name].copy().view(Refusing) for name in CACHES}
        out = np.zeros_like(expected).view(Refusing)
        assert cuflash.attention_with_kv_cache(**(arrays | caches), out=out) is out
        np.testing.assert_array_equal(out.view(np.ndarray), expected)
        after = appended(arrays)
        assert same([caches[name].view(np.ndarray) for name in CACHES], [after[name] for name in CACHES])


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_ints_of_other_kinds() -> None:
    arrays = draw(np.float32, (9, 9), num_new=2)
    expected = call(arrays, num_splits=2)
    given = {name: x.copy() for name, x in arrays.items() if name != "seqlens_k"}
    for _ in range(2):  # what is appended is the same again
        for length, splits in ((Index(9), Index(2)), (np.int64(9), np.uint8(7)), (9, None)):
            out = cuflash.attention_with_kv_cache(**given, seqlens_k=length, num_splits=splits)
            assert same([out], expected[:1])


# Little


@pytest.mark.parametrize("page_size", [0, 8])
@pytest.mark.parametrize("num_new", [None, 2])
def test_nothing_to_do(num_new: int | None, page_size: int) -> None:
    for changes in ({"seqlen_q": 0}, {"heads": (0, 2)}, {"heads": (0, 0)}):
        arrays = draw(np.float32, (0, 9, 40), num_new=num_new, page_size=page_size, **changes)
        out, lse = call(arrays, causal=True)  # which checks that new keys are written even so
        assert out.shape == (*arrays["q"].shape[:3], 12) and lse.shape == out.shape[:3]
    arrays = draw(np.float32, (), num_new=num_new, page_size=page_size)
    for lengths in (arrays["seqlens_k"], 5):
        assert call(arrays | {"seqlens_k": lengths})[0].shape == (0, 4, 3, 12)


@pytest.mark.parametrize("num_new", [None, 0, 2])
@pytest.mark.parametrize("sinks", [None, np.float32([1, 2, 3, 4])], ids=["", "sinks"])
def test_no_keys(num_new: int | None, sinks: Any) -> None:
    options = {} if sinks is None else {"sinks": sinks}
    expected = np.broadcast_to(-np.inf if sinks is None else sinks[:, None], (2, 4, 3))
    none = draw(np.float32, (0, 0), num_new=num_new, capacity=0)
    paged = draw(np.float32, (0, 0), num_new=num_new, capacity=0, page_size=8)
    assert paged["page_table"].shape == (2, 0)
    no_pages = paged | {name: paged[name][:0] for name in CACHES}
    for arrays in (none, paged, no_pages):
        for lengths in (np.array([0, 9]), 0, 9):
            for causal in (False, True):
                out, lse = call(arrays | {"seqlens_k": lengths}, causal=causal, **options)
                assert out.shape == (2, 4, 3, 12) and not out.any()
                np.testing.assert_array_equal(lse, expected)


def test_pages_that_are_named_without_a_key() -> None:
    """No page is read, and there need be none."""
    paged = draw(np.float32, (0, 0), page_size=8)
    for pages in (paged, paged | {name: paged[name][:0] for name in CACHES}):
        for lengths in (pages["seqlens_k"], 0):
            out, lse = call(pages | {"seqlens_k": lengths})
            assert not out.any() and (lse == -np.inf).all()
