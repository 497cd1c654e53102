"""docs/performance.md shows what is stored; the error table and the sweep, by which it is measured."""

from __future__ import annotations

import json
import os
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.bench import accuracy, plot, sweep
from cuflash.bench import command as bench
from cuflash.bench import report as reports
from cuflash.bench.accuracy import ACCURACY, DISTRIBUTIONS
from cuflash.bench.cases import GROUPS, SWEEP_ELEMENTS, SWEEP_HEADS, SWEEP_SCORES
from cuflash.bench.device import NumpyBackend
from cuflash.bench.measure import Request
from cuflash.problem.arrays import FLOAT_NAMES
from tools.programs import load

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS = str(ROOT / "benchmarks" / "peers.py")


performance = load("performance")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time."""
    monkeypatch.setattr(accuracy, "QUERIES", 8)
    monkeypatch.setattr(accuracy, "KEYS", 100)
    monkeypatch.setattr(accuracy, "HEAD_DIMS", {"numpy": (16, 24)})
    monkeypatch.setattr(accuracy, "COPIES", {"gpu": (1, 2), "numpy": (1, 2)})


def measured(**peers: Any) -> reports.Report:
    return bench.run([], {ACCURACY}, NumpyBackend(), Request(), bench.Peers(peers))


# The page


def test_page_shows_what_is_stored() -> None:
    hint = "python benchmarks/performance.py has not been run"
    errors, sweeps = performance.read("accuracy"), performance.read("sweep")
    assert performance.PAGE.read_text() == performance.text(errors, sweeps), hint
    for path, report in {**errors, **sweeps}.items():
        assert plot.describe(report) in path.with_suffix(".svg").read_text(), hint
    for link in re.findall(r"\]\((?!https?:)(.*?)\)", performance.PAGE.read_text()):
        assert (performance.PAGE.parent / link).is_file(), link


def test_stored_errors_are_of_all_distributions() -> None:
    for report in performance.read("accuracy").values():
        rows = report["accuracy"]["rows"]
        assert {row["distribution"] for row in rows} == set(DISTRIBUTIONS)
        assert {row["dtype"] for row in rows} == set(FLOAT_NAMES) and not reports.bad_errors(report)


def test_page_of_a_gpu(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = performance.RESULTS
    errors = measured() | {"backend": "gpu"}
    monkeypatch.setattr(performance, "machine", lambda report: "### Some GPU")
    text = performance.text({folder / "accuracy" / "x.json": errors}, {folder / "sweep" / "x.json": fake_sweep()})
    assert "No error table" not in text and "No sweep" not in text
    for part in (
        "| distribution |",
        "| float64: rms / maximum | cpu | naive |",
        "results/sweep/x.svg",
        "| 8 | 0.50 float",
    ):
        assert part in text


# The error table


def test_error_table_in_one_command(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = tmp_path / "errors.json"
    assert bench.main(["--backend", "numpy", "--group", "accuracy", "--peers", PEERS, "--json", str(stored)]) == 0
    report = json.loads(stored.read_text())
    found = report["accuracy"]
    assert (found["queries"], found["keys"], found["head_dims"]) == (8, 100, [16, 24])
    assert len(found["rows"]) == len(FLOAT_NAMES) * len(DISTRIBUTIONS) * 2
    for row in found["rows"]:
        names = [reports.error_column(result) for result in row["results"]]
        assert names[:2] == ["cpu", "naive"] and "naive NumPy" not in names
        assert all(0 < result["rms"] < 0.02 for result in row["results"][:2])
    printed = capsys.readouterr().out
    assert "| float16: rms / maximum | cpu | naive |" in printed and "\n| small columns | " in printed
    assert "error over that of naive, at most, float64: cpu " in printed


def test_quick_error_table_has_one_head_dim(small: None) -> None:
    assert accuracy.accuracy(NumpyBackend(), {}, quick=True)["head_dims"] == [16]


def test_float64_without_a_judge_is_left_out_loudly(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "WIDE_IS_WIDER", False)
    report = measured()
    assert "float64" not in {row["dtype"] for row in report["accuracy"]["rows"]}
    assert "SKIPPED: float64: long double is no wider" in reports.summary(report)


def test_kernel_that_fails_is_a_failure(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_served", lambda kernel, inputs: "ieee")
    monkeypatch.setattr(accuracy, "attention", lambda *arrays, **options: None)  # the result stays NaN
    report = measured()
    assert bench.status(report) == 1 and "not finite" in reports.error_tables(report["accuracy"])["float32"]
    assert "NOT FINITE OR FAILED: cpu, float32, normal, D 16: not finite" in reports.summary(report)
    monkeypatch.setattr(bench, "accuracy", lambda *arguments: 1 / 0)
    report = measured()
    assert bench.status(report) == 1 and "FAILED: accuracy: ZeroDivisionError" in reports.summary(report)


def test_the_larger_error_of_one_head_and_of_many_counts(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoils_many(q: Any, *arrays: Any, out: Any, **options: Any) -> None:
        out[...] = cuflash.attention(q, *arrays, **options)
        out *= out.dtype.type(1 if len(q) == 1 else 1.25)

    monkeypatch.setattr(accuracy, "_served", lambda kernel, inputs: "ieee")
    monkeypatch.setattr(accuracy, "attention", spoils_many)
    found = accuracy.accuracy(NumpyBackend(), {}, quick=True)
    assert all(row["results"][0]["rms"] > 0.2 > row["results"][1]["rms"] for row in found["rows"])


def test_peers_that_refuse_and_that_overflow(small: None) -> None:
    def refuses(inputs: Any) -> Any:
        raise NotImplementedError("only on Sundays")

    def overflows(inputs: Any) -> Any:
        return lambda: np.full(inputs.case.shape_out, np.inf, inputs.arrays["q"].dtype)

    report = measured(refuses=refuses, overflows=overflows)
    assert bench.status(report) == 0
    assert "| normal | " in reports.markdown(report) and "| cpu | naive | overflows |" in reports.markdown(report)


def test_kernels_are_asked_in_the_precision_that_they_serve() -> None:
    """forward_wmma computes float32 as tf32 alone."""
    column = reports.error_column
    assert column({"kernel": "forward_wmma", "precision": "tf32"}) == "forward_wmma, tf32"
    assert column({"kernel": "forward_scalar", "precision": "ieee"}) == "forward_scalar"
    assert column({"peer": "naive"}) == "naive"


def test_plot_of_errors_is_the_same_file_every_time(small: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = measured()
    for name in ("a.svg", "b.svg"):
        plot.save_errors(report, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert all(part in drawn for part in (*FLOAT_NAMES, *DISTRIBUTIONS, "naive", "rms error"))


@pytest.mark.gpu
def test_error_table_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash.bench.device import GpuBackend

    monkeypatch.setattr(accuracy, "HEAD_DIMS", {"gpu": (64,)})
    report = bench.run([], {ACCURACY}, GpuBackend(), Request(), bench.load_peers(PEERS, "gpu"))
    assert bench.status(report) == 0
    tables = reports.error_tables(report["accuracy"])
    assert all("forward_scalar" in table for table in tables.values())
    assert "forward_wmma, tf32" in tables["float32"] and "naive" in tables["float64"]


# The sweep


def fake_sweep() -> reports.Report:
    """The sweep of a GPU on which cuflash needs 2 s for head_dim 8, else 1 s; one peer takes 1 s, one 3 s."""
    problems = []
    for case in GROUPS["sweep"]:
        results: list[dict[str, Any]] = [
            {"kernel": "a", "automatic": True, "seconds": 2.0 if case.head_dim == 8 else 1.0}
        ]
        results.append({"peer": "naive CuPy", "seconds": 1.0 if case.head_dim == 8 else 2.0})
        if case.seqlen_q == 16384 and case.dtype == "float64":
            results[1] = {"peer": "naive CuPy", "refused": "OutOfMemoryError: Out of memory allocating 1 byte"}
        if case.dtype == "bfloat16":
            results[1] = {"peer": "naive CuPy", "refused": "TypeError: data type 'E' not understood"}
        results.append({"peer": "torch math", "seconds": 3.0})
        problems.append({"name": case.name, **case._asdict(), "results": results})
    versions = {"sources": "abc"}
    return {"device": "Some GPU", "backend": "gpu", "date": "2026-01-01", "versions": versions, "problems": problems}


def test_sweep_has_every_dtype_head_dim_and_length_in_every_way() -> None:
    cases = GROUPS["sweep"]
    assert 100 <= len(cases) <= 150
    sizes = product(FLOAT_NAMES, (8, 16, 32, 64, 128, 256, 512), (512, 1024, 2048, 4096, 16384))
    assert {(c.dtype, c.head_dim, c.seqlen_q) for c in cases} == set(sizes)
    ways = {(many, causal) for many in (False, True) for causal in (False, True)}
    for chosen in ("dtype", "head_dim", "seqlen_q"):
        for value in {getattr(c, chosen) for c in cases}:
            assert {(c.batch * c.heads > 1, c.causal) for c in cases if getattr(c, chosen) == value} == ways
    for c in cases:
        heads = c.batch * c.heads
        assert heads == 1 or (heads <= SWEEP_HEADS and heads * c.seqlen_q**2 <= SWEEP_SCORES)
        assert heads * c.seqlen_q * c.head_dim <= SWEEP_ELEMENTS


def test_summary_of_the_sweep_names_the_worst_and_what_does_not_fit() -> None:
    lines = sweep.summary(fake_sweep()).splitlines()
    slower = sum(case.head_dim == 8 and case.dtype != "bfloat16" for case in GROUPS["sweep"])
    unfit = sum(case.seqlen_q == 16384 and case.dtype == "float64" and case.head_dim == 8 for case in GROUPS["sweep"])
    assert f"140 problems, 238 comparisons: {slower - unfit} slower than the peer" in lines[0]
    assert "naive CuPy 1." in lines[1] and "torch math 2.72" in lines[1]
    assert lines[2].startswith("  by dtype: ") and lines[3].startswith("  by head_dim: 8 ")
    worst = [line for line in lines if line.startswith("  worst: ")]
    assert len(worst) == 10 and all(" D8 " in line and line.endswith(", naive CuPy") for line in worst)
    missing = [line for line in lines if line.startswith("  not measured: ")]
    assert "  not measured: naive CuPy, TypeError: data type 'E' not understood: 35 of bfloat16" in missing
    (named,) = (line for line in missing if "does not fit memory" in line)
    assert named.count("float64 ") == 7


def test_table_of_the_sweep_has_the_least_ratio() -> None:
    lines = sweep.table(fake_sweep()).splitlines()
    assert lines[0] == "| head_dim | N 512 | N 1024 | N 2048 | N 4096 | N 16384 |"
    assert len(lines) == 2 + 7 and lines[2].startswith("| 8 | 0.50 float") and lines[3].startswith("| 16 | 2.00 float")


def test_sweep_of_nothing() -> None:
    report = fake_sweep()
    for problem in report["problems"]:
        problem["results"] = [{"kernel": "a", "failed": "MemoryError: "}]
    assert sweep.ratios(report) == [] and "does not fit memory" in sweep.summary(report)


def test_plot_of_the_sweep(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.save_sweep(fake_sweep(), tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert all(part in drawn for part in (*FLOAT_NAMES, "N 512", "N 16384", "Some GPU"))


def test_peers_are_chosen_by_words(tmp_path: Path) -> None:
    peers = tmp_path / "mine.py"
    peers.write_text("def peers(backend):\n    return {'naive CuPy': 1, 'torch flash': 2, 'torch math': 3}\n")
    assert list(bench.load_peers(str(peers), "gpu", ["naive", "math"]).attention) == ["naive CuPy", "torch math"]
    assert len(bench.load_peers(str(peers), "gpu").attention) == 3


def test_steps_of_the_gpu_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = load("gpu")
    commands = []

    class Finished:
        def wait(self) -> int:
            return 0

    def popen(command: list[str], **options: Any) -> Finished:
        commands.append(command)
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"device": "NVIDIA H200"}))
        return Finished()

    monkeypatch.setattr(gpu.subprocess, "Popen", popen)
    steps = ["accuracy", "sweep", "--quick"]
    monkeypatch.setattr("sys.argv", ["gpu.py", *steps, "--logs", str(tmp_path / "logs"), "--results", str(tmp_path)])
    usable = os.sched_getaffinity(0)
    assert gpu.main() == 0 and os.sched_getaffinity(0) == usable
    stored = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")}
    assert stored == {"accuracy/h200.json", "accuracy/cpu.json", "sweep/h200.json"}
    parser = bench.make_parser()
    parsed = [parser.parse_args(command[4:]) for command in commands]
    assert [(p.backend, p.group) for p in parsed] == [
        ("gpu", ["accuracy"]),
        ("numpy", ["accuracy"]),
        ("gpu", ["sweep"]),
    ]
    assert parsed[2].only_peers == ["naive", "math"] and all(p.quick for p in parsed)
