"""`merge_attention_states` on both back ends, and the kernel behind it on the CPU: against float64, and attention."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulator.emulator import compiler, merge
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax

import cuflash
from cuflash import reference
from cuflash.problem.arrays import DTYPES, FLOAT_NAMES
from cuflash.testing import LAYOUTS, Poisoned

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def _on_gpu(outs: Any, lses: Any) -> Any:
    import cupy

    def moved(x: Any) -> Any:
        return [_copied(part, cupy.asarray) for part in x] if isinstance(x, (list, tuple)) else _copied(x, cupy.asarray)

    return tuple(_copied(x, cupy.asnumpy) for x in cuflash.merge_attention_states(moved(outs), moved(lses)))


def _copied(x: Any, copy: Callable[..., Any]) -> Any:
    """Copy between host and GPU without a change of the order of axes in memory."""
    order = sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))
    return copy(x.transpose(order)).transpose(np.argsort(order))


BACK_ENDS = {"numpy": cuflash.merge_attention_states, "emulated": merge, "gpu": _on_gpu}
without_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
back_ends = pytest.mark.parametrize(
    "function",
    [
        pytest.param(BACK_ENDS["numpy"], id="numpy"),
        pytest.param(BACK_ENDS["emulated"], id="emulated", marks=without_compiler),
        pytest.param(BACK_ENDS["gpu"], id="gpu", marks=pytest.mark.gpu),
    ],
)


def _draw(shape: tuple[int, ...], dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    lses = 3 * rng.standard_normal(shape[:-1])
    lses[rng.random(lses.shape) < 0.2] = -np.inf
    outs = (1 + rng.standard_normal(shape)).astype(DTYPES[dtype])
    return outs, lses.astype(np.float64 if dtype == "float64" else np.float32)


def _check(outs: np.ndarray, lses: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
    """Within the rounding of the result and a few of each exponential."""
    expected, expected_lse = reference.merge_attention_states(outs, lses)
    assert out.dtype == outs.dtype and lse.dtype == lses.dtype
    eps = float(np.finfo(lses.dtype).eps)
    magnitude = np.abs(np.where(np.isneginf(lses)[..., np.newaxis], 0, outs.astype(np.float64))).max(0, initial=0)
    logits = np.abs(lses[np.isfinite(lses)]).max(initial=0)
    tolerance = eps * (8 + len(lses) / 4 + logits) * magnitude + ROUNDING[outs.dtype.name] * 1.01 * np.abs(expected)
    assert (np.abs(out.astype(np.float64) - expected) <= tolerance).all()
    nothing = np.isneginf(expected_lse)
    assert (np.isneginf(lse) == nothing).all() and (out[nothing] == 0).all()
    np.testing.assert_allclose(lse[~nothing], expected_lse[~nothing], rtol=4 * eps, atol=4 * eps)


SHAPES = [
    (1, 5, 64), (2, 70, 64), (3, 2, 4, 33, 128), (7, 3, 2, 40), (5, 9, 17), (20, 2, 3, 1), (130, 2, 512), (3, 2, 600),
    (4, 2, 1, 3, 1, 2, 2, 3, 16),
]  # fmt: skip


@back_ends
@pytest.mark.parametrize("dtype", FLOAT_NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, ...], dtype: str, function: Callable[..., Any]) -> None:
    outs, lses = _draw(shape, dtype)
    stacked = function(outs, lses)
    _check(outs, lses, *stacked)
    for given_outs, given_lses in ((list(outs), tuple(lses)), (list(outs), lses)):
        out, lse = function(given_outs, given_lses)
        _check(outs, lses, out, lse)
        again = function(given_outs, given_lses)
        assert out.tobytes() == again[0].tobytes() and lse.tobytes() == again[1].tobytes(), "not repeatable"


@back_ends
@pytest.mark.parametrize("dtype", FLOAT_NAMES)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "broadcast"])
def test_layouts(layout: str, dtype: str, function: Callable[..., Any]) -> None:
    outs, lses = _draw((3, 2, 4, 9, 24), dtype)
    given_outs = Poisoned(np, outs.shape, outs.dtype, layout, outs)
    given_lses = Poisoned(np, lses.shape, lses.dtype, layout if layout != "swapped" else "contiguous", lses)
    _check(outs, lses, *function(given_outs.array, given_lses.array))
    parts = [Poisoned(np, x.shape, x.dtype, name, x) for x, name in zip(outs, (layout, "gaps", layout), strict=True)]
    _check(outs, lses, *function([x.array for x in parts], given_lses.array))
    assert given_outs.unchanged() and given_lses.unchanged() and all(x.unchanged() for x in parts)


@back_ends
def test_six_axes_that_cannot_be_walked_as_one(function: Callable[..., Any]) -> None:
    shape = (3, 2, 3, 2, 3, 2, 3, 2, 16)
    outs, lses = _draw(tuple(2 * length for length in shape[:-1]) + shape[-1:], "float16")
    every_second = (slice(None, None, 2),) * 8
    outs, lses = outs[every_second], lses[every_second]
    _check(outs, lses, *function(outs, lses))


@back_ends
def test_results_keep_the_axis_order_of_the_first(function: Callable[..., Any]) -> None:
    outs, lses = _draw((2, 3, 50, 4, 16), "float32")
    outs, lses = outs.swapaxes(-3, -2), lses.swapaxes(-2, -1)
    out, lse = function(outs, lses)
    assert out.strides == np.empty_like(outs[0]).strides and lse.swapaxes(-1, -2).flags.c_contiguous


@back_ends
def test_one_part_is_returned_as_it_is(function: Callable[..., Any]) -> None:
    for dtype in FLOAT_NAMES:
        outs, lses = _draw((1, 3, 5, 16), dtype)
        outs[np.isneginf(lses)] = 0
        out, lse = function(outs, lses)
        assert out.tobytes() == outs.tobytes() and lse.tobytes() == lses.tobytes()


@back_ends
@pytest.mark.parametrize("shape", [(2, 0, 64), (2, 3, 0, 5, 16), (2, 5, 0)], ids=str)
def test_empty(shape: tuple[int, ...], function: Callable[..., Any]) -> None:
    outs, lses = _draw(shape, "float32")
    out, lse = function(outs, lses)
    assert out.shape == shape[1:] and lse.shape == shape[1:-1]
    np.testing.assert_allclose(lse, reference.merge_attention_states(outs, lses)[1], rtol=1e-6)


@back_ends
def test_many_parts_without_rows(function: Callable[..., Any]) -> None:
    out, lse = function([np.zeros((0, 8), np.float32)] * 17, [np.zeros(0, np.float32)] * 17)
    assert (out.shape, lse.shape) == ((0, 8), (0,))


@back_ends
def test_parts_without_keys_count_for_nothing(function: Callable[..., Any]) -> None:
    outs, lses = _draw((3, 40, 32), "float32")
    lses[1] = -np.inf
    outs[1] = np.nan  # as from memory that nobody has written
    lses[:, 7] = -np.inf
    out, lse = function(outs, lses)
    _check(outs, lses, out, lse)
    assert np.isfinite(out).all() and (out[7] == 0).all() and np.isneginf(lse[7])


@back_ends
def test_extreme_lses(function: Callable[..., Any]) -> None:
    outs = np.ones((2, 6, 16), np.float32)
    outs[1] = 3
    big, inf = float(np.finfo(np.float32).max), np.inf
    lses = np.array([[big, -big, -big, inf, np.nan, 0.0], [big, -big, big, 0.0, 0.0, -200.0]], np.float32)
    with np.errstate(all="ignore"):
        out, lse = function(outs, lses)
    np.testing.assert_array_equal(out[:, 0], np.array([2, 2, 3, 1, np.nan, 1], np.float32))
    np.testing.assert_allclose(lse, [big, -big, big, inf, np.nan, 0], rtol=1e-6)
    expected = reference.merge_attention_states(outs, lses)
    np.testing.assert_array_equal(np.isnan(expected[1]), np.isnan(lse))


@pytest.mark.parametrize("num_parts", [2, 16, 17, 300])
@pytest.mark.parametrize(
    ("dtype", "lse"), [("float32", -1e9), ("float16", 3e38), ("float64", 1e17), ("float64", -1e300)]
)
def test_many_parts_of_equal_huge_lse_with_numpy(dtype: str, lse: float, num_parts: int) -> None:
    outs, lses = np.zeros((num_parts, 3, 4), dtype), np.full((num_parts, 3), lse, "f8" if dtype == "float64" else "f4")
    outs[-1] = 50
    out, total = cuflash.merge_attention_states(list(outs), list(lses))
    np.testing.assert_allclose(out.astype(np.float64), 50 / num_parts, rtol=2 * ROUNDING[dtype] + 1e-15)
    np.testing.assert_allclose(total, lses[0], rtol=1e-6)


def test_the_error_does_not_grow_with_the_number_of_parts_with_numpy() -> None:
    rng = np.random.default_rng(0)
    outs = (1 + 0.1 * rng.standard_normal((10000, 4, 8))).astype(np.float32)
    lses = rng.standard_normal((10000, 4)).astype(np.float32)
    weights = np.exp(lses.astype(np.float64))
    expected = (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None]
    out, lse = cuflash.merge_attention_states(outs, lses)
    assert abs(out - expected).max() < 1.2e-7
    assert abs(lse - np.log(weights.sum(0))).max() < 1e-6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=20), st.integers(0, 2**32 - 1), st.booleans())
def test_any_partition_of_the_keys(lengths: list[int], seed: int, shuffled: bool) -> None:
    rng = np.random.default_rng(seed)
    q, (k, v) = rng.standard_normal((2, 9, 8)), rng.standard_normal((2, 2, sum(lengths), 8))
    keys = rng.permutation(sum(lengths)) if shuffled else np.arange(sum(lengths))
    parts = np.split(keys, np.cumsum(lengths)[:-1])
    outs, lses = zip(*(cuflash.attention(q, k[:, i], v[:, i], return_lse=True) for i in parts), strict=True)
    out, lse = cuflash.merge_attention_states(outs, lses)
    expected, expected_lse = cuflash.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


def test_reference_by_scipy() -> None:
    outs, lses = _draw((4, 3, 5, 8), "float64")
    lses[0] = 1  # scipy has no row without a key
    out, lse = reference.merge_attention_states(outs, lses)
    np.testing.assert_allclose(lse, logsumexp(lses, axis=0), rtol=1e-13)
    np.testing.assert_allclose(out, (softmax(lses, axis=0)[..., np.newaxis] * outs).sum(0), rtol=1e-12)


OUT, LSE = np.zeros((2, 5, 16), np.float32), np.zeros((2, 5), np.float32)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "words"),
    [
        ([], [], ValueError, "outs has no parts, expected at least one"),
        (OUT[:0], LSE[:0], ValueError, "outs has no parts"),
        (OUT, [], ValueError, "lses has no parts"),
        (OUT, LSE[:1], ValueError, "lses has 1 parts but outs has 2"),
        (OUT[0], LSE, ValueError, r"outs has shape \(5, 16\), expected \(S, ..., Nq, Dv\)"),
        (OUT, LSE[0], ValueError, r"lses has shape \(5,\), expected \(S, ..., Nq\)"),
        ([OUT[0, 0]] * 2, LSE, ValueError, r"outs\[0\] has shape \(16,\), expected \(..., Nq, Dv\)"),
        ([OUT[0], OUT[0, :4]], LSE, ValueError, r"outs\[1\] has shape \(4, 16\), expected \(5, 16\)"),
        (OUT, [LSE[0], LSE[0, :4]], ValueError, r"lses\[1\] has shape \(4,\), expected \(5,\)"),
        (OUT, LSE[:, :3], ValueError, r"lses\[0\] has shape \(3,\), expected \(5,\) \(outs\[0\] has \(5, 16\)\)"),
        (OUT.astype(np.int32), LSE, TypeError, r"outs\[0\] has dtype int32, expected float16"),
        ([OUT[0], OUT[0].astype(np.float16)], LSE, TypeError, r"outs\[1\] has dtype float16, expected float32"),
        (OUT, LSE.astype(np.float64), TypeError, r"lses\[0\] has dtype float64, expected float32"),
        (OUT.astype(np.float64), LSE, TypeError, r"lses\[0\] has dtype float32, expected float64"),
        (None, LSE, TypeError, "outs is None, expected a NumPy or CuPy array"),
        (OUT.tolist(), LSE, TypeError, r"outs\[0\] is a list, expected a NumPy or CuPy array"),
    ],
)
def test_errors(outs: Any, lses: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        cuflash.merge_attention_states(outs, lses)


@pytest.mark.parametrize(("name", "hint"), [("lse", "did you mean lses"), ("axis", "expected one of lses, outs")])
def test_unknown_options(name: str, hint: str) -> None:
    words = re.escape(f"merge_attention_states() got an unexpected keyword argument {name!r}; {hint}")
    with pytest.raises(TypeError, match=words):
        cuflash.merge_attention_states(OUT, **{name: LSE})


def test_states_one_by_one() -> None:
    """As FlashInfer's merge_state takes them."""
    words = "takes 2 positional arguments (outs, lses) but 4 were given; pass [out_a, out_b], [lse_a, lse_b]"
    with pytest.raises(TypeError, match=re.escape(f"merge_attention_states() {words}")):
        cuflash.merge_attention_states(OUT[0], LSE[0], OUT[1], LSE[1])


