"""What the NumPy back end owes exactly: finite logits are a softmax, and a row depends on what it sees alone."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash.cpu import attention as cpu
from cuflash.cpu import blocks as cpu_blocks
from cuflash.cpu import execute as host

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
wide_dtypes = pytest.mark.parametrize("dtype", DTYPES[2:], ids=lambda dtype: dtype.name)


def _draw(dtype: Any, *shape: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]


def _agrees(dtype: Any, q: Any, k: Any, v: Any, eps: float = 64.0, **options: Any) -> tuple[Any, Any]:
    """Compare with float64: where -inf, NaN and 0 are, and values within `eps` units of the dtype."""
    with np.errstate(all="ignore"):
        expected, expected_lse = reference.attention(q, k, v, **options)
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    unit = float(ml_dtypes.finfo(dtype).eps)
    # Without the lse there is another way for what has no options.
    for got in (out, cuflash.attention(q, k, v, **options)):
        np.testing.assert_allclose(got.astype(np.float64), expected, rtol=eps * unit, atol=eps * unit * np.abs(v).max())
    limit = float(np.finfo(lse.dtype).max)
    kept = np.where(np.isfinite(expected_lse), np.clip(expected_lse, -limit, limit), expected_lse)
    largest = np.abs(kept[np.isfinite(kept)]).max(initial=10.0)
    np.testing.assert_allclose(lse, kept, rtol=1e-5, atol=1e-6 * largest)
    return out, lse


@dtypes
@pytest.mark.parametrize("value", [-1e300, float(np.finfo(np.float64).min), -1e39, 1e39, 1e300])
def test_float64_bias_beyond_float32(value: float, dtype: Any) -> None:
    q, k, v = _draw(dtype, 2, 37, 16)
    q, k = np.zeros_like(q), np.zeros_like(k)
    everywhere = np.full((37, 37), value)
    _agrees(dtype, q, k, v, bias=everywhere)
    _agrees(dtype, q, k, v, bias=everywhere, causal=True)
    everywhere[:5] = -np.inf
    out, lse = _agrees(dtype, q, k, v, bias=everywhere)
    assert (out[:, :5] == 0).all() and np.isneginf(lse[:, :5]).all() and np.isfinite(lse[:, 5:]).all()
    one = np.zeros((37, 37))
    one[:, 7] = abs(value)
    out, lse = _agrees(dtype, q, k, v, bias=one)
    np.testing.assert_array_equal(out, np.broadcast_to(v[:, 7:8], out.shape))
    _agrees(dtype, q, k, v, bias=-one)


@wide_dtypes
@pytest.mark.parametrize("bias_dtype", [np.float32, np.float64])
def test_a_bias_of_plus_infinity_is_not_clipped(bias_dtype: Any, dtype: Any) -> None:
    q, k, v = _draw(dtype, 1, 20, 8)
    bias = np.zeros((20, 20), bias_dtype)
    bias[4, 2] = np.inf
    out, lse = _agrees(dtype, q, k, v, bias=bias)
    assert np.isnan(out[0, 4]).all() and np.isnan(lse[0, 4])
    assert np.isfinite(np.delete(out, 4, 1)).all()


@dtypes
@pytest.mark.parametrize("sink", [np.inf, np.nan, 1e38, 300.0, -86.0, -300.0, -np.inf])
def test_a_row_without_keys_is_0_whatever_the_sink(sink: float, dtype: Any) -> None:
    q, k, v = _draw(dtype, 2, 30, 8)
    sinks = np.full(2, sink)
    with np.errstate(all="ignore"):
        out, lse = cuflash.attention(q, k, v, sinks=sinks, causal=True, query_offset=-12, return_lse=True)
        expected = reference.attention(q, k, v, sinks=sinks, causal=True, query_offset=-12)
    for got, got_lse in ((out, lse), expected):
        assert (got[:, :12] == 0).all()
        np.testing.assert_array_equal(got_lse[:, :12], np.float32(sink) if got_lse.dtype == np.float32 else sink)
    if np.isfinite(sink):
        _agrees(dtype, q, k, v, sinks=sinks, causal=True, query_offset=-12)


@dtypes
@pytest.mark.parametrize("sink", [1e300, -1e300])
def test_a_finite_sink_has_a_finite_lse(sink: float, dtype: Any) -> None:
    q, k, v = _draw(dtype, 2, 30, 8)
    options: dict[str, Any] = {"sinks": np.full(2, sink), "causal": True, "query_offset": -12, "return_lse": True}
    out, lse = cuflash.attention(q, k, v, **options)
    bounded = np.clip(sink, np.finfo(lse.dtype).min, np.finfo(lse.dtype).max)
    np.testing.assert_array_equal(lse[:, :12] if sink < 0 else lse, bounded)
    out_with_slopes, lse_with_slopes = cuflash.attention(q, k, v, alibi_slopes=np.zeros(2), **options)
    np.testing.assert_array_equal(lse, lse_with_slopes)
    np.testing.assert_array_equal(out, out_with_slopes)


@dtypes
def test_a_sink_far_above_the_logits(dtype: Any) -> None:
    q, k, v = _draw(dtype, 1, 20, 8)
    v = np.full_like(v, 1e30 if dtype.itemsize > 2 or dtype == BFLOAT16 else 6e4)
    _agrees(dtype, q, k, v, sinks=np.array([95.0]))


@dtypes
@pytest.mark.parametrize("softcap", [1e-30, 1e-20, 1e-18, 2e-17, 1e-5, 1.0, 50.0, 1e10, 2.0**64, 1e30, 1e36, 3e38])
@pytest.mark.parametrize("causal", [False, True])
def test_softcaps(causal: bool, softcap: float, dtype: Any) -> None:
    q, k, v = _draw(dtype, 2, 70, 16)
    _agrees(dtype, q, k, v, softcap=softcap, causal=causal)
    _agrees(dtype, q, k, v, softcap=softcap, causal=causal, scale=1e-30)
    largest = 1e300 if dtype == np.float64 else 1e30
    if softcap <= 1e18:
        _agrees(dtype, np.zeros_like(q), k, v, softcap=softcap, causal=causal, scale=largest)
    q[:, ::2] = 0
    if softcap <= 100:
        _agrees(dtype, q, k, v, softcap=softcap, causal=causal, scale=largest)


@dtypes
@pytest.mark.parametrize("scale", [0.0, 1e-30, -1e-30, 1e10, -1e20, 1e30])
def test_scales(scale: float, dtype: Any) -> None:
    q, k, v = _draw(dtype, 2, 40, 16)
    q[:, 3] = 0
    _agrees(dtype, q, k, v, scale=scale, causal=True)
    if dtype == np.float64:
        _agrees(dtype, q, k, v, scale=scale * 1e270, causal=True)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("masked", [False, True])
def test_products_beyond_float32(masked: bool, sign: int) -> None:
    q, k, v = _draw(np.float32, 2, 50, 8)
    k = np.abs(k)
    q = np.abs(q) * np.float32(sign)
    mask = np.random.default_rng(1).random((50, 50)) < 0.5
    mask[:6] = False
    options: dict[str, Any] = {"mask": mask} if masked else {"causal": True}
    _agrees(np.float32, q * np.float32(1e20), k * np.float32(1e20), v, **options)
    _agrees(np.float32, q * np.float32(1e10), k, v, scale=1e30, **options)
    out, lse = cuflash.attention(q[:, :3], k, np.full_like(v, 3e38), return_lse=True)
    np.testing.assert_allclose(out, 3e38, rtol=1e-6)
    for length in (50, 10):
        huge = np.full_like(v[:, :length], 3e38)
        np.testing.assert_allclose(cuflash.attention(q[:, :3], k[:, :length], huge), 3e38, rtol=1e-6)
    assert np.isfinite(lse).all()


@dtypes
@pytest.mark.parametrize("slope", [1e38, -1e38, 1e30, 100.0, -3.0])
@pytest.mark.parametrize("offset", [None, -100, 1000, 10**9])
def test_slopes(offset: int | None, slope: float, dtype: Any) -> None:
    q, k, v = _draw(dtype, 2, 40, 16)
    # The definition adds the whole distance, and rounds to float64.
    eps = 64 + 4 * abs(slope * (offset or 0)) if dtype == np.float64 and abs(slope) < 1e30 else 64
    for scale in (None, 1e-29):
        options: dict[str, Any] = {"alibi_slopes": np.full(2, slope), "query_offset": offset, "scale": scale}
        _, lse = _agrees(dtype, q, k, v, eps, **options)
        assert np.isfinite(lse).all()
        _agrees(dtype, q, k, v, eps, causal=True, **options)
        _agrees(dtype, q, k, v, eps, sinks=np.array([0.0, -50.0]), **options)


@dtypes
@pytest.mark.parametrize("length", [1, 5, 17, 64, 300, 1000])
@pytest.mark.parametrize("heads", [1, 2, 40])
def test_a_row_that_sees_one_key_returns_its_value(heads: int, length: int, dtype: Any) -> None:
    if heads * length > 12000:
        heads = 3
    q, k, v = _draw(dtype, heads, length, 16)
    q, k = q * dtype.type(4), k * dtype.type(4)
    chosen = np.random.default_rng(1).integers(0, length, length)
    mask = np.arange(length) == chosen[:, np.newaxis]
    expected = v[:, chosen]
    np.testing.assert_array_equal(cuflash.attention(q, k, v, mask=mask), expected)
    np.testing.assert_array_equal(cuflash.attention(q, k, v, bias=np.where(mask, 7.0, -np.inf)), expected)
    np.testing.assert_array_equal(cuflash.attention(q, k, v, window=(0, 0)), v)
    for scale in (1e-3, None):
        out = cuflash.attention(q, k, v, causal=True, scale=scale)
        np.testing.assert_array_equal(out[:, 0], v[:, 0])
    single = cuflash.attention(q, k[:, :1], v[:, :1], softcap=50.0)
    np.testing.assert_array_equal(single, np.broadcast_to(v[:, :1], single.shape))


@dtypes
def test_values_of_1_give_1(dtype: Any) -> None:
    for heads, length in ((1, 1), (2, 5), (3, 17), (2, 64), (1, 300), (2, 1000), (40, 10)):
        q, k, v = _draw(dtype, heads, length, 64)
        for options in ({}, {"causal": True}):
            out = cuflash.attention(q, k, np.ones_like(v), **options).astype(np.float64)
            # BLAS adds up the weights in another order than NumPy does; 16-bit results are rounded to 1.
            units = 10 * (dtype.itemsize > 2)
            assert np.abs(out - 1).max() <= units * float(ml_dtypes.finfo(dtype).eps)


@pytest.fixture(params=["small tiles", "as they are"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small tiles":
        for name, value in {"TILE_BYTES": 2**14, "BLOCK_ROWS": 64, "MIN_BLOCK_ROWS": 32}.items():
            monkeypatch.setattr(cpu_blocks, name, value)
        monkeypatch.setattr(host, "_calls", {})
        cpu_blocks.cut.cache_clear()
        request.addfinalizer(cpu_blocks.cut.cache_clear)


@dtypes
@pytest.mark.parametrize("length", [40, 600])
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0])
@pytest.mark.usefixtures("_tiles")
def test_bits_do_not_depend_on_keys_that_a_row_does_not_see(spread: float, length: int, dtype: Any) -> None:
    for heads, options in ((1, {}), (4, {"softcap": 20.0}), (2, {"window": (100, 0)})):
        q, k, v = (x * dtype.type(spread) for x in _draw(dtype, heads, length, 32))
        expected = cuflash.attention(q, k, v, causal=True, return_lse=True, **options)
        alone = cuflash.attention(q, k, v, causal=True, **options)
        for factor in (1e3, 0.0, np.nan):
            other_k, other_v = k.copy(), v.copy()
            other_k[:, -1] = other_k[:, -1].astype(np.float64) * factor
            other_v[:, -1] = 7
            changed = cuflash.attention(q, other_k, other_v, causal=True, return_lse=True, **options)
            for x, y in zip(changed, expected, strict=True):
                assert x[:, :-1].tobytes() == y[:, :-1].tobytes()
            changed = cuflash.attention(q, other_k, other_v, causal=True, **options)
            assert changed[:, :-1].tobytes() == alone[:, :-1].tobytes()


@wide_dtypes
def test_bits_do_not_depend_on_unused_rows(dtype: Any) -> None:
    q, k, v = _draw(dtype, 1, 600, 32)
    expected = cuflash.attention(q[:, :400], k, v, causal="top_left")
    k[:, 400:], v[:, 400:] = np.nan, np.nan
    assert cuflash.attention(q[:, :400], k, v, causal="top_left").tobytes() == expected.tobytes()


def test_rows_whose_weights_would_be_thin_are_shifted() -> None:
    q, k, v = _draw(np.float32, 1, 2000, 16)
    q[:, ::3], k = 1.3, -np.abs(k) - np.float32(3)
    v[..., 1], v[..., 2], v[..., 3] = 1e-32, 1e-36, 1e-37
    for options in ({}, {"causal": True}):
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        expected, expected_lse = reference.attention(q, k, v, **options)
        np.testing.assert_allclose(out[..., 1:4], expected[..., 1:4], rtol=1e-5)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_small_columns_beside_large_ones() -> None:
    for lengths in ((8, 300), (300, 3000)):
        rng = np.random.default_rng(3)
        q, k, v = (rng.standard_normal((1, n, 16), dtype=np.float32) for n in (*lengths, lengths[1]))
        v = np.abs(v)
        for column, size in enumerate((1e-20, 1e-32, 1e-36, 1e20, 1e37)):
            v[..., column] *= np.float32(size)
        out, expected = cuflash.attention(q, k - 2, v), reference.attention(q, k - 2, v)[0]
        np.testing.assert_allclose(out, expected, rtol=2e-5)


FLUSH = """
#include <immintrin.h>
unsigned set_csr(unsigned value) { unsigned before = _mm_getcsr(); _mm_setcsr(value); return before; }
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="needs gcc on x86-64")
def test_subnormal_float16_where_a_library_flushes_subnormals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flush.c").write_text(FLUSH)
    library = tmp_path / "flush.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "flush.c"], check=True)
    set_csr = ctypes.CDLL(str(library)).set_csr
    set_csr.argtypes, set_csr.restype = [ctypes.c_uint], ctypes.c_uint
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "1")
    q, k, _ = _draw(np.float16, 2, 100, 16)
    v = (np.arange(3200).reshape(2, 100, 16) % 1000).astype(np.int16).view(np.float16)
    expected = cuflash.attention(q, k, v)
    before = set_csr(0x9FC0)  # flush to zero, denormals are zero, no exceptions
    try:
        out = cuflash.attention(q, k, v)
    finally:
        set_csr(before)
    np.testing.assert_array_equal(out, expected)
    assert np.count_nonzero(out) > 0.9 * out.size


