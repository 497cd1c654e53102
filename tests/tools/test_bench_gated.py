"""The gated delta rule in `python -m cuflash bench`: its table, its gate, and what other libraries are asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash.bench import command as bench
from cuflash.bench import measure
from cuflash.bench import report as reports
from cuflash.bench.cases import GROUPS, Case
from cuflash.bench.check import Verdict, check
from cuflash.bench.device import GpuBackend, NumpyBackend
from cuflash.bench.exact import FORGOTTEN, exact_result
from cuflash.bench.gated import CHUNKS, OUTPUT, RECURRENT, GatedCase
from cuflash.bench.inputs import Inputs, make_inputs, stand_ins
from cuflash.bench.measure import Request
from cuflash.plan.gated import GATED_KERNELS
from cuflash.problem import describe_gated

PEERS = str(Path(cuflash.__file__).resolve().parents[1] / "benchmarks" / "peers.py")
RULE = GatedCase("", CHUNKS, "float32", (150, 150), 2, 4, 16, 24)
PACKED = RULE._replace(lengths=(70, 1, 64, 200), packed=True)
STEP = GatedCase("", RECURRENT, "float32", (3,) * 5, 2, 4, 16, 24)
CHUNK = GatedCase("", OUTPUT, "float32", (128, 64), 2, 4, 16, 24, packed=True)
CASES = [RULE, PACKED, STEP, CHUNK, CHUNK._replace(chunk_size=16, lengths=(70, 3))]
LIMITS = {"gemm_tflops": dict.fromkeys(bench.FLOAT_NAMES, 1.0), "copy_gbs": 1.0}


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits and caches of a size that takes no time."""
    monkeypatch.setattr(GpuBackend, "flush_bytes", 4096)
    for name, value in {"gemm_size": 32, "copy_bytes": 4096, "rest_seconds": 0.0}.items():
        monkeypatch.setattr(NumpyBackend, name, value)
        monkeypatch.setattr(GpuBackend, name, value)


def table() -> list[GatedCase]:
    return [case for group in GROUPS.values() for case in group if isinstance(case, GatedCase)]


def named(case: GatedCase) -> str:
    return case.name


# The table


@pytest.mark.parametrize("case", table(), ids=named)
def test_every_case_is_a_valid_call(case: GatedCase) -> None:
    describe: Callable[..., Any] = getattr(describe_gated, f"describe_{case.op}")
    problem, infos = describe(**stand_ins(case), **case.options)
    traits = problem.traits
    assert (traits.op, traits.dtype, traits.packed) == (case.op, case.dtype, case.packed)
    assert (problem.num_heads, problem.num_heads_v) == (case.heads, case.heads_v)
    assert problem.num_sequences == len(case.lengths) and set(infos) >= {"q", "k", "v", "log_g"}


def test_table_covers_what_it_must() -> None:
    found = {(case.op, len(case.lengths), max(case.lengths), case.heads, case.heads_v) for case in GROUPS["gated"]}
    assert found >= {
        (CHUNKS, 1, 8192, 32, 32),
        (CHUNKS, 1, 65536, 32, 32),
        (CHUNKS, 4, 8192, 16, 16),
        (CHUNKS, 1, 8192, 8, 8),
        (CHUNKS, 1, 8192, 16, 32),
        (RECURRENT, 64, 1, 32, 32),
        (OUTPUT, 1, 8192, 32, 32),
        (OUTPUT, 1, 65536, 32, 32),
        (OUTPUT, 1, 8192, 16, 32),
        (OUTPUT, 1, 8192, 16, 64),
    }
    packed, equal = (case for case in GROUPS["gated"] if case.op == CHUNKS and case.packed)
    assert len(packed.lengths) == 64 and 16 == min(packed.lengths) < max(packed.lengths) <= 8192 + 64
    assert len(set(equal.lengths)) == 1 and equal.queries == packed.queries
    assert "float32" in {case.dtype for case in GROUPS["gated"]}
    assert all(case.flops <= 6e9 for case in GROUPS["gated-cpu"])


