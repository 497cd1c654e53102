"""What docs/coming_from.md says of other libraries, for those that are installed: the same numbers by both names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_K = 2, 4, 2, 5, 7
RNG = np.random.default_rng(0)
Q = RNG.standard_normal((BATCH, HEADS, SEQLEN_Q, 16), dtype=np.float32)
K, V = RNG.standard_normal((2, BATCH, HEADS_KV, SEQLEN_K, 16), dtype=np.float32)
BIAS = RNG.standard_normal((SEQLEN_Q, SEQLEN_K), dtype=np.float32)
MASK = RNG.random((BATCH, 1, SEQLEN_Q, SEQLEN_K)) < 0.5
MASK[..., 0] = True


def same(theirs: Any, ours: Any) -> bool:
    return np.allclose(np.asarray(theirs), ours, atol=1e-5)


def ours(**options: Any) -> Any:
    return cuflash.attention(Q, K, V, **options)


def test_torch_scaled_dot_product_attention() -> None:
    torch = pytest.importorskip("torch")
    biases = pytest.importorskip("torch.nn.attention.bias")
    q, k, v, bias, mask = (torch.from_numpy(x) for x in (Q, K, V, BIAS, MASK))

    def theirs(**options: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    assert same(theirs(), ours())
    assert same(theirs(is_causal=True), ours(causal="top_left")) and not same(theirs(is_causal=True), ours(causal=True))
    assert same(theirs(attn_mask=mask), ours(mask=MASK))
    assert same(theirs(attn_mask=bias, scale=0.3), ours(bias=BIAS, scale=0.3))
    expanded = (x.repeat_interleave(HEADS // HEADS_KV, dim=1) for x in (k, v))
    lower_right = biases.causal_lower_right(SEQLEN_Q, SEQLEN_K)
    causal = torch.nn.functional.scaled_dot_product_attention(q, *expanded, attn_mask=lower_right)
    assert same(causal, ours(causal=True))


def test_torch_lse() -> None:
    pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    if not hasattr(flex, "AuxRequest"):
        pytest.skip("this torch has no AuxRequest")
    import torch

    arrays = (torch.from_numpy(x) for x in (Q, K, V))
    out, further = flex.flex_attention(*arrays, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
    expected, lse = ours(return_lse=True)
    assert same(out, expected) and further.lse.shape == lse.shape and same(further.lse, lse)


def test_torch_key_padding_mask() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.MultiheadAttention(8, 1, bias=False, batch_first=True).eval()
    identity = torch.eye(8)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([identity] * 3))
        module.out_proj.weight.copy_(identity)
        x = RNG.standard_normal((2, 6, 8), dtype=np.float32)
        is_padding = np.arange(6) >= np.array([6, 4])[:, None]
        t = torch.from_numpy(x)
        theirs, _ = module(t, t, t, key_padding_mask=torch.from_numpy(is_padding))
    heads = x[:, None]
    assert same(theirs, cuflash.attention(heads, heads, heads, mask=~is_padding[:, None, None, :])[:, 0])


def test_jax_dot_product_attention() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = (x.swapaxes(1, 2) for x in (Q, K, V))

    def theirs(**options: Any) -> np.ndarray:
        return np.asarray(jax.nn.dot_product_attention(q, k, v, **options)).swapaxes(1, 2)

    assert same(theirs(), ours())
    assert same(theirs(is_causal=True), ours(causal="top_left")) and not same(theirs(is_causal=True), ours(causal=True))
    assert same(theirs(local_window_size=(2, 1)), ours(window=(2, 1), query_offset=0))
    assert same(theirs(local_window_size=2), ours(window=(2, 2), query_offset=0))
    both = theirs(local_window_size=(2, 1), is_causal=True)
    assert same(both, ours(window=(2, 1), causal="top_left"))
    assert same(theirs(mask=MASK), ours(mask=MASK))
    assert same(theirs(bias=BIAS[None, None], scale=0.3), ours(bias=BIAS, scale=0.3))
    lengths = np.array([3, 5], np.int32)
    in_use = np.arange(SEQLEN_K) < lengths[:, None, None, None]
    assert same(theirs(key_value_seq_lengths=lengths), ours(mask=in_use))
    asked = (np.arange(SEQLEN_Q) < lengths[:, None])[:, None, :, None]
    assert same(theirs(query_seq_lengths=lengths), ours(mask=asked))
    nothing = np.zeros_like(MASK)
    means = np.repeat(V.mean(axis=2, keepdims=True), HEADS // HEADS_KV, axis=1)
    assert same(theirs(mask=nothing), np.broadcast_to(means, Q.shape)) and not ours(mask=nothing).any()


def test_jax_residual() -> None:
    jax = pytest.importorskip("jax")
    arrays = (x.swapaxes(1, 2) for x in (Q, K, V))
    _, residual = jax.nn.dot_product_attention(*arrays, is_causal=True, return_residual=True)
    _, lse = ours(causal="top_left", return_lse=True)
    assert residual.shape == (BATCH, SEQLEN_Q, HEADS) and same(residual.swapaxes(1, 2), lse)