def test_a_repeated_call_finds_the_checked_one() -> None:
    q, k, v = _draw(np.float32, 2, 30, 8)
    expected = cuflash.attention(q, k, v, causal=True, return_lse=True)
    for _ in range(2):
        for scale in (1, True, 1.0):
            if scale is True:
                with pytest.raises(TypeError, match="scale"):
                    cuflash.attention(q, k, v, scale=scale)
            else:
                cuflash.attention(q, k, v, scale=scale)
        out, lse = np.full_like(q, np.nan), np.full(q.shape[:-1], np.nan, np.float32)
        results = cuflash.attention(q, k, v, causal=True, out=out, lse=lse)
        assert results[0] is out and results[1] is lse
        assert out.tobytes() == expected[0].tobytes() and lse.tobytes() == expected[1].tobytes()
        with pytest.raises(ValueError, match="out overlaps q"):
            cuflash.attention(q, k, v, causal=True, out=q, lse=lse)
        out.flags.writeable = False
        with pytest.raises(ValueError, match="out is read-only"):
            cuflash.attention(q, k, v, causal=True, out=out, lse=lse)
    bias = np.random.default_rng(2).standard_normal((1, 30), dtype=np.float32)
    for scale in (1.0, 2.0):
        for seed in (1, 2):
            arrays = _draw(np.float32, 2, 30, 8, seed=seed)
            exact = reference.attention(*arrays, bias=bias, scale=scale)[0]
            np.testing.assert_allclose(cuflash.attention(*arrays, bias=bias, scale=scale), exact, atol=1e-5)


