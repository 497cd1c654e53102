"""What keeps a new user from a GPU: each is one sentence, with the command that mends it, wherever it is met."""

from __future__ import annotations

import errno
import os
import re
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import cupy_cache
from cuflash import doctor as doctor_module
from cuflash.gpu import compile as compile_module
from cuflash.gpu import core, installed, launch
from cuflash.gpu.compile import KernelCompileError, kernel_function
from cuflash.plan.plan import make_plan
from cuflash.plan.table import KERNELS, device_of
from cuflash.problem.describe import describe_attention
from cuflash.settings import AUTOMATIC

from .machines import ARCHS, Machine

INSUFFICIENT = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
NO_DEVICE = "cudaErrorNoDevice: no CUDA-capable device is detected"
BANNER = ImportError("\n====\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: libcublas.so.13\n====\n")
BANNER.__cause__ = ImportError("libcublas.so.13: cannot open shared object file\n")
CUDA12: dict[str, Any] = {"built_for": 12090, "packages": ("cupy-cuda12x",)}

NO_GPU = {
    "no driver": (
        Machine(driver=None),
        "no CUDA driver; for a GPU, install NVIDIA's driver (a container gets it by docker run --gpus all) and "
        "pip install 'cuflash[cuda13]'",
    ),
    "no CuPy": (
        Machine(packages=(), import_error=ModuleNotFoundError("No module named 'cupy'", name="cupy")),
        "CUDA driver found, but CuPy is not installed: pip install 'cuflash[cuda13]'",
    ),
    "no CuPy, older driver": (
        Machine(driver=12040, packages=(), import_error=ModuleNotFoundError("No module named 'cupy'", name="cupy")),
        "CUDA driver found, but CuPy is not installed: pip install 'cuflash[cuda12]'",
    ),
    "broken CuPy": (
        Machine(import_error=BANNER),
        "CUDA driver found, but CuPy cannot be imported (libcublas.so.13: cannot open shared object file): "
        "pip uninstall -y cupy-cuda13x && pip install 'cuflash[cuda13]'",
    ),
    "error without words": (
        Machine(packages=(), import_error=RuntimeError()),
        "CUDA driver found, but CuPy cannot be imported (RuntimeError): pip install 'cuflash[cuda13]'",
    ),
    "two CuPys": (
        Machine(packages=("cupy-cuda12x", "cupy-cuda13x"), import_error=ImportError("undefined symbol")),
        "CUDA driver found, but several CuPys (cupy-cuda12x, cupy-cuda13x) overwrite each other's files: "
        "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'cuflash[cuda13]'",
    ),
    "CuPy for a newer driver": (
        Machine(driver=12040, device_error=INSUFFICIENT),
        "CuPy is built for CUDA 13, but the driver runs CUDA 12.4 at most: pip uninstall -y cupy-cuda13x && "
        "pip install 'cuflash[cuda12]', or update NVIDIA's driver, to 580 or newer",
    ),
    "driver too old for any CuPy": (
        Machine(driver=11080, device_error=INSUFFICIENT, **CUDA12),
        "CuPy is built for CUDA 12, but the driver runs CUDA 11.8 at most: update NVIDIA's driver, to 525 or newer",
    ),
    "failing driver": (
        Machine(device_error="cudaErrorSystemDriverMismatch: mismatch"),
        "the CUDA driver fails (cudaErrorSystemDriverMismatch: mismatch): see nvidia-smi, and restart the machine "
        "after a driver's update",
    ),
    "no device": (
        Machine(device_error=NO_DEVICE),
        "CuPy finds no GPU: nvidia-smi says whether the driver does",
    ),
}  # fmt: skip
"""By case: a machine, and why it has no GPU to use."""

