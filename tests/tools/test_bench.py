"""`python -m cuflash bench`: what it counts, that its gate closes, and what it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash.bench import cases as case_table
from cuflash.bench import command as bench
from cuflash.bench import device, measure
from cuflash.bench import host as bench_host
from cuflash.bench import overheads as bench_overheads
from cuflash.bench import report as reports
from cuflash.bench.cases import DEFAULT_GROUPS, GROUPS, OVERHEADS, Case, visible_pairs
from cuflash.bench.check import Verdict, check
from cuflash.bench.device import GpuBackend, NumpyBackend
from cuflash.bench.exact import exact_result, sampled_rows
from cuflash.bench.inputs import make_inputs, poisoned, stand_ins
from cuflash.bench.measure import Request
from cuflash.bench.sweep import SWEEP
from cuflash.plan.table import KERNELS
from cuflash.problem.describe import describe_attention, describe_attention_lse

from .machines import Machine

ROOT = Path(cuflash.__file__).resolve().parent.parent
PEERS = str(ROOT / "benchmarks" / "peers.py")
SMALL = Case("small", "float32", 2, 4, 2, 50, 70, 16, 8, causal=True)
SMALL_OPTIONS = ["--backend", "numpy", "--seqlen", "40", "--heads", "2", "--head-dim", "16", "--repeats", "1"]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits and caches of a size that takes no time."""
    monkeypatch.setattr(GpuBackend, "flush_bytes", 4096)
    for name, value in {"gemm_size": 32, "copy_bytes": 4096, "rest_seconds": 0.0}.items():
        monkeypatch.setattr(NumpyBackend, name, value)
        monkeypatch.setattr(GpuBackend, name, value)


def all_cases() -> list[Case]:
    """Those of attention."""
    return [case for group in GROUPS.values() for case in group if isinstance(case, Case)]


# What is counted


@pytest.mark.parametrize("window", [None, (3, 0), (0, 0), (None, 2), (2, None), (5, 4)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (7, 7), (5, 12), (12, 5), (1, 9), (9, 1), (16, 16)])
def test_visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool, window: Any) -> None:
    left, right = window or (None, None)
    count = 0
    for i in range(seqlen_q):
        p = i + seqlen_k - seqlen_q
        for j in range(seqlen_k):
            hidden = causal and j > p
            hidden |= left is not None and j < p - left
            hidden |= right is not None and j > p + right
            count += not hidden
    assert visible_pairs(seqlen_q, seqlen_k, causal, window) == count


def test_visible_pairs_are_those_that_attention_sees() -> None:
    """With equal scores a query's result is the mean over what it sees: 1 / count, for the first of the values."""
    case = Case("", "float64", 1, 1, 1, 9, 14, 4, 14, causal=True, window=(5, None))
    q, v = np.zeros((1, 14, 4)), np.eye(14)[None]
    weights, _ = reference.attention(q[:, :9], q, v, causal=case.causal, window=case.window)
    assert visible_pairs(9, 14, True, case.window) == np.count_nonzero(weights)
    assert case.flops == 2 * np.count_nonzero(weights) * (4 + 14)


def test_work_of_a_case() -> None:
    assert SMALL.flops == 2 * visible_pairs(50, 70, True, None) * (16 + 8) * 2 * 4
    assert SMALL.bytes == 4 * (2 * 4 * 50 * 16 + 2 * 2 * 70 * 16 + 2 * 2 * 70 * 8 + 2 * 4 * 50 * 8)
    assert SMALL._replace(bias=True).bytes == SMALL.bytes + 4 * 4 * 50 * 70
    assert SMALL.queries == 100


# The table


def test_every_case_is_a_valid_call() -> None:
    for case in all_cases():
        describe: Any = describe_attention if case.head_dim_v else describe_attention_lse
        problem, _ = describe(**stand_ins(case), **case.options)
        assert (problem.traits.dtype, problem.seqlen_k, problem.traits.head_dim_v) == (
            case.dtype,
            case.seqlen_k,
            case.head_dim_v,
        )


def test_table_covers_what_it_must() -> None:
    for dtype in ("float16", "bfloat16"):
        found = {(case.head_dim, case.seqlen_q, case.causal) for case in GROUPS[dtype]}
        assert found == {(d, n, c) for d in (32, 64, 80, 128, 256) for n in (512, 2048, 4096, 16384) for c in (0, 1)}
        assert all(case.queries == 16384 for case in GROUPS[dtype])
    drift = [case for case in GROUPS["drift"] if case.dtype == "float16"]
    assert [case.seqlen_k for case in drift] == [1024, 8192, 65536, 262144]
    options = GROUPS["options"]
    assert any(case.window for case in options) and any(case.softcap for case in options)
    assert any(case.bias for case in options) and any(case.alibi for case in options)
    assert any(case.heads != case.kv_heads for case in options)
    assert {case.dtype for case in all_cases()} == set(bench.FLOAT_NAMES)


