"""The float64 definition against another one: Python loops decide what is visible, scipy does the softmax."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy.special import logsumexp, softmax

from cuflash import reference

LENGTHS = [(1, 1), (3, 7), (7, 3), (5, 5), (4, 0), (0, 4), (1, 6)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": "bottom_right"},
    {"causal": "top_left"},
    {"window": (1, 1)},
    {"window": (0, 0), "query_offset": 1},
    {"window": (2, None), "causal": True},
    {"window": (None, 2)},
    {"window": (None, 9), "causal": "top_left"},
    {"query_offset": -3, "causal": True},
    {"query_offset": 100, "window": (3, 3)},
    {"query_offset": "array", "causal": True, "alibi_slopes": "array"},
    {"scale": 0.0},
    {"scale": -1.5, "softcap": 0.7},
    {"bias": "array"},
    {"bias": "holes", "causal": True},
    {"bias": "hole everywhere"},
    {"mask": "array", "alibi_slopes": "array", "query_offset": 2},
    {"sinks": "array"},
    {"sinks": "array", "mask": "nothing"},
    {"softcap": 2.0, "bias": "holes", "mask": "array", "alibi_slopes": "array", "sinks": "array", "window": (3, 1)},
]


def _materialise(options: dict[str, Any], heads: tuple[int, ...], scores: tuple[int, ...], rng: Any) -> dict[str, Any]:
    """Replace the words in `OPTIONS` by arrays."""
    made = dict(options)
    for name, value in options.items():
        if not isinstance(value, str) or name == "causal":
            continue
        if name == "query_offset":
            made[name] = rng.integers(-2, 5, heads[:-1])
        elif name == "mask":
            made[name] = np.zeros(scores, bool) if value == "nothing" else rng.random(scores) < 0.5
        elif name == "bias":
            made[name] = rng.standard_normal(scores[-2:])
            holes = {"array": 0.0, "holes": 0.4, "hole everywhere": 1.0}[value]
            made[name][rng.random(scores[-2:]) < holes] = -np.inf
        else:
            made[name] = rng.standard_normal(heads)
    return made


def _sees(i: int, j: int, offset: int, options: dict[str, Any]) -> bool:
    position = i + offset
    if options.get("causal", False) and j > position:
        return False
    left, right = options.get("window") or (None, None)
    if left is not None and j < position - left:
        return False
    return right is None or j <= position + right


def _oracle(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Compute one query head of one batch element, with options that are scalars or (Nq, Nk) arrays."""
    seqlen_q, seqlen_k = len(q), len(k)
    offset = options.get("query_offset")
    if offset is None:
        offset = 0 if options.get("causal") == "top_left" else seqlen_k - seqlen_q
    scale = options.get("scale")
    scale = 1 / np.sqrt(q.shape[1]) if scale is None else scale
    out, lse = np.zeros((seqlen_q, v.shape[1])), np.full(seqlen_q, -np.inf)
    for i in range(seqlen_q):
        logits, values = [], []
        for j in range(seqlen_k):
            mask, bias = options.get("mask"), options.get("bias")
            if not _sees(i, j, int(offset), options) or (mask is not None and not mask[i, j]):
                continue
            logit = scale * sum(float(a) * float(b) for a, b in zip(q[i], k[j], strict=True))
            if options.get("softcap"):
                logit = options["softcap"] * np.tanh(logit / options["softcap"])
            logit += 0.0 if bias is None else bias[i, j]
            logit -= options.get("alibi_slopes", 0.0) * abs(i + int(offset) - j)
            if logit > -np.inf:
                logits.append(logit)
                values.append(v[j])
        if "sinks" in options:
            logits.append(options["sinks"])
            values.append(np.zeros(v.shape[1]))
        if logits:
            out[i] = softmax(logits) @ np.array(values)
            lse[i] = logsumexp(logits)
    return out, lse


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("num_heads_q", "num_heads_kv"), [(1, 1), (4, 2), (3, 1)])
def test_attention(options: dict[str, Any], num_heads_q: int, num_heads_kv: int) -> None:
    rng = np.random.default_rng(0)
    for seqlen_q, seqlen_k in LENGTHS:
        heads = (2, num_heads_q)
        q = rng.standard_normal((2, num_heads_q, seqlen_q, 3))
        k = rng.standard_normal((2, num_heads_kv, seqlen_k, 3))
        v = rng.standard_normal((2, num_heads_kv, seqlen_k, 2))
        made = _materialise(options, heads, (*heads, seqlen_q, seqlen_k), rng)
        out, lse = reference.attention(q, k, v, **made)
        assert out.dtype == lse.dtype == np.float64
        assert out.shape == (*heads, seqlen_q, 2)
        assert lse.shape == out.shape[:-1]
        for b, h in itertools.product(range(2), range(num_heads_q)):
            single = dict(made)
            for name in ("alibi_slopes", "sinks", "mask"):
                if name in made:
                    single[name] = made[name][b, h]
            if np.ndim(made.get("query_offset")):
                single["query_offset"] = made["query_offset"][b]
            kv = h // (num_heads_q // num_heads_kv)
            expected_out, expected_lse = _oracle(q[b, h], k[b, kv], v[b, kv], single)
            np.testing.assert_allclose(out[b, h], expected_out, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(lse[b, h], expected_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_dtypes_are_widened_first(dtype: Any) -> None:
    q, k, v = (np.random.default_rng(1).standard_normal((3, 2, 5, 4)) * 3).astype(dtype)
    out, lse = reference.attention(q, k, v, causal=True)
    wide = reference.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    np.testing.assert_array_equal(out, wide[0])
    np.testing.assert_array_equal(lse, wide[1])


def test_two_dimensions_are_one_head() -> None:
    q, k, v = np.random.default_rng(2).standard_normal((3, 5, 4))
    out, lse = reference.attention(q, k, v)
    assert out.shape == (5, 4)
    assert lse.shape == (5,)
    np.testing.assert_array_equal(out, reference.attention(q[None], k[None], v[None])[0][0])


def test_leading_axes_broadcast() -> None:
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((3, 1, 2, 5, 4)), rng.standard_normal((7, 1, 6, 4)), rng.standard_normal((1, 6, 4))
    out, lse = reference.attention(q, k, v, query_offset=np.arange(3)[:, None], causal=True)
    assert out.shape == (3, 7, 2, 5, 4)
    single = reference.attention(q[1, 0], k[4], v, query_offset=1, causal=True)
    np.testing.assert_allclose(out[1, 4], single[0], rtol=1e-13)
    np.testing.assert_allclose(lse[1, 4], single[1], rtol=1e-13)


def test_hidden_keys_may_hold_anything() -> None:
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 2, 6, 4))
    mask = np.ones((6, 6), bool)
    mask[:, [1, 4]] = False
    clean = reference.attention(q, k, v, mask=mask)
    k[:, 1], k[:, 4], v[:, 1], v[:, 4] = np.nan, np.inf, np.nan, -np.inf
    for options in ({"mask": mask}, {"bias": np.where(mask, 0.0, -np.inf)}):
        dirty = reference.attention(q, k, v, **options)
        np.testing.assert_array_equal(dirty[0], clean[0])
        np.testing.assert_array_equal(dirty[1], clean[1])


