"""The gated delta rule of the NumPy back end against the float64 definition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gated_cases import (
    BOUNDARIES,
    DTYPES,
    KINDS,
    LAYOUTS,
    TOKENS,
    Arrays,
    Shape,
    assert_close,
    computed_dtype,
    draw,
    draw_output,
    draw_packed,
    gates_of_kind,
    naive,
    poisoned,
    without_rest,
)
from scipy.linalg import solve_triangular

import cuflash
from cuflash import reference
from cuflash.cpu import chunks as cpu_chunks
from cuflash.cpu import gated as cpu
from cuflash.testing import Poisoned

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
# batch, tokens, heads of q and k, heads of v, features of k, features of v
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 17, 1, 2, 5, 3),
    (1, 70, 2, 2, 16, 24),
    (3, 64, 1, 5, 24, 8),
    (1, 130, 2, 6, 96, 33),
    (2, 33, 4, 4, 7, 256),
    (1, 40, 1, 1, 256, 16),
]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give small problems many parts, and chunks that are computed one after the other, in several threads."""
    monkeypatch.setattr(cpu, "STEP_COST", 2**10)
    monkeypatch.setattr(cpu, "WINDOW_SIZE", 2**13)
    monkeypatch.setattr(cpu, "STATE_SIZE", 2**8)
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "3")
    yield


def _check_chunks(arrays: Arrays, layout: str = "contiguous", *, give_out: bool = False, **options: Any) -> Any:
    """Call `chunk_gated_delta_rule` and compare it with the definition."""
    placed = poisoned(arrays, layout)
    tokens = [placed[name].array for name in TOKENS]
    given = {name: x.array for name, x in placed.items() if name not in TOKENS}
    v = arrays["v"]
    written = Poisoned(np, v.shape, v.dtype, layout) if give_out else None
    extra = {} if written is None else {"out": written.array}
    out, state = cuflash.chunk_gated_delta_rule(*tokens, output_final_state=True, **given, **options, **extra)
    assert all(x.unchanged() for x in placed.values()), "an input was changed"
    if written is not None:
        assert out is written.array and written.unchanged(outside_only=True)
    assert out.dtype == v.dtype and state.dtype == computed_dtype(v.dtype)
    known = {"cu_seqlens": arrays.get("cu_seqlens"), "scale": options.get("scale")}
    counted = without_rest(arrays)
    exact = reference.gated_delta_rule(*(counted[x] for x in TOKENS), initial_state=arrays["initial_state"], **known)
    plain = naive(counted, chunk_size=options.get("chunk_size", 64), **known)
    assert_close(out, exact[0], [x for x, _ in plain], "out")
    assert_close(state, exact[1], [x for _, x in plain], "state")
    return out, state


def _check_recurrent(arrays: Arrays, layout: str = "contiguous", *, give_out: bool = False, **options: Any) -> Any:
    """Call `recurrent_gated_delta_rule` and compare it with the definition."""
    placed = poisoned(arrays, layout)
    state, v = placed.pop("initial_state"), arrays["v"]
    written = Poisoned(np, v.shape, v.dtype, layout) if give_out else None
    extra = {} if written is None else {"out": written.array}
    tokens = [placed[name].array for name in TOKENS]
    out = cuflash.recurrent_gated_delta_rule(*tokens, state.array, **options, **extra)
    assert all(x.unchanged() for x in placed.values()), "an input was changed"
    assert state.unchanged(outside_only=True)
    if written is not None:
        assert out is written.array and written.unchanged(outside_only=True)
    assert out.dtype == v.dtype
    known = {"scale": options.get("scale")}
    exact = reference.gated_delta_rule(*(arrays[x] for x in TOKENS), initial_state=arrays["initial_state"], **known)
    plain = naive(arrays, **known)
    assert_close(out, exact[0], [x for x, _ in plain], "out")
    assert_close(state.array, exact[1], [x for _, x in plain], "state")
    return out, state.array


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: Shape, dtype: Any) -> None:
    arrays = draw(shape, dtype)
    _check_chunks(arrays)
    _check_recurrent(arrays)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("shape", SHAPES[1:5], ids=str)
