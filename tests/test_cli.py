"""`python -m cuflash`: what it prints and its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import __main__ as cli
from cuflash.arrays import FLOAT_NAMES
from cuflash.kernels import KERNELS

ROOT = Path(cuflash.__file__).parent.parent


def run(*arguments: str, gpu: bool = False) -> subprocess.CompletedProcess[str]:
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": python_path, **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})}
    command = [sys.executable, "-m", "cuflash", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_doctor() -> None:
    done = run("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"cuflash {cuflash.__version__}, sources ")
    for dtype in FLOAT_NAMES:
        assert f"check: NumPy {dtype} relative error " in done.stdout
    assert done.stdout.count(" ok\n") == len(FLOAT_NAMES) == done.stdout.count("check: ")
    assert "WRONG" not in done.stdout and "FAILED" not in done.stdout


@pytest.mark.gpu
def test_doctor_with_a_gpu() -> None:
    done = run("doctor", gpu=True)
    assert done.returncode == 0
    assert done.stdout.count(" ok\n") == 2 * len(FLOAT_NAMES)
    assert all(f"check: GPU {dtype} relative error " in done.stdout for dtype in FLOAT_NAMES)


def test_doctor_finds_wrong_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = cli.attention
    monkeypatch.setattr(cli, "gpu_available", lambda: False)
    monkeypatch.setattr(cli, "attention", lambda *arrays, **options: 1.1 * right(*arrays, **options))
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.count("WRONG") == len(FLOAT_NAMES)


def test_doctor_survives_what_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = cli.attention

    def fails_for_one(q: Any, *others: Any, **options: Any) -> Any:
        if q.dtype == "float16":
            raise RuntimeError("no such luck")
        return right(q, *others, **options)

    monkeypatch.setattr(cli, "gpu_available", lambda: False)
    monkeypatch.setattr(cli, "attention", fails_for_one)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "check: NumPy float16 FAILED: no such luck\n" in printed and printed.count(" ok\n") == 3


def test_kernels() -> None:
    done = run("kernels")
    assert (done.returncode, done.stderr) == (0, "")
    for spec in KERNELS:
        assert f"{spec.name}: {spec.summary}\n" in done.stdout
        assert ", ".join(spec.dtypes) in done.stdout and f"1 to {spec.max_head_dim}" in done.stdout
    assert "cpu: NumPy arrays, every feature\n" in done.stdout


def _first_row(capability: int) -> str:
    """Name of the row that serves a plain float16 call."""
    x = np.empty((2, 100, 64), np.float16)
    return cuflash.explain(cuflash.attention, x, x, x, device=capability).kernel


def test_explain() -> None:
    done = run("explain", "--q", "4,16,4096,128", "--causal", "--device", "90")
    assert (done.returncode, done.stderr) == (0, "")
    first, *rest = done.stdout.splitlines()
    assert first == "attention float16, batch 4, heads 16/16, 4096 x 4096, head_dim 128, window (None, 0)"
    assert rest[0] == f"  kernel         {_first_row(90)} for sm_90"


def test_explain_for_this_machine() -> None:
    done = run("explain", "--q", "4,16,4096,128")
    assert (done.returncode, done.stderr) == (0, "")
    assert "cpu: NumPy arrays are computed on the CPU" in done.stdout


@pytest.mark.gpu
def test_explain_for_the_gpu_of_this_machine() -> None:
    done = run("explain", "--q", "4,16,4096,128", gpu=True)
    assert done.returncode == 0
    assert " for sm_" in done.stdout and "registers" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "first_line"),
    [
        (["--q", "5,8"], "attention float16, batch 1, heads 1/1, 5 x 5, head_dim 8"),
        (["--q", "8,5,8", "--k", "2,7,8"], "attention float16, batch 1, heads 8/2, 5 x 7, head_dim 8"),
        (["--q", "8,5,8", "--v", "8,5,6"], "attention float16, batch 1, heads 8/8, 5 x 5, head_dim 8/6"),
        (["--q", "5,8", "--dtype", "bfloat16"], "attention bfloat16, batch 1, heads 1/1, 5 x 5, head_dim 8"),
        (
            ["--q", "5,8", "--window", "3,4", "--softcap", "2.5", "--causal"],
            "attention float16, batch 1, heads 1/1, 5 x 5, head_dim 8, window (3, 0), softcap 2.5",
        ),
        (
            ["--q", "5,8", "--window", "3,none"],
            "attention float16, batch 1, heads 1/1, 5 x 5, head_dim 8, window (3, None)",
        ),
        (
            ["--q", "5,8", "--window", "none,0"],
            "attention float16, batch 1, heads 1/1, 5 x 5, head_dim 8, window (None, 0)",
        ),
        (["--q", "5,8", "--window", "none,none"], "attention float16, batch 1, heads 1/1, 5 x 5, head_dim 8"),
    ],
)
def test_explain_options(arguments: list[str], first_line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--device", "80", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[0] == first_line


def test_explain_prints_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--q", "2,100,64", "--device", "80", "--source"]) == 0
    printed = capsys.readouterr().out
    assert "#define CUFLASH_HEAD_DIM 64\n" in printed and f'#include "{_first_row(80)}.cu"\n' in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--q", "2,5,8", "--k", "2,5,9"], "ValueError: k has head_dim 9 but q has 8\n"),
        (["--q", "2,5,600"], "ValueError: q has head_dim 600, expected 1 to 512\n"),
        (["--q", "5"], "ValueError: q has shape (5,), expected "),
        (["--q", "2,-5,8"], "ValueError: q is a stand-in with shape (2, -5, 8)"),
        (["--q", "2,5,8", "--window", "3"], "ValueError: window has 1 entries"),
        (["--q", "2,5,8", "--softcap", "0"], "ValueError: softcap is 0.0"),
        (["--q", "2,5,8", "--device", "9"], "ValueError: device is 9, expected a compute capability"),
    ],
)
def test_calls_that_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(message) and captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["cure"], "invalid choice: 'cure'"),
        (["doctor", "--loud"], "unrecognized arguments: --loud"),
        (["kernels", "fast"], "unrecognized arguments: fast"),
        (["explain"], "required: --q"),
        (["explain", "--q", "a,b"], "argument --q: invalid"),
        (["explain", "--q", "5,8", "--window", "3,open"], "argument --window: invalid"),
        (["explain", "--q", "2,5,8", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["explain", "--q", "2,5,8", "--device", "sm_90"], "argument --device: invalid int value: 'sm_90'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("usage: python -m cuflash") and captured.out == ""


def test_bad_arguments_end_the_process() -> None:
    assert run("cure").returncode == 2
    refused = run("explain", "--q", "2,5,8", "--k", "2,5,9")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "ValueError: k has head_dim 9 but q has 8\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("doctor", "kernels", "explain", "bench", "demo"))


def test_bench_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash.bench import command

    monkeypatch.setattr(command, "main", lambda arguments: 7 if arguments == ["--group", "drift"] else 0)
    assert cli.main(["bench", "--group", "drift"]) == 7


def test_demo_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash import demo

    monkeypatch.setattr(demo, "main", lambda arguments: 7 if arguments == ["--backend", "numpy"] else 0)
    assert cli.main(["demo", "--backend", "numpy"]) == 7