def test_work_of_a_case() -> None:
    state, tokens = 16 * 24 * 4, 300
    assert RULE.flops == 6 * state * tokens and PACKED.queries == 335
    assert RULE.bytes == 4 * tokens * (2 * 2 * 16 + 2 * 4 * 24 + 2 * 4)
    assert PACKED.bytes == RULE.bytes * 335 // tokens + 4 * 5
    assert STEP.bytes == 4 * 15 * (2 * 2 * 16 + 2 * 4 * 24 + 2 * 4) + 2 * 4 * 5 * state, "states move twice"
    pairs = 3 * 64 * 65 // 2
    assert CHUNK.flops == 2 * (192 * state + pairs * (2 * 16 + 4 * 24))
    assert CHUNK.bytes == 4 * (192 * (2 * 2 * 16 + 2 * 4 * 24 + 4) + 3 * state + 3)
    assert [case.kernels for case in (RULE, STEP, CHUNK)] == [
        [spec.name for spec in GATED_KERNELS if op in spec.operations] for op in (CHUNKS, RECURRENT, OUTPUT)
    ]


def test_inputs_repeat_and_are_what_the_definition_wants() -> None:
    for case in CASES:
        first, second = (make_inputs(case, np).arrays for _ in range(2))
        assert set(first) == set(case.inputs)
        for name, (shape, dtype) in case.inputs.items():
            assert first[name].shape == shape and first[name].dtype == dtype and (first[name] == second[name]).all()
        np.testing.assert_allclose(np.linalg.norm(first["k"], axis=-1), 1, rtol=1e-5)
    gates, boundaries = first["log_g_cumsum"], [0, 16, 32, 48, 64, 70, 73]
    assert first["cu_seqlens"].tolist() == [0, 70, 73] and len(first["h"]) == len(boundaries) - 1
    steps = np.concatenate([np.diff(gates[a:b], axis=0, prepend=0) for a, b in pairwise(boundaries)])
    assert (steps <= 0).all() and -0.2 < steps.mean() < -0.05


# The gate


def call(case: GatedCase) -> tuple[Inputs, dict[str, Any]]:
    inputs = make_inputs(case, np)
    results = inputs.new_results(np)
    measure.compute(inputs, results)
    return inputs, results


def verdict_on(inputs: Inputs, results: dict[str, Any]) -> Verdict:
    return check(exact_result(inputs), results, np)


@pytest.mark.parametrize("dtype", bench.FLOAT_NAMES)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_gate_lets_right_results_pass(case: GatedCase, dtype: str) -> None:
    verdict = verdict_on(*call(case._replace(dtype=dtype)))
    assert verdict.good and verdict.mse > 0, str(verdict)


@pytest.mark.parametrize(
    "case", [RULE._replace(lengths=(1500,)), PACKED._replace(lengths=(900, 700)), CHUNK], ids=named
)
def test_places_are_those_of_the_whole_reference(case: GatedCase) -> None:
    """Even though most of them begin where they have forgotten what was before."""
    inputs = make_inputs(case._replace(dtype="float64"), np)
    function = reference.chunk_gated_output if case.op == OUTPUT else reference.gated_delta_rule
    options = case.options if case.op == OUTPUT else {}
    expected = function(**inputs.arrays, **options)
    expected = expected if case.op == OUTPUT else expected[0]
    compared = np.zeros(expected.shape, bool)
    for part in exact_result(inputs).parts:
        np.testing.assert_allclose(part.values, expected[part.place], rtol=0, atol=1e-15)
        compared[part.place] = True
    rows = compared.any(axis=-1).reshape(case.queries, case.heads_v)
    assert rows[0].any() and rows[-1].any() and rows.any(axis=1).mean() > 0.9 and rows.any(axis=0).all()


