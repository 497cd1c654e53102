"""float32 and float64 to their last digits, on every distribution of the error table.

float64 is compared with extended precision, as float64 cannot judge float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from emulator.emulator import Emulator, compiler

import cuflash
from cuflash.bench.accuracy import DISTRIBUTIONS, WIDE_IS_WIDER, Arrays, draw, errors, exact_result, naive
from cuflash.plan.table import KERNELS, KernelSpec, device_of
from cuflash.problem.arrays import FLOAT_NAMES
from cuflash.problem.describe import describe_attention

MAX_HEAD_DIM = {spec.name: spec.max_head_dim for spec in KERNELS}
PLAIN = ("normal", "uniform", "mean")
"""Distributions for which float64 owes 1.1e-15, whatever the naive formula does."""


def is_precise(spec: KernelSpec, dtype: str) -> bool:
    """Whether a row serves calls of a dtype with the precision of the dtype itself, on some GPU."""
    q = np.zeros((1, 8), dtype)
    problem, _ = describe_attention(q, q, q, precision="ieee")
    return any(spec.refusal(problem.traits, device_of(capability)) is None for capability in (80, 90, 100))


def precise_rows() -> Iterator[Any]:
    for dtype in ("float32", "float64"):
        for spec in KERNELS:
            if is_precise(spec, dtype):
                yield pytest.param(spec.name, dtype, id=f"{spec.name}-{dtype}")


rows = pytest.mark.parametrize(("kernel", "dtype"), list(precise_rows()))
distributions = pytest.mark.parametrize("name", DISTRIBUTIONS)
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")


def assert_precise(name: str, got: np.ndarray, arrays: Arrays) -> None:
    """Within twice what the naive formula is off by in the dtype; a single element is a matter of luck.

    Logits that span hundreds follow the rounding of scaled queries as much as that of the products, by which one of few
    samples may be just above. Where the maximum of a row jumps, one exponential rescales all keys before: its error
    doesn't average out as those of naive weights do, which shows in float64 over 5000 keys.
    """
    if got.dtype == np.float64 and not WIDE_IS_WIDER:
        pytest.skip("long double is no wider than double here")
    eps = float(np.finfo(got.dtype).eps)
    exact = exact_result(name, arrays)
    ours, bound = errors(got, exact), errors(naive(*arrays), exact)
    factor = 3 if (name, got.dtype) == ("dominating key", np.float64) else 2.1 if name == "wide logits" else 2
    assert ours.rms <= max(factor * bound.rms, 1.35 * eps)
    assert ours.maximum <= max(4 * bound.maximum, 4 * eps)
    assert name not in PLAIN or got.dtype != np.float64 or ours.rms <= 5 * eps


@needs_compiler
@pytest.mark.share(3)
@distributions
@rows
def test_emulated(kernel: str, dtype: str, name: str) -> None:
    arrays = draw(name, dtype, 40, 700, min(48, MAX_HEAD_DIM[kernel]))
    assert_precise(name, Emulator(kernel).attention(*arrays, precision="ieee"), arrays)


@pytest.mark.gpu
@distributions
@pytest.mark.parametrize("copies", [1, 512])
@pytest.mark.parametrize("head_dim", [32, 128, 256])
@rows
def test_on_a_gpu(kernel: str, dtype: str, head_dim: int, copies: int, name: str) -> None:
    """The keys of one head are split among many blocks; those of many heads, here the same one again, are not."""
    import cupy

    arrays = draw(name, dtype, 40, 5000, min(head_dim, MAX_HEAD_DIM[kernel]))
    try:
        with cuflash.options(kernel=kernel):
            on_device = (cupy.broadcast_to(cupy.asarray(x), (copies, *x.shape)) for x in arrays)
            got = cuflash.attention(*on_device, precision="ieee")[-1]
    except ValueError as refusal:
        assert "cannot serve this call" in str(refusal)
        pytest.skip(str(refusal))
    assert_precise(name, cupy.asnumpy(got), arrays)


@distributions
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_with_numpy(dtype: str, name: str) -> None:
    arrays = draw(name, dtype, 40, 5000, 64)
    assert_precise(name, cuflash.attention(*arrays), arrays)


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
@distributions
def test_what_is_drawn_has_the_scales_that_it_claims(name: str, dtype: str) -> None:
    q, k, v = draw(name, dtype, 64, 300, 32)
    again = draw(name, dtype, 64, 300, 32)
    assert all(x.dtype.name == dtype and (x == y).all() for x, y in zip((q, k, v), again, strict=True))
    assert all(np.isfinite(x.astype(np.float64)).all() and (x != 0).mean() > 0.99 for x in (q, k, v))
    exact = exact_result(name, (q, k, v))
    assert np.isfinite(exact.values).all() and (exact.sizes > 0).all()
    logits = q.astype(np.float64) @ k.astype(np.float64).T * 32**-0.5
    span = float((logits.max(-1) - logits.min(-1)).max())
    assert (100 < span < 400) if name == "wide logits" else name == "heavy tails" or span < 60
    columns = np.linalg.norm(v.astype(np.float64), axis=0)
    assert DISTRIBUTIONS[name].own_columns == (columns.max() > 20 * columns.min())


def test_errors_of_small_columns_do_not_hide() -> None:
    """Noise of 1e-5 of the largest value of a tile is far above what some columns hold."""
    arrays = draw("small columns", "float32", 40, 700, 48)
    exact = exact_result("small columns", arrays)
    noisy = naive(*arrays) + np.float32(1e-10) * np.ones((40, 48), np.float32)
    assert errors(noisy, exact._replace(own_columns=False)).rms < 1e-6
    assert errors(noisy, exact).rms > 10 and errors(noisy, exact).maximum > 10


@needs_compiler
@pytest.mark.parametrize("kernel", [spec.name for spec in KERNELS if "float64" in spec.dtypes])
def test_infinite_values_stay_infinite(kernel: str) -> None:
    z = np.zeros((1, 2))
    for v in (np.array([[np.inf, -np.inf]]), np.array([[np.inf, -np.inf], [1.0, 1.0]])):
        out = Emulator(kernel).attention(z, np.zeros_like(v), v)
        np.testing.assert_array_equal(out, [[np.inf, -np.inf]])


@needs_compiler
@pytest.mark.parametrize("kernel", [spec.name for spec in KERNELS if "float32" in spec.dtypes])
@pytest.mark.parametrize("exponent", [77, 78, 90, 91, 120])
def test_large_rows_whose_products_are_zero(kernel: str, exponent: int) -> None:
    """Their scales alone, multiplied, may be infinite."""
    q, k = np.zeros((3, 8), np.float32), np.zeros((5, 8), np.float32)
    q[:, 0] = k[:, 1] = 2.0**exponent
    v = np.arange(40, dtype=np.float32).reshape(5, 8)
    out = Emulator(kernel).attention(q, k, v, precision="tf32" if kernel == "forward_wmma" else "ieee")
    np.testing.assert_allclose(out, [v.mean(0)] * 3, rtol=1e-3)