@pytest.mark.gpu
def test_mixing_numpy_and_gpu_is_refused() -> None:
    import cupy

    with pytest.raises(TypeError, match=r"lses\[0\] is a NumPy array but outs\[0\] is a GPU array"):
        cuflash.merge_attention_states(cupy.asarray(OUT), LSE)
    with pytest.raises(TypeError, match=r"outs\[1\] is a GPU array but outs\[0\] is a NumPy array"):
        cuflash.merge_attention_states([OUT[0], cupy.asarray(OUT[1])], LSE)


@pytest.mark.gpu
@pytest.mark.parametrize("num_parts", [3, 40])
def test_allocates_results_and_nothing_of_a_parts_size(num_parts: int, allocations: Any) -> None:
    import cupy

    outs, lses = (cupy.asarray(x) for x in _draw((num_parts, 2, 100, 64), "float32"))
    with allocations() as sizes:
        out, lse = cuflash.merge_attention_states(outs, lses)
    assert sizes == [out.nbytes, lse.nbytes]
    with allocations() as sizes:
        cuflash.merge_attention_states(list(outs), list(lses))
    groups = 0 if num_parts <= 16 else 3
    assert sorted(sizes) == sorted([out.nbytes, lse.nbytes] + [groups * (out.nbytes + 3 * lse.nbytes)] * (groups > 0))


@pytest.mark.gpu
def test_graph_of_many_parts_keeps_its_scratch_memory() -> None:
    import cupy

    outs, lses = _draw((40, 2, 100, 64), "float16")
    on_gpu = [cupy.asarray(x) for x in outs], [cupy.asarray(x) for x in lses]
    cuflash.merge_attention_states(*on_gpu)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        out, lse = cuflash.merge_attention_states(*on_gpu)
        graph = stream.end_capture()
        others = [cupy.full(4096, 0xFF, np.uint8) for _ in range(1000)]
        graph.launch()
    stream.synchronize()
    assert len(others) == 1000
    _check(outs, lses, out.get(), lse.get())


def test_pairs_of_results_are_explained() -> None:
    parts = [(np.ones((2, 5, 4)), np.ones((2, 5))) for _ in range(2)]
    for pairs in (parts, (parts[0], parts[1])):
        with pytest.raises(TypeError, match=re.escape("pass *zip(*pairs)")):
            cuflash.merge_attention_states(pairs, pairs)
    with pytest.raises(ValueError, match=re.escape("outs[1] has shape (2, 5), expected (2, 5, 4)") + ".*zip"):
        cuflash.merge_attention_states(*parts)