def test_batches_and_heads_are_cut_alike() -> None:
    q, k, v = _draw(np.float32, 60, 4, 16)
    expected = cuflash.attention(q, k, v)
    for shape in ((60, 1), (1, 60), (3, 20), (2, 3, 10)):
        out = cuflash.attention(*(x.reshape(*shape, 4, 16) for x in (q, k, v)))
        assert out.tobytes() == expected.tobytes()
    apart = [np.ascontiguousarray(x.reshape(6, 10, 4, 16).swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    assert np.ascontiguousarray(cuflash.attention(*apart)).tobytes() == expected.tobytes()
    assert cpu_blocks.merged_axes((3, 4, 1, 5), ((80, 20, 7, 4), (0, 0, 0, 0))) == (60,)
    assert cpu_blocks.merged_axes((3, 4, 5), ((80, 20, 4), (0, 20, 4))) == (3, 20)


@pytest.mark.parametrize("shape", [(5000, 2, 4, 16), (100_000, 1, 1, 16), (300, 4, 1, 64)])
def test_heads_of_small_problems_go_together(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    attend = cpu.attend_directly
    monkeypatch.setattr(cpu, "attend_directly", lambda *arguments: computed.append(1) or attend(*arguments))  # type: ignore
    q, k, v = _draw(np.float32, *shape)
    out = cuflash.attention(q, k, v)
    np.testing.assert_allclose(out[::97], reference.attention(q[::97], k[::97], v[::97])[0], atol=1e-5)
    assert 1 <= len(computed) <= 1 + shape[0] * shape[1] // 500


@pytest.mark.usefixtures("_tiles")
def test_many_heads_with_more_keys_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_blocks, "TILE_BYTES", 2**10)
    q, k, v = _draw(np.float32, 64, 40, 4)
    for rows in (1, 2, 5):
        _agrees(np.float32, q[:, :rows], k, v)


@wide_dtypes
def test_strided_results_and_groups_without_options(dtype: Any) -> None:
    for heads, rows, keys in ((1, 3, 300), (4, 40, 50), (64, 2, 3), (40, 1, 1)):
        rng = np.random.default_rng(4)
        q, k, v = (
            rng.standard_normal((n, h, 16)).astype(dtype) for n, h in ((rows, 2 * heads), (keys, heads), (keys, heads))
        )
        arrays = [x.swapaxes(0, 1) for x in (q, k, v)]
        out = np.full((2 * heads, 2 * rows, 16), 7, dtype)
        for options in ({}, {"causal": True}, {"window": (2, 1)}):
            expected = reference.attention(*arrays, **options)[0]
            for got in (cuflash.attention(*arrays, **options), cuflash.attention(*arrays, out=out[:, ::2], **options)):
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        assert (out[:, 1::2] == 7).all()


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1e-40},
        {"scale": 1e-30, "bias": np.array([[[1e12, 0]]], np.float32)},
        {"scale": 1e-30, "alibi_slopes": np.array([1e12], np.float32)},
        {"scale": 1e-30, "softcap": 1.0},
        {"scale": 2.0**-20},
        {"mask": np.ones((1, 2), bool)},
        {},
    ],
    ids=str,
)
def test_one_score_beyond_float32_beside_others(options: dict[str, Any]) -> None:
    v = np.array([[[1.0], [0.0]]], np.float32)
    q, k = np.full((1, 1, 16), 10, np.float32), np.zeros((1, 2, 16), np.float32)
    k[0, 0] = -1e38
    for order in (slice(None), slice(None, None, -1)):
        _agrees(np.float32, q, k[:, order], v[:, order], **options)
    # Partial sums are beyond it, the score is not.
    k[0, 0, :8], k[0, 0, 8:] = -3e38, 3e38
    _agrees(np.float32, q / 10, k, v, **options)


