"""Fixtures for all tests, and the `gpu` marker: such tests are skipped, and counted, where there is no usable GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

# The caller's settings stay out of the tests; before the first import of cuflash, which reads some of them.
for _name in [name for name in os.environ if name.startswith("CUFLASH_") or name == "CUPY_TF32"]:
    del os.environ[_name]

NO_GPU = "no GPU: "
"""How the reason of every skip for lack of a GPU begins."""


@lru_cache(maxsize=1)
def missing_for_gpu() -> str | None:
    """What keeps tests marked gpu from running; None if nothing does."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(library)
    except OSError:
        return f"{NO_GPU}the CUDA driver ({library}) is not installed"
    try:
        import cupy
    except Exception as error:
        return f"{NO_GPU}CuPy cannot be imported ({error})"
    try:
        if cupy.cuda.runtime.getDeviceCount() == 0:
            return f"{NO_GPU}CuPy finds no device"
        cupy.empty(1)
    except Exception as error:
        return f"{NO_GPU}CuPy cannot use the device ({error})"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing_for_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    reasons = [report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple)]
    lacking = [reason.removeprefix("Skipped: ") for reason in reasons if reason.startswith(f"Skipped: {NO_GPU}")]
    if lacking:
        missing = "; ".join(sorted({reason.removeprefix(NO_GPU) for reason in lacking}))
        terminalreporter.write_line(f"{len(lacking)} tests were skipped for lack of a GPU: {missing}", yellow=True)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that are the same in every run and different in every test."""
    return np.random.default_rng(list(request.node.name.encode()))


@contextmanager
def _recorded_allocations() -> Iterator[list[int]]:
    import cupy

    sizes: list[int] = []

    class Recorder(cupy.cuda.MemoryHook):
        name = "recorder"

        def malloc_preprocess(self, **kwargs: Any) -> None:
            sizes.append(kwargs["size"])

    with Recorder():
        yield sizes


@pytest.fixture
def allocations() -> Callable[[], AbstractContextManager[list[int]]]:
    """`with allocations() as sizes:` lists what CuPy is asked for meanwhile, in bytes."""
    return _recorded_allocations