NOT_COMPILED = {
    "no NVRTC": (
        Machine(nvrtc=None),
        "CuPy finds no NVRTC, which compiles CUDA kernels: pip install 'cuflash[cuda13]'",
    ),
    "no NVRTC for CUDA 12": (
        Machine(nvrtc=None, **CUDA12),
        "CuPy finds no NVRTC, which compiles CUDA kernels: pip install 'cuflash[cuda12]'",
    ),
    "GPU too old for CUDA 13": (
        Machine(capability=(7, 0)),
        "NVRTC 13.0 compiles for compute capability 7.0 no longer: pip uninstall -y cupy-cuda13x && "
        "pip install 'cuflash[cuda12]'",
    ),
    "GPU too old for any": (
        Machine(capability=(3, 7), **CUDA12),
        "compute capability 3.7 is too old, cuflash needs 5.0: pass NumPy arrays",
    ),
    "GPU too new for an old NVRTC": (
        Machine(driver=12080, capability=(12, 0), nvrtc=(12, 4), archs=[50, 75, 80, 90], **CUDA12),
        "NVRTC 12.4 does not know compute capability 12.0 yet: pip install --upgrade 'cuflash[cuda12]' cuda-toolkit",
    ),
    "GPU too new for CUDA 12": (
        Machine(capability=(11, 0), nvrtc=(12, 9), **CUDA12),
        "NVRTC 12.9 does not know compute capability 11.0 yet: pip uninstall -y cupy-cuda12x && "
        "pip install 'cuflash[cuda13]'",
    ),
}
"""By case: a machine, and why no kernels can be compiled for its GPU."""

OLD_NVRTC = Machine(driver=12080, nvrtc=(12, 8), **CUDA12)
SLOWER = (
    "NVRTC 12.8 lacks the instructions of the fastest kernels, which 12.9 and newer have: "
    "pip install --upgrade 'cuflash[cuda12]' cuda-toolkit"
)
Case = tuple[Machine, str]


def cases(table: dict[str, Case]) -> Any:
    return pytest.mark.parametrize(("machine", "sentence"), table.values(), ids=table.keys())


def verdict(capsys: pytest.CaptureFixture[str]) -> str:
    """Run the doctor, whose NumPy back end must be healthy; return what it says last."""
    assert doctor_module.doctor() == 0
    return capsys.readouterr().out.splitlines()[-1].removeprefix("verdict: ")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))