def test_scores_beyond_float32_of_keys_that_are_hidden_change_nothing() -> None:
    q, k, v = _draw(np.float32, 3, 40, 16)
    expected = cuflash.attention(q, k, v, causal=True)
    k[:, -1] = 3e38
    q[:, :-1] *= np.float32(1.0)
    out = cuflash.attention(q, k, v, causal=True)
    assert out[:, :-1].tobytes() == expected[:, :-1].tobytes()


@dtypes
def test_results_as_large_as_the_largest_number(dtype: Any) -> None:
    for keys in (1, 4, 16, 300):
        q, k, v = _draw(dtype, 1, keys, 64)
        v = np.full_like(v, ml_dtypes.finfo(dtype).max)
        if dtype.itemsize == 8:
            v /= 1000  # there is nothing wider to add them up in
        for options in ({}, {"causal": True}, {"mask": np.ones((keys, keys), bool)}):
            out = cuflash.attention(q, k, v, **options).astype(np.float64)
            np.testing.assert_allclose(out, v.astype(np.float64), rtol=10 * float(ml_dtypes.finfo(dtype).eps))


def test_an_infinite_sink_beside_alibi() -> None:
    q, k, v = _draw(np.float32, 1, 4, 8)
    options: dict[str, Any] = {"sinks": np.array([np.inf]), "alibi_slopes": np.array([1.0])}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    assert (out == 0).all() and np.isposinf(lse).all()


