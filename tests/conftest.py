"""Fixtures for all tests, and two markers.

Tests marked `gpu` are skipped, and counted, where there is no usable GPU. Of those marked `share(parts)` one in so many
runs, another one whenever the CUDA sources change; all of them with `--thorough`, or where tests are named or chosen.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

# The caller's settings stay out of the tests; before the first import of cuflash, which reads some of them.
for _name in [name for name in os.environ if name.startswith("CUFLASH_") or name == "CUPY_TF32"]:
    del os.environ[_name]

# Processes of `pytest -n` begin with one GPU after the other, before CUDA is asked which there are.
_gpus = [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if _worker and len(_gpus) > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
    _first = int(_worker.removeprefix("gw")) % len(_gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus[_first:] + _gpus[:_first])

# Programs that tests start find this checkout too.
_paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="run all tests marked share(parts), rather than one part of them"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing_for_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
    if not (config.getoption("thorough") or config.option.keyword or any("::" in name for name in config.args)):
        left = [item for item in items if not _has_its_turn(item)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def _has_its_turn(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("share")
    if marker is None:
        return True
    from cuflash.plan.gated import GATED_KERNELS
    from cuflash.plan.table import KERNELS

    # Kernels that take the same case take turns, and so does what is parametrised by `turn`.
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if "turn" in params:
        return _in_turn(item.originalname, marker.args[0], params["turn"])
    if "spec" in params:
        spec = params["spec"]
        return _in_turn(item.nodeid.replace(spec.name, ""), marker.args[0], (*KERNELS, *GATED_KERNELS).index(spec))
    return _in_turn(item.nodeid, marker.args[0])


def _in_turn(name: str, parts: int, rank: int = 0) -> bool:
    from cuflash.gpu.compile import source_digest

    return (crc32(f"{name} {source_digest()}".encode()) + rank) % parts == 0


Share = Callable[[str, int], bool]


@pytest.fixture
def share(request: pytest.FixtureRequest) -> Share:
    """`share(name, parts)`: whether something within a test has its turn, as tests marked `share` have."""
    return (lambda name, parts: True) if request.config.getoption("thorough") else _in_turn


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    reasons = [report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple)]
    lacking = [reason.removeprefix("Skipped: ") for reason in reasons if reason.startswith(f"Skipped: {NO_GPU}")]
    if lacking:
        missing = "; ".join(sorted({reason.removeprefix(NO_GPU) for reason in lacking}))
        terminalreporter.write_line(f"{len(lacking)} tests were skipped for lack of a GPU: {missing}", yellow=True)
    from cuflash.plan.names import kernel_names

    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        name, duration = getattr(report, "nodeid", ""), getattr(report, "duration", 0.0)
        seconds[name.removeprefix("tests/").partition("/")[0]] += duration
        for kernel in kernel_names()[:-1]:
            if kernel in name:
                seconds[kernel] += duration
    taken = ", ".join(f"{name} {time:.0f}" for name, time in sorted(seconds.items()) if time >= 1)
    if taken:
        terminalreporter.write_line(f"seconds by folder, and of tests named for a kernel: {taken}")


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


@pytest.fixture(autouse=True)
def _one_thread_of_blas(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests of kernels, whose products in float64 are small: other threads of BLAS would wait at full speed."""
    with _blas().limit(limits=1) if request.path.parent.name in ("emulator", "kernels", "plan") else nullcontext():
        yield


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that are the same in every run and different in every test."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture(autouse=True)
def _leave_memory_to_other_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if _worker and request.node.get_closest_marker("gpu") and "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


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
