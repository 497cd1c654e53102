"""Launches that begin while the one in front of them ends: what the driver is given, and that results are whole."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.gpu import overlap

cupy = pytest.importorskip("cupy", reason="needs CuPy, though no GPU")


def test_the_driver_is_given_the_whole_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[Any, ...]] = []

    def launch_kernel(config: int, function: int, arguments: int, extra: None) -> int:
        given = overlap._Config.from_address(config)
        attribute = overlap._Attribute.from_address(given.attributes)
        (memory,) = (ctypes.c_void_p * 1).from_address(arguments)
        packed = ctypes.string_at(memory, 5)
        numbers = [*given.grid, *given.block, given.shared_memory, given.stream, given.num_attributes]
        found.append((function, numbers, attribute.id, attribute.value[0], packed, extra))
        return 0

    monkeypatch.setattr(overlap, "_launch_kernel", lambda: launch_kernel)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=77))
    overlap.start_overlapping(SimpleNamespace(ptr=123), (40,), (256,), 512, b"hello")
    overlap.start_overlapping(SimpleNamespace(ptr=124), (41,), (128,), 0, b"world")
    assert found == [
        (123, [40, 1, 1, 256, 1, 1, 512, 77, 1], 6, 1, b"hello", None),
        (124, [41, 1, 1, 128, 1, 1, 0, 77, 1], 6, 1, b"world", None),
    ]
    assert (ctypes.sizeof(overlap._Config), ctypes.sizeof(overlap._Attribute)) == (56, 72), "those of cuda.h"


def test_what_the_driver_says_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_launch_kernel", lambda: lambda *arguments: 1)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=0))
    monkeypatch.setattr(cupy.cuda.driver, "CUDADriverError", lambda status: RuntimeError(f"status {status}"))
    with pytest.raises(RuntimeError, match="status 1"):
        overlap.start_overlapping(SimpleNamespace(ptr=1), (1,), (32,), 0, b"")


@pytest.mark.parametrize(
    ("capability", "driver", "expected"),
    [(90, (12, 3), True), (120, (13, 0), True), (90, (12, 2), False), (89, (13, 0), False)],
)
def test_where_kernels_overlap(
    capability: int, driver: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "driver_cuda", lambda: driver)
    overlap.can_overlap.cache_clear()
    assert overlap.can_overlap(capability) == expected
    overlap.can_overlap.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("heads_kv", [1, 8])
def test_results_are_those_of_launches_one_after_the_other(heads_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many calls in a row, whose workspace is the same memory, and a graph of them."""
    rng = np.random.default_rng(0)
    q = cupy.asarray(rng.standard_normal((40, 1, 64, 1, 128)).astype(np.float16))
    k, v = (cupy.asarray(rng.standard_normal((1, heads_kv, 9000, 128)).astype(np.float16)) for _ in range(2))

    def compute() -> list[bytes]:
        return [x.tobytes() for x in [cuflash.attention(x, k, v) for x in q]]

    overlapping = compute()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        captured = [cuflash.attention(x, k, v) for x in q[:4]]
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch()
    stream.synchronize()
    monkeypatch.setattr(cuflash.gpu.execute, "_launches", {})
    monkeypatch.setattr(cuflash.gpu.workspace, "can_overlap", lambda compute_capability: False)
    assert overlapping == compute()
    assert [x.tobytes() for x in captured] == overlapping[:4]
