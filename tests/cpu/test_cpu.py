"""The NumPy back end against the float64 definition."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from threadpoolctl import threadpool_info

import cuflash
from cuflash import reference
from cuflash.cpu import attention as cpu
from cuflash.cpu import blocks as cpu_blocks
from cuflash.cpu import execute as host
from cuflash.cpu import tile as cpu_tile

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give small problems many blocks and tiles, and short ones in several threads."""
    for name, value in {
        "TILE_BYTES": 2**12,
        "BLOCK_ROWS": 32,
        "MIN_BLOCK_ROWS": 8,
        "MIN_BLOCKS": 4,
        "MIN_BLOCK_COST": 2**15,
        "MAX_BLOCK_COST": 2**16,
    }.items():
        monkeypatch.setattr(cpu_blocks, name, value)
    monkeypatch.setattr(cpu, "THREAD_COST", 2**14)
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "3")
    monkeypatch.setattr(host, "_calls", {})
    cpu_blocks.cut.cache_clear()
    yield
    cpu_blocks.cut.cache_clear()


def _draw(
    rng: np.random.Generator, dtype: Any, heads: tuple[int, int] = (2, 2), lengths: tuple[int, int] = (40, 50),
    features: tuple[int, int] = (16, 16), batch: tuple[int, ...] = (), mean: float = 0.0,
) -> list[Any]:  # fmt: skip
    """Draw q, k and v; `mean` is that of v."""
    q = rng.standard_normal((*batch, heads[0], lengths[0], features[0]))
    k = rng.standard_normal((*batch, heads[1], lengths[1], features[0]))
    v = rng.standard_normal((*batch, heads[1], lengths[1], features[1])) + mean
    return [x.astype(dtype) for x in (q, k, v)]


def _naive(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """Compute the definition step by step in float32, for the error that this makes."""
    dtype = np.float32
    seqlen_q, seqlen_k, group_size = q.shape[-2], k.shape[-2], q.shape[-3] // max(k.shape[-3], 1)
    q, k, v = (x.astype(dtype) for x in (q, np.repeat(k, group_size, -3), np.repeat(v, group_size, -3)))
    scale = options.get("scale")
    with np.errstate(all="ignore"):
        s = q @ k.swapaxes(-1, -2) * dtype(q.shape[-1] ** -0.5 if scale is None else scale)
        if options.get("softcap"):
            s = np.tanh(s / dtype(options["softcap"])) * dtype(options["softcap"])
        if options.get("bias") is not None:
            s = s + options["bias"].astype(dtype)
        offset = options.get("query_offset")
        offset = (0 if options.get("causal") == "top_left" else seqlen_k - seqlen_q) if offset is None else offset
        p = np.asarray(offset)[..., None, None, None] + np.arange(seqlen_q)[:, None]
        distance = p - np.arange(seqlen_k)
        if options.get("alibi_slopes") is not None:
            s = s - options["alibi_slopes"].astype(dtype)[..., None, None] * np.abs(distance).astype(dtype)
        left, right = options.get("window") or (None, None)
        hidden = np.zeros(s.shape, bool) if options.get("mask") is None else ~np.broadcast_to(options["mask"], s.shape)
        for edge in ([0] if options.get("causal") else []) + ([] if right is None else [right]):
            hidden |= distance < -edge
        if left is not None:
            hidden |= distance > left
        s = np.where(hidden, dtype(-np.inf), s)
        sink = options.get("sinks", np.full(1, -np.inf)).astype(dtype)[..., None]
        peak = np.maximum(s.max(-1, initial=-np.inf), sink)
        shift = np.where(peak == -np.inf, dtype(0), peak)
        w = np.exp(s - shift[..., None])
        total = w.sum(-1) + np.exp(sink - shift)
        return w @ v / np.where(total == 0, dtype(1), total)[..., None], shift + np.log(total)


def _check(out: Any, lse: Any, expected: tuple[Any, Any], naive: tuple[Any, Any]) -> None:
    """Bound = 2 x the error of a naive computation, for 16-bit results plus 1.1 x the rounding of the exact result.

    The naive computation is in float32. For float64 its error is scaled: in float64 it would make the same errors as
    the reference, and look better than it is.
    """
    seen = expected[1] > -np.inf
    np.testing.assert_array_equal(lse == -np.inf, ~seen)
    np.testing.assert_array_equal(out[~seen].astype(np.float64), 0.0)
    eps = np.finfo(lse.dtype).eps
    for got, exact, plain in zip(
        (out[seen], lse[seen]), (x[seen] for x in expected), (x[seen] for x in naive), strict=True
    ):
        if not got.size:
            continue
        bound = 2 * np.abs(plain - exact).max() * eps / np.finfo(np.float32).eps
        bound += 8 * eps * max(np.abs(exact).max(), 1e-3)
        if got.dtype.itemsize == 2:
            bound += 1.1 * np.abs(exact.astype(got.dtype).astype(np.float64) - exact).max()
        assert np.abs(got.astype(np.float64) - exact).max() <= bound


def _run(q: Any, k: Any, v: Any, **options: Any) -> None:
    before = [x.copy() for x in (q, k, v)]
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    assert out.dtype == q.dtype
    assert lse.dtype == (np.float64 if q.dtype == np.float64 else np.float32)
    _check(out, lse, reference.attention(q, k, v, **options), _naive(q, k, v, **options))
    for x, old in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(x, old)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": "top_left"},
    {"causal": True, "window": (5, None)},
    {"window": (3, 4)},
    {"window": (0, 0)},
    {"window": (None, 3), "query_offset": -7},
    {"causal": True, "query_offset": 25},
    {"causal": True, "query_offset": 10**6},
    {"window": (2, 2), "query_offset": -(10**6)},
    {"scale": 0.0},
    {"scale": -0.7},
    {"scale": 2.0**-30},
    {"scale": 2.0**30},
    {"scale": 3.0},
    {"softcap": 1.5},
    {"softcap": 1e-30},
    {"softcap": 50.0, "causal": True},
    {"bias": "array"},
    {"bias": "float64"},
    {"bias": "holes", "causal": True},
    {"mask": "array"},
    {"mask": "nothing"},
    {"alibi_slopes": "array", "causal": True},
    {"sinks": "array"},
    {"sinks": "array", "mask": "nothing"},
    {"sinks": "array", "window": (1, 1), "query_offset": 30},
]


