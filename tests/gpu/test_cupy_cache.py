"""CuPy's folder of compiled kernels, where it can't be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash import cupy_cache
from cuflash.gpu import compile as compile_module
from cuflash.gpu.compile import KernelCompileError, kernel_function
from cuflash.plan.build import Program
from cuflash.plan.plan import make_plan
from cuflash.plan.table import device_of
from cuflash.problem.describe import describe_attention
from cuflash.settings import AUTOMATIC

cupy = pytest.importorskip("cupy", reason="needs CuPy, though no GPU")
MESSAGE = "CuPy cannot keep compiled kernels on disk"


def in_a_new_process(code: str, folder: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    environment |= {"CUPY_CACHE_DIR": str(folder)}
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run


@pytest.mark.parametrize("asked_for", ["0", "1"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, asked_for: str) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    code = """
import os
from cuflash.cupy_cache import import_cupy
for _ in range(2):
    import_cupy()
import cupy
print(os.environ["CUPY_CACHE_DIR"], os.environ["CUPY_CACHE_IN_MEMORY"], cupy.float32)
"""
    done = in_a_new_process(code, folder, CUPY_CACHE_IN_MEMORY=asked_for)
    assert done.stdout == f"{folder} 1 <class 'numpy.float32'>\n"
    assert done.stderr.count(MESSAGE) == (asked_for == "0")


def test_a_folder_that_can_be_made(tmp_path: Path) -> None:
    code = "import os; from cuflash.cupy_cache import import_cupy; import_cupy(); print(os.environ['CUPY_CACHE_DIR'])"
    done = in_a_new_process(code, tmp_path / "new" / "cache", CUPY_CACHE_IN_MEMORY="0")
    assert (done.stdout, done.stderr) == (f"{tmp_path / 'new' / 'cache'}\n", "")
    assert (tmp_path / "new" / "cache").is_dir()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """Plans of several kernels, with nothing compiled yet, nothing warned of, and modules that are not loaded."""
    from cupy.cuda import compiler

    class RawModule:
        def __init__(self, code: str, **_: Any) -> None:
            self._code = code

        def get_function(self, name: str) -> Any:
            compiler._compile_module_with_cache(self._code, ("--std=c++17",), arch="80")
            return SimpleNamespace(kernel=name)

    module = SimpleNamespace(load=lambda binary: None, _set_mapping=lambda mapping: None)
    monkeypatch.setattr(compiler, "function", SimpleNamespace(Module=lambda: module))
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch=None: ("-arch=sm_80", "cubin"))
    monkeypatch.setattr(compile_module, "entry_text", lambda program: f"// {program}")
    monkeypatch.setattr(cupy, "RawModule", RawModule)
    monkeypatch.setattr(cupy.cuda, "Device", nullcontext)
    monkeypatch.setattr(compile_module, "_functions", {})
    monkeypatch.setattr(cupy_cache, "_warnings", count())
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    found = []
    for head_dim in (64, 128, 192, 256):
        x = np.ones((2, 5, head_dim), np.float16)
        found.append(make_plan(describe_attention(x, x, x)[0], device_of(80), AUTOMATIC).program)
    yield found


def _compile(programs: list[Program]) -> list[Any]:
    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(lambda program: kernel_function(program, 0), programs))


@pytest.mark.parametrize("failure", ["no such folder", "disk full", "unreadable"])
def test_a_folder_that_cannot_be_used(
    failure: str, programs: list[Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, but with CuPy's own compiler and cache."""
    from cupy.cuda import compiler

    def refuse(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    backend = type(compiler._kernel_cache_backend)(str(tmp_path))
    if failure == "no such folder":  # as root, too, unlike one that is read-only
        backend._cache_dir = str(tmp_path / "gone")
    else:
        monkeypatch.setattr(backend, "save" if failure == "disk full" else "load", refuse)
    monkeypatch.setattr(compiler, "_kernel_cache_backend", backend)
    with pytest.warns(RuntimeWarning, match=MESSAGE) as warned:
        assert _compile(programs) == [f"cuflash_{program.kernel}" for program in programs]
    assert len(warned) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_can_be_used(programs: list[Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import compiler

    monkeypatch.setattr(compiler, "_kernel_cache_backend", type(compiler._kernel_cache_backend)(str(tmp_path)))
    _compile(programs)
    assert len(list(tmp_path.iterdir())) == len(programs)
    assert os.environ["CUPY_CACHE_IN_MEMORY"] == "0"


def test_another_error_is_no_matter_of_the_folder(programs: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("no headers")

    monkeypatch.setattr(cupy, "RawModule", refuse)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    with pytest.raises(KernelCompileError, match="no headers"):
        kernel_function(programs[0], 0)


@pytest.mark.gpu
@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that nobody can write, root neither")
@pytest.mark.parametrize("folder", ["/proc", "/proc/cache"])
def test_calls_with_a_folder_that_cannot_be_written(folder: str) -> None:
    code = "import cuflash, cupy; x = cupy.ones((2, 5, 8)); assert (cuflash.attention(x, x, x) == 1).all()"
    done = in_a_new_process(code, folder, CUPY_CACHE_IN_MEMORY="0")
    assert done.stderr.count(MESSAGE) == 1