@cases(NO_GPU)
def test_doctor_says_why_there_is_no_gpu(
    machine: Machine, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.set_up(monkeypatch)
    assert verdict(capsys) == f"ready for NumPy arrays only: {sentence}"
    with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
        installed.choose_backend("cupy")


@cases(NOT_COMPILED)
def test_doctor_says_why_nothing_compiles(
    machine: Machine, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.set_up(monkeypatch)
    assert verdict(capsys) == f"ready for NumPy arrays only: GPU 0 (Toaster) cannot be used: {sentence}"


def test_doctor_names_a_variable_that_hides_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Machine(device_error=NO_DEVICE).set_up(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert verdict(capsys).endswith("CUDA_VISIBLE_DEVICES=7 leaves no GPU to use: unset CUDA_VISIBLE_DEVICES")


def test_doctor_tells_of_an_old_nvrtc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    OLD_NVRTC.set_up(monkeypatch)
    expected = (
        f"ready, on GPU 0 (Toaster), and for NumPy arrays on the CPU; but GPU 0 (Toaster) could be faster: {SLOWER}"
    )
    assert verdict(capsys) == expected
    for better in (OLD_NVRTC._replace(nvrtc=(12, 9)), OLD_NVRTC._replace(capability=(8, 0))):
        better.set_up(monkeypatch)
        assert verdict(capsys) == "ready, on GPU 0 (Toaster), and for NumPy arrays on the CPU"


def test_newest_kernels_want_what_doctor_asks_for() -> None:
    """Rows refuse for lack of a compiler where `why_slower` has something to say, and nowhere else."""
    x = np.ones((4, 16, 1024, 128), np.float16)
    traits = describe_attention(x, x, x)[0].traits
    for capability in (75, 80, 86, 90, 100, 120):
        device = device_of(capability)
        before, now = (
            [spec.refusal(traits, device._replace(**{device._fields[3]: has})) for spec in KERNELS]
            for has in (False, True)
        )
        assert (before != now) == (capability == 90)


@pytest.mark.parametrize("kind", ["no such folder", "full disk"])
def test_doctor_tries_the_cache(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Machine().set_up(monkeypatch)
    if kind == "full disk":
        folder, remedy = tmp_path, f"free some space in {tmp_path}, or export CUPY_CACHE_DIR=/a/folder/with/space"

        def full(**_: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(cupy_cache, "tempfile", SimpleNamespace(TemporaryFile=full))
    else:  # for root, too, unlike one that is read-only
        (tmp_path / "file").touch()
        folder, remedy = tmp_path / "file" / "cache", "export CUPY_CACHE_DIR=/a/folder/that/can/be/written"
    monkeypatch.setenv("CUPY_CACHE_DIR", str(folder))
    said = verdict(capsys)
    assert said.startswith("ready, on GPU 0 (Toaster), and for NumPy arrays on the CPU; but CuPy cannot keep compiled ")
    assert said.endswith(f", so every process compiles its own: {remedy}")


@pytest.mark.parametrize("mode", [0o500, 0o700])
def test_read_only_home(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode == 0o500 and (not hasattr(os, "geteuid") or os.geteuid() == 0):
        pytest.skip("nothing is read-only for this user")
    home = tmp_path / "home"
    home.mkdir(mode=mode)
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    assert bool(cupy_cache.why_nothing_is_kept()) == (mode == 0o500)


def test_the_first_kernel_on_a_full_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_cache, "_warnings", count())
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    sentence = r"\(\[Errno 28\] No space left on device\), so every process compiles its own: free some space in "
    with pytest.warns(RuntimeWarning, match=sentence):
        cupy_cache.compile_in_memory(OSError(errno.ENOSPC, "No space left on device"))


SILENT = ("no driver", "no CuPy", "no CuPy, older driver", "no device")
"""Machines whose users may well want NumPy alone."""


@cases({name: case for name, case in NO_GPU.items() if name not in ("no driver", "failing driver")})
def test_import_warns(
    machine: Machine,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    request: pytest.FixtureRequest,
) -> None:
    machine.set_up(monkeypatch)
    core.compile_core_kernels()
    expected = "cuflash could not compile its kernels at import: " + sentence.removeprefix("CUDA driver found, but ")
    wanted = [] if request.node.callspec.id in SILENT else [expected]
    assert [str(warning.message) for warning in recwarn] == wanted


def _device(capability: tuple[int, int]) -> Any:
    attributes = {"MaxSharedMemoryPerBlockOptin": 99 << 10, "MultiProcessorCount": 2}
    return SimpleNamespace(attributes=attributes, compute_capability="{}{}".format(*capability))


@cases({name: case for name, case in NOT_COMPILED.items() if name.startswith("no NVRTC")})
def test_import_and_first_call_want_a_compiler(
    machine: Machine, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set_up(monkeypatch)
    sys.modules["cupy"].cuda.Device = lambda number: _device(machine.capability)
    launch.device_info.cache_clear()
    with pytest.warns(RuntimeWarning, match=f"at import: {re.escape(sentence)}$"):
        core.compile_core_kernels()
    with pytest.raises(KernelCompileError, match=f"^{re.escape(sentence)}$"):
        launch.device_info(0)
    launch.device_info.cache_clear()


@cases(NOT_COMPILED)
def test_the_first_kernel_says_why_it_does_not_compile(
    machine: Machine, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set_up(monkeypatch)

    def refuse(**_: Any) -> Any:
        raise RuntimeError("nvrtc: error: invalid value for --gpu-architecture (-arch)\nand many more lines")

    sys.modules["cupy"].RawModule = refuse
    monkeypatch.setattr(compile_module, "_functions", {})
    x = np.ones((2, 5, 64), np.float32)
    program = make_plan(describe_attention(x, x, x)[0], device_of(70), AUTOMATIC).program
    with pytest.raises(KernelCompileError, match=rf"^could not compile or load // .*: {re.escape(sentence)}$"):
        kernel_function(program, 0)


def test_explain_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(nvrtc=None).set_up(monkeypatch)
    x = np.empty((1, 16, 77, 40), np.float16)
    assert "unknown (no NVRTC here" in str(cuflash.explain(cuflash.attention, x, x, x, device=86))


@pytest.mark.parametrize(
    ("capability", "archs", "works"),
    [
        ((8, 6), ARCHS[13], True),
        ((12, 1), [75, 90, 100, 120], True),  # CuPy takes 12.0, which runs on it
        ((10, 3), [75, 90, 100, 120], False),  # CuPy asks for 10.3
        ((13, 0), ARCHS[13], False),
    ],
)
def test_what_a_compiler_serves(
    capability: tuple[int, int], archs: list[int], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(archs=archs).set_up(monkeypatch)
    assert (installed.why_not_compiled(10 * capability[0] + capability[1]) == "") == works


def test_packages_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installed._cupy_packages() == []
    for name in ("cupy_cuda13x", "cupy_cuda12x", "cupyx_other"):
        (tmp_path / f"{name}-14.2.0.dist-info").mkdir()
        (tmp_path / f"{name}-14.2.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 14.2.0\n")
    assert installed._cupy_packages() == ["cupy-cuda12x", "cupy-cuda13x"]
