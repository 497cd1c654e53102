"""Whether there is a GPU to use, and the array library that follows from it."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType

import numpy as np

from ..cupy_cache import import_cupy


def driver_installed() -> bool:
    """Whether the CUDA driver's library can be loaded. Does not initialise it."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def gpu_available() -> bool:
    """Whether CuPy is installed and finds a usable GPU. Imports CuPy only where a CUDA driver is installed."""
    if not driver_installed():
        return False
    try:
        return bool(import_cupy().cuda.is_available())
    except Exception:  # a broken CuPy or driver raises many kinds; for us they all mean "no GPU"
        return False


def choose_backend(backend: str) -> ModuleType:
    """CuPy where a GPU is usable, else NumPy; `backend` "numpy" or "cupy" insists.

    Raises
    ------
    RuntimeError
        "cupy" was asked for, and it isn't installed or finds no GPU.
    """
    if backend == "numpy" or (backend == "auto" and not gpu_available()):
        return np
    try:
        cupy = import_cupy()
    except ImportError as error:
        raise RuntimeError(f"CuPy cannot be imported ({error}); install cuflash[cuda12] or cuflash[cuda13]") from error
    if not gpu_available():
        raise RuntimeError("CuPy finds no GPU")
    return cupy
