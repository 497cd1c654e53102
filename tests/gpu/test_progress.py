"""What is said while kernels are compiled: nothing if they are there at once, else a bar or a line."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from cuflash.gpu import compile as compile_module
from cuflash.gpu import progress
from cuflash.gpu.compile import compile_core, kernel_function
from cuflash.plan.build import Program


class Terminal(io.StringIO):
    """A stream that somebody watches."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(compile_module, "_functions", {})


def watch(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stderr a terminal. No fixture: pytest sets stderr anew when the test begins."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def builds(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[Program]:
    """Three programs, each of which takes its time to compile."""

    def build(program: Program, device_id: int) -> str:
        time.sleep(seconds)
        return program.kernel

    monkeypatch.setattr(compile_module, "_build", build)
    return [Program(kernel, (), 0) for kernel in ("one", "two", "three")]


LINE = r"cuflash: compiling 3 kernels for sm_90, once \(CuPy keeps them on disk\)"


def test_quick_kernels_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = watch(monkeypatch)
    monkeypatch.setattr(progress, "SILENT_SECONDS", 30)
    compile_core(builds(monkeypatch, 0), 0, "sm_90")
    assert kernel_function(Program("four", (), 0), 0) == "four"
    assert (terminal.getvalue(), *capsys.readouterr()) == ("", "", "")


def test_a_line_where_nobody_watches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    programs = builds(monkeypatch, 0.2)
    compile_core(programs, 0, "sm_90")
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(LINE + r": 1 2 3, \d+\.\d s\n", err)
    assert kernel_function(Program("four", (), 0), 0) == "four"
    assert capsys.readouterr().err == "", "a single kernel has no progress to show"


def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    pytest.importorskip("tqdm")
    compile_core(builds(monkeypatch, 0.2), 0, "sm_90")
    last = terminal.getvalue().rstrip().split("\r")[-1]
    assert re.match(r"cuflash compiles for sm_90, once: 100%\|.*\| 3/3 \[", last)


def test_a_line_in_a_terminal_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    compile_core(builds(monkeypatch, 0.2), 0, "sm_90")
    assert re.fullmatch(LINE + r": 1 2 3, \d+\.\d s\n", terminal.getvalue())


def test_a_single_slow_kernel_is_named_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    program = builds(monkeypatch, 0.3)[0]
    for _ in range(2):
        assert kernel_function(program, 0) == "one"
    assert terminal.getvalue() == "cuflash: compiling one, once (CuPy keeps it on disk)\n"


def test_nothing_is_said_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)

    def fail(program: Program, device_id: int) -> Any:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(compile_module, "_build", fail)
    with pytest.raises(RuntimeError, match="no such luck"):
        kernel_function(Program("one", (), 0), 0)
    time.sleep(0.2)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("shell", "watched"), [(lambda: None, False), (lambda: SimpleNamespace(kernel=1), True), (SimpleNamespace, False)]
)
def test_notebooks_are_watched(shell: Callable[[], Any], watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=shell))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert progress.is_watched() == watched


def test_without_any_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under pythonw."""
    monkeypatch.setattr(sys, "stderr", None)
    with ThreadPoolExecutor(1) as pool:
        jobs: list[Future[Any]] = [pool.submit(time.sleep, 0.2)]
        progress.show_progress(jobs, "sm_90")
    assert jobs[0].done()
