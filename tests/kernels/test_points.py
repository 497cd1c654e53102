"""What forward_points owes beside the case matrix: scales in queries, references that stay, sums of many keys."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from emulator.emulator import Emulator, compiler

from cuflash import reference
from cuflash.problem.arrays import DTYPES

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
KERNEL = "forward_points"
types = pytest.mark.parametrize("dtype", ["float32", "float64"])


def assert_close(emulator: Emulator, q: Any, k: Any, v: Any, rtol: float = 1e-5, **options: Any) -> None:
    out, lse = emulator.attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(out, expected, rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)


def head_dims_between_those_compiled(emulator: Emulator) -> None:
    """What lies behind the features of a point is not looked at."""
    for dtype in map(DTYPES.__getitem__, emulator.spec.dtypes):
        memory = np.full((3, 90, 16), np.nan, dtype)
        q, k, v = memory[0, :70, :5], memory[1, :, :5], memory[2, :, :7]
        for x in (q, k, v):
            x[:] = np.random.default_rng(0).standard_normal(x.shape)
        assert_close(emulator, q, k, v)
        q, k, v = (np.ascontiguousarray(x) for x in (q, k, v))  # whose last row ends where the array ends
        assert_close(emulator, q, k, v)


def rising_and_falling_scores(emulator: Emulator) -> None:
    """Of rows that a thread has together: references rise each for itself, and do not fall."""
    for name, tile in (("float32", "256x256"), ("float64", "256x128")):
        q = np.where(np.arange(256) < 128, 1, -1).astype(DTYPES[name])[:, np.newaxis]
        k = (np.arange(40) * 300).astype(q.dtype)[:, np.newaxis]
        v = np.random.default_rng(0).standard_normal((40, 1)).astype(q.dtype)
        pinned = Emulator(KERNEL, tile, sources=emulator.sources)
        assert_close(pinned, q, k, v)
        if name == "float32":
            assert_close(pinned, q, k, v, alibi_slopes=np.array([0.01]))


def windows_over_several_tiles(emulator: Emulator) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((length, 3)).astype(np.float32) for length in (130, 1000, 1000))
    for tile in ("128x256", "8x256"):
        assert_close(Emulator(KERNEL, tile, sources=emulator.sources), q, k, v, window=(600, None))


def sums_start_again(emulator: Emulator) -> None:
    """Equal weights, and values that are rounded the same way again and again."""
    for keys in (1500, 70000):
        v = np.full((keys, 2), [1.1, -0.3], np.float32)
        v[0] = 100
        k = np.zeros((keys, 1), np.float32)
        out = Emulator(KERNEL, "128x256", sources=emulator.sources).attention(k[:1], k, v)
        np.testing.assert_allclose(out[0], v.astype(np.float64).mean(0), rtol=2e-6)


def queries_and_scales_of_any_size(emulator: Emulator) -> None:
    """Logits are of order one, zero or huge, whatever they are made of."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((length, 3)) for length in (10, 50, 50))
    sizes: dict[str, tuple[tuple[float, float, float], ...]] = {
        "float32": (
            (1e30, 1e-30, 1), (1e-30, 1e30, 1), (1e-15, 1e-15, 1e30), (1e15, 1e15, -1e-30), (1e8, 1e-37, 1e29),
            (1e-20, 1, 1e20), (1e-30, 1e-3, 1e-30), (1e-5, 1, 1e-20), (1, 1, 0), (1e4, 1e4, 1e29), (2e-38, 5e37, 1),
        ),
        "float64": (
            (5e307, 2e-308, 1), (1e-300, 1e300, 1), (1e-150, 1e-150, 1e300), (1e150, 1e150, -1e-300),
            (1e250, 1e-307, 1e57), (1e-300, 1, 1e-300), (1e100, 1e100, 1e99),
        ),
    }  # fmt: skip
    for name, those in sizes.items():
        for of_q, of_k, scale in those:
            arrays = [x.astype(DTYPES[name]) for x in (q * of_q, k * of_k, v)]
            assert_close(emulator, *arrays, rtol=2e-5, scale=scale)  # type: ignore[arg-type]