def _materialise(
    options: dict[str, Any], dtype: Any, scores: tuple[int, ...], rng: np.random.Generator
) -> dict[str, Any]:
    """Replace the words in `OPTIONS` by arrays."""
    made = dict(options)
    for name in ("bias", "mask", "alibi_slopes", "sinks"):
        kind = options.get(name)
        if kind is None:
            continue
        if name == "mask":
            made[name] = np.zeros(scores[-2:], bool) if kind == "nothing" else rng.random(scores) < 0.5
        elif name == "bias":
            made[name] = rng.standard_normal(scores[-2:]).astype(np.float64 if kind == "float64" else dtype)
            if kind == "holes":
                made[name][rng.random(scores[-2:]) < 0.4] = -np.inf
        else:
            made[name] = rng.standard_normal(scores[:-2]).astype(dtype)
    return made


@dtypes
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_every_option(options: dict[str, Any], dtype: Any) -> None:
    rng = np.random.default_rng(0)
    for lengths in ((41, 150), (90, 37)):
        q, k, v = _draw(rng, dtype, (4, 2), lengths, (16, 8), (2,))
        _run(q, k, v, **_materialise(options, dtype, (2, 4, *lengths), rng))


@dtypes
@pytest.mark.usefixtures("small_tiles")
def test_combinations(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        options: dict[str, Any] = {}
        for name, choices in {
            "causal": (False, True, "bottom_right", "top_left"),
            "window": (None, None, (3, 0), (None, 20), (17, None), (40, 11)),
            "query_offset": (None, None, 3, -5, 60),
            "scale": (None, 0.3, -1.0),
            "softcap": (None, None, 2.0),
            "bias": (None, "array", "holes"),
            "mask": (None, "array"),
            "alibi_slopes": (None, "array"),
            "sinks": (None, "array"),
        }.items():
            value = choices[rng.integers(len(choices))]
            if value is not None:
                options[name] = value
        if isinstance(options.get("causal"), str):
            options.pop("query_offset", None)
        num_heads_kv, group_size = (int(x) for x in rng.integers(1, 4, 2))
        lengths = (int(rng.integers(1, 90)), int(rng.integers(1, 160)))
        heads = (num_heads_kv * group_size, num_heads_kv)
        q, k, v = _draw(rng, dtype, heads, lengths, (int(rng.integers(1, 40)), int(rng.integers(1, 40))), (1,))
        _run(q, k, v, **_materialise(options, dtype, (1, heads[0], *lengths), rng))


@dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(dtype: Any, causal: bool) -> None:
    rng = np.random.default_rng(2)
    for pair in (
        (1, 1),
        (1, 7),
        (2, 1),
        (0, 5),
        (5, 0),
        (0, 0),
        (31, 1021),
        (63, 64),
        (65, 63),
        (255, 257),
        (257, 1025),
        (1, 5003),
    ):
        _run(*_draw(rng, dtype, (2, 2), pair), causal=causal)


@pytest.mark.parametrize("features", [(1, 1), (1, 5), (3, 200), (80, 96), (512, 512), (512, 1)])
def test_features(features: tuple[int, int]) -> None:
    for dtype in (np.float32, np.float16):
        _run(*_draw(np.random.default_rng(3), dtype, (2, 1), (70, 600), features), causal=True)


@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2), (8, 1), (6, 2), (5, 1), (300, 1), (1, 1), (40, 40), (0, 0)])
def test_group_sizes(heads: tuple[int, int]) -> None:
    rng = np.random.default_rng(4)
    for seqlen_q in (1, 20):
        _run(*_draw(rng, np.float32, heads, (seqlen_q, 33), (4, 6), (2,)), causal=True)