def test_small_queries_of_large_keys() -> None:
    for small, large, features, options in (
        (5e-36, 3e38, 512, {"scale": 1e-6}),
        (1.2e-38, 3e38, 512, {}),
        (1e-40, 1e38, 36, {"softcap": 30.0}),
    ):
        q, k, v = _draw(np.float32, 1, 20, features)
        q, k = q * np.float32(small), np.tanh(k) * np.float32(large)
        _, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        np.testing.assert_allclose(lse, reference.attention(q, k, v, **options)[1], rtol=2e-6, atol=2e-6)


@dtypes
@pytest.mark.parametrize("shape", [(8, 1), (3, 2), (2, 2, 1), (1, 7)], ids=str)
def test_few_rows_of_many_keys(shape: tuple[int, ...], dtype: Any) -> None:
    """Long products of few results, which are multiplied head by head."""
    *heads, rows = shape
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((*heads, n, 32)).astype(dtype) for n in (rows, 3000, 3000))
    for options in ({}, {"mask": rng.random((rows, 3000)) < 0.5}, {"causal": True}):
        expected, expected_lse = reference.attention(q, k, v, **options)
        eps = float(ml_dtypes.finfo(dtype).eps)
        for order in (range(q.ndim), (q.ndim - 2, *range(q.ndim - 2), q.ndim - 1)):
            out = np.empty(tuple(q.shape[i] for i in order), dtype).transpose(np.argsort(order))
            result, lse = cuflash.attention(q, k, v, out=out, return_lse=True, **options)
            assert result is out
            np.testing.assert_allclose(out.astype(np.float64), expected, atol=4 * eps)
            np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
        np.testing.assert_allclose(cuflash.attention_lse(q, k, **options), expected_lse, rtol=1e-5)


