"""What a call of the gated delta rule means: strides with all axes, those of results, alignment; and the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuflash import reference
from cuflash.problem.arrays import ArrayInfo, contiguous_strides, strides_like
from cuflash.problem.describe_gated import (
    describe_chunk_gated_delta_rule,
    describe_chunk_gated_output,
    describe_recurrent_gated_delta_rule,
)
from cuflash.problem.gated import GATED_ARRAYS, GatedStrides, GatedTraits


def gpu(
    *shape: int, dtype: str = "float16", strides: tuple[int, ...] | None = None, pointer: int = 1 << 20
) -> ArrayInfo:
    """What is known of an array on a GPU, where there is none."""
    size = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4}[dtype]
    return ArrayInfo(None, shape, strides or contiguous_strides(shape, size), dtype, pointer, 0, True)


def tokens(batch: int = 2, dtype: str = "float16", **changed: ArrayInfo) -> dict[str, ArrayInfo]:
    """Arguments of the delta rule, for 70 tokens, 2 heads of q and k with 32 features and 4 of v with 64."""
    q, v, gates = (batch, 70, 2, 32), (batch, 70, 4, 64), (batch, 70, 4)
    found = {"q": gpu(*q, dtype=dtype), "k": gpu(*q, dtype=dtype), "v": gpu(*v, dtype=dtype)}
    found |= {"log_g": gpu(*gates, dtype="float32"), "beta": gpu(*gates, dtype="bfloat16")}
    return found | changed


def test_chunks() -> None:
    problem, infos = describe_chunk_gated_delta_rule(**tokens())
    assert set(infos) == {"q", "k", "v", "log_g", "beta"}
    assert problem.traits == GatedTraits(
        "chunk_gated_delta_rule", "float16", "float32", "bfloat16", "float32", 32, 64, 64, False, 16, 16
    )
    assert problem.traits.computed == "float32"
    assert problem[1:7] == (2, 70, 2, 4, 0, 32**-0.5) and problem.cu_seqlens_dtype == ""
    row = contiguous_strides((2, 70, 4, 64), 2)
    gates = contiguous_strides((2, 70, 4), 4), contiguous_strides((2, 70, 4), 2)
    key = contiguous_strides((2, 70, 2, 32), 2)
    assert problem.strides == GatedStrides(key, key, row, gates[0], row, gates[1])
    assert hash(problem) == hash(describe_chunk_gated_delta_rule(**tokens())[0])


def test_packed_chunks_with_states() -> None:
    swapped = gpu(3, 4, 32, 64, dtype="float32", strides=(4 * 4 * 32 * 64, 4 * 32 * 64, 4, 4 * 32))
    problem, infos = describe_chunk_gated_delta_rule(
        **tokens(1),
        initial_state=swapped,
        output_final_state=True,
        cu_seqlens=gpu(4, dtype="int32"),
        chunk_size=np.int8(32),
    )
    assert set(infos) == {"q", "k", "v", "log_g", "beta", "initial_state", "cu_seqlens"}
    assert problem.traits.packed and problem.traits.chunk_size == 32 and type(problem.traits.chunk_size) is int
    assert (problem.num_sequences, problem.seqlen, problem.cu_seqlens_dtype) == (3, 70, "int32")
    assert problem.strides.initial_state == problem.strides.final_state == swapped.strides
    assert (problem.traits.input_alignment, problem.traits.result_alignment) == (16, 16)
    assert problem.traits.swapped_states and not describe_chunk_gated_delta_rule(**tokens())[0].traits.swapped_states


def test_a_final_state_without_an_initial_one_is_in_c_order() -> None:
    problem, _ = describe_chunk_gated_delta_rule(**tokens(dtype="float64"), output_final_state=True)
    assert problem.strides.final_state == contiguous_strides((2, 4, 32, 64), 8)
    assert problem.traits.state_dtype == problem.traits.computed == "float64"


def test_recurrent() -> None:
    state = gpu(2, 4, 32, 64, dtype="float32")
    problem, infos = describe_recurrent_gated_delta_rule(**tokens(), state=state, scale=2)
    assert set(infos) == {"q", "k", "v", "log_g", "beta", "initial_state", "final_state"}
    assert infos["initial_state"] is infos["final_state"] is state
    assert problem.strides.initial_state == problem.strides.final_state == state.strides
    assert problem.traits.op == "recurrent_gated_delta_rule" and problem.traits.chunk_size == 0
    assert problem.scale == 2.0 and problem.num_sequences == 2


def test_output() -> None:
    given: dict[str, Any] = {"q": gpu(70, 2, 32), "k": gpu(70, 2, 32), "v_new": gpu(70, 4, 64)}
    given |= {"h": gpu(9, 4, 32, 64, dtype="bfloat16"), "log_g_cumsum": gpu(70, 4, dtype="float64")}
    problem, infos = describe_chunk_gated_output(**given, cu_seqlens=gpu(3, dtype="int32"))
    assert set(infos) == {"q", "k", "v", "states", "log_g", "cu_seqlens"} <= set(GATED_ARRAYS)
    traits = problem.traits
    assert (traits.op, traits.gate_dtype, traits.beta_dtype, traits.state_dtype) == (
        "chunk_gated_output",
        "float64",
        "",
        "bfloat16",
    )
    assert problem.strides.q == (0, *given["q"].strides) and problem.strides.out == (0, *given["v_new"].strides)
    assert problem.strides.log_g == (0, *given["log_g_cumsum"].strides)
    assert problem.strides.states == given["h"].strides
    assert (problem.num_sequences, problem.seqlen, problem.num_chunks) == (2, 70, 9)


def test_new_output_lies_as_q_does() -> None:
    q = gpu(2, 70, 2, 32, strides=strides_like((2, 70, 2, 32), (1, 3, 2, 0), 2))
    problem, _ = describe_chunk_gated_delta_rule(**tokens(q=q))
    assert problem.strides.out == strides_like((2, 70, 4, 64), q.strides, 2)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (16, 16)),
        ({"q": gpu(2, 70, 2, 32, pointer=(1 << 20) + 2)}, (2, 16)),
        ({"q": gpu(2, 70, 2, 32, pointer=(1 << 20) + 1)}, (1, 16)),
        ({"v": gpu(2, 70, 4, 64, strides=(70 * 4 * 128, 4 * 128, 128, 4))}, (2, 16)),
        ({"k": gpu(2, 70, 2, 32, strides=(70 * 2 * 66, 2 * 66, 66, 2))}, (2, 16)),
        ({"k": gpu(2, 70, 2, 32, strides=(70 * 2 * 65, 2 * 65, 65, 2))}, (1, 16)),
        ({"log_g": gpu(2, 70, 4, dtype="float32", pointer=2)}, (1, 16)),
        ({"log_g": gpu(2, 70, 4, dtype="float32", pointer=4)}, (16, 16)),
        ({"out": gpu(2, 70, 4, 64, pointer=8)}, (16, 2)),
        ({"out": gpu(2, 70, 4, 64, pointer=9)}, (16, 1)),
        ({"v": gpu(2, 70, 4, 60)}, (2, 2)),
        ({"initial_state": gpu(2, 4, 32, 64, dtype="float32", pointer=8)}, (2, 16)),
    ],
)
def test_alignment(changed: dict[str, ArrayInfo], expected: tuple[int, int]) -> None:
    traits = describe_chunk_gated_delta_rule(**tokens(**changed))[0].traits
    assert (traits.input_alignment, traits.result_alignment) == expected


# The definition


def test_definition_is_a_product_of_matrices() -> None:
    """Each token multiplies the state by exp(g) (1 - beta k k^T), and adds beta k v^T."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 12, 2, 5))
    v, gates, beta = rng.standard_normal((1, 12, 4, 3)), -rng.random((1, 12, 4)), rng.random((1, 12, 4))
    initial = rng.standard_normal((3, 4, 5, 3))
    boundaries = [0, 7, 7, 11]
    out, states = reference.gated_delta_rule(q, k, v, gates, beta, initial_state=initial, cu_seqlens=boundaries)
    for n, head in np.ndindex(3, 4):
        state = initial[n, head]
        for t in range(boundaries[n], boundaries[n + 1]):
            key = k[0, t, head // 2]
            state = np.exp(gates[0, t, head]) * (np.eye(5) - beta[0, t, head] * np.outer(key, key)) @ state
            state = state + beta[0, t, head] * np.outer(key, v[0, t, head])
            np.testing.assert_allclose(out[0, t, head], state.T @ q[0, t, head // 2] / 5**0.5, atol=1e-12)
        np.testing.assert_allclose(states[n, head], state, atol=1e-12)
    assert not out[:, 11:].any()


def test_definition_of_the_output_is_a_recurrence() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 12, 2, 5))
    v, gates = rng.standard_normal((12, 4, 3)), -rng.random((12, 4))
    boundaries, first = [0, 7, 7, 11], [0, 4, 7]
    h = rng.standard_normal((5, 4, 5, 3))
    c = np.concatenate([np.cumsum(gates[a:b], axis=0) for a, b in ((0, 4), (4, 7), (7, 11), (11, 12))])
    out = reference.chunk_gated_output(q, k, v, h, c, boundaries, chunk_size=4, scale=-2)
    for chunk, head in np.ndindex(3, 4):
        state = h[chunk, head]
        for t in range(first[chunk], [*first, 11][chunk + 1]):
            state = np.exp(gates[t, head]) * state + np.outer(k[t, head // 2], v[t, head])
            np.testing.assert_allclose(out[t, head], -2 * state.T @ q[t, head // 2], atol=1e-12)
    assert not out[11:].any()
