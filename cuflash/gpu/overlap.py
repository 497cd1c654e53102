"""Launches that may begin while the one in front of them ends: a part of a microsecond that nothing else gives.

CuPy has no such launches, so the driver is called itself. A kernel that is launched so waits for the one in front of it
before it touches memory (`wait_for_launch_before` of cuda_src/ptx/overlap.cuh).
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any

import numpy as np

from .arguments import LARGEST
from .installed import driver_cuda, load_driver

LEAST_CAPABILITY = 90
LEAST_DRIVER = (12, 3)
"""The first one that captures such launches into graphs."""
_OVERLAPS = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _Launch:
    """What the driver is given, with memory for arguments: all in one piece that does not move."""

    def __init__(self) -> None:
        arguments = np.empty(LARGEST, np.uint8)
        self.arguments = arguments.data
        self._attribute = _Attribute(_OVERLAPS, 0, (ctypes.c_int * 16)(1))
        ones = (ctypes.c_uint * 3)(1, 1, 1)
        self.config = _Config(ones, ones, 0, None, ctypes.addressof(self._attribute), 1)
        self._by_value = (ctypes.c_void_p * 1)(arguments.ctypes.data)
        self.addresses = ctypes.addressof(self.config), ctypes.addressof(self._by_value)


_free_launches: list[_Launch] = []


@lru_cache(maxsize=1)
def _launch_kernel() -> Any:
    function = load_driver().cuLaunchKernelEx
    function.argtypes, function.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return function


@lru_cache(maxsize=16)
def can_overlap(compute_capability: int) -> bool:
    """Whether kernels of a GPU can be launched so."""
    return compute_capability >= LEAST_CAPABILITY and driver_cuda() >= LEAST_DRIVER


def start_overlapping(function: Any, grid: tuple[int], block: tuple[int], shared_memory: int, packed: bytes) -> None:
    """Launch a kernel, CuPy's Function, with a packed struct on the current stream of the current device."""
    cupy = sys.modules["cupy"]
    # As in `arguments.start`: no other thread, and no call that interrupts this one, has the same.
    try:
        launch = _free_launches.pop()
    except IndexError:
        launch = _Launch()
    launch.arguments[: len(packed)] = packed
    config = launch.config
    config.grid[0], config.block[0], config.shared_memory = grid[0], block[0], shared_memory
    config.stream = cupy.cuda.get_current_stream().ptr
    at_config, at_arguments = launch.addresses
    status = _launch_kernel()(at_config, function.ptr, at_arguments, None)
    _free_launches.append(launch)
    if status:
        raise cupy.cuda.driver.CUDADriverError(status)
