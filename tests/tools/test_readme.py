"""The README and the docstrings: their examples run; results are those that are stored, and these belong together."""

from __future__ import annotations

import doctest
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import cuflash
from cuflash.bench import plot
from cuflash.bench import report as reports
from tools.programs import load

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "README.md").read_text()
INTRODUCTION = TEXT.partition("\n## ")[0]


readme = load("readme")


@pytest.mark.parametrize("library", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_first_example_runs(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = re.findall(r"```python\n(.*?)```", INTRODUCTION, re.DOTALL)[0]
    first, _, rest = example.partition("\n")
    assert first == "import cupy as cp  # or: import numpy as cp"
    names: dict[str, Any] = {}
    exec(f"import {library} as cp\n{rest}", names)
    assert type(names["out"]).__module__.partition(".")[0] == library
    for name in ("out", "lse"):
        assert str(names[name].shape) in rest, "the comment names another shape"
    assert "kernel" in capsys.readouterr().out


def test_says_early_what_it_does_not_do_and_can_be_read_in_five_minutes() -> None:
    for words in ("no gradients", "no dropout", "no torch tensors on the CPU"):
        assert words in " ".join(INTRODUCTION.split())
    assert len(TEXT.splitlines()) <= 150
    assert "pip install '.[cuda13]'" in TEXT and "pip install cuflash" not in TEXT
    for link in re.findall(r"\]\((?!https?:)(.*?)\)", TEXT):
        assert (ROOT / link).is_file(), link


@pytest.mark.parametrize(
    "name",
    [
        "KVCache",
        "attention",
        "attention_lse",
        "attention_varlen",
        "attention_with_kv_cache",
        "chunk_gated_delta_rule",
        "chunk_gated_output",
        "explain",
        "merge_attention_states",
        "options",
        "recurrent_gated_delta_rule",
    ],
)
def test_examples_of_docstrings_run(name: str) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(cuflash, name), name, globs={})
    assert example.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0


# Results


def test_shows_what_is_stored() -> None:
    stored = readme.read_reports(readme.RESULTS)
    hint = "python benchmarks/readme.py has not been run"
    assert f"{readme.BEGIN}\n{readme.section(stored)}\n{readme.END}" in TEXT, hint
    for path, report in stored.items():
        assert readme.page(path).read_text() == f"# `{path.name}`\n\n{reports.markdown(report)}\n", hint
    assert plot.describe(next(iter(stored.values()))) in readme.PLOT.read_text(), hint


def test_one_plot_and_one_table_of_ten_rows_that_names_who_is_faster() -> None:
    section = TEXT.partition(readme.BEGIN)[2].partition(readme.END)[0]
    assert section.count("![") == 1
    title, _line, *rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) == 10 and "fastest other" in title and "cuDNN" in "".join(rows)


def test_results_of_both_back_ends_are_of_the_same_sources() -> None:
    gpu, cpu = (json.loads((readme.RESULTS / f"{name}.json").read_text()) for name in ("h200", "cpu"))
    hint = "measure both in one run: python benchmarks/gpu.py bench --results benchmarks/results"
    for name in ("sources", "modules"):
        assert gpu["versions"].get(name) == cpu["versions"].get(name), hint
    assert cpu.get("threads") == 2, hint


def problem(name: str, **speeds: float) -> dict[str, Any]:
    results = [{"peer": peer, "tflops": speed, "gbs": 1e3 * speed} for peer, speed in speeds.items() if peer != "ours"]
    ours = {"kernel": "a", "automatic": True, "relative_error": 2e-7, "gbs": 8.0, "bound": "memory"}
    return {"name": name, "results": [*results, ours | {"tflops": speeds["ours"]}]}


def test_line_names_the_fastest_other_in_our_unit() -> None:
    report = {
        "device": "CPU, 2 threads",
        "problems": [problem("p", ours=2.0, slow=1.0, fast=4.0), problem("q", ours=1.0)],
    }
    assert readme.line(report, "p") == "| CPU | p | 8 GB/s | fast, 4000 GB/s | 0.50 | 2.0e-07 |"
    assert readme.line(report, "q") == "| CPU | q | 8 GB/s | - | - | 2.0e-07 |"
    assert readme.wins(report) == "Of 2 problems on CPU, 2 threads, cuflash is the fastest in 1, fast in 1."
    with pytest.raises(SystemExit, match="no speed of r"):
        readme.line(report, "r")


def test_plot_is_the_same_file_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = json.loads((readme.RESULTS / "h200.json").read_text())
    for name in ("a.svg", "b.svg"):
        plot.save_overview(report, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    for part in ("bfloat16", "float64", "torch cuDNN", "cuflash", "speed (TFLOP/s)"):
        assert part in drawn


# One command measures both back ends


def test_bench_measures_both_back_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = load("gpu")
    usable = os.sched_getaffinity(0)
    calls = []

    class Finished:
        def wait(self) -> int:
            return 0

    def popen(command: list[str], *, env: dict[str, str], **options: Any) -> Finished:
        calls.append((command, env, os.sched_getaffinity(0)))
        stored = Path(command[command.index("--json") + 1])
        stored.write_text(json.dumps({"device": "NVIDIA H200"}))
        return Finished()

    monkeypatch.setattr(gpu.subprocess, "Popen", popen)
    monkeypatch.setattr("sys.argv", ["gpu.py", "bench", "--logs", str(tmp_path / "logs"), "--results", str(tmp_path)])
    assert gpu.main() == 0
    assert {path.name for path in tmp_path.glob("*.json")} == {"h200.json", "cpu.json"}
    (first, _, cores), (second, variables, few) = calls
    assert first[first.index("--backend") + 1] == "gpu" and cores == usable
    assert second[second.index("--backend") + 1] == "numpy" and len(few) == min(2, len(usable))
    assert variables["CUFLASH_NUM_THREADS"] == "2" and os.sched_getaffinity(0) == usable
