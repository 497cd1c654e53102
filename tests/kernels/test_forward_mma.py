"""Short forms of the kernel whose scores stay in registers, and the order of its tiles, run on the CPU.

Functions take an emulator, as tests/emulator/test_mutations.py calls them with changed sources too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulator.emulator import Emulator, compiler

import cuflash.plan.plan
from cuflash import reference
from cuflash.plan.plan import make_plan
from cuflash.problem.describe import describe_attention, describe_varlen
from cuflash.testing import Case, check, make_data, run

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")


def draw(*shape: int, seed: int = 0, dtype: Any = np.float16) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def assert_right(emulator: Emulator, q: Any, k: Any, v: Any, **options: Any) -> None:
    """Close to the reference, infinities and NaN in the same places."""
    out, lse = emulator.attention(q, k, v, return_lse=True, **options)
    with np.errstate(invalid="ignore"):
        exact, exact_lse = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=4e-3, rtol=2e-3)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-4, rtol=1e-5)


def pinned(emulator: Emulator, tile: str) -> Emulator:
    """The same with a certain tile, for the kernel whose tiles these are."""
    if emulator.spec.name != "forward_mma":
        return emulator
    return Emulator(emulator.spec.name, tile, emulator.device, emulator.seed, emulator.sources)


def turns(emulator: Emulator) -> None:
    """Heads take turns, in the last of which there are fewer."""
    emulator = pinned(emulator, "64x64x2")
    for heads, heads_kv, planes in ((5, 5, 4), (10, 5, 8)):
        q, k = draw(3, heads, 100, 16), draw(3, heads_kv, 100, 16, seed=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuflash.plan.plan, "CACHED_BYTES", 4 * 100 * 2 * 16 * 2 + 1)
            plan = make_plan(describe_attention(q, k, k, causal=True)[0], emulator.device, emulator.settings)
            if emulator.spec.name == "forward_mma":
                assert plan.planes_at_once == planes and 3 * heads % planes and plan.num_m_blocks == 2
            assert_right(emulator, q, k, k, causal=True)
    tokens, boundaries = draw(300, 5, 16), np.array([0, 150, 170, 300])
    call = tokens, tokens, tokens, boundaries, boundaries
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuflash.plan.plan, "CACHED_BYTES", 3 * 100 * 2 * 16 * 2 + 1)
        plan = make_plan(describe_varlen(*call, causal=True)[0], emulator.device, emulator.settings)
        assert emulator.spec.name != "forward_mma" or plan.planes_at_once == 3
        out, lse = emulator.attention_varlen(*call, causal=True, return_lse=True)
    exact, exact_lse = reference.attention_varlen(*call, causal=True)
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=4e-3, rtol=2e-3)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-4, rtol=1e-5)


def head_steps() -> dict[str, tuple[tuple[np.ndarray, ...], dict[str, Any], bool]]:
    """Arrays with options, and whether all of them step from batch to batch as from head to head."""
    x, y = draw(2, 3, 4, 20, 16), draw(2, 3, 2, 20, 16, seed=1)
    turned = np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)
    slopes = np.array([0.5, 0.25, 0.1, 0], np.float32)
    return {
        "contiguous": ((x, x, x), {}, True),
        "groups": ((x, y, y), {}, True),
        "transposed": ((turned, turned, turned), {}, False),
        "keys transposed": ((x, turned, turned), {}, False),
        "sliced heads": ((x[:, :, :2], y, y), {}, False),
        "sliced batches": ((x[:, :2], y[:, :2], y[:, :2]), {}, False),
        "broadcast keys": ((x, y[0], y[0]), {}, False),
        "slopes of heads": ((x, y, y), {"alibi_slopes": slopes}, False),
        "slopes of all": ((x, y, y), {"alibi_slopes": slopes * np.ones((2, 3, 4), np.float32)}, True),
        "one value for all": ((x, y, y), {"alibi_slopes": np.array(0.1, np.float32)}, True),
        "one row": ((x[:1], y[:1], y[:1]), {}, True),
        "one column": ((x[:, :1], y[:, :1], y[:, :1]), {}, False),
        "every second": ((x[:, ::2, :2], y[:, ::2], y[:, ::2]), {}, False),
    }


def steps_of_heads(emulator: Emulator) -> None:
    for (q, k, v), options, _ in head_steps().values():
        assert_right(emulator, q, k, v, **options)


SLOPES = np.array([[1, 0.1], [-0.05, 2.0**-7]], np.float32)


def alibi(emulator: Emulator, **options: Any) -> None:
    """Positions behind all keys, before all, and at borders of tiles and among their keys."""
    offsets = np.array([500, -500, 0, 37, 63, 64, 65, 120, -30], np.int32)
    q, k, v = draw(9, 1, 2, 70, 16), draw(1, 2, 150, 16, seed=1), draw(1, 2, 150, 16, seed=2)
    for slopes in SLOPES:
        assert_right(emulator, q, k, v, alibi_slopes=slopes, query_offset=offsets[:, np.newaxis], **options)


def alibi_with_few_registers(emulator: Emulator, **options: Any) -> None:
    """One buffer for keys and values stands for tiles that take nearly all registers."""
    alibi(pinned(emulator, "64x64"), **options)


def alibi_scales(emulator: Emulator) -> None:
    """Scales that no unit of logits can have."""
    for scale in (0, 1e-35, -0.3, 1e8):
        alibi(emulator, scale=scale)


def softcap(emulator: Emulator, **options: Any) -> None:
    """Scores so small that a polynomial does, so large that they are capped, and both in one row or one warp."""
    sizes = np.array([0.1, 1, 20])
    q = (draw(3, 1, 70, 32, dtype=np.float64) * sizes[:, np.newaxis, np.newaxis, np.newaxis]).astype(np.float16)
    q[1, :, ::8] *= np.float16(30)
    k, v = draw(150, 32, seed=1), draw(1, 150, 32, seed=2)
    k[::5] *= np.float16(8)
    for cap in (5, 30, 256):
        assert_right(emulator, q, k[np.newaxis], v, softcap=cap, **options)


def softcap_of_low_scores(emulator: Emulator) -> None:
    """Rows without a key, and rows whose scores are all far below 0."""
    q, k, v = draw(1, 70, 32), draw(1, 150, 32, seed=1), draw(1, 150, 32, seed=2)
    for offset in (-20, 0, 60):
        assert_right(emulator, q, k, v, softcap=30, causal=True, query_offset=offset)
    assert_right(emulator, q, k, v, softcap=30, window=(3, 2), query_offset=-30)
    assert_right(emulator, q * np.float16(8), k, v, softcap=5, causal=True, query_offset=-20)
    below = np.float16(-1.5) + k / np.float16(10)
    assert_right(emulator, np.abs(q) + np.float16(0.5), below, v, softcap=256, scale=1.2)
    assert_right(emulator, np.abs(q) + np.float16(0.5), below, v, softcap=256, scale=0.35)
    assert_right(emulator, np.abs(q) + np.float16(0.5), below, v, softcap=300, scale=1.2)


def softcap_of_no_numbers(emulator: Emulator) -> None:
    q, k, v = draw(1, 70, 32), draw(1, 90, 32, seed=1), draw(1, 90, 32, seed=2)
    q[0, 3, 5], q[0, 20, 7], q[0, 40, 0] = np.nan, np.inf, -np.inf
    for scale in (None, 0.01):
        assert_right(emulator, q, k, v, softcap=30, scale=scale)


def bias_of_no_numbers(emulator: Emulator, tile: str = "64x64x2") -> None:
    """Keys that are no numbers, hidden by the bias of some rows."""
    emulator, hidden = pinned(emulator, tile), (3, 10, 70)
    for num_keys, dtype in itertools.product((128, 87), ("float16", "float32")):
        q, k, v = draw(1, 70, 32), draw(1, num_keys, 32, seed=1), draw(1, num_keys, 32, seed=2)
        k[0, hidden, :3] = [[np.nan] * 3, [np.inf, 0, 0], [-np.inf, np.inf, 0]]
        bias = draw(70, num_keys, seed=3, dtype=dtype)
        bias[:60, hidden] = -np.inf
        bias[7] = -np.inf
        assert_right(emulator, q, k, v, bias=bias)
        assert_right(emulator, q, k, v, bias=bias, mask=draw(70, num_keys) < 1, causal=True)


@pytest.mark.share(3)
@pytest.mark.parametrize("tile", ["64x64x2", "64x32", "128x64x2"])
def test_bias_hides_what_is_no_number(tile: str) -> None:
    bias_of_no_numbers(Emulator("forward_mma"), tile)


@pytest.mark.share(3)
@pytest.mark.parametrize("kernel", ["forward_decode", "forward_wmma", "forward_scalar"])
def test_bias_hides_what_is_no_number_elsewhere(kernel: str) -> None:
    bias_of_no_numbers(Emulator(kernel))


@pytest.mark.parametrize("kernel", ["forward_mma", "forward_wmma", "forward_scalar"])
def test_heads_in_turns(kernel: str) -> None:
    turns(Emulator(kernel))


@pytest.mark.parametrize("name", head_steps())
def test_steps_of_heads(name: str) -> None:
    (q, k, v), options, _ = head_steps()[name]
    assert_right(Emulator("forward_mma"), q, k, v, **options)


@pytest.mark.parametrize("options", [{}, {"window": (40, 10)}, {"causal": True}], ids=["all", "window", "causal"])
@pytest.mark.parametrize("run_alibi", [alibi, alibi_with_few_registers])
def test_alibi_alone(run_alibi: Callable[..., None], options: dict[str, Any]) -> None:
    run_alibi(Emulator("forward_mma"), **options)


def test_alibi_with_scales_beyond_the_unit() -> None:
    alibi_scales(Emulator("forward_mma"))


@pytest.mark.parametrize("scale", [None, 0.02, -0.3], ids=str)
def test_softcap_alone(scale: float | None) -> None:
    softcap(Emulator("forward_mma"), scale=scale)


@pytest.mark.parametrize("function", [softcap_of_low_scores, softcap_of_no_numbers], ids=lambda f: f.__name__)
def test_softcap_of_unusual_scores(function: Any) -> None:
    function(Emulator("forward_mma"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cap", [5, 16, 30, 50, 100, 256])
@pytest.mark.parametrize("scale", [0.3, 1.2], ids=["small", "bent"])
def test_polynomial_of_softcap_keeps_to_the_error_rule(cap: int, scale: float, dtype: str) -> None:
    case = Case(f"softcap-{cap}", (1, 2, 70, 32), (1, 2, 150, 32), options={"softcap": cap, "scale": scale})
    data, emulator = make_data(case, dtype), Emulator("forward_mma")
    check(case, data, run(case, data, np, emulator.function(case)), rounds_weights=True)


@pytest.mark.parametrize("scale", [0.03, 0.3, 3.0, 30.0])
def test_logits_below_a_tiny_softcap_count_nothing(scale: float) -> None:
    q, k, v = draw(1, 70, 32), draw(1, 150, 32, seed=1), draw(1, 150, 32, seed=2)
    _, lse = Emulator("forward_mma").attention(q, k, v, softcap=1e-6, scale=scale * 1e-6, return_lse=True)
    np.testing.assert_allclose(lse, np.log(150), rtol=0, atol=2e-6)


def test_tokens_of_no_sequence_have_no_slopes() -> None:
    x, boundaries = np.ones((3, 1, 8), np.float16), np.zeros(1, np.int32)
    emulator = Emulator("forward_mma")
    out = emulator.attention_varlen(x, x[:0], x[:0], boundaries, boundaries, alibi_slopes=np.ones((0, 1), np.float16))
    assert (out == 0).all()