def test_batch_axes_and_query_offsets() -> None:
    rng = np.random.default_rng(5)
    q, k, v = _draw(rng, np.float32, (4, 2), (20, 30))
    k, v = (np.stack([x, x * 0.5, x + 1]) for x in (k, v))
    q = np.stack([q, -q])[:, None]
    offsets = np.array([[-3, 0, 4], [9, 10, 100]])
    wide_q, wide_k, wide_v = (np.ascontiguousarray(np.broadcast_to(x, (2, 3, *x.shape[-3:]))) for x in (q, k, v))
    _run(wide_q, wide_k, wide_v, query_offset=offsets, causal=True)
    out = cuflash.attention(q, k, v, query_offset=offsets, causal=True)
    single = cuflash.attention(q[1, 0], k[2], v[2], query_offset=100, causal=True)
    np.testing.assert_array_equal(out[1, 2], single)
    assert cuflash.attention(q[:, :, :0], k[:, :0], v[:, :0]).shape == (2, 3, 0, 20, 16)
    assert cuflash.attention(q[:0], k, v).shape == (0, 3, 4, 20, 16)


def _layouts(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield views equal to x with unusual strides."""
    yield "sequence before heads", np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2)
    yield "features outermost", np.ascontiguousarray(np.moveaxis(x, -1, 0)).transpose(1, 2, 0)
    yield "every second element", np.repeat(x, 2, -1)[..., ::2]
    yield "rows reversed", np.ascontiguousarray(x[:, ::-1])[:, ::-1]
    yield "everything reversed", np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]
    raw = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(x.dtype).reshape(x.shape)
    unaligned[...] = x
    yield "unaligned", unaligned
    padded = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, x.dtype)
    padded[..., 1:-2] = x
    yield "padded rows", padded[..., 1:-2]


@dtypes
def test_layouts(dtype: Any) -> None:
    rng = np.random.default_rng(6)
    q, k, v = _draw(rng, dtype, (3, 3), (70, 90), (16, 12))
    expected, expected_lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    for (name, a), (_, b), (_, c) in zip(_layouts(q), _layouts(k), _layouts(v), strict=True):
        out, lse = cuflash.attention(a, b, c, causal=True, return_lse=True)
        # BLAS takes matrices whose columns lie in one piece as they are, in another way.
        eps = np.finfo(lse.dtype).eps if name == "features outermost" else 0.0
        rounding = float(ml_dtypes.finfo(dtype).eps) if eps else 0.0
        exact = expected.astype(np.float64)
        np.testing.assert_allclose(out.astype(np.float64), exact, rounding, 8 * eps, err_msg=name)
        np.testing.assert_allclose(lse, expected_lse, 8 * eps, err_msg=name)
    for name, out in _layouts(np.zeros_like(expected)):
        out[...] = np.nan
        assert cuflash.attention(q, k, v, causal=True, out=out) is out
        eps = np.finfo(expected_lse.dtype).eps if name == "features outermost" and dtype.itemsize > 2 else 0.0
        np.testing.assert_allclose(out.astype(np.float64), exact, 0, 8 * eps, err_msg=name)
    lse = np.zeros((90, 3), expected_lse.dtype)[:70][::-1].T
    cuflash.attention(q, k, v, causal=True, lse=lse)
    np.testing.assert_array_equal(lse, expected_lse)


def test_repeated_rows_and_broadcast_options() -> None:
    rng = np.random.default_rng(7)
    q, k, v = _draw(rng, np.float32, (4, 4), (30, 40))
    same = np.broadcast_to(k[:1, :1], k.shape)
    bias, mask = rng.standard_normal((4, 1, 40)).astype(np.float32), rng.random((30, 1)) < 0.5
    repeated = (np.broadcast_to(q[:, :1], q.shape), same, np.broadcast_to(v[:1], v.shape))
    out = cuflash.attention(*repeated, bias=bias, mask=mask)
    wide_bias, wide_mask = (np.ascontiguousarray(np.broadcast_to(x, (4, 30, 40))) for x in (bias, mask))
    expected = cuflash.attention(*(np.ascontiguousarray(x) for x in repeated), bias=wide_bias, mask=wide_mask)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("bias_dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_bias_of_any_dtype(bias_dtype: Any) -> None:
    rng = np.random.default_rng(8)
    for dtype in DTYPES:
        q, k, v = _draw(rng, dtype)
        _run(q, k, v, bias=rng.standard_normal((40, 50)).astype(bias_dtype))


@dtypes
@pytest.mark.usefixtures("small_tiles")
def test_hidden_rows_may_hold_anything(dtype: Any) -> None:
    rng = np.random.default_rng(9)
    q, k, v = _draw(rng, dtype, (2, 2), (60, 100))
    mask = rng.random((60, 100)) < 0.5
    mask[:, [0, 7, 64, 99]] = False
    dirty = k.copy()
    dirty[:, 0], dirty[:, 7], dirty[:, 64], dirty[:, 99] = np.nan, np.inf, -np.inf, np.nan
    for options in ({"mask": mask}, {"bias": np.where(mask, 0.0, -np.inf).astype(dtype)}):
        for extra in ({}, {"softcap": 2.0}, {"scale": 2.0**-25}):
            clean_out, clean_lse = cuflash.attention(q, k, v, return_lse=True, **options, **extra)
            out, lse = cuflash.attention(q, dirty, v, return_lse=True, **options, **extra)
            eps = float(ml_dtypes.finfo(dtype).eps)
            np.testing.assert_allclose(out.astype(np.float64), clean_out.astype(np.float64), rtol=2 * eps, atol=4 * eps)
            np.testing.assert_allclose(lse, clean_lse, rtol=1e-5)
    k[:, 60:], v[:, 60:] = np.nan, np.nan
    out, lse = cuflash.attention(q, k, v, causal="top_left", return_lse=True)
    assert np.isfinite(out.astype(np.float32)).all()
    assert np.isfinite(lse).all()
    k, v = k[:, :60], v[:, :60]
    _check(out, lse, reference.attention(q, k, v, causal=True), _naive(q, k, v, causal=True))


def test_large_logits() -> None:
    rng = np.random.default_rng(10)
    q, k, v = _draw(rng, np.float32, lengths=(20, 3000))
    _run(q * 1e4, k * 1e4, v)
    lowest = np.full((20, 3000), np.finfo(np.float32).min, np.float32)
    _run(q, k, v, bias=lowest)
    out, lse = cuflash.attention(q, k, v, bias=np.full((20, 3000), -1e300), return_lse=True)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    _run(q, k, v * 1e30)
    _run(q * 3, k * 3, v * 1e37)
    _run(q, k, v * 1e-36)


def test_peak_is_found_wherever_it_is() -> None:
    rng = np.random.default_rng(0)
    for num_keys in (255, 257, 300, 1000):
        q, v = np.full((64, 16), 100.0), rng.standard_normal((num_keys, 16))
        for place in (0, num_keys // 2, num_keys - 1):
            k = np.zeros((num_keys, 16))
            k[place] = 100.0
            np.testing.assert_array_equal(cuflash.attention(q, k, v), np.broadcast_to(v[place], (64, 16)))


@pytest.mark.usefixtures("small_tiles")
def test_peak_rises_from_tile_to_tile() -> None:
    q, k, v = _draw(np.random.default_rng(11), np.float32, (1, 1), (16, 1000), (8, 8))
    k *= np.linspace(0, 40, 1000, dtype=np.float32)[:, None]
    _run(q, k, v)
    _run(q, k[:, ::-1], v)


@pytest.mark.parametrize("spread", [1e-3, 0.05, 1.0, 8.0])
@pytest.mark.parametrize("heavy_tails", [False, True])
def test_error_over_distributions(spread: float, heavy_tails: bool) -> None:
    rng = np.random.default_rng(21)
    for lengths in ((1, 5000), (70, 2600), (300, 1300)):
        for center in (0.0, 2.0):
            q, k, v = _draw(rng, np.float32, (1, 1), lengths, (32, 32), mean=5.0)
            if heavy_tails:
                q, k = q / rng.random(q.shape, np.float32), k / rng.random(k.shape, np.float32)
            _run(q * np.float32(spread) + np.float32(center), k * np.float32(spread), v)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda dtype: dtype.name)
def test_16_bit_error_does_not_grow_with_keys(dtype: Any) -> None:
    q, k, v = _draw(np.random.default_rng(12), dtype, (1, 1), (8, 2**18), (8, 16), mean=1.0)
    exact = reference.attention(q, k, v)[0]
    error = cuflash.attention(q, k, v).astype(np.float64) - exact
    rounding = exact.astype(dtype).astype(np.float64) - exact
    assert np.sqrt((error**2).mean()) <= 1.1 * np.sqrt((rounding**2).mean())


def test_float32_error_does_not_grow_with_keys() -> None:
    errors = []
    for seqlen_k in (2**12, 2**18):
        q, k, v = _draw(np.random.default_rng(13), np.float32, (1, 1), (64, seqlen_k), (16, 16), mean=1.0)
        out, lse = cuflash.attention(q, k, v, return_lse=True)
        exact = reference.attention(q, k, v)
        _check(out, lse, exact, exact)
        errors.append(np.sqrt(((out / exact[0] - 1) ** 2).mean()))
    assert errors[1] <= 1.5 * errors[0]


def test_every_float16_is_widened_exactly() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    for x in (every, every[np.isfinite(every)], every[::-3]):
        wide = np.empty(x.shape, np.float32)
        cpu_tile.widen_into(wide, x)
        np.testing.assert_array_equal(wide, x.astype(np.float32))
        np.testing.assert_array_equal(np.signbit(wide), np.signbit(x))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_out_dtype(out_dtype: Any) -> None:
    q, k, v = _draw(np.random.default_rng(14), np.float32)
    out = cuflash.attention(q, k, v, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    np.testing.assert_allclose(out.astype(np.float64), reference.attention(q, k, v)[0], rtol=1e-2, atol=1e-2)


def test_no_warnings(recwarn: pytest.WarningsRecorder) -> None:
    q, k, v = _draw(np.random.default_rng(15), np.float16)
    with np.errstate(all="raise"):
        cuflash.attention(q, k * 0, v, mask=np.zeros((40, 50), bool), return_lse=True)
        cuflash.attention(q * 200, k * 200, v * 1e4, bias=np.full(50, -np.inf), sinks=np.full(2, -np.inf))
        cuflash.attention(q, k, v, causal=True, query_offset=-20, out_dtype=np.float16, return_lse=True)
    assert not recwarn.list


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    seqlen = 2**15
    options: dict[str, Any] = {}
    if dtype == np.float16:
        monkeypatch.setenv("CUFLASH_NUM_THREADS", "64")
        options = {"window": (600, 0), "mask": np.ones((1, seqlen), bool)}
    q, k, v = _draw(np.random.default_rng(16), dtype, (1, 1), (seqlen, seqlen), (64, 64))
    out, lse = np.empty_like(q), np.empty(q.shape[:-1], np.float32)
    tracemalloc.start()
    try:
        cuflash.attention(q, k, v, out=out, lse=lse, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20
    for row in (0, 12345, seqlen - 1):
        exact = reference.attention(q[:, row : row + 1], k, v, query_offset=row, **options)[0]
        tolerance = 1e-6 if dtype == np.float32 else 1e-3
        np.testing.assert_allclose(out[:, row : row + 1].astype(np.float64), exact, atol=tolerance)


@dtypes
def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    rng = np.random.default_rng(17)
    for heads, lengths in (((1, 1), (700, 1500)), ((8, 2), (300, 400)), ((16, 16), (20, 30))):
        q, k, v = _draw(rng, dtype, heads, lengths)
        results = []
        for threads in ("1", "2", "3", "7", "1"):
            monkeypatch.setenv("CUFLASH_NUM_THREADS", threads)
            results.append(cuflash.attention(q, k, v, causal=True, return_lse=True))
        for out, lse in results[1:]:
            assert out.tobytes() == results[0][0].tobytes()
            assert lse.tobytes() == results[0][1].tobytes()


def _blas_threads() -> list[int]:
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


def test_calls_from_several_threads() -> None:
    before = _blas_threads()
    inputs = [_draw(np.random.default_rng(seed), np.float32, (4, 4), (300, 700)) for seed in range(6)]
    expected = [cuflash.attention(*arrays, causal=True) for arrays in inputs]
    results: list[Any] = [None] * len(inputs)

    def call(index: int) -> None:
        for _ in range(5):
            results[index] = cuflash.attention(*inputs[index], causal=True)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for out, right in zip(results, expected, strict=True):
        assert out.tobytes() == right.tobytes()
    assert _blas_threads() == before


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _blas_threads()
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "2")
    q, k, v = _draw(np.random.default_rng(18), np.float32, (4, 4), (300, 700))
    right = cuflash.attention(q, k, v)

    def fail(*_: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(cpu, "attend_directly", fail)
        with pytest.raises(MemoryError):
            cuflash.attention(q, k, v)
    assert _blas_threads() == before
    assert cuflash.attention(q, k, v).tobytes() == right.tobytes()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_after_a_call() -> None:
    program = """
import os, numpy as np, cuflash
q, k, v = np.random.default_rng(0).standard_normal((3, 4, 500, 32), dtype=np.float32)
expected = cuflash.attention(q, k, v)
child = os.fork()
if not child:
    os._exit(0 if (cuflash.attention(q, k, v) == expected).all() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environment = os.environ | {"CUFLASH_NUM_THREADS": "3"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment, check=True, timeout=60)


@dtypes
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (4, 2)}, {"softcap": 2.0, "causal": "top_left"}], ids=str
)
def test_varlen(dtype: Any, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(19)
    boundaries_q, boundaries_k = np.cumsum([0, 5, 0, 130, 1, 40]), np.cumsum([0, 7, 9, 300, 0, 20], dtype=np.int32)
    q = rng.standard_normal((180, 4, 8)).astype(dtype)
    k, v = (rng.standard_normal((350, 2, 8)).astype(dtype) for _ in range(2))
    k[336:], v[336:], q[176:] = np.nan, np.nan, np.nan
    options = options | {"alibi_slopes": rng.random((5, 4)), "sinks": rng.standard_normal(4)}
    out, lse = cuflash.attention_varlen(q, k, v, boundaries_q, boundaries_k, return_lse=True, **options)
    exact = reference.attention_varlen(q, k, v, boundaries_q, boundaries_k, **options)
    for b, h in itertools.product(range(5), range(4)):
        rows, keys = (slice(x[b], x[b + 1]) for x in (boundaries_q, boundaries_k))
        single = options | {"alibi_slopes": options["alibi_slopes"][b, h : h + 1], "sinks": options["sinks"][h : h + 1]}
        naive = _naive(q[rows, h][None], k[keys, h // 2][None], v[keys, h // 2][None], **single)
        _check(out[rows, h], lse[rows, h], (exact[0][rows, h], exact[1][rows, h]), (naive[0][0], naive[1][0]))
    assert (out[176:] == 0).all()
    assert (lse[176:] == -np.inf).all()


def test_varlen_equals_dense() -> None:
    q, k, v = _draw(np.random.default_rng(20), np.float32, (2, 2), (300, 300))
    packed = [np.ascontiguousarray(x.swapaxes(0, 1)) for x in (q, k, v)]
    out, lse = cuflash.attention_varlen(*packed, np.array([0, 300]), causal=True, return_lse=True)
    dense_out, dense_lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(out.swapaxes(0, 1), dense_out)
    np.testing.assert_array_equal(lse.T, dense_lse)
    nothing = cuflash.attention_varlen(*packed, np.array([0]), return_lse=True)
    assert (nothing[0] == 0).all()
    assert (nothing[1] == -np.inf).all()


def test_as_many_axes_as_an_array_can_have() -> None:
    axes = (1,) * (33 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 28)
    x, y = np.ones((*axes, 2, 3, 4), np.float32), np.ones((2, *axes[1:], 2, 3, 4), np.float32)
    assert (cuflash.attention(x, y, y) == 1).all()
    offsets = np.arange(2).reshape(2, *axes[1:])
    assert cuflash.attention(x, y, y, query_offset=offsets, causal=True).shape == y.shape
