"""Double precision to its last digits, against extended precision: float64 cannot judge float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator.emulator import Emulator, compiler

import cuflash
from cuflash.plan.table import KERNELS

Exact = np.longdouble
pytestmark = pytest.mark.skipif(np.finfo(Exact).nmant < 60, reason="long double is no wider than double here")

DOUBLES = {spec.name: spec.max_head_dim for spec in KERNELS if "float64" in spec.dtypes}
DRAWN: dict[str, Any] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.random(shape),
    "mean": lambda rng, shape: 100 + rng.standard_normal(shape),
    "heavy_tails": lambda rng, shape: rng.standard_t(2, shape),
}
"""Values; queries and keys are normal, but with heavy tails where these have them."""


def draw(name: str, queries: int, keys: int, head_dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    score = DRAWN[name] if name == "heavy_tails" else DRAWN["normal"]
    return score(rng, (queries, head_dim)), score(rng, (keys, head_dim)), DRAWN[name](rng, (keys, head_dim))


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: Any) -> np.ndarray:
    """Compute naively, in a type."""
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    scores = q @ k.T * dtype(q.shape[-1] ** -0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)


def error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm((got.astype(Exact) - exact).astype(float)) / np.linalg.norm(exact.astype(float)))


def assert_precise(name: str, got: np.ndarray, arrays: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Within twice what a naive float64 implementation is off by; 1e-15 where logits are not large."""
    exact = attend(*arrays, Exact)
    naive = error(attend(*arrays, np.float64), exact)
    assert error(got, exact) <= max(2 * naive, 3e-16)
    assert name == "heavy_tails" or error(got, exact) <= 1.1e-15


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("kernel", DOUBLES)
def test_emulated(kernel: str, name: str) -> None:
    arrays = draw(name, 40, 700, min(48, DOUBLES[kernel]))
    assert_precise(name, Emulator(kernel).attention(*arrays), arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("head_dim", [32, 128, 256])
@pytest.mark.parametrize("kernel", DOUBLES)
def test_on_a_gpu(kernel: str, head_dim: int, name: str) -> None:
    import cupy

    arrays = draw(name, 40, 5000, min(head_dim, DOUBLES[kernel]))
    with cuflash.options(kernel=kernel):
        assert_precise(name, cupy.asnumpy(cuflash.attention(*map(cupy.asarray, arrays))), arrays)


@pytest.mark.parametrize("name", DRAWN)
def test_with_numpy(name: str) -> None:
    arrays = draw(name, 40, 5000, 64)
    assert_precise(name, cuflash.attention(*arrays), arrays)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
@pytest.mark.parametrize("kernel", DOUBLES)
def test_infinite_values_stay_infinite(kernel: str) -> None:
    z = np.zeros((1, 2))
    for v in (np.array([[np.inf, -np.inf]]), np.array([[np.inf, -np.inf], [1.0, 1.0]])):
        out = Emulator(kernel).attention(z, np.zeros_like(v), v)
        np.testing.assert_array_equal(out, [[np.inf, -np.inf]])