@pytest.mark.parametrize("group", GROUPS)
def test_names_tell_cases_apart(group: str) -> None:
    assert len({case.name for case in GROUPS[group]}) == len(GROUPS[group])


def test_default_groups_exist() -> None:
    for groups in DEFAULT_GROUPS.values():
        assert set(groups) <= {*GROUPS, OVERHEADS}
    assert set(DEFAULT_GROUPS["gpu"]) | {"cpu", "small", "gated-cpu", SWEEP} == {*GROUPS, OVERHEADS}


@pytest.mark.parametrize("backend", DEFAULT_GROUPS)
def test_quick_cases_are_few_and_small(backend: str) -> None:
    groups = [GROUPS[name] for name in DEFAULT_GROUPS[backend] if name != OVERHEADS]
    some = case_table.quick(groups, backend)
    assert len(set(some)) == len(some) and all(case.flops <= case_table.QUICK_FLOPS[backend] for case in some)
    names = [case.group for case in some]
    assert names[: len(groups)] == [group[0].group for group in groups], "every group once before any a second time"
    assert all(1 < names.count(name) <= 3 for name in names)


def test_inputs_repeat_and_have_the_mean_that_is_asked_for() -> None:
    case = SMALL._replace(value_mean=1.0, value_spread=0.1, bias=True, alibi=True, seqlen_k=2000)
    first, second = make_inputs(case, np), make_inputs(case, np)
    assert list(first.arrays) == ["q", "k", "v", "bias", "alibi_slopes"]
    assert all((x == second.arrays[name]).all() for name, x in first.arrays.items())
    v, k = first.arrays["v"], first.arrays["k"]
    assert abs(v.mean() - 1) < 0.01 and abs(v.std() - 0.1) < 0.01 and abs(k.std() - 1) < 0.02
    q = make_inputs(SMALL._replace(dtype="float64"), np).arrays["q"]
    assert (q != q.astype(np.float32)).any(), "float64 arrays must have more bits than float32"


# The gate


@pytest.mark.parametrize("seqlen_q", [1, 2, 63, 64, 65, 1000, 4096, 16384])
def test_sampled_rows_meet_every_place_of_a_tile(seqlen_q: int) -> None:
    rows = np.concatenate([np.arange(seqlen_q)[some] for some in sampled_rows(SMALL._replace(seqlen_q=seqlen_q))])
    assert {0, seqlen_q - 1} <= set(rows) and len(set(rows)) == len(rows)
    assert len(rows) <= 2 * 1024
    if seqlen_q >= 4096:
        assert set(rows % 64) == set(range(64)) and np.diff(np.sort(rows)).max() < 256


def test_rows_are_checked_in_parts_that_fit_memory() -> None:
    case = Case("", "float16", 1, 1, 1, 5000, 2**20, 64, 64)
    parts = [np.arange(case.seqlen_q)[some] for some in sampled_rows(case)]
    assert max(map(len, parts)) * case.seqlen_k <= 2**24 and len(np.unique(np.concatenate(parts))) > 500


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        SMALL._replace(window=(9, 3), causal=False, softcap=2.0, bias=True),
        SMALL._replace(alibi=True, bias=True, seqlen_q=3000),
        SMALL._replace(seqlen_q=90, seqlen_k=30),
        SMALL._replace(seqlen_q=90, seqlen_k=30, window=(5, None), bias=True),
        SMALL._replace(head_dim_v=0, bias=True),
    ],
    ids=str,
)
def test_exact_rows_are_those_of_the_reference(case: Case) -> None:
    inputs = make_inputs(case._replace(dtype="float64"), np)
    function = reference.attention if case.head_dim_v else reference.attention_lse
    expected = function(**inputs.arguments)
    expected = expected[0] if case.head_dim_v else expected
    exact = exact_result(inputs)
    assert [part.place[2] for part in exact.parts] == sampled_rows(case)
    for part in exact.parts:
        np.testing.assert_allclose(part.values, expected[part.place], rtol=1e-12, atol=1e-15)


def result_of(case: Case) -> tuple[Any, np.ndarray]:
    inputs = make_inputs(case, np)
    return inputs, case.function(**inputs.arguments)


