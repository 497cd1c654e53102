"""`show_config` and `python -m cuflash doctor`: what this machine can do."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import __main__ as cli
from cuflash import doctor as doctor_module
from cuflash.gpu.compile import source_digest
from cuflash.plan.gated import GATED_KERNELS
from cuflash.plan.table import KERNELS
from cuflash.problem.arrays import FLOAT_NAMES
from cuflash.settings import KNOBS, Settings

from .machines import Machine

OPERATIONS = ("attention", "KV cache", "gated delta rule")
CHECKS = len(OPERATIONS) * len(FLOAT_NAMES)
"""Of each back end."""


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(driver=None).set_up(monkeypatch)


def test_no_program_is_started() -> None:
    program = """
import sys
started = []
sys.addaudithook(lambda event, _: started.append(event) if event.startswith(("subprocess", "os.")) else None)
import cuflash
cuflash.show_config()
programs = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
assert not programs & set(started), started
"""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # what CuPy does is not ours
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=environment)


def test_show_config(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_TILE", "32x32")
    cuflash.show_config()
    printed = capsys.readouterr().out
    assert printed.startswith(f"cuflash {cuflash.__version__}, sources {source_digest()}, Python ")
    summaries = [spec.summary for spec in (*KERNELS, *GATED_KERNELS)]
    for part in (f"numpy {np.__version__}", "CPU back end with", *summaries, "settings:"):
        assert part in printed
    lines = printed.splitlines()
    for knob in KNOBS:
        (line,) = [line for line in lines if line.startswith(f"  {knob.variable}=")]
        value = "32x32" if knob.variable == "CUFLASH_TILE" else knob.default
        assert line.split() == [f"{knob.variable}={value}", *knob.meaning.split()]


def test_misspelt_settings_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_driver: None
) -> None:
    assert cli.main(["doctor"]) == 0
    assert "no such setting" not in capsys.readouterr().out
    monkeypatch.setenv("CUFLASH_THREADS", "3")
    assert cli.main(["doctor"]) == 0
    words = "CUFLASH_THREADS is set, and there is no such setting (did you mean CUFLASH_NUM_THREADS?)"
    printed = capsys.readouterr().out
    assert f"\n  {words}\n" in printed and printed.splitlines()[-1].endswith(f"; but {words}")


def test_show_config_says_why_there_is_no_gpu(capsys: pytest.CaptureFixture[str], no_driver: None) -> None:
    cuflash.show_config()
    assert "\nno CUDA driver; for a GPU, install NVIDIA's driver " in capsys.readouterr().out


def test_with_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Machine().set_up(monkeypatch)
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "GPU 0: Toaster, compute capability 9.0, 2 multiprocessors, 3 GiB" in printed
    assert sum(line.startswith("check: ") and line.endswith(" ok") for line in printed) == 2 * CHECKS
    assert printed[-1] == "verdict: ready, on GPU 0 (Toaster), and for NumPy arrays on the CPU"


def test_every_gpu_is_checked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(count=2).set_up(monkeypatch)
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for number, operation, dtype in product(range(2), OPERATIONS, FLOAT_NAMES):
        assert f"check: GPU {number} {operation} {dtype} relative error " in printed
    assert printed.endswith("verdict: ready, on GPU 0 (Toaster) and GPU 1 (Toaster), and for NumPy arrays on the CPU\n")


@pytest.mark.parametrize(
    ("function", "operation"), [("attention", "attention"), ("recurrent_gated_delta_rule", "gated delta rule")]
)
def test_finds_wrong_results(
    function: str,
    operation: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_driver: None,
) -> None:
    right = getattr(doctor_module, function)
    monkeypatch.setattr(doctor_module, function, lambda *arrays, **options: 2 * right(*arrays, **options))
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("WRONG") == len(FLOAT_NAMES)
    failed = ", ".join(f"NumPy {operation} {dtype}" for dtype in FLOAT_NAMES)
    assert printed.splitlines()[-1] == f"verdict: not ready, 4 of 12 checks failed ({failed}); report all of the above"


def test_finds_states_that_are_not_updated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_driver: None
) -> None:
    right = doctor_module.recurrent_gated_delta_rule
    monkeypatch.setattr(
        doctor_module, "recurrent_gated_delta_rule", lambda *tokens: right(*tokens[:-1], tokens[-1].copy())
    )
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.count("WRONG") == len(FLOAT_NAMES)


def test_survives_what_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_driver: None
) -> None:
    right = doctor_module.attention

    def fails_for_one(q: Any, *others: Any, **options: Any) -> Any:
        if q.dtype == "float16":
            raise RuntimeError("no such luck")
        return right(q, *others, **options)

    monkeypatch.setattr(doctor_module, "attention", fails_for_one)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "check: NumPy attention float16 FAILED: no such luck\n" in printed and printed.count(" ok\n") == CHECKS - 1
    assert "verdict: not ready, 1 of 12 checks failed (NumPy attention float16); " in printed


def test_a_chosen_kernel_is_no_failure_but_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_driver: None
) -> None:
    with cuflash.options(kernel="forward_mma", tile="64x64"):
        assert cli.main(["doctor"]) == 0
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert "; but CUFLASH_KERNEL=forward_mma is set, and calls that it cannot serve raise" in verdict
    assert "; but CUFLASH_TILE=64x64 is set, and calls that it cannot serve raise" in verdict
    assert Settings("", "", False) == doctor_module.settings()


@pytest.mark.gpu
def test_show_config_names_the_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    import cupy

    cuflash.show_config()
    printed = capsys.readouterr().out
    assert f"cupy {cupy.__version__}, NVRTC " in printed
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    assert f"GPU 0: {name}, compute capability " in printed
