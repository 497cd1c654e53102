"""Arrays between a GPU and the host's memory."""

from __future__ import annotations

from typing import Any

import numpy as np


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