def verdict_on(inputs: Any, out: Any, xp: Any = np) -> Verdict:
    return check(exact_result(inputs), {"out": out}, xp)


@pytest.mark.parametrize("dtype", bench.FLOAT_NAMES)
def test_gate_lets_right_results_pass(dtype: str) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"seqlen_q": 90, "seqlen_k": 30},
        {"window": (9, 0), "softcap": 2.0, "bias": True},
        {"head_dim_v": 0},
    )
    for options in changes:
        verdict = verdict_on(*result_of(SMALL._replace(dtype=dtype, **options)))
        assert verdict.good and verdict.mse > 0, str(verdict)


def test_an_lse_is_measured_as_any_result() -> None:
    case = SMALL._replace(dtype="float16", head_dim_v=0)
    inputs, lse = result_of(case)
    assert "v" not in inputs.arrays and lse.shape == case.shape_out and lse.dtype == case.dtype_out == "float32"
    assert not verdict_on(inputs, lse + np.float32(1e-4)).good
    assert case.flops == SMALL.flops * case.head_dim // (SMALL.head_dim + SMALL.head_dim_v)
    problem = measure.measure(
        case, NumpyBackend(), Request(repeats=1), {"gemm_tflops": {"float16": 1}, "copy_gbs": 1}, {}
    )
    assert "lse alone" in problem["name"] and problem["results"][0]["tflops"] > 0


def spoil_scale(out: np.ndarray) -> None:
    out *= 1 + 1e-5


def spoil_heads(out: np.ndarray) -> None:
    out[:, [0, 1]] = out[:, [1, 0]]


def spoil_one_row_of_a_tile(out: np.ndarray) -> None:
    out[:, :, 5::64] *= 1.01


def spoil_last_row(out: np.ndarray) -> None:
    out[1, 3, -1] = 0


def spoil_one_element(out: np.ndarray) -> None:
    out[0, 1, 7, 3] = np.nan


@pytest.mark.parametrize(
    "spoil", [spoil_scale, spoil_heads, spoil_one_row_of_a_tile, spoil_last_row, spoil_one_element]
)
def test_gate_catches(spoil: Callable[[np.ndarray], None]) -> None:
    inputs, out = result_of(SMALL._replace(seqlen_q=700, seqlen_k=700))
    assert verdict_on(inputs, out).good
    spoil(out)
    assert not verdict_on(inputs, out).good


def test_gate_catches_what_is_not_written() -> None:
    for dtype in bench.FLOAT_NAMES:
        out = poisoned((2, 3, 5), dtype, np)
        assert out.shape == (2, 3, 5) and out.dtype.name == dtype and np.isnan(out.astype(np.float64)).all()


def test_drift_is_measured_in_units_of_rounding() -> None:
    case = Case("drift", "float16", 1, 2, 2, 16, 1024, 32, 32, value_mean=1.0, value_spread=0.1)
    inputs, out = result_of(case)
    verdict = verdict_on(inputs, out)
    assert verdict.good and verdict.allowed == pytest.approx(1.1 * verdict.rounding_error)
    drifted = (out.astype(np.float64) * (1 - 3e-4)).astype(np.float16)
    verdict = verdict_on(inputs, drifted)
    assert not verdict.good and verdict.relative_error < measure.PEER_ERROR


def spoiled_compute(inputs: Any, results: Any) -> None:
    results["out"][...] = cuflash.attention(**inputs.arguments) * np.float32(1.001)


def test_wrong_results_have_no_speed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = tmp_path / "bench.json"
    arguments = [*SMALL_OPTIONS, "--peers", "none", "--json", str(stored)]
    assert bench.main(arguments) == 0
    assert "MSE" in capsys.readouterr().out
    monkeypatch.setattr(measure, "compute", spoiled_compute)
    assert bench.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "WRONG: relative error 1.0e-03, allowed 2.0e-06" in printed and "1 wrong or failed" in printed
    assert "ns/token" not in printed and " of matrix product" not in printed
    (result,) = json.loads(stored.read_text())["problems"][0]["results"]
    assert "wrong" in result and not {"tflops", "seconds", "gbs"} & set(result)
    assert bench.main([*arguments, "--no-verify"]) == 0
    printed = capsys.readouterr().out
    assert "ns/token" in printed and "relative error 1" not in printed and "results were not checked" in printed


def test_nan_is_wrong_and_json_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "compute", lambda inputs, results: None)
    stored = tmp_path / "bench.json"
    assert bench.main([*SMALL_OPTIONS, "--peers", "none", "--json", str(stored)]) == 1
    assert "NaN" not in stored.read_text() and "not finite" in stored.read_text()