def test_reference_begins_where_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed for a place does not grow with what is before it."""
    lengths, right = [], reference.gated_delta_rule

    def noted(q: Any, *others: Any, **options: Any) -> Any:
        lengths.append(q.shape[1])
        return right(q, *others, **options)

    monkeypatch.setattr(reference, "gated_delta_rule", noted)
    exact_result(make_inputs(RULE._replace(lengths=(5000,)), np))
    assert 64 in lengths and max(lengths) < 64 + 2 * FORGOTTEN / -0.1


def spoil_scale(results: dict[str, Any]) -> None:
    results["out"] *= 1 + 1e-5


def spoil_heads(results: dict[str, Any]) -> None:
    results["out"][..., [0, 1], :] = results["out"][..., [1, 0], :]


def spoil_last_token(results: dict[str, Any]) -> None:
    results["out"][..., -1, :, :] = 0


def spoil_one_element(results: dict[str, Any]) -> None:
    results["out"][..., 2, 1, 3] = np.nan


@pytest.mark.parametrize("spoil", [spoil_scale, spoil_heads, spoil_last_token, spoil_one_element])
@pytest.mark.parametrize("case", CASES[:4], ids=named)
def test_gate_catches(case: GatedCase, spoil: Callable[[dict[str, Any]], None]) -> None:
    inputs, results = call(case)
    if case.op == OUTPUT:
        results["out"] = results["out"][np.newaxis]
        spoil(results)
        results["out"] = results["out"][0]
    else:
        spoil(results)
    assert not verdict_on(inputs, results).good


def test_states_are_results() -> None:
    """They are updated in place, each kernel's in a copy, so that all start from the same."""
    inputs, results = call(STEP)
    assert verdict_on(inputs, results).good and (results["state"] != inputs.arrays["state"]).all()
    assert not verdict_on(inputs, results | {"state": inputs.arrays["state"]}).good
    again = inputs.new_results(np)
    assert np.isnan(again["out"]).all() and (again["state"] == inputs.arrays["state"]).all()


# Speeds


def test_a_wrong_kernel_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    (right,) = measure.measure(RULE, NumpyBackend(), Request(repeats=1), LIMITS, {})["results"]
    assert right["seconds"] > 0 and right["bound"] in ("memory", "compute")
    monkeypatch.setattr(measure, "compute", lambda inputs, results: None)
    (wrong,) = measure.measure(RULE, NumpyBackend(), Request(repeats=1), LIMITS, {})["results"]
    assert "not finite" in wrong["wrong"] and "seconds" not in wrong


def test_a_step_is_measured_by_the_bytes_of_its_states() -> None:
    step = next(case for case in GROUPS["gated"] if case.op == RECURRENT)
    states = 2 * 64 * 32 * 128 * 128 * 4
    assert states < step.bytes < 1.02 * states
    found = measure.speed(step, [1e-3], {"gemm_tflops": {"bfloat16": 800.0}, "copy_gbs": 4000.0})
    assert found["bound"] == "memory" and found["fraction_of_limit"] == pytest.approx(step.bytes / 4e9)


def test_both_operations_in_one_report() -> None:
    attention = Case("", "float32", 1, 2, 2, 20, 20, 16, 16)
    peers = bench.load_peers(PEERS, "numpy", ["naive"])
    report = bench.run([attention, RULE, STEP], (), NumpyBackend(), Request("all", repeats=1), peers)
    assert bench.status(report) == 0
    assert [len(problem["results"]) for problem in report["problems"]] == [2, 2, 2]
    assert all("tflops" in result for problem in report["problems"] for result in problem["results"])
    shown = reports.markdown(report)
    assert all(case.name in shown for case in (attention, RULE, STEP))
    assert " ms | " in reports.block(report["problems"][1]) and "3 measured" in reports.summary(report)


def test_picture_has_panels_for_attention_alone() -> None:
    pytest.importorskip("matplotlib")
    from cuflash.bench.plot import draw

    results = [{"kernel": "a", "automatic": True, "tflops": 100.0, "relative_error": 2e-4, "allowed": 4e-4}]
    cases = [Case("float32", "float32", 1, 2, 2, 20, 20, 16, 16), RULE]
    problems = [{"name": case.name, **case._asdict(), "results": results} for case in cases]
    titles = [axes.get_title() for axes in draw({"device": "Some GPU", "problems": problems}).axes]
    assert titles == ["float32, D 16, full", ""]


