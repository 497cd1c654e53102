"""Attention over some of the keys by each kernel, merged as on a GPU: the emulator in place of launches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cuflash import reference
from cuflash.gpu.states import merge_of_states, with_sinks
from cuflash.plan.partial import PARTIAL_COLUMNS, partial_traits
from cuflash.plan.table import KERNELS, KernelSpec
from cuflash.problem.arrays import DTYPES, inspect
from cuflash.problem.describe import describe_attention
from cuflash.problem.states import State, share_offset, writes_state

from .emulator import Emulator, compile_kernel, compiler, span

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
rows = pytest.mark.parametrize(
    "spec", [spec for spec in KERNELS if "attention" in spec.operations], ids=lambda spec: spec.name
)
SLOPES, SINKS = np.array([0.5, 0.0, 2.0, 0.125]), np.array([0.0, 3.0, -np.inf, 40.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (40, 3)},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi_slopes": SLOPES, "sinks": SINKS},
    "alibi_far": {"alibi_slopes": SLOPES, "query_offset": 10**7},
    "alibi_far_and_sinks": {"alibi_slopes": SLOPES, "query_offset": 10**7, "sinks": np.array([3.3, -1.7, 0.1, 5.9])},
}


def memory(dtype: str, *shape: int) -> np.ndarray:
    """NaN where nothing was written, on a boundary as memory of a GPU is."""
    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
    flat = np.full(size + 16, 0xFF, np.uint8)
    skip = -flat.ctypes.data % 16
    return flat[skip : skip + size].view(DTYPES[dtype]).reshape(shape)


def attend(emulator: Emulator, keys: tuple[int, int], *arrays: np.ndarray, **options: Any) -> State | None:
    problem, infos = describe_attention(*arrays, return_lse=True, **options)
    traits = problem.traits
    shape = *problem.batch, problem.num_heads_q, problem.seqlen_q
    state = State(
        memory(traits.lse_dtype, *shape, traits.head_dim_v), memory(traits.lse_dtype, *shape, PARTIAL_COLUMNS)
    )
    problem = writes_state(problem._replace(traits=partial_traits(traits)), state)
    if emulator.refuses(problem):
        return None
    emulator.run(problem, infos, *state)
    share_offset(np, problem, infos, state.sums, keys)
    return state


def merge(states: list[State], out: np.ndarray, sums: np.ndarray) -> None:
    outs, all_sums = [inspect("out", x.out) for x in states], [inspect("sums", x.sums) for x in states]
    results = inspect("out", out), inspect("lse", sums)
    plan = merge_of_states(outs, all_sums, *results)
    written = {info.pointer for info in results}  # the first of the states, perhaps
    ranges = [(*span(info)[1:], "state", False) for info in (*outs, *all_sums) if info.pointer not in written]
    ranges += [(*span(info)[1:], "result", True) for info in results]
    kernel = compile_kernel(plan.program)
    at = [x.pointer for x in outs], [x.pointer for x in all_sums]
    for packed in plan.arguments(*at, *(x.pointer for x in results)):
        kernel.launch(plan.num_blocks, plan.num_threads, plan.program.shared_memory, packed, ranges)


def together(emulator: Emulator, edges: list[int], *arrays: np.ndarray, **options: Any) -> Any:
    """Attention whose keys are cut at edges, with states merged one by one, in place; None if it is not served."""
    q, k, v = arrays
    offset, sinks = options.pop("query_offset", k.shape[-2] - q.shape[-2]), options.pop("sinks", None)
    state: State | None = None
    for start, stop in pairwise(edges):
        here = slice(start, stop)
        keys, options["query_offset"] = (start, k.shape[-2]), offset - start
        found = attend(emulator, keys, q, k[..., here, :], v[..., here, :], **options)
        if found is None:
            return None
        if state is None:
            state = found
        else:
            merge([state, found], *state)
    assert state is not None, "there are keys"
    states = [state] if sinks is None else with_sinks(np, sinks, state)
    out, lse = memory(q.dtype.name, *state.out.shape), memory(state.sums.dtype.name, *state.out.shape[:-1])
    merge(states, out, lse)
    return out, lse


@rows
@pytest.mark.share(4)
@pytest.mark.parametrize("name", OPTIONS)
def test_keys_in_parts(spec: KernelSpec, name: str, rng: np.random.Generator) -> None:
    dtype, dim = spec.dtypes[0], min(32, spec.max_head_dim)
    shapes = (4, 20, dim), (2, 150, dim), (2, 150, min(16, dim))
    q, k, v = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
    found = together(Emulator(spec.name), [0, 40, 41, 150], q, k, v, **OPTIONS[name])
    if found is None:
        pytest.skip(f"{spec.name} refuses")
    exact, exact_lse = reference.attention(q, k, v, **OPTIONS[name])
    bound = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "float64": 1e-14}[dtype]
    np.testing.assert_allclose(found[0].astype(np.float64), exact, atol=bound)
    rounding = 1e-5 if dtype != "float64" else 1e-14
    np.testing.assert_allclose(found[1], exact_lse, rtol=rounding, atol=rounding)


@rows
@pytest.mark.share(4)
def test_numbers_of_keys_are_not_forgotten(spec: KernelSpec, rng: np.random.Generator) -> None:
    """Where logits are huge and equal, the mean of all values, however they are cut."""
    dtype, dim = spec.dtypes[0], min(32, spec.max_head_dim)
    q, k, v = (np.ones((1, n, dim), DTYPES[dtype]) for n in (3, 100, 100))
    v[:, 3:] = 0
    state: State | None = None
    for start, stop in ((0, 3), (3, 100)):
        bias = np.full(stop - start, -1e9, np.float32)
        found = attend(Emulator(spec.name), (start, 100), q, k[:, start:stop], v[:, start:stop], bias=bias)
        if found is None:
            pytest.skip(f"{spec.name} refuses")
        if state is None:
            state = found
        else:
            merge([state, found], *state)
    assert state is not None and np.abs(state.out - 0.03).max() < 1e-6