def test_failure_of_one_problem_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = measure.compute

    def fails_for_one(inputs: Any, results: Any) -> None:
        if inputs.case.seqlen_q == 41:
            raise MemoryError("no more")
        right(inputs, results)

    monkeypatch.setattr(measure, "compute", fails_for_one)
    cases = [SMALL, SMALL._replace(seqlen_q=41), SMALL._replace(seqlen_q=42)]
    report = bench.run(cases, (), NumpyBackend(), Request(repeats=1), bench.Peers({}))
    assert ["tflops" in problem["results"][0] for problem in report["problems"]] == [True, False, True]
    assert "FAILED: MemoryError: no more" in capsys.readouterr().out and bench.status(report) == 1
    assert "| failed |" in reports.markdown(report)


def test_inputs_that_do_not_fit_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(case: Case, xp: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(measure, "make_inputs", no_memory)
    report = bench.run([SMALL], (), NumpyBackend(), Request(), bench.Peers({}))
    assert bench.status(report) == 1 and "failed" in report["problems"][0]["results"][0]


def test_every_dtype_is_shown() -> None:
    cases = [SMALL._replace(dtype=dtype, value_mean=mean) for dtype in bench.FLOAT_NAMES for mean in (0.0, 1.0)]
    cases = [case for case in cases if not case.value_mean or case.dtype.endswith("16")]
    report = bench.run(cases, (), NumpyBackend(), Request(repeats=1), bench.load_peers(PEERS, "numpy"))
    assert bench.status(report) == 0
    blocks = [reports.block(problem) for problem in report["problems"]]
    assert [" x rounding)" in block for block in blocks] == [bool(case.value_mean) for case in cases]
    assert "error / rounding" in reports.table(report["problems"])


# Speeds


def test_speed_is_that_of_the_nearer_limit() -> None:
    limits = {"gemm_tflops": {"float32": 1.0}, "copy_gbs": 10.0}
    case = Case("", "float32", 1, 8, 8, 1024, 1024, 64, 64)
    found = measure.speed(case, [4.0, 2.0, 3.0], limits)
    assert found["seconds"] == 3.0 and found["fastest_seconds"] == 2.0
    assert found["tflops"] == pytest.approx(1e-12 * case.flops / 3) and found["bound"] == "compute"
    assert found["fraction_of_limit"] == pytest.approx(found["tflops"])
    assert found["ns_per_token"] == pytest.approx(3e9 / 1024)
    decode = measure.speed(case._replace(seqlen_q=1), [1.0], limits)
    assert decode["bound"] == "memory" and decode["fraction_of_limit"] == pytest.approx(decode["gbs"] / 10)
    assert reports.rate(decode).endswith(" GB/s") and reports.rate(found).endswith(" TFLOP/s")


def test_runs_are_as_many_as_asked_for_or_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = NumpyBackend()
    calls: list[int] = []
    monkeypatch.setattr(backend, "loop_seconds", 0.0)
    assert len(backend.times(lambda: calls.append(1), 5)) == 5 and len(calls) == 6
    monkeypatch.setattr(backend, "loop_seconds", 1e-3)
    assert max(backend.times(lambda: calls.append(1), 5)) < 1e-4 and len(calls) > 1000
    numbers: list[int] = []
    monkeypatch.setattr(backend, "_loop", lambda function, number: numbers.append(number) or 1e-5 * number)
    assert backend.times(lambda: None, 5) == pytest.approx([1e-5] * 5)
    assert len(set(numbers[-5:])) == 1 and 1e-5 * numbers[-1] >= 1e-3
    monkeypatch.setattr(backend, "_time", lambda function, number: 100.0)
    assert len(backend.times(lambda: None, 5)) == 3


def test_candidates_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = NumpyBackend()
    monkeypatch.setattr(backend, "loop_seconds", 0.0)
    calls: list[int] = []
    found = backend.time_candidates({(64, splits): partial(calls.append, splits) for splits in (1, 2, 4)}, 3)
    assert calls == [1, 2, 4] * 4 and list(found) == [(64, 1), (64, 2), (64, 4)]
    assert all(0 < least <= median < 1e4 for least, median in found.values())


class FakeEvent:
    """Counts up whenever an event is recorded."""

    clock = 0

    def record(self) -> None:
        FakeEvent.clock += 7
        self.at = FakeEvent.clock

    def synchronize(self) -> None:
        pass


class FakeArray(np.ndarray):
    """CuPy's array type must be another than NumPy's."""


def fake_cupy() -> SimpleNamespace:
    """What `GpuBackend` takes from CuPy, made of NumPy."""
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        memGetInfo=lambda: (2**30, 2**36),
        getDeviceProperties=lambda device: {"name": b"Some GPU"},
        driverGetVersion=lambda: 13020,
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        Event=FakeEvent,
        get_elapsed_time=lambda begin, end: float(end.at - begin.at),
        Device=lambda: SimpleNamespace(synchronize=lambda: None),
        nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
    )
    names = (
        "ones",
        "full",
        "empty",
        "empty_like",
        "arange",
        "where",
        "exp",
        "tanh",
        "isfinite",
        "matmul",
        "copyto",
        "concatenate",
        "stack",
        "random",
    )
    functions = {name: getattr(np, name) for name in names}
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    return SimpleNamespace(
        **functions,
        bool_=bool,
        ndarray=FakeArray,
        cuda=cuda,
        __version__="14.2.0",
        get_default_memory_pool=lambda: pool,
    )