# Peers


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    "case", [RULE, RULE._replace(packed=True), STEP, CHUNK._replace(lengths=(128, 128))], ids=named
)
def test_the_definition_as_one_writes_it_down(case: GatedCase, dtype: str) -> None:
    inputs = make_inputs(case._replace(dtype=dtype), np)
    before = {name: x.copy() for name, x in inputs.arrays.items()}
    returned = bench.load_peers(PEERS, "numpy").gated["naive NumPy"](inputs)()
    results = dict(zip(case.results, returned if isinstance(returned, tuple) else (returned,), strict=True))
    verdict = verdict_on(inputs, results)
    assert verdict.good, str(verdict)
    assert all((x == before[name]).all() for name, x in inputs.arrays.items())


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (PACKED, "one length"),
        (CHUNK._replace(lengths=(70,)), "whole chunks"),
        (RULE._replace(lengths=(10_000,)), "a step for each token, and 8192 at most"),
    ],
)
def test_the_definition_refuses_with_a_reason(case: GatedCase, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        bench.load_peers(PEERS, "numpy").gated["naive NumPy"](make_inputs(case, np))


class Tensor(np.ndarray):
    """A NumPy array that looks like PyTorch's."""

    def long(self) -> Tensor:
        return self.astype(np.int64)


def rule_in_chunks(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, cu_seqlens: Any) -> Any:
    assert cu_seqlens is None or cu_seqlens.dtype == np.int64
    return reference.gated_delta_rule(q, k, v, g, beta, scale=scale, cu_seqlens=cu_seqlens)[0].astype(v.dtype), None


def rule_in_steps(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, initial_state: Any, output_final_state: bool
) -> Any:
    assert output_final_state
    out, state = reference.gated_delta_rule(q, k, v, g, beta, scale=scale, initial_state=initial_state)
    return out.astype(v.dtype), state.astype(initial_state.dtype)


def output_of_chunks(q: Any, k: Any, v: Any, h: Any, g: Any, scale: float, cu_seqlens: Any, chunk_size: int) -> Any:
    boundaries = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens
    states = h.reshape(-1, *h.shape[-3:])
    out = reference.chunk_gated_output(
        q[0], k[0], v[0], states, g[0], boundaries, scale=scale, chunk_size=chunk_size
    )  # fmt: skip
    return out[np.newaxis].astype(v.dtype)


@pytest.fixture
def linear_attention(monkeypatch: pytest.MonkeyPatch) -> Callable[[Inputs], Callable[[], Any]]:
    """The peer, between stand-ins for PyTorch and flash-linear-attention."""
    spec = SimpleNamespace()
    torch = SimpleNamespace(
        from_dlpack=lambda x: x.view(Tensor), __version__="2.9", __spec__=spec,
        cuda=SimpleNamespace(empty_cache=lambda: None, is_available=lambda: False),
    )  # fmt: skip
    rules = SimpleNamespace(
        chunk_gated_delta_rule=rule_in_chunks, fused_recurrent_gated_delta_rule=rule_in_steps, __spec__=spec
    )
    modules = {"fla": SimpleNamespace(__version__="0.5", __spec__=spec), "fla.ops": SimpleNamespace()}
    modules |= {"fla.ops.common": SimpleNamespace(), "fla.ops.gated_delta_rule": rules, "torch": torch}
    modules["fla.ops.common.chunk_o"] = SimpleNamespace(chunk_fwd_o=output_of_chunks)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    found = bench.load_peers(PEERS, "gpu")
    assert found.versions is not None and found.versions()["flash-linear-attention"] == "0.5"
    return found.gated["linear attention"]


@pytest.mark.parametrize("case", [RULE, PACKED, STEP, CHUNK, CHUNK._replace(lengths=(70,))], ids=named)
def test_linear_attention_is_asked_for_the_problem(
    case: GatedCase, linear_attention: Callable[[Inputs], Callable[[], Any]]
) -> None:
    inputs = make_inputs(case, np)
    returned = linear_attention(inputs)()
    results = dict(zip(case.results, returned if isinstance(returned, tuple) else (returned,), strict=True))
    verdict = verdict_on(inputs, results)
    assert verdict.good, str(verdict)


def test_linear_attention_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert list(bench.load_peers(PEERS, "gpu").gated) == ["naive CuPy"]


def test_peers_of_one_operation_are_no_peers_of_the_other(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def peers(backend):\n    return {'mine': lambda inputs: lambda: inputs.arrays['q']}\n")
    peers = bench.load_peers(str(file), "numpy")
    attention = Case("", "float32", 1, 2, 2, 20, 20, 16, 16)
    assert list(peers.of(attention)) == ["mine"] and not peers.of(RULE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, RULE._replace(head_dim=128, head_dim_v=128)], ids=named)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gpu_gate(case: GatedCase, dtype: str) -> None:
    case = case._replace(dtype=dtype)
    found = measure.measure(case, GpuBackend(), Request("all", repeats=1), LIMITS, {})
    assert [result["kernel"] for result in found["results"]] == case.kernels
    assert all("tflops" in result or "refused" in result for result in found["results"]), found["results"]
    assert any("tflops" in result for result in found["results"])
