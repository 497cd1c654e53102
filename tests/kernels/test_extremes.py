"""Extreme but finite inputs, and rows that see one key or none: on NumPy and on every row of the kernel table.

What is exact here is compared exactly; the case matrix measures ordinary errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from emulator import emulator
from emulator.emulator import Emulator, compiler

import cuflash
from cuflash import reference
from cuflash.plan.table import KERNELS
from cuflash.problem.arrays import DTYPES

FLOAT32 = np.finfo(np.float32)


class BackEnd(NamedTuple):
    """Something that computes attention of NumPy arrays."""

    name: str
    dtype: str
    kernel: str | None = None
    on_gpu: bool = False

    def attention(self, *arrays: np.ndarray, splits: int | None = None, **options: Any) -> tuple[Any, Any]:
        """Out and lse; `splits` as the plan chooses, but on a CPU any number can be asked for."""
        try:
            return self._attention(*arrays, splits=splits, **options)
        except ValueError as error:
            if "cannot serve this call" in str(error):
                pytest.skip(f"{self.kernel} refuses")
            raise

    def _attention(self, *arrays: np.ndarray, splits: int | None, **options: Any) -> tuple[Any, Any]:
        if self.kernel is None:
            return cuflash.attention(*arrays, return_lse=True, **options)
        if self.on_gpu:
            import cupy

            on_device = {
                name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in options.items()
            }
            with cuflash.options(kernel=self.kernel):
                out, lse = cuflash.attention(*map(cupy.asarray, arrays), return_lse=True, **on_device)
            return out.get(), lse.get()
        return Emulator(self.kernel, num_splits=splits).attention(*arrays, return_lse=True, **options)

    def merge(self, outs: Any, lses: Any) -> tuple[Any, Any]:
        """`merge_attention_states`."""
        if self.kernel is None:
            return cuflash.merge_attention_states(outs, lses)
        if self.on_gpu:
            import cupy

            outs, lses = ([cupy.asarray(x) for x in parts] for parts in (outs, lses))
            out, lse = cuflash.merge_attention_states(outs, lses)
            return out.get(), lse.get()
        return emulator.merge(outs, lses)

    @property
    def widest(self) -> int:
        """The largest head dimension."""
        return next((spec.max_head_dim for spec in KERNELS if spec.name == self.kernel), 512)

    def draw(self, *shape: int, seed: int = 0) -> np.ndarray:
        """Normal numbers; features behind the widest that the row takes are left out."""
        shape = (*shape[:-1], min(shape[-1], self.widest))
        return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(DTYPES[self.dtype])

    @property
    def rounding(self) -> float:
        """Twice that of weights and results, for values of 1."""
        return {"float16": 2.0**-9, "bfloat16": 2.0**-6, "float32": 2e-6, "float64": 1e-14}[self.dtype]


EMULATED = {
    "forward_wgmma": ("float16", "bfloat16"),
    "forward_mma": ("float16", "bfloat16"),
    "forward_decode": ("float16", "bfloat16"),
    "forward_wmma": ("float16",),
    "forward_points": ("float32", "float64"),
    "precise_wgmma": ("float32",),
    "precise_float32": ("float32",),
    "precise_float64": ("float64",),
    "precise_wide": ("float64",),
    "precise_decode": ("float32",),
    "forward_scalar": ("float32", "float64"),
}
"""Types that a row treats in ways of their own; a GPU runs the others, too."""


def _back_ends() -> Iterator[Any]:
    no_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
    marks = [no_compiler, pytest.mark.share(sum(map(len, EMULATED.values())))]
    for dtype in DTYPES_TESTED:
        yield pytest.param(BackEnd("numpy", dtype), id=f"numpy-{dtype}")
        for spec in KERNELS:
            if dtype in EMULATED.get(spec.name, ()):
                back_end = BackEnd("emulated", dtype, spec.name)
                yield pytest.param(back_end, id=f"emulated-{spec.name}-{dtype}", marks=marks)
            ieee = dtype in spec.dtypes and not (spec.name == "forward_wmma" and dtype == "float32")  # tf32 alone
            if ieee:
                back_end = BackEnd("gpu", dtype, spec.name, True)
                yield pytest.param(back_end, id=f"gpu-{spec.name}-{dtype}", marks=pytest.mark.gpu)


def test_every_row_is_emulated() -> None:
    assert set(EMULATED) == {spec.name for spec in KERNELS}, "CONTRIBUTING.md, Add a kernel: name it in EMULATED"


DTYPES_TESTED = ("float16", "bfloat16", "float32", "float64")
back_ends = pytest.mark.parametrize("back_end", list(_back_ends()))


def assert_close(
    back_end: BackEnd, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, atol: float = 0.0, **options: Any
) -> None:
    """Close to float64, NaN nowhere; where the lse leaves the range of its type it is not compared."""
    out, lse = back_end.attention(q, k, v, **options)
    options.pop("splits", None)
    expected, expected_lse = reference.attention(q, k, v, **options)
    size = max(1.0, float(np.abs(v.astype(np.float64)).max()))
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=0, atol=(back_end.rounding + atol) * size)
    fits = ~(np.abs(expected_lse) > FLOAT32.max / 4) | (lse.dtype == np.float64)
    np.testing.assert_allclose(lse[fits], expected_lse[fits], rtol=1e-5, atol=1e-5 + 2 * back_end.rounding)


@back_ends
@pytest.mark.parametrize("splits", [1, 3, None])
@pytest.mark.parametrize("bias", [-1e9, -3e8, 1e9, -1e30, float(FLOAT32.min)])
def test_equal_huge_logits_keep_the_number_of_keys(back_end: BackEnd, bias: float, splits: int | None) -> None:
    """A row that is padded from end to end by a finite mask is a mean, however its keys are split."""
    q, k = back_end.draw(1, 1, 32), back_end.draw(1, 2049, 32)
    v = np.zeros_like(k)
    v[:, 2048:] = 50
    options = {"bias": np.full((1, 2049), bias, np.float32), "scale": 1e-9}
    out, lse = back_end.attention(q, k, v, splits=splits, **options)
    np.testing.assert_allclose(out.astype(np.float64), 50 / 2049, rtol=back_end.rounding + 1e-6)
    np.testing.assert_allclose(lse, bias, rtol=1e-6)


@back_ends
@pytest.mark.parametrize("bias", [-1e300, float(np.finfo(np.float64).min)])
def test_bias_of_float64_hides_by_infinity_alone(back_end: BackEnd, bias: float) -> None:
    q, k, v = back_end.draw(1, 4, 32), back_end.draw(1, 8, 32), back_end.draw(1, 8, 16)
    array = np.full((4, 8), bias)
    array[2] = -np.inf
    array[3, 5] = 1e39
    out, lse = back_end.attention(q, k, v, bias=array)
    mean = np.broadcast_to(v.astype(np.float64).mean(-2, keepdims=True), (1, 2, 16))
    np.testing.assert_allclose(out[:, :2].astype(np.float64), mean, atol=back_end.rounding)
    assert (out[:, 2] == 0).all() and np.isneginf(lse[:, 2]).all()
    assert (out[:, 3] == v[:, 5]).all() and (lse[:, :2] < -1e38).all() and (lse[:, 3] > 1e38).all()


@back_ends
@pytest.mark.parametrize("softcap", [1e-30, 1e-18, 2e-17, 1e-9, 1e-3, 1e9, 1e36, 1e38, 3e38])
def test_softcap_of_any_size(back_end: BackEnd, softcap: float) -> None:
    q, k = back_end.draw(1, 70, 32), back_end.draw(1, 90, 32)
    assert_close(back_end, q, k, k, softcap=softcap, causal="top_left")
    out, _ = back_end.attention(q, k, k, softcap=softcap, causal="top_left")
    assert (out[:, 0] == k[:, 0]).all()


@back_ends
@pytest.mark.parametrize(
    ("scale", "softcap"), [(1e30, 1.0), (1e30, 1e-20), (-1e30, 50.0), (1e-30, 1e30), (1e20, 300.0)]
)
def test_softcap_beside_a_scale_far_from_it(back_end: BackEnd, scale: float, softcap: float) -> None:
    q, k = back_end.draw(1, 20, 32), back_end.draw(1, 90, 32)
    q[:, 3] = 0
    assert_close(back_end, q, k, k, scale=scale, softcap=softcap)


@back_ends
@pytest.mark.parametrize(("scale", "softcap"), [(1.01e-21, 1e-15), (1e-20, 1e-15), (1.01e-14, 1e-8), (3e-5, 30.0)])
def test_hidden_keys_beside_small_softcap_and_smaller_scale(back_end: BackEnd, scale: float, softcap: float) -> None:
    """Whose powers leave the range of float32."""
    q, k = back_end.draw(1, 20, 32), back_end.draw(1, 90, 32)
    assert_close(back_end, q, k, k, atol=2e-5, scale=scale, softcap=softcap, causal="top_left")
    out, _ = back_end.attention(q, k, k, scale=scale, softcap=softcap, causal="top_left")
    assert (out[:, 0] == k[:, 0]).all()


@back_ends
@pytest.mark.parametrize("softcap", [None, 1.0, 50.0, 300.0])
@pytest.mark.parametrize("sink", [-1e30, -100.0, -86.0, 0.0, 1e30, np.inf, np.nan])
@pytest.mark.parametrize("splits", [1, 2])
def test_sinks_of_rows_that_see_no_key(back_end: BackEnd, splits: int, sink: float, softcap: float | None) -> None:
    q, k = back_end.draw(1, 70, 32), back_end.draw(1, 90 if splits == 1 else 300, 32)
    options = {"causal": True, "query_offset": -20, "softcap": softcap, "sinks": np.array([sink]), "splits": splits}
    out, lse = back_end.attention(q, k, k, **options)
    assert (out[:, :20] == 0).all()
    np.testing.assert_allclose(lse[:, :20], sink, rtol=1e-6)
    if sink == np.inf:  # takes all the weight of rows that see keys, too
        assert (out == 0).all() and (lse == np.inf).all()
    elif not np.isnan(sink):
        assert_close(back_end, q, k, k, **options)


@back_ends
@pytest.mark.parametrize(
    ("slope", "options"),
    [
        (1e38, {}),
        (-1e38, {}),
        (1e38, {"causal": True, "scale": 3.0}),
        (100.0, {"scale": 1e-29, "query_offset": 10**9}),
        (3.0, {"query_offset": -(10**12)}),
        (1e-3, {"query_offset": 10**9, "causal": True}),
        (1e6, {}),
        (-1e6, {}),
        (-3e3, {"query_offset": -30}),
        (1e10, {"scale": 1e-12}),
        (1e-10, {"scale": 1e12}),
    ],
)
def test_alibi_of_any_slope_and_distance(back_end: BackEnd, slope: float, options: dict[str, Any]) -> None:
    q, k = back_end.draw(1, 70, 32), back_end.draw(1, 300, 32)
    # Which float64 itself loses where all logits are that large.
    lost = 4 * np.finfo(np.float64).eps * abs(slope * options.get("query_offset", 0))
    assert_close(back_end, q, k, k, atol=lost, alibi_slopes=np.array([slope]), **options)


@back_ends
@pytest.mark.parametrize("slope", [3e37, -3e37])
@pytest.mark.parametrize("num_keys", [1, 2, 5])
def test_steep_alibi_of_few_keys(back_end: BackEnd, num_keys: int, slope: float) -> None:
    """The tile is far longer than the keys."""
    q, k, v = back_end.draw(2, 3, 32), back_end.draw(2, num_keys, 32), back_end.draw(2, num_keys, 16)
    out, lse = back_end.attention(q, k, v, alibi_slopes=np.array([slope, 0.0]), scale=2e-3)
    position = np.arange(3)[:, None] + num_keys - 3
    distance = np.abs(position - np.arange(num_keys)) * np.sign(slope)
    for row in range(3):
        keys = np.flatnonzero(distance[row] == distance[row].min())
        assert len(keys) > 1 or (out[0, row] == v[0, keys[0]]).all()
    assert not np.isnan(out.astype(np.float64)).any() and not np.isnan(lse).any()


ONE_KEY: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 50.0},
    "softcap-large": {"softcap": 300.0},
    "softcap-small": {"softcap": 2.0},
    "scale": {"scale": 100.0},
    "scale-negative": {"scale": -30.0},
    "alibi": {"alibi_slopes": np.array([0.3])},
}


@back_ends
@pytest.mark.parametrize("head_dim", [32, 224])
@pytest.mark.parametrize("options", ONE_KEY.values(), ids=ONE_KEY)
def test_one_key_gives_its_value(back_end: BackEnd, options: dict[str, Any], head_dim: int) -> None:
    """By a window, by a mask, by a bias and by the number of keys; also beside keys that others see."""
    q, k, v = back_end.draw(1, 70, head_dim), back_end.draw(1, 70, head_dim), back_end.draw(1, 70, head_dim, seed=1)
    v[:, :, 0] = 1
    tiny = np.float64(back_end.dtype == "float64") or FLOAT32.tiny
    v[:, :, 1] = np.asarray(tiny / 4 if back_end.dtype != "float16" else 2.0**-23).astype(v.dtype)  # subnormal
    one = np.eye(70, dtype=bool)
    for shown in (
        {"window": (0, 0)},
        {"mask": one},
        {"bias": np.where(one, 0, -np.inf).astype(np.float32)},
    ):
        out, _ = back_end.attention(q, k, v, **options, **shown)
        assert (out == v).all(), next(iter(shown))
    out, _ = back_end.attention(q, k[:, :1], v[:, :1], **options)
    assert (out == v[:, :1]).all()
    out, lse = back_end.attention(q, k, v, **options, causal=True)
    assert (out[:, 0] == v[:, 0]).all()
    np.testing.assert_allclose(out[:, :, 0].astype(np.float64), 1, rtol=4 * np.finfo(lse.dtype).eps)


@pytest.mark.parametrize("back_end", [p for p in back_ends.args[1] if p.values[0].dtype != "float64"])
@pytest.mark.parametrize(
    ("out_dtype", "options"),
    [
        *(("float32", {"softcap": softcap}) for softcap in (None, 2.0, 50.0, 300.0)),
        *(("float64", {"splits": splits}) for splits in (1, 2)),
    ],
)
def test_one_key_gives_its_value_in_a_wider_type(back_end: BackEnd, out_dtype: str, options: dict[str, Any]) -> None:
    q, k, v = (back_end.draw(1, 130, 64, seed=i) for i in range(3))
    v[:, :, 0] = 6e-39 if back_end.dtype != "float16" else 2.0**-23  # below the normal range
    out, _ = back_end.attention(q, k, v, window=(0, 0), scale=3.0, out_dtype=out_dtype, **options)
    assert out.dtype == out_dtype and (out == v.astype(out_dtype)).all()


@pytest.mark.parametrize("back_end", [p for p in back_ends.args[1] if p.values[0].dtype in ("float32", "float64")])
@pytest.mark.parametrize("small", [1e-20, 1e-32, 1e-36])
def test_small_columns_keep_their_digits(back_end: BackEnd, small: float) -> None:
    q, k, v = back_end.draw(1, 30, 16), back_end.draw(1, 700, 16), back_end.draw(1, 700, 8, seed=1) + 3
    v[:, :, 1:] *= v.dtype.type(small)
    out, _ = back_end.attention(q * 5, k, v)
    expected, _ = reference.attention(q * 5, k, v)
    np.testing.assert_allclose(out, expected, rtol=40 * back_end.rounding if small > 1e-33 else 1e-4)


@pytest.mark.parametrize("back_end", [p for p in back_ends.args[1] if p.values[0].dtype in ("float32", "bfloat16")])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_values_below_the_normal_range_outlast_a_growing_maximum(back_end: BackEnd, head_dim: int) -> None:
    """One key has all the weight, in front of others or behind them; all values are the same."""
    q, k = (np.zeros_like(back_end.draw(1, length, head_dim)) for length in (3, 65))
    v = np.full_like(k, 6e-39)
    q[..., 0] = 1
    for place in (0, 40, 64):
        k[...] = 0
        k[0, place, 0] = 25
        out, _ = back_end.attention(q, k, v, scale=1.0, out_dtype="float32")
        np.testing.assert_allclose(out, v[:, :3].astype(np.float32), rtol=1e-3)


@back_ends
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(256, 4), (128, 32), (68, 4), (4, 256), (32, 128)])
def test_keys_and_values_of_other_widths(back_end: BackEnd, head_dim: int, head_dim_v: int) -> None:
    q, k, v = (back_end.draw(2, *shape) for shape in ((3, head_dim), (90, head_dim), (90, head_dim_v)))
    out, _ = back_end.attention(q, k, v)
    expected, _ = reference.attention(q, k, v)
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=0, atol=2 * back_end.rounding)


@pytest.mark.parametrize("back_end", [p for p in back_ends.args[1] if p.values[0].dtype in ("float32", "bfloat16")])
@pytest.mark.parametrize(("of_q", "of_k", "scale"), [(3e29, 1e-39, 1e9), (3e37, 1e-39, 10.0), (3e24, 1e-40, 1e15)])
def test_keys_below_the_normal_range(back_end: BackEnd, of_q: float, of_k: float, scale: float) -> None:
    q, k, v = back_end.draw(1, 30, 32), back_end.draw(1, 50, 32), back_end.draw(1, 50, 32, seed=1)
    q, k = (q * q.dtype.type(of_q)).astype(q.dtype), (k.astype(np.float64) * of_k).astype(k.dtype)
    out, lse = back_end.attention(q, k, v, scale=scale)
    expected, expected_lse = reference.attention(q, k, v, scale=scale)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=10 * back_end.rounding, rtol=0)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=2e-6)


@back_ends
@pytest.mark.parametrize("value", [7.0, 3e4, np.nan])
def test_a_row_does_not_depend_on_keys_that_it_does_not_see(back_end: BackEnd, value: float) -> None:
    q, k, v = back_end.draw(1, 200, 32), back_end.draw(1, 200, 32), back_end.draw(1, 200, 32, seed=1)
    for options in ({"causal": True}, {"causal": True, "window": (30, None)}):
        first, first_lse = back_end.attention(q, k, v, **options)
        changed_k, changed_v = k.copy(), v.copy()
        changed_k[:, -1] = value
        changed_v[:, -1] = value if np.isfinite(value) else 3e4
        second, second_lse = back_end.attention(q, changed_k, changed_v, **options)
        # A tile's values have one scale, and one way to be multiplied.
        if back_end.kernel in ("precise_wgmma", "precise_float32"):
            np.testing.assert_allclose(second[:, :-1], first[:, :-1], rtol=0, atol=2e-6)
            np.testing.assert_allclose(second_lse[:, :-1], first_lse[:, :-1], rtol=0, atol=2e-6)
            continue
        assert first[:, :-1].tobytes() == second[:, :-1].tobytes()
        assert first_lse[:, :-1].tobytes() == second_lse[:, :-1].tobytes()


MERGING = [p for p in back_ends.args[1] if p.values[0].kernel in (None, "forward_scalar")]


@pytest.mark.parametrize("back_end", MERGING)
@pytest.mark.parametrize("num_parts", [2, 16, 17, 40, 300])
@pytest.mark.parametrize("lse", [-1e9, 1e9, -1e30, 0.0])
def test_merged_parts_are_counted(back_end: BackEnd, lse: float, num_parts: int) -> None:
    dtype = np.float64 if back_end.dtype == "float64" else np.float32
    outs = [np.full((2, 5, 8), float(part == num_parts // 2), DTYPES[back_end.dtype]) for part in range(num_parts)]
    out, merged = back_end.merge(outs, [np.full((2, 5), lse, dtype)] * num_parts)
    np.testing.assert_allclose(out.astype(np.float64), 1 / num_parts, rtol=back_end.rounding)
    np.testing.assert_allclose(merged, lse + np.log(num_parts), rtol=1e-6)


@pytest.mark.parametrize("back_end", MERGING)
def test_merged_infinite_sink_takes_all_weight(back_end: BackEnd) -> None:
    dtype = np.float64 if back_end.dtype == "float64" else np.float32
    outs = [np.full((3, 8), value, DTYPES[back_end.dtype]) for value in (0, 3)]
    lses = [np.array([np.inf, -np.inf, 1], dtype), np.array([2, -np.inf, 1], dtype)]
    out, lse = back_end.merge(outs, lses)
    assert (out == np.array([0, 0, 1.5])[:, None]).all()
    assert lse[0] == np.inf and np.isneginf(lse[1]) and lse[2] == pytest.approx(1 + np.log(2))


@back_ends
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(("slope", "offset"), [(1e-3, -(10**12)), (0.5, 10**6), (3.0, -(10**9))])
def test_alibi_far_from_the_keys_does_not_depend_on_splits(
    back_end: BackEnd, slope: float, offset: int, splits: int
) -> None:
    """As where keys are those of another part of a long sequence."""
    head_dim = min(32, back_end.widest)
    q, k = np.full((1, 1, head_dim), 2, DTYPES[back_end.dtype]), np.ones((1, 200, head_dim), DTYPES[back_end.dtype])
    v = np.zeros((1, 200, 16), k.dtype)
    k[:, :100], v[:, 100:] = 0.5, 1
    options = {"alibi_slopes": np.array([slope]), "query_offset": offset}
    out, lse = back_end.attention(q, k, v, splits=splits, **options)
    nearest = 0 if offset < 0 else 199
    logits = 2 * head_dim**0.5 * k[0, :, 0].astype(np.float64) - slope * np.abs(np.arange(200) - nearest)
    weights = np.exp(logits - logits.max())
    np.testing.assert_allclose(out.astype(np.float64), weights[100:].sum() / weights.sum(), atol=back_end.rounding)
    expected = np.log(weights.sum()) + logits.max() - slope * abs(offset - nearest)
    np.testing.assert_allclose(lse, expected, rtol=1e-6)


@back_ends
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("sink", [1.3, -3.75, -499898.5, -1e6, -np.inf])
def test_sinks_far_from_the_keys(back_end: BackEnd, sink: float, splits: int) -> None:
    """One of them outweighs keys that are lower by far more than it, another has as much weight as they have."""
    head_dim = min(32, back_end.widest)
    q, k = back_end.draw(1, 3, head_dim), back_end.draw(1, 200, head_dim)
    options = {"alibi_slopes": np.array([0.5]), "query_offset": 10**6, "sinks": np.array([sink])}
    assert_close(back_end, q, k, k, atol=1e-9, splits=splits, **options)
    _, lse = back_end.attention(q, k, k, splits=splits, **options)
    if sink > -4:
        np.testing.assert_allclose(lse, sink, rtol=1e-6)