def test_gpu_backend_asks_cupy_for_time_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_cupy()
    monkeypatch.setattr(device, "importlib", SimpleNamespace(import_module=lambda name: fake))
    backend = GpuBackend()
    assert backend.times(lambda: None, 2) == [0.007, 0.007]
    assert backend.time_candidates({"one": lambda: None}, 2) == {"one": (7000.0, 7000.0)}
    report = bench.run([SMALL], (), backend, Request(), bench.Peers({}))
    assert report["device"] == "Some GPU" and report["versions"]["driver"] == "CUDA 13.2"
    assert report["versions"]["cupy"] == "14.2.0" and report["versions"]["nvrtc"] == "13.0"
    (result,) = report["problems"][0]["results"]
    assert result["seconds"] == 0.007 and "wrong" not in result
    assert report["limits"]["gemm_tflops"]["float32"] == pytest.approx(2 * 32**3 / 0.007 * 1e-12)
    assert backend.gemm_dtype("bfloat16") == "float16" and NumpyBackend().gemm_dtype("bfloat16") == "float32"


# Kernels and peers


def test_every_row_of_the_table_can_be_asked_for() -> None:
    assert Request("all").kernels("gpu", SMALL) == [spec.name for spec in KERNELS]
    assert Request("all").kernels("numpy", SMALL) == ["cpu"] and Request().kernels("gpu", SMALL) == [""]


def test_kernel_that_serves_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with cuflash.options(kernel=KERNELS[-1].name):
        report = bench.run([SMALL], (), NumpyBackend(), Request(), bench.Peers({}))
    assert bench.status(report) == 1
    captured = capsys.readouterr()
    assert "not measured: " in captured.out and "cannot serve this call" in captured.out
    assert captured.err == "nothing was measured: no kernel serves these problems\n"


def test_peer_is_measured_beside_the_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers = tmp_path / "mine.py"
    peers.write_text(
        "import cuflash\n"
        "def peers(backend):\n"
        "    def right(inputs):\n"
        "        return lambda: cuflash.attention(**inputs.arguments)\n"
        "    def wrong(inputs):\n"
        "        return lambda: inputs.arrays['q']\n"
        "    def unfit(inputs):\n"
        "        raise RuntimeError(f'not on {backend}\\nfor many reasons')\n"
        "    return {'right': right, 'wrong': wrong, 'unfit': unfit}\n"
        "def release():\n"
        "    print('released')\n"
    )
    stored = tmp_path / "bench.json"
    assert bench.main([*SMALL_OPTIONS, "--peers", str(peers), "--json", str(stored)]) == 0
    results = {r["peer"]: r for r in json.loads(stored.read_text())["problems"][0]["results"] if "peer" in r}
    assert results["right"]["tflops"] > 0 and results["right"]["relative_error"] < 1e-6
    assert results["wrong"]["refused"] == "computes something else" and "tflops" not in results["wrong"]
    assert results["unfit"] == {"peer": "unfit", "refused": "RuntimeError: not on numpy"}
    printed = capsys.readouterr().out
    assert "times the best peer's speed" in printed and printed.count("released\n") == 1


def test_peers_of_the_repository_are_measured_where_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench.load_peers(PEERS, "numpy")
    assert "naive NumPy" in found.attention and found.small_calls is not None and found.versions is not None
    assert bench.load_peers(None, "numpy") == bench.load_peers("none", "numpy") == bench.Peers({})
    assert bench.main([*SMALL_OPTIONS]) == 0
    assert "naive" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="--only-peers chooses of those that --peers names, expected both"):
        bench.load_peers(None, "numpy", ["naive"])
    with pytest.raises(ValueError, match=r"no peer.s name in .*peers\.py contains nobody or none"):
        bench.load_peers(PEERS, "numpy", ["nobody", "none"])