def test_many_parts(small_parts: None, shape: Shape, dtype: Any) -> None:
    arrays = draw(shape, np.dtype(dtype))
    _check_chunks(arrays, chunk_size=16)
    _check_recurrent(arrays)


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
def test_lengths_around_a_chunk(chunk_size: int) -> None:
    for seqlen in (1, chunk_size - 1, chunk_size, chunk_size + 1, 2 * chunk_size + 3):
        _check_chunks(draw((1, seqlen, 2, 4, 16, 8), np.float32), chunk_size=chunk_size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_layouts(layout: str, dtype: Any) -> None:
    arrays = draw((2, 35, 2, 4, 16, 8), np.dtype(dtype))
    for give_out in (False, True):
        _check_chunks(arrays, layout, give_out=give_out, chunk_size=16)
        _check_recurrent(arrays, layout, give_out=give_out)


def test_repeated_inputs() -> None:
    arrays = draw((2, 35, 2, 4, 16, 8), np.dtype(np.float32))
    arrays |= {name: np.broadcast_to(arrays[name][:, :1], arrays[name].shape) for name in TOKENS}
    out = cuflash.chunk_gated_delta_rule(*(arrays[name] for name in TOKENS))
    dense = cuflash.chunk_gated_delta_rule(*(arrays[name].copy() for name in TOKENS))
    np.testing.assert_array_equal(out, dense)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3, 1e30])
def test_scale(scale: float) -> None:
    arrays = draw((1, 40, 1, 2, 8, 8), np.dtype(np.float32))
    _check_chunks(arrays, scale=scale)
    _check_recurrent(arrays, scale=scale)


# Packed sequences


@dtypes
@pytest.mark.parametrize("boundaries", BOUNDARIES, ids=str)
def test_packed(boundaries: list[int], dtype: Any) -> None:
    out, _ = _check_chunks(draw_packed(boundaries, dtype, 3))
    np.testing.assert_array_equal(out[:, boundaries[-1] :], 0)


@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int64, np.uint64])
def test_packed_in_many_parts(small_parts: None, integer: Any) -> None:
    for boundaries in BOUNDARIES:
        if integer != np.int8 or boundaries[-1] < 128:
            _check_chunks(draw_packed(boundaries, np.float32, 2, integer), "gaps", give_out=True, chunk_size=32)


def test_a_wrong_setting_raises_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "0")
    x, gates, out = np.ones((1, 4, 1, 3), "f"), np.zeros((1, 4, 1), "f"), np.full((1, 4, 1, 3), 7, "f")
    with pytest.raises(ValueError, match="CUFLASH_NUM_THREADS is '0', expected a positive int"):
        cuflash.chunk_gated_delta_rule(x, x, x, gates, gates, cu_seqlens=np.array([0, 2]), out=out)
    assert (out == 7).all()


def test_sequences_do_not_see_each_other() -> None:
    arrays = draw_packed(BOUNDARIES[0], np.float32, 0)
    whole, states = cuflash.chunk_gated_delta_rule(
        *(arrays[name] for name in TOKENS), cu_seqlens=arrays["cu_seqlens"], output_final_state=True
    )
    for n, (first, last) in enumerate(pairwise(BOUNDARIES[0])):
        out, state = cuflash.chunk_gated_delta_rule(
            *(arrays[name][:, first:last] for name in TOKENS), output_final_state=True
        )
        np.testing.assert_allclose(whole[:, first:last], out, atol=1e-6)
        np.testing.assert_allclose(states[n], state[0], atol=1e-6)


