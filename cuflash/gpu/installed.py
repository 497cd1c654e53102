"""What there is of a driver, CuPy and a compiler; what is missing or does not fit, each as one sentence.

The sentences name the command that mends matters. `import cuflash`, the first call and `python -m cuflash doctor` all
take them from here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from types import ModuleType
from typing import Any

import numpy as np

from ..cupy_cache import import_cupy

NEEDED_DRIVERS = {12: 525, 13: 580}
"""The oldest driver for each CUDA that there is a CuPy for."""
LEAST_CAPABILITY = 50
"""Compute capability of the oldest GPUs that a kernel is written for."""
WGMMA_NVRTC = (12, 9)
"""The first compiler that takes the architecture of a source from its own options, behind CuPy's."""
_CUPY_PACKAGES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")


def load_driver() -> Any:
    """The CUDA driver's library, not initialised; None without one."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def driver_installed() -> bool:
    """Whether the CUDA driver's library can be loaded. Does not initialise it."""
    return load_driver() is not None


def driver_cuda() -> tuple[int, int]:
    """Newest CUDA version that the driver runs; (0, 0) without a driver. Does not initialise it."""
    version, driver = ctypes.c_int(0), load_driver()
    if driver is not None:
        driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def gpu_available() -> bool:
    """Whether CuPy is installed and finds a usable GPU. Imports CuPy only where a CUDA driver is installed."""
    if not driver_installed():
        return False
    try:
        return bool(import_cupy().cuda.is_available())
    except Exception:  # a broken CuPy or driver raises many kinds; for us they all mean "no GPU"
        return False


def choose_backend(backend: str) -> ModuleType:
    """CuPy where a GPU is usable, else NumPy; `backend` "numpy" or "gpu" insists.

    Raises
    ------
    RuntimeError
        "gpu" was asked for, and there is no GPU to use; the message says what to do about it.
    """
    if backend == "numpy" or (backend == "auto" and not gpu_available()):
        return np
    missing = why_no_gpu()
    if missing:
        raise RuntimeError(missing)
    cupy: ModuleType = import_cupy()
    return cupy


def why_no_gpu() -> str:
    """Why no GPU can be used, and what to do about it; "" if one can."""
    if not driver_installed():
        return (
            "no CUDA driver; for a GPU, install NVIDIA's driver (a container gets it by docker run --gpus all) and "
            f"{_install()}"
        )
    try:
        cupy = import_cupy()
    except Exception as error:  # of one that does not match the machine, of many kinds
        return f"CUDA driver found, but {why_no_cupy(error)}"
    if cupy.cuda.is_available():
        return ""
    failure = why_driver_fails(cupy)
    if failure:
        return failure
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible} leaves no GPU to use: unset CUDA_VISIBLE_DEVICES"
    return "CuPy finds no GPU: nvidia-smi says whether the driver does"


def why_no_cupy(error: Exception) -> str:
    """What to do about an error of `import cupy`."""
    if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
        return f"CuPy is not installed: {_install()}"
    found = _cupy_packages()
    if len(found) > 1:
        return f"several CuPys ({', '.join(found)}) overwrite each other's files: {_replace()}"
    # CuPy wraps the error that tells in a banner of many lines.
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    first_line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    return f"CuPy cannot be imported ({first_line}): {_replace()}"


def why_driver_fails(cupy: Any) -> str:
    """Why a driver that is installed cannot be used, and what to do about it; "" if it merely has no GPU."""
    runs, built_for = driver_cuda(), cupy.cuda.runtime.runtimeGetVersion() // 1000
    if runs[0] < built_for:
        newer = f"update NVIDIA's driver, to {NEEDED_DRIVERS.get(built_for, 'the newest')} or newer"
        older = f"{_replace()}, or " if runs[0] in NEEDED_DRIVERS else ""
        return f"CuPy is built for CUDA {built_for}, but the driver runs CUDA {_version(runs)} at most: {older}{newer}"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        if "cudaErrorNoDevice" not in str(error):
            return f"the CUDA driver fails ({error}): see nvidia-smi, and restart the machine after a driver's update"
    return ""


def why_no_nvrtc() -> str:
    """Why CUDA sources cannot be compiled, and what to do about it; "" if they can."""
    try:
        _nvrtc().getVersion()
    except Exception:  # whatever the search for its library raises
        return f"CuPy finds no NVRTC, which compiles CUDA kernels: {_install(_cupy_cuda())}"
    return ""


def compiles_for(arch: str) -> bool:
    """Whether there is a compiler here that knows an architecture such as `"sm_80"`."""
    try:
        _nvrtc().getVersion()
        return int(arch.removeprefix("sm_")) in _nvrtc().getSupportedArchs()
    except Exception:  # there is no CuPy, or whatever its search for NVRTC raises
        return False


def why_not_compiled(capability: int) -> str:
    """Why there can't be kernels for GPUs of a compute capability, and what to do about it; "" if there can."""
    missing = why_no_nvrtc()
    if missing:
        return missing
    gpu = f"compute capability {capability // 10}.{capability % 10}"
    if capability < LEAST_CAPABILITY:
        return f"{gpu} is too old, cuflash needs {LEAST_CAPABILITY / 10}: pass NumPy arrays"
    nvrtc = _nvrtc()
    known, version = nvrtc.getSupportedArchs(), _version(nvrtc.getVersion())
    if capability < min(known):
        return f"NVRTC {version} compiles for {gpu} no longer: {_replace(12)}"
    # CuPy compiles for the newest architecture that NVRTC knows where the GPU is newer; within a generation that runs.
    compiled_for = min(capability, max(known))
    if compiled_for not in known or compiled_for // 10 != capability // 10:
        return f"NVRTC {version} does not know {gpu} yet: {_upgrade()}"
    return ""


def why_slower(capability: int) -> str:
    """What keeps the fastest kernels from a GPU that has kernels, and what to do about it; "" if nothing does."""
    version = _nvrtc().getVersion()
    if capability != 90 or version >= WGMMA_NVRTC:
        return ""
    return (
        f"NVRTC {_version(version)} lacks the instructions of the fastest kernels, which 12.9 and newer have: "
        f"{_upgrade()}"
    )


def _nvrtc() -> Any:
    from cupy.cuda import nvrtc

    return nvrtc


def _version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _cupy_packages() -> list[str]:
    """CuPys that pip or conda have installed; they share one folder, so more than one is a fault."""
    from importlib import metadata  # 7 % of the time that importing cuflash took, and few ask

    return [name for name in _CUPY_PACKAGES if any(metadata.distributions(name=name))]


def _cupy_cuda() -> int:
    """Major version of CUDA that the CuPy at hand is built for."""
    import cupy

    major: int = cupy.cuda.runtime.runtimeGetVersion() // 1000
    return major


def _best_cuda() -> int:
    """Major version of CUDA that fits the driver; the newest without a driver."""
    newest = max(NEEDED_DRIVERS)
    return max(min(NEEDED_DRIVERS), min(driver_cuda()[0] or newest, newest))


def _install(cuda: int = 0) -> str:
    return f"pip install 'cuflash[cuda{cuda or _best_cuda()}]'"


def _replace(cuda: int = 0) -> str:
    found = _cupy_packages()
    uninstall = f"pip uninstall -y {' '.join(found)} && " if found else ""
    return uninstall + _install(cuda)


def _upgrade() -> str:
    if _cupy_cuda() < _best_cuda():
        return _replace()
    # The wheels of NVRTC and of the headers follow the version of this one.
    return f"pip install --upgrade 'cuflash[cuda{_cupy_cuda()}]' cuda-toolkit"