def test_large_logits_neither_overflow_nor_hide() -> None:
    q, k, v = np.random.default_rng(5).standard_normal((3, 1, 4, 4)) * 1e3
    out, lse = reference.attention(q, k, v, bias=np.full((4, 4), -1e30))
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    np.testing.assert_allclose(out, v.mean(axis=-2, keepdims=True).repeat(4, axis=-2), rtol=1e-12)


@pytest.mark.parametrize("causal", [False, True, "bottom_right", "top_left"])
def test_varlen(causal: bool | str) -> None:
    rng = np.random.default_rng(6)
    boundaries_q, boundaries_k = np.array([0, 3, 3, 8, 9]), np.array([0, 4, 6, 6, 11])
    q, k, v = rng.standard_normal((12, 4, 3)), rng.standard_normal((13, 2, 3)), rng.standard_normal((13, 2, 5))
    k[11:], v[11:] = np.nan, np.nan
    slopes, sinks = rng.standard_normal((4, 4)), rng.standard_normal(4)
    options: dict[str, Any] = {"causal": causal, "window": (2, 3), "scale": 0.4, "softcap": 3.0}
    out, lse = reference.attention_varlen(
        q, k, v, boundaries_q, boundaries_k, alibi_slopes=slopes, sinks=sinks, **options
    )
    assert out.shape == (12, 4, 5)
    for b, h in itertools.product(range(4), range(4)):
        rows, keys = (slice(x[b], x[b + 1]) for x in (boundaries_q, boundaries_k))
        single = options | {"alibi_slopes": slopes[b, h], "sinks": sinks[h]}
        expected_out, expected_lse = _oracle(q[rows, h], k[keys, h // 2], v[keys, h // 2], single)
        np.testing.assert_allclose(out[rows, h], expected_out, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse[rows, h], expected_lse, rtol=1e-12, atol=1e-13)
    assert (out[9:] == 0).all()
    assert (lse[9:] == -np.inf).all()


def test_varlen_keys_are_cut_like_queries_by_default() -> None:
    q, k, v = np.random.default_rng(7).standard_normal((3, 7, 2, 3))
    out, lse = reference.attention_varlen(q, k, v, [0, 2, 7])
    both = reference.attention_varlen(q, k, v, [0, 2, 7], [0, 2, 7])
    np.testing.assert_array_equal(out, both[0])
    np.testing.assert_array_equal(lse, both[1])