# Decays and keys


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_decays(kind: str, dtype: Any) -> None:
    arrays = draw((1, 150, 1, 2, 16, 16), np.dtype(dtype))
    log_g = gates_of_kind(kind, arrays["log_g"].shape)
    for gate_dtype in (np.float32, np.float64):
        arrays["log_g"] = log_g.astype(gate_dtype)
        out, state = _check_chunks(arrays)
        assert np.isfinite(out).all() and np.isfinite(state).all()
        _check_recurrent(arrays)


@pytest.mark.parametrize("chunk_size", [16, 64, 128])
def test_a_state_keeps_small_decays_behind_a_strong_one(chunk_size: int) -> None:
    arrays = draw((1, 128, 1, 2, 16, 16), np.dtype(np.float32))
    arrays["beta"][:] = 0  # nothing but the decay
    arrays["log_g"] = np.full_like(arrays["log_g"], -9e-7)  # less than half of what float32 tells apart beside 16
    arrays["log_g"][:, 0] = -16
    tokens, state = [arrays[name] for name in TOKENS], arrays["initial_state"]
    _, final = cuflash.chunk_gated_delta_rule(
        *tokens, initial_state=state, output_final_state=True, chunk_size=chunk_size
    )
    left = np.exp(arrays["log_g"].astype(np.float64).sum(1))[..., np.newaxis, np.newaxis]
    np.testing.assert_allclose(final, state * left, rtol=2e-6)


def test_reset_forgets_exactly() -> None:
    arrays = draw((1, 100, 1, 2, 16, 16), np.dtype(np.float32))
    arrays["log_g"][:, 30] = -np.inf
    tokens = [arrays[name] for name in TOKENS]
    first = cuflash.chunk_gated_delta_rule(*tokens)
    others = [x.copy() for x in tokens]
    for x in others[:3]:
        x[:, :30] *= 3
    again = cuflash.chunk_gated_delta_rule(*others, initial_state=arrays["initial_state"])
    np.testing.assert_array_equal(first[:, 30:], again[:, 30:])


def test_dtypes_of_gates() -> None:
    for dtype in DTYPES:
        arrays = draw((1, 70, 1, 2, 16, 16), np.dtype(np.float32))
        arrays |= {name: arrays[name].astype(dtype) for name in ("log_g", "beta")}
        _check_chunks(arrays)
        _check_recurrent(arrays)