@wide_dtypes
def test_a_repeated_call_gives_the_same_bits(dtype: Any) -> None:
    rng = np.random.default_rng(5)
    for heads, rows, keys in ((8, 100, 100), (4, 1, 30), (1, 7, 1)):
        for features, head_dim_v in ((64, 1), (1, 4), (1, 1)):
            q, k, v = (rng.standard_normal((heads, n, 4 + d)).astype(dtype) for n, d in (
                (rows, features), (keys, features), (keys, head_dim_v)
            ))  # fmt: skip
            arrays = q[..., :features], k[..., :features], v[..., :head_dim_v]
            for options in ({}, {"causal": True}, {"softcap": 5.0}, {"return_lse": True}):
                first, again = (cuflash.attention(*arrays, **options) for _ in range(2))
                assert np.asarray(first[0]).tobytes() == np.asarray(again[0]).tobytes()


@wide_dtypes
def test_matrices_whose_columns_lie_in_one_piece(dtype: Any) -> None:
    rng = np.random.default_rng(6)
    for heads, rows, keys in ((3, 1, 300), (2, 70, 90), (20, 4, 5)):
        q, k, v = (rng.standard_normal((heads, 16, n)).astype(dtype).swapaxes(1, 2) for n in (rows, keys, keys))
        for options in ({}, {"causal": True}, {"mask": np.ones((rows, keys), bool)}):
            out = cuflash.attention(q, k, v, **options)
            assert rows == 1 or out.strides[1] == out.itemsize
            np.testing.assert_allclose(out, reference.attention(q, k, v, **options)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [1e37, 5e37, 3e38])
def test_large_softcaps_of_scores_that_are_larger_when_scaled(softcap: float) -> None:
    q, k, v = (np.array(x, np.float32) for x in ([[[1.0]]], [[[3.5e8], [7e8]]], [[[0.0], [1.0]]]))
    _agrees(np.float32, q, k, v, scale=1e30, softcap=softcap)


@pytest.mark.parametrize("slope", [np.nan, -np.inf, np.inf, -1e308])
def test_the_lse_of_a_row_without_keys_whatever_the_slope(slope: float) -> None:
    x = np.ones((1, 3, 2), np.float32)
    slopes = np.array([slope])
    out, lse = cuflash.attention(x, x, x, alibi_slopes=slopes, causal=True, query_offset=-10, return_lse=True)
    assert (out == 0).all() and np.isneginf(lse).all()


@dtypes
@pytest.mark.parametrize(
    "options", [{"bias": np.zeros((1, 1), np.float32)}, {"causal": True}, {"softcap": 3.0}], ids=str
)
def test_output_is_to_the_bit_what_it_is_without_an_lse(dtype: Any, options: dict[str, Any]) -> None:
    for seed, out_dtype in enumerate([None, np.float32, np.float16, np.float64] * 25):
        q, k, v = _draw(dtype, 2, 3, 29, 8, seed=seed)
        k, v = k[..., : 1 + seed % 29, :], v[..., : 1 + seed % 29, :]
        out, _ = cuflash.attention(q, k, v, return_lse=True, out_dtype=out_dtype, **options)
        assert out.tobytes() == cuflash.attention(q, k, v, out_dtype=out_dtype, **options).tobytes(), seed