def test_runs_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    stored = tmp_path / "bench.json"
    assert bench.main([*SMALL_OPTIONS, "--peers", PEERS, "--json", str(stored)]) == 0
    report = json.loads(stored.read_text())
    assert "torch" not in report["versions"]
    assert [r.get("peer") for r in report["problems"][0]["results"]] == [None, "naive NumPy"]
    small_calls = bench.load_peers(PEERS, "numpy").small_calls
    assert small_calls is not None and small_calls(np.ones((1, 1, 16, 64), np.float32)) == {}


PEER_CASES = [
    SMALL._replace(seqlen_k=50),
    SMALL._replace(causal=False),
    SMALL._replace(seqlen_q=1),
    SMALL._replace(causal=False, window=(9, 3), softcap=2.0, bias=True),
    SMALL._replace(causal=False, bias=True),
    SMALL._replace(seqlen_k=50, alibi=True),
    SMALL._replace(dtype="bfloat16", causal=False),
    SMALL._replace(dtype="float64", kv_heads=4, seqlen_k=50),
]


@pytest.mark.parametrize("case", PEER_CASES, ids=lambda case: case.name)
def test_peers_compute_attention(case: Case) -> None:
    """Or refuse: what they return is right."""
    inputs = make_inputs(case, np)
    for name, prepare in bench.load_peers(PEERS, "numpy").attention.items():
        try:
            out = prepare(inputs)()
        except (NotImplementedError, TypeError):
            assert name == "torch CPU" or case.dtype == "bfloat16"
            assert case.window or case.alibi or case.dtype == "bfloat16" or case.seqlen_q not in (1, case.seqlen_k)
            continue
        got = np.asarray(out.float() if case.dtype == "bfloat16" else out)
        verdict = verdict_on(inputs, got)
        assert verdict.good, f"{name}: {verdict}"


# Arguments and output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seqlen", "0"], "argument --seqlen: 0 is not a positive int"),
        (["--heads", "many"], "argument --heads: many is not a positive int"),
        (["--heads", "6", "--kv-heads", "4"], "heads"),
        (["--head-dim", "600"], "head_dim 600, expected 1 to 512"),
        (["--group", "float8"], "argument --group: invalid choice: 'float8'"),
        (["--group", "drift", "--seqlen", "64"], "--group chooses from the table"),
        (["--kernel", "fastest"], "argument --kernel: invalid choice: 'fastest'"),
        (["--repeats", "-1"], "argument --repeats: -1 is not a positive int"),
        (["--dtype", "int8"], "argument --dtype: invalid choice"),
        (["--json", "no/such/folder/x.json"], "--json no/such/folder/x.json: there is no folder"),
        (["--json", "."], "--json .: [Errno 21] Is a directory"),
        (["--markdown", "/proc/x.md"], "--markdown /proc/x.md: [Errno 2] No such file"),
        (["--plot", "x.xyz"], "--plot x.xyz: no picture has the suffix '.xyz', expected one of"),
        (["--peers", "no_such_module"], "--peers no_such_module: ModuleNotFoundError"),
        (["--peers", "no_such_file.py"], "--peers no_such_file.py: FileNotFoundError"),
        (["--peers", "json"], "--peers json: AttributeError"),
        (["--tile", "banana"], "tile is 'banana', expected rows x keys"),
        (["--tile", "64x64"], "tile '64x64' cannot serve this call: the NumPy back end has no choice of tile"),
        (["--kernel", "all", "--tile", "64x64"], "the NumPy back end has no choice of tile"),
        (["--kernel", "forward_mma"], "kernel 'forward_mma' cannot serve this call: it needs GPU arrays"),
        (["--backend", "tpu"], "argument --backend: invalid choice: 'tpu'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--backend", "numpy", *arguments])
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and captured.out == ""
    assert message in captured.err and captured.err.startswith("usage: python -m cuflash bench")


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (Machine(driver=None), "no CUDA driver"),
        (Machine(import_error=ImportError("libcublas.so.13")), "CuPy cannot be imported (libcublas.so.13)"),
    ],
)
def test_gpu_that_is_not_there(
    machine: Machine, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.set_up(monkeypatch)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--backend", "gpu"])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_plot_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench.main([*SMALL_OPTIONS, "--plot", str(tmp_path / "x.png")])
    assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_shape_options_make_one_problem() -> None:
    parse = bench.make_parser().parse_args
    arguments = parse(["--batch", "3", "--heads", "8", "--kv-heads", "2", "--seqlen", "100", "--seqlen-k", "300",
                       "--head-dim", "48", "--dtype", "bfloat16", "--causal"])  # fmt: skip
    ((case,), with_overheads) = bench.choose_cases(arguments, "gpu")
    assert case[1:] == Case("", "bfloat16", 3, 8, 2, 100, 300, 48, 48, causal=True)[1:] and not with_overheads
    ((case,), _) = bench.choose_cases(parse(["--causal"]), "numpy")
    assert case.causal and case.dtype == "float32"
    cases, with_overheads = bench.choose_cases(parse(["--group", "float64", "overheads"]), "gpu")
    assert cases == GROUPS["float64"] and with_overheads


def test_writes_json_markdown_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("bench.json", "bench.md", "bench.png")]
    options = [f"--{name}={path}" for name, path in zip(("json", "markdown", "plot"), files, strict=True)]
    assert bench.main([*SMALL_OPTIONS, "--causal", *options]) == 0
    report = json.loads(files[0].read_text())
    assert report["versions"]["numpy"] == np.__version__ and report["device"] and report["backend"] == "numpy"
    assert report["limits"]["gemm_tflops"]["float32"] > 0 and report["limits"]["copy_gbs"] > 0
    (problem,) = report["problems"]
    assert problem["name"] == "float32 B1 H2 N40 D16 causal" and problem["causal"] is True
    result = problem["results"][0]
    assert result["kernel"] == "cpu" and result["plan"].startswith("cpu, ") and result["automatic"]
    assert result["tflops"] == pytest.approx(problem["flops"] / result["seconds"] * 1e-12)
    text = files[1].read_text()
    assert f"| {problem['name']} |" in text and "| cuflash |" in text and f"| {result['relative_error']:.1e} |" in text
    assert text == reports.markdown(report) + "\n", "tables can be made again from what is stored"
    assert files[2].read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "plan: cpu, " in printed and printed.rpartition("summary:\n")[2].startswith("  1 problem, 0 wrong")