def biases_and_masks_that_lie_anywhere(emulator: Emulator) -> None:
    """Rows are read in vectors, in the pieces that hold them, or one by one, and have the same bits."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((length, 3)).astype(np.float32) for length in (70, 288, 288))
    arrays: dict[str, dict[str, Any]] = {name: {"bias": DTYPES[name]} for name in ("float16", "float32", "float64")}
    arrays |= {"mask": {"mask": np.dtype(bool)}, "both": {"bias": DTYPES["float32"], "mask": np.dtype(bool)}}
    for tile, dtypes in product(("128x256", "8x256"), arrays.values()):
        pinned = Emulator(KERNEL, tile, sources=emulator.sources)
        for keys, offset in ((288, 0), (281, 1), (287, 1), (283, 2), (288, 3), (286, 9)):
            aligned, options = {}, {}
            for name, dtype in dtypes.items():
                memory = np.full((70, 299), True if name == "mask" else np.nan, dtype)
                options[name] = memory[:, offset : offset + keys]
                options[name][:] = rng.random((70, keys)) < 0.8 if name == "mask" else rng.standard_normal((70, keys))
                aligned[name] = options[name].copy()
            assert_close(pinned, q, k[:keys], v[:keys], **options)
            out = [pinned.attention(q, k[:keys], v[:keys], **those) for those in (options, aligned)]
            assert out[0].tobytes() == out[1].tobytes()


CALLS = (
    head_dims_between_those_compiled, rising_and_falling_scores, windows_over_several_tiles, sums_start_again,
    queries_and_scales_of_any_size, biases_and_masks_that_lie_anywhere,
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_calls(call: Any) -> None:
    call(Emulator(KERNEL))


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_whose_bits_leave_the_range(sign: int) -> None:
    """Beyond 2.36e38 a logit is a float, its product with log2(e) is not."""
    q = np.full((3, 1), sign * 1e19, np.float32)
    k = np.array([[2.9e19], [2.9e19], [2.8e19], [2.9e19], [1], [2.8e19]], np.float32)
    v = np.random.default_rng(0).standard_normal((6, 2)).astype(np.float32)
    for seen in (np.ones(6, bool), np.arange(6) != 4):
        mask = {} if seen.all() else {"window": (None, None)}
        out = Emulator(KERNEL).attention(q, k[seen], v[seen], scale=1.0, **mask)
        logits = q[0, 0].astype(np.float64) * k[seen, 0]
        np.testing.assert_allclose(out, [v[seen][logits == logits.max()].mean(0)] * 3, rtol=1e-6)


def _naive(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    scores = q @ k.T * dtype(q.shape[-1] ** -0.5)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - largest)
    sums = weights.sum(-1, keepdims=True)
    return weights @ v / sums, (largest + np.log(sums))[:, 0]


def _draw(name: str, head_dim: int, keys: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng([head_dim, keys])
    q, k, v = rng.standard_normal((33, head_dim)), rng.standard_normal((keys, head_dim)), rng.random((keys, 3))
    if name == "far":  # logits of hundreds
        return q * 10, k * 10, v
    if name == "sorted":  # every chunk has larger logits than those before
        return np.abs(q), np.sort(np.abs(k) * 20, 0), v
    return q, k, v + (100 if name == "mean" else 0)


@pytest.mark.parametrize("tile", ["", "128x256", "8x256"])
@pytest.mark.parametrize("head_dim", [1, 3, 16])
@pytest.mark.parametrize("name", ["plain", "mean", "far", "sorted"])
def test_error_of_float32(name: str, head_dim: int, tile: str) -> None:
    """At most twice that of a naive implementation in float32; the smallest that is asked for is a rounding."""
    arrays = tuple(x.astype(np.float32) for x in _draw(name, head_dim, 3000))
    got = Emulator(KERNEL, tile).attention(*arrays, return_lse=True)
    for ours, naive, exact in zip(got, _naive(*arrays, np.float32), _naive(*arrays, np.float64), strict=True):
        size = np.linalg.norm(exact)
        error, allowed = np.linalg.norm(ours - exact) / size, 2 * np.linalg.norm(naive - exact) / size
        assert error <= max(allowed, 2.0**-23)


@types
def test_error_does_not_grow_with_the_number_of_keys(dtype: str) -> None:
    errors, tile = [], "256x256" if dtype == "float32" else "256x128"
    for keys in (1000, 100_000):
        q, k, v = (x.astype(DTYPES[dtype]) for x in _draw("mean", 3, keys))
        out, exact = Emulator(KERNEL, tile).attention(q[:8], k, v), _naive(q[:8], k, v, np.longdouble)[0]
        errors.append(float(np.linalg.norm((out - exact).astype(float)) / np.linalg.norm(exact.astype(float))))
    assert max(errors) <= 2 * float(np.finfo(DTYPES[dtype]).eps)
