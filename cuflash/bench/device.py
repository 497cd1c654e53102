"""What `python -m cuflash bench` measures with, on GPUs and with NumPy: a clock, the machine's limits and its name."""

from __future__ import annotations

import hashlib
import importlib
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .. import __version__
from ..gpu.compile import source_digest
from ..problem.arrays import DTYPES, computed_dtype
from ..settings import num_threads

Key = TypeVar("Key", bound=Hashable)
Times = tuple[float, float]
"""Microseconds: the least, and the median."""


class NumpyBackend:
    """NumPy arrays, timed by the clock of the host."""

    name = "numpy"
    gemm_size = 1024
    copy_bytes = 256 << 20
    rest_seconds = 0.2
    """Pause before something is timed, in which the threads of what ran before stop spinning; OpenBLAS's take 0.1 s."""
    enough_seconds = 5.0
    """Time after which a function that is slow has been run often enough."""
    loop_seconds = 1e-3
    """What takes less is run again and again for so long."""

    def __init__(self) -> None:
        self.xp: Any = np

    def device_name(self) -> str:
        """Processor and threads."""
        return f"{processor_name()}, {num_threads()} threads"

    def times(self, function: Callable[[], Any], repeats: int) -> list[float]:
        """Seconds of each of several runs, after one that warms up; at least three if it is slow.

        A GPU's caches are cold, the processor's are not: what is short there would be measured by the interpreter.
        """
        time.sleep(self.rest_seconds)
        number = self._warm_up(function)
        times: list[float] = []
        while len(times) < repeats and (len(times) < 3 or sum(times) < self.enough_seconds):
            times.append(self._time(function, number))
        return times

    def time_candidates(self, candidates: Mapping[Key, Callable[[], Any]], repeats: int = 5) -> dict[Key, Times]:
        """Compare several ways to compute the same: they take turns, so that a machine that changes is fair to all.

        Parameters
        ----------
        candidates : mapping
            Calls by anything that names them, such as a tile and a number of splits; what one raises, this raises.
        repeats : int
            Turns, after one that warms up.

        Returns
        -------
        dict
            Microseconds of each candidate, the least and the median, with caches as in `times`.
        """
        numbers = {name: self._warm_up(function) for name, function in candidates.items()}
        turns = [
            {name: self._time(function, numbers[name]) for name, function in candidates.items()} for _ in range(repeats)
        ]
        seconds = {name: [turn[name] for turn in turns] for name in candidates}
        return {name: (1e6 * min(found), 1e6 * statistics.median(found)) for name, found in seconds.items()}

    def _warm_up(self, function: Callable[[], Any]) -> int:
        """Return how many runs are timed together: one if it takes long enough."""
        function()
        number, seconds = 1, min(self._loop(function, 1) for _ in range(3)) if self.loop_seconds else 0.0
        while seconds < self.loop_seconds:
            number *= 1 + int(self.loop_seconds / seconds)
            seconds = self._loop(function, number)
        return number

    def _time(self, function: Callable[[], Any], number: int) -> float:
        return self._loop(function, number) / number

    def _loop(self, function: Callable[[], Any], number: int) -> float:
        begin = time.perf_counter()
        for _ in range(number):
            function()
        return time.perf_counter() - begin

    def synchronize(self) -> None:
        """Wait for what was begun."""

    def release(self, others: Callable[[], None] | None = None) -> None:
        """Give unused memory back, so that the next library can have it; `others` does it for those that ran before."""
        if others is not None:
            others()

    def versions(self) -> dict[str, str]:
        """Of everything that takes part."""
        found = {"cuflash": __version__, "sources": source_digest(), "modules": module_digest()}
        return found | {"python": platform.python_version(), "numpy": np.__version__}

    def gemm_dtype(self, dtype: str) -> str:
        """Type whose matrix product is the limit: NumPy has no fast one in 16 bits, and cuflash computes in float32."""
        return computed_dtype(dtype)

    def gemm_flops(self, dtype: str) -> float:
        """FLOP/s of the library's matrix product."""
        n = self.gemm_size
        rng = self.xp.random.default_rng(0)
        a, b = (rng.standard_normal((n, n), dtype=np.float32).astype(DTYPES[dtype]) for _ in range(2))
        out = self.xp.empty_like(a)
        # The fastest run: a limit is what the machine can do undisturbed.
        return 2 * n**3 / min(self.times(lambda: self.xp.matmul(a, b, out=out), 5))

    def copy_rate(self) -> float:
        """Bytes per second, read and written, of a copy."""
        source = self.xp.ones(self.copy_bytes // 4, np.float32)
        target = self.xp.empty_like(source)
        return 2 * self.copy_bytes / min(self.times(lambda: self.xp.copyto(target, source), 5))


class GpuBackend(NumpyBackend):
    """CuPy arrays on the current GPU, timed by its own clock."""

    name = "gpu"
    flush_bytes = 256 << 20
    """More than the caches hold."""
    gemm_size = 8192
    copy_bytes = 1 << 30
    rest_seconds = 0.0
    enough_seconds = 0.5
    loop_seconds = 0.0
    cleared_per_second = 2e11
    """Bytes; an H100's driver clears more than twice as many."""

    def __init__(self) -> None:
        super().__init__()
        self.xp = importlib.import_module("cupy")
        self._flush: Any = None

    def flush(self) -> None:
        """Fill the caches with something else, by reading: what is written goes to memory while others are timed."""
        if self._flush is None:
            self._flush = self.xp.ones(self.flush_bytes // 4, np.float32)
        self._flush.sum()

    def device_name(self) -> str:
        """Name of the GPU, from the driver."""
        properties = self.xp.cuda.runtime.getDeviceProperties(self.xp.cuda.runtime.getDevice())
        return str(properties["name"].decode())

    def _time(self, function: Callable[[], Any], number: int) -> float:
        begin, end = self.xp.cuda.Event(), self.xp.cuda.Event()
        # Reading takes the GPU so long that the host, which is ahead meanwhile, adds nothing to what is measured.
        for _ in range(4):
            self.flush()
        begin.record()
        function()
        end.record()
        end.synchronize()
        return 1e-3 * float(self.xp.cuda.get_elapsed_time(begin, end))

    def synchronize(self) -> None:
        """Wait for what was begun."""
        self.xp.cuda.Device().synchronize()

    def release(self, others: Callable[[], None] | None = None) -> None:
        """Give unused memory back, so that the next library can have it, and wait until the driver has cleared it.

        It does so behind the process's back, with bandwidth that would be missing in what is timed next.
        """
        self.synchronize()
        free_bytes = self.xp.cuda.runtime.memGetInfo
        before, _ = free_bytes()
        self.xp.get_default_memory_pool().free_all_blocks()
        super().release(others)
        after, _ = free_bytes()
        time.sleep(max(after - before, 0) / self.cleared_per_second)

    def versions(self) -> dict[str, str]:
        """Of everything that takes part."""
        runtime = self.xp.cuda.runtime
        return {
            **super().versions(),
            "cupy": self.xp.__version__,
            "nvrtc": ".".join(map(str, self.xp.cuda.nvrtc.getVersion())),
            "driver": f"CUDA {runtime.driverGetVersion() // 1000}.{runtime.driverGetVersion() % 1000 // 10}",
        }

    def gemm_dtype(self, dtype: str) -> str:
        """Type whose matrix product is the limit: CuPy multiplies no bfloat16, and GPUs are as fast with float16."""
        return "float16" if dtype == "bfloat16" else dtype


def measure_limits(backend: NumpyBackend, dtypes: list[str]) -> dict[str, Any]:
    """What the machine can do at most: TFLOP/s of the library's matrix products by dtype, and GB/s of a copy."""
    measured: dict[str, float] = {}
    for dtype in dtypes:
        stands_for = backend.gemm_dtype(dtype)
        if stands_for not in measured:
            measured[stands_for] = backend.gemm_flops(stands_for)
    limits = {
        "gemm_tflops": {dtype: 1e-12 * measured[backend.gemm_dtype(dtype)] for dtype in dtypes},
        "copy_gbs": 1e-9 * backend.copy_rate(),
    }
    backend.release()
    return limits


def peak_bytes(xp: Any, call: Callable[[], Any]) -> int:
    """Most memory that a call of the library `xp`, numpy or cupy, holds at once beside what was there, once warm."""
    call()
    if xp is np:
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    class Recorder(xp.cuda.MemoryHook):
        name = "cuflash_peak"
        held = peak = 0

        def malloc_postprocess(self, **event: int) -> None:
            self.held += event["mem_size"]
            self.peak = max(self.peak, self.held)

        def free_postprocess(self, **event: int) -> None:
            self.held -= event["mem_size"]

    with Recorder() as recorder:
        call()
    return int(recorder.peak)


def module_digest() -> str:
    """Twelve hexadecimal digits over the names and contents of the package's Python modules."""
    digest = hashlib.sha256()
    folder = Path(__file__).resolve().parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def processor_name() -> str:
    """Name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