def test_picture_of_many_problems(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from cuflash.bench.plot import draw

    problems = []
    for case in GROUPS["float16"] + GROUPS["drift"] + GROUPS["options"]:
        results = [{"kernel": "a", "automatic": True, "tflops": 100.0, "relative_error": 2e-4, "allowed": 4e-4}]
        results.append({"peer": "b", "tflops": 50.0})
        problems.append({"name": case.name, **case._asdict(), "results": results})
    report = {"device": "Some GPU", "problems": problems}
    figure = draw(report)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    titles = {axes.get_title() for axes in panels}
    assert {"float16, D 32, full", "float16, D 256, causal"} <= titles
    (panel,) = (axes for axes in panels if axes.get_title() == "float16, D 64, full")
    assert [line.get_label() for line in panel.lines] == ["cuflash", "b"]
    assert list(panel.lines[0].get_xdata()) == [512, 2048, 4096, 16384]
    legend = panels[-1].get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["cuflash", "b", "allowed"]
    assert "Some GPU" in figure.get_suptitle()


def test_picture_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from cuflash.bench.plot import save

    save({"device": "Some GPU", "problems": []}, tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").stat().st_size


def test_quick_run_stops_beginning_problems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(GROUPS, "cpu", [SMALL, SMALL._replace(seqlen_q=60)])
    stored = tmp_path / "bench.json"
    arguments = ["--backend", "numpy", "--quick", "--group", "cpu", "--peers", "none", "--json", str(stored)]
    assert bench.main(arguments) == 0
    report = json.loads(stored.read_text())
    assert len(report["problems"]) == 2 and report["repeats"] == 3 and "left_out" not in report
    monkeypatch.setattr(bench, "QUICK_SECONDS", -1.0)
    assert bench.main(arguments) == 0
    report = json.loads(stored.read_text())
    assert report["problems"] == [] and len(report["left_out"]) == 2
    assert "not measured for lack of time: float32" in capsys.readouterr().out


def test_run_that_is_stopped_leaves_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stopped(inputs: Any, results: Any) -> None:
        if inputs.case.seqlen_q == 41:
            raise KeyboardInterrupt
        cuflash.attention(**inputs.arguments, **results)

    monkeypatch.setattr(measure, "compute", stopped)
    stored = tmp_path / "bench.json"
    cases = [SMALL, SMALL._replace(seqlen_q=41)]
    with pytest.raises(KeyboardInterrupt):
        bench.run(cases, (), NumpyBackend(), Request(repeats=1), bench.Peers({}), stored=stored)
    (problem,) = json.loads(stored.read_text())["problems"]
    assert problem["name"] == SMALL.name and "tflops" in problem["results"][0]


def test_import_times_are_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    run = bench_overheads.subprocess.run

    def noted(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        folders.append(Path(env["PYTHONPATH"].split(bench_overheads.os.pathsep)[0]))
        return run(command, env=env, **options)

    monkeypatch.setattr(bench_overheads.subprocess, "run", noted)
    assert bench_overheads.import_times("numpy", 1)["warm"] > 0
    assert set(folders) == {ROOT}


def test_overheads(monkeypatch: pytest.MonkeyPatch) -> None:
    report = bench.run([], (OVERHEADS,), NumpyBackend(), Request(), bench.load_peers(PEERS, "numpy"), deadline=0.0)
    found = report["overheads"]
    assert "import_s" not in found and "numpy.empty" in found["others_us"]
    assert {"plain", "out", "varlen", "decoding with sinks"} <= set(found["calls_us"])
    for times in found["calls_us"].values():
        assert set(times) == {"repeated", "new length", "new scale"}
        assert all(0 < least <= median for least, median in times.values())
    assert 0 < found["memory_mib"]["1 head, N 4096, D 64, causal"] < 48
    shown = reports.markdown(report)
    assert "| host time per call, microseconds: least, median | repeated | new length |" in shown
    assert "us per call, new length: plain " in reports.summary(report) and bench.status(report) == 0
    monkeypatch.setattr(bench, "overheads", lambda *arguments: 1 / 0)
    report = bench.run([], (OVERHEADS,), NumpyBackend(), Request(), bench.Peers({}))
    assert bench.status(report) == 1 and "FAILED: overheads: ZeroDivisionError" in reports.summary(report)


def test_host_times_are_of_calls_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, float | None]] = []

    def make_call(length: int) -> Callable[..., Any]:
        return lambda scale=None: calls.append((length, scale))

    monkeypatch.setattr(bench_host, "REPEATS", 20)
    bench_host._times(NumpyBackend(), make_call, range(10, 80))
    warm = {(length, None) for length in range(10, 80, bench_host.WARM_EVERY)}
    new = [call for call in calls if call not in warm]
    assert len(new) == len(set(new)) == 2 * (70 - len(warm))
    assert sum(scale is None for _, scale in new) == 70 - len(warm) and calls.count((10, None)) > 20


def test_compile_times_are_those_of_every_row() -> None:
    pytest.importorskip("cupy", reason="compiling needs CuPy with NVRTC")
    rows = bench_overheads.compile_times(bench_overheads.device_of(90), ["float16"])
    assert {row["kernel"] for row in rows} == {spec.name for spec in KERNELS if "float16" in spec.dtypes}
    assert all(row["seconds"] > 0 and row["registers"] > 0 and row["arch"] == "sm_90" for row in rows)
    assert reports.overhead_tables({"compile": rows}).count("| sm_90 |") == len(rows)


@pytest.mark.gpu
def test_gpu_in_one_command(tmp_path: Path) -> None:
    stored = tmp_path / "bench.json"
    arguments = ["--backend", "gpu", "--seqlen", "500", "--heads", "4", "--repeats", "3", "--kernel", "all"]
    assert bench.main([*arguments, "--json", str(stored)]) == 0
    report = json.loads(stored.read_text())
    results = [r for r in report["problems"][0]["results"] if "peer" not in r]
    assert {r["kernel"] for r in results} == {spec.name for spec in KERNELS}
    assert all("tflops" in r or "refused" in r for r in results) and "nvrtc" in report["versions"]


@pytest.mark.gpu
def test_gpu_overheads() -> None:
    found = bench_overheads.overheads(GpuBackend(), None, quick=True)
    assert {"cupy.empty", "RawKernel launch"} <= set(found["others_us"]) and found["calls_us"]["plain"]
    assert "import_s" not in found and found["compile"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", bench.FLOAT_NAMES)
def test_gpu_gate(dtype: str) -> None:
    import cupy

    case = SMALL._replace(dtype=dtype, window=(30, 3), causal=False, softcap=2.0, bias=True)
    inputs = make_inputs(case, cupy)
    out = poisoned(case.shape_out, dtype, cupy)
    assert not verdict_on(inputs, out, cupy).good
    measure.compute(inputs, {"out": out})
    assert verdict_on(inputs, out, cupy).good
    spoiled = (out.astype(np.float64) * 1.01).astype(out.dtype)
    assert not verdict_on(inputs, spoiled, cupy).good
