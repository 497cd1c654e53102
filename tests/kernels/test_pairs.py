"""What kernels of pairs of float16 owe beside the case matrix: numbers that those hold badly, and what is done then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from emulator.emulator import Emulator, compiler

from cuflash import reference
from kernels.test_precise import assert_precise, draw

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
KERNELS = "precise_float32", "precise_wgmma"
HEAD_DIM = 32


def pinned(emulator: Emulator, *tiles: str) -> Iterator[Emulator]:
    """With these tiles of precise_float32, or the one that precise_wgmma has for a call."""
    for tile in tiles if emulator.spec.name == KERNELS[0] else ("",):
        yield Emulator(emulator.spec.name, tile, sources=emulator.sources)


def numbers(*shape: int) -> np.ndarray:
    """Of magnitudes from 1 to 2, so that their exponents are known, and of either sign."""
    rng = np.random.default_rng([*shape])
    return (rng.uniform(1, 2, shape) * rng.choice([-1, 1], shape)).astype(np.float32)


def assert_close(emulator: Emulator, q: Any, k: Any, v: Any, **options: Any) -> None:
    """Each element within a few roundings of the largest terms that it is the sum of."""
    out, expected = emulator.attention(q, k, v, **options), reference.attention(q, k, v, **options)[0]
    sizes = reference.attention(q, k, abs(v), **options)[0]
    assert (abs(out - expected) <= 3e-6 * sizes).all()


def distributions(emulator: Emulator) -> None:
    """Elements of a row and values of a tile that lie far apart."""
    for tile in pinned(emulator, "16x16", "64x32p"):
        for name in ("score columns", "value rows", "small columns"):
            arrays = draw(name, "float32", 20, 70, HEAD_DIM)
            assert_precise(name, tile.attention(*arrays), arrays)


def rows_out_of_range(emulator: Emulator) -> None:
    """Queries, keys and values that are tiny or huge, beside what makes results of ordinary size of them."""
    q, k, v = numbers(20, HEAD_DIM), numbers(40, HEAD_DIM), numbers(40, HEAD_DIM)
    for tile in pinned(emulator, "16x16", "64x32p"):
        for of_q, of_k in ((-118, 60), (60, -118), (100, -100), (-100, 100)):
            assert_close(tile, np.ldexp(q, of_q), np.ldexp(k, of_k), v, scale=2.0 ** -(of_q + of_k + 2))
        for of_v in (-118, -114, -80, 80, 120):
            assert_close(tile, q, k, np.ldexp(v, of_v))
        assert_close(tile, q, k[:2], np.ldexp(v[:2], 126))


def huge_rows_that_do_not_meet(emulator: Emulator) -> None:
    """Products of 0 alone, whatever the scales of both rows are: 0 times infinity would be NaN."""
    q, k, v = np.zeros((20, HEAD_DIM), np.float32), np.zeros((40, HEAD_DIM), np.float32), numbers(40, HEAD_DIM)
    for exponent in (70, 80, 90, 110):
        q[:, 0] = k[:, 1] = 2.0**exponent
        assert_close(next(pinned(emulator, "16x16")), q, k, v)


def tiny_elements_meet(emulator: Emulator) -> None:
    """Those of queries meet what is large in keys that are 0 elsewhere, and the other way round."""
    of_query, of_key = numbers(20, HEAD_DIM), numbers(40, HEAD_DIM)
    even = np.arange(HEAD_DIM) % 2 == 0
    tiny, zero = np.where(even, 1, 1e-12), np.where(even, 0, 1e12)
    for factor_q, factor_k in ((tiny, zero), (zero, tiny), (tiny, tiny / 1e-12), (tiny / 1e-12, tiny)):
        q, k = (of_query * factor_q).astype(np.float32), (of_key * factor_k).astype(np.float32)
        assert_close(next(pinned(emulator, "16x16")), q, k, numbers(40, HEAD_DIM))


def values_far_below_the_largest(emulator: Emulator) -> None:
    """Those that are seen are tiny: beside huge ones in a tile, behind a tile of huge ones, and alone."""
    q, k, v = numbers(20, HEAD_DIM), numbers(100, HEAD_DIM), numbers(100, HEAD_DIM)
    key = np.arange(100)
    seen = (key >= 64) | ((key >= 32) & (key % 3 == 1) & (key % 16 < 12))
    q[:, 0], k[:, 0] = 30, np.where(seen, 0, -30)
    for tile in pinned(emulator, "16x16", "64x32p"):
        assert_close(tile, q, k, np.where(seen[:, np.newaxis], np.ldexp(v, -70), v))


def keys_alone(emulator: Emulator) -> None:
    """Each row has one of its own, wherever that lies; its value is the result, to the bit."""
    q, k, v = np.zeros((40, HEAD_DIM), np.float32), np.zeros((40, HEAD_DIM), np.float32), numbers(40, HEAD_DIM)
    key = np.arange(40)
    k[key, key % 20], k[20:, 20] = 100, 100
    leading = key * 7 % 40
    q[key, leading % 20], q[key, 20] = 100, np.where(leading < 20, -50, 50)
    v[20, ::2] *= np.float32(1e-12)
    v[0] *= np.float32(1e-12)
    for tile in pinned(emulator, "16x16", "64x32p"):
        assert (tile.attention(q, k, v) == v[leading]).all()
        assert (tile.attention(q[:1], k[:1], v[:1]) == v[:1]).all()


def keys_that_share(emulator: Emulator) -> None:
    """Two that weigh the same, and of whose values nothing is left, beside one that is alone in its row."""
    q, k, v = np.zeros((2, HEAD_DIM), np.float32), np.zeros((20, HEAD_DIM), np.float32), numbers(20, HEAD_DIM)
    q[0, 0] = q[1, 1] = k[3, 0] = k[9, 0] = k[5, 1] = 100
    v[9] = -v[3]
    out = next(pinned(emulator, "16x16")).attention(q, k, v)
    assert (out[0] == 0).all() and (out[1] == v[5]).all()


def keys_alone_in_front_of_unseen_ones(emulator: Emulator) -> None:
    """Half of the rows see none of the last tile, in which others lead."""
    q, k, v = np.zeros((32, HEAD_DIM), np.float32), np.zeros((100, HEAD_DIM), np.float32), numbers(100, HEAD_DIM)
    q[:16, 0], k[40, 0], q[16:, 1], k[64, 1] = 100, 100, 100, 100
    out = next(pinned(emulator, "32x32")).attention(q, k, v, causal=True, query_offset=48)
    assert (out == np.where(np.arange(32)[:, np.newaxis] < 16, v[40], v[64])).all()


def tf32(emulator: Emulator) -> None:
    """Rows that see few keys in front of them and behind them, and a few rows that leave a block half empty."""
    q, k, v = numbers(200, HEAD_DIM), numbers(200, HEAD_DIM), numbers(200, HEAD_DIM)
    for rows, options in ((200, {"window": (20, 20)}), (30, {})):
        for precision, most in (("tf32", 3e-3), ("ieee", 3e-6)):
            out = emulator.attention(q[:rows], k, v, precision=precision, **options)
            expected, sizes = (reference.attention(q[:rows], k, x, **options)[0] for x in (v, abs(v)))
            assert (abs(out - expected) <= most * sizes).all()


def half_of_the_rows_see_nothing(emulator: Emulator) -> None:
    """As all keys are far in front of them, or behind; tiles of wide rows are narrow."""
    q, k, v = numbers(128, 160), numbers(70, 160), numbers(70, 160)
    out = emulator.attention(q, k, v, window=(0, 0), query_offset=69)
    assert (out[0] == v[69]).all() and (out[1:] == 0).all()
    out = emulator.attention(q, k, v, causal=True, query_offset=-127)
    assert (out[127] == v[0]).all() and (out[:127] == 0).all()


def lse_alone(emulator: Emulator) -> None:
    """Keys of several tiles, without values behind which others could wait."""
    q, k = numbers(40, HEAD_DIM), numbers(100, HEAD_DIM)
    for tile in pinned(emulator, "32x32", "64x32p"):
        lse = tile.attention_lse(q, k, causal="top_left")
        expected = reference.attention(q, k, k, causal="top_left")[1]
        np.testing.assert_allclose(lse, expected, atol=3e-6)


CALLS = (
    distributions, rows_out_of_range, huge_rows_that_do_not_meet, tiny_elements_meet, values_far_below_the_largest,
    keys_alone, keys_that_share, keys_alone_in_front_of_unseen_ones, tf32,
    half_of_the_rows_see_nothing, lse_alone,
)  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_calls(call: Any, kernel: str) -> None:
    call(Emulator(kernel))
