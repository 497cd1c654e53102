"""Arrays between a GPU and the host's memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..problem.arrays import HOST


def to_host(x: Any) -> np.ndarray:
    """Return a contiguous copy of a GPU array; waits for it."""
    import cupy

    with cupy.cuda.Device(x.device.id):
        return np.ascontiguousarray(cupy.asnumpy(x))


def from_host(memory: np.ndarray, x: Any) -> None:
    """Copy an array into one of a GPU; waits for it."""
    import cupy

    with cupy.cuda.Device(x.device.id):
        x.set(memory)
        cupy.cuda.get_current_stream().synchronize()


def on_gpu(x: np.ndarray) -> Any:
    """Return a copy on the current GPU."""
    import cupy

    return cupy.asarray(x)


def use_device(device_id: int) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is the current one; of NumPy arrays' device, one that changes nothing."""
    if device_id == HOST:
        return nullcontext()
    import cupy

    device: AbstractContextManager[Any] = cupy.cuda.Device(device_id)
    return device