@pytest.mark.parametrize("distance", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("largest", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_keys_that_are_nearly_parallel(distance: float, largest: float, dtype: Any) -> None:
    # Errors of one such system are a matter of luck; the largest ones of many are not.
    arrays = draw((1, 200, 16, 32, 32, 16), np.dtype(dtype))
    k = arrays["k"][:, :1] + distance * arrays["k"]
    arrays["k"] = k / np.linalg.norm(k, axis=-1, keepdims=True)
    arrays["beta"] = np.full_like(arrays["beta"], largest)
    for log_g in (arrays["log_g"], np.zeros_like(arrays["log_g"])):
        arrays["log_g"] = log_g
        for chunk_size in (16, 64, 128):
            _check_chunks(arrays, chunk_size=chunk_size)
        _check_recurrent(arrays)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_triangular_systems(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    a = np.tril(rng.uniform(-1, 2, (3, 2, 64, 64)), -1).astype(dtype) / 4
    right = rng.standard_normal((3, 2, 64, 20)).astype(dtype)
    x = right.copy()
    # What lies on and above the diagonal does not count.
    cpu_chunks.solve(a, cpu_chunks.inverses_of_blocks(a + np.triu(np.ones_like(a)).astype(dtype)), x)
    eye = np.eye(64)
    for at in np.ndindex(3, 2):
        exact = solve_triangular(eye + a[at], right[at].astype(np.float64), lower=True)
        plain = solve_triangular(eye.astype(dtype) + a[at], right[at], lower=True)
        if dtype == np.float64:
            np.testing.assert_allclose(x[at], exact, rtol=0, atol=1e-12 * np.abs(exact).max())
        else:
            assert np.abs(x[at] - exact).max() <= 2 * np.abs(plain - exact).max() + 1e-6 * np.abs(exact).max()


# Relations


@pytest.mark.parametrize("threads", ["1", "3"])
def test_twice_the_same_bits(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = draw((2, 150, 2, 4, 64, 32), np.dtype(np.float32))
    monkeypatch.setattr(cpu, "STEP_COST", 2**17)
    tokens, state = [arrays[name] for name in TOKENS], arrays["initial_state"]
    found = []
    for number in ("1", threads):
        monkeypatch.setenv("CUFLASH_NUM_THREADS", number)
        states = state.copy()
        chunks = cuflash.chunk_gated_delta_rule(*tokens, initial_state=state, output_final_state=True)
        found.append((*chunks, cuflash.recurrent_gated_delta_rule(*tokens, states), states))
    for first, second in zip(*found, strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_sequence_can_be_split_anywhere() -> None:
    arrays = draw((1, 140, 1, 2, 16, 8), np.dtype(np.float64))
    arrays["log_g"][:, 50] = -np.inf
    tokens = [arrays[name] for name in TOKENS]
    whole, last = cuflash.chunk_gated_delta_rule(*tokens, output_final_state=True)
    for at in range(141):
        first, state = cuflash.chunk_gated_delta_rule(*(x[:, :at] for x in tokens), output_final_state=True)
        second, state = cuflash.chunk_gated_delta_rule(
            *(x[:, at:] for x in tokens), initial_state=state, output_final_state=True
        )
        np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=1e-13)
        np.testing.assert_allclose(state, last, atol=1e-13)


def test_recurrent_continues_chunks() -> None:
    arrays = draw((2, 80, 1, 2, 16, 8), np.dtype(np.float32))
    tokens = [arrays[name] for name in TOKENS]
    whole, last = cuflash.chunk_gated_delta_rule(*tokens, output_final_state=True)
    _, state = cuflash.chunk_gated_delta_rule(*(x[:, :70] for x in tokens), output_final_state=True)
    for t in range(70, 80):
        out = cuflash.recurrent_gated_delta_rule(*(x[:, t : t + 1] for x in tokens), state)
        np.testing.assert_allclose(out, whole[:, t : t + 1], atol=1e-6)
    np.testing.assert_allclose(state, last, atol=1e-6)


# The output alone


def _check_output(
    arrays: Arrays, layout: str = "contiguous", *, give_out: bool = False, swap: bool = False, **options: Any
) -> Any:
    """Call `chunk_gated_output` and compare it with the definition; `swap` has features of v before those of k."""
    held = dict(arrays, h=arrays["h"].swapaxes(-1, -2)) if swap else arrays
    placed = poisoned(held, layout)
    given = {name: x.array for name, x in placed.items()}
    given["v_new"] = given.pop("v")
    if swap:
        given["h"] = given["h"].swapaxes(-1, -2)
    written = Poisoned(np, arrays["v"].shape, arrays["v"].dtype, layout) if give_out else None
    out = cuflash.chunk_gated_output(**given, **options, **({} if written is None else {"out": written.array}))
    assert all(x.unchanged() for x in placed.values()), "an input was changed"
    if written is not None:
        assert out is written.array and written.unchanged(outside_only=True)
    assert out.dtype == arrays["v"].dtype
    last = int(arrays["cu_seqlens"][-1])
    exact = reference.chunk_gated_output(**{("v_new" if x == "v" else x): y for x, y in arrays.items()}, **options)
    error = np.abs(out[:last].astype(np.float64) - exact[:last]).max(initial=0)
    eps = np.finfo(computed_dtype(out.dtype)).eps
    bound = 16 * eps * np.abs(exact[:last]).max(initial=0)
    if out.dtype.itemsize == 2:
        bound += 1.1 * np.abs(exact[:last].astype(out.dtype).astype(np.float64) - exact[:last]).max(initial=0)
    assert error <= bound, f"error {error:.2e}, allowed {bound:.2e}"
    np.testing.assert_array_equal(out[last:], 0)
    return out


@dtypes
@pytest.mark.parametrize("boundaries", BOUNDARIES, ids=str)
def test_output(boundaries: list[int], dtype: Any) -> None:
    _check_output(draw_output(boundaries, dtype, gap=3, surplus=2))


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
def test_output_of_every_size_of_chunks(small_parts: None, chunk_size: int) -> None:
    for seqlen in (1, chunk_size - 1, chunk_size, chunk_size + 1):
        boundaries = [0, seqlen, seqlen + chunk_size]
        arrays = draw_output(boundaries, np.float32, chunk_size=chunk_size, surplus=1)
        _check_output(arrays, chunk_size=chunk_size, scale=-0.3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("swap", [False, True])
def test_output_of_layouts(layout: str, swap: bool) -> None:
    arrays = draw_output([0, 40, 75], np.float32, gap=2, surplus=1)
    for give_out in (False, True):
        _check_output(arrays, layout, give_out=give_out, swap=swap)


@pytest.mark.parametrize("state_dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("gate_dtype", [np.float16, np.float64])
def test_output_of_dtypes(state_dtype: Any, gate_dtype: Any) -> None:
    for dtype in (np.float16, np.float32):
        arrays = draw_output([0, 40, 75], np.dtype(dtype))
        arrays |= {"h": arrays["h"].astype(state_dtype), "log_g_cumsum": arrays["log_g_cumsum"].astype(gate_dtype)}
        _check_output(arrays)


def test_output_of_gates_in_float64_that_have_decayed_far() -> None:
    arrays = draw_output([0, 40, 75], np.float32)
    gates = arrays["log_g_cumsum"].astype(np.float64)
    gates[5:40] -= 3000.1
    _check_output(arrays | {"log_g_cumsum": gates})


def test_output_keeps_the_digits_of_gates_in_float64() -> None:
    arrays = draw_output([0, 40, 75], np.float32)
    arrays["v"][:] = 0  # nothing but what states give
    gates = np.full(arrays["log_g_cumsum"].shape, -80 - 3.5e-6)  # nearly half of what float32 tells apart there
    _check_output(arrays | {"log_g_cumsum": gates})


@pytest.mark.parametrize(
    "sums",
    [(-0.1, -1e30, -1e30), (-0.1, -1e10, -1.1e10), (0, -3e38, -3.5e38), (0, -1e300, -2e300), (0, -4e38, -8e38)],
    ids=str,
)
def test_output_of_sums_in_float64_of_any_size(sums: tuple[float, ...]) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        arrays = draw_output([0, 3], np.dtype(dtype))
        gates = np.broadcast_to(np.array(sums)[:, np.newaxis], arrays["log_g_cumsum"].shape)
        assert np.isfinite(_check_output(arrays | {"log_g_cumsum": gates.copy()}).astype(np.float64)).all()


def test_output_where_gates_are_lost() -> None:
    """Where two cumulated gates are -inf, nothing has decayed between them."""
    arrays = draw_output([0, 40, 75], np.float32)
    arrays["log_g_cumsum"][10:40] = -np.inf
    arrays["log_g_cumsum"][50:75] -= 200
    out = _check_output(arrays)
    assert np.isfinite(out).all()
    with np.errstate(over="ignore"):
        arrays["log_g_cumsum"] = np.maximum(arrays["log_g_cumsum"].astype(np.float64), -1e300)
    np.testing.assert_allclose(_check_output(arrays), out, rtol=1e-6, atol=3e-7)


def test_output_is_the_last_step_of_the_delta_rule() -> None:
    arrays = draw((1, 100, 2, 4, 16, 12), np.dtype(np.float64))
    tokens = [arrays[name] for name in TOKENS]
    whole = cuflash.chunk_gated_delta_rule(*tokens, chunk_size=32)
    q, k, v, log_g, beta = tokens
    states, v_new, c = [], np.empty_like(v), np.empty_like(log_g)
    state = np.zeros((4, 16, 12))
    for t in range(100):
        if t % 32 == 0:
            states.append(state)
        c[:, t] = log_g[:, t] + (c[:, t - 1] if t % 32 else 0)
        key = np.repeat(k[0, t], 2, axis=0)[..., None]
        state = np.exp(log_g[0, t])[:, None, None] * state
        v_new[0, t] = beta[0, t, :, None] * (v[0, t] - (key * state).sum(axis=1))
        state = state + key * v_new[0, t, :, None]
    out = cuflash.chunk_gated_output(q[0], k[0], v_new[0], np.stack(states), c[0], np.array([0, 100]), chunk_size=32)
    np.testing.assert_allclose(out, whole[0], atol=1e-13)


# Little, and results


@pytest.mark.parametrize("shape", [(2, 0, 1, 2, 8, 4), (0, 5, 1, 2, 8, 4), (2, 5, 0, 0, 8, 4), (2, 5, 2, 0, 8, 4)])
def test_nothing_to_do(shape: Shape) -> None:
    arrays = draw(shape, np.dtype(np.float32))
    out, state = _check_chunks(arrays)
    assert out.shape == arrays["v"].shape
    np.testing.assert_array_equal(state, arrays["initial_state"])
    _, state = _check_recurrent(arrays)
    np.testing.assert_array_equal(state, arrays["initial_state"])
    tokens = [arrays[name] for name in TOKENS]
    assert not cuflash.chunk_gated_delta_rule(*tokens, output_final_state=True)[1].any()


def test_results_lie_as_the_inputs_do() -> None:
    arrays = draw((2, 20, 1, 2, 8, 4), np.dtype(np.float32))
    tokens = [arrays[name].swapaxes(0, 1).copy().swapaxes(0, 1) for name in TOKENS]
    state = arrays["initial_state"].swapaxes(-1, -2).copy().swapaxes(-1, -2)
    out, last = cuflash.chunk_gated_delta_rule(*tokens, initial_state=state, output_final_state=True)
    assert out.swapaxes(0, 1).flags.c_contiguous and last.swapaxes(-1, -2).flags.c_contiguous
    assert cuflash.chunk_gated_delta_rule(*tokens, output_final_state=True)[1].flags.c_contiguous
    assert cuflash.recurrent_gated_delta_rule(*tokens, state).swapaxes(0, 1).flags.c_contiguous
    output = draw_output([0, 40], np.float32)
    q = np.asfortranarray(output["q"])
    new = cuflash.chunk_gated_output(
        q, output["k"], output["v"], output["h"], output["log_g_cumsum"], output["cu_seqlens"]
    )
    assert new.flags.f_contiguous


def test_without_the_final_state() -> None:
    arrays = draw((1, 20, 1, 2, 8, 4), np.dtype(np.float32))
    tokens = [arrays[name] for name in TOKENS]
    alone = cuflash.chunk_gated_delta_rule(*tokens, output_final_state=False)
    np.testing.assert_array_equal(alone, cuflash.chunk_gated_delta_rule(*tokens, output_final_state=np.True_)[0])


def test_subclasses_are_written_past_their_methods() -> None:
    class Refusing(np.ndarray):
        def __setitem__(self, *_: Any) -> None:
            raise AssertionError("must not be called")

        def reshape(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("must not be called")

    arrays = draw((1, 20, 1, 2, 8, 4), np.dtype(np.float32))
    tokens = [arrays[name] for name in TOKENS]
    out, state = (np.zeros_like(arrays[name]).view(Refusing) for name in ("v", "initial_state"))
    assert cuflash.chunk_gated_delta_rule(*tokens, out=out) is out
    expected = cuflash.chunk_gated_delta_rule(*tokens)
    np.testing.assert_array_equal(out.view(np.ndarray), expected)
    assert cuflash.recurrent_gated_delta_rule(*tokens, state, out=out) is out
    np.testing.assert_allclose(out.view(np.ndarray), expected, atol=1e-6)
    assert state.view(np.ndarray).any()
