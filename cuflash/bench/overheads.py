"""What calls cost beside their kernels: import, host time, compile time, memory. Group "overheads" of the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..dense import attention
from ..gpu.compile import compile_offline
from ..gpu.installed import compiles_for
from ..gpu.launch import device_info
from ..plan.plan import make_plan
from ..plan.table import KERNELS, Device, KernelSpec, device_of
from ..problem.arrays import DTYPES, FLOAT_NAMES, ArrayInfo, contiguous_strides
from ..problem.describe import describe_attention
from ..settings import Settings
from .device import NumpyBackend, Times, peak_bytes
from .host import host_times, new_head_dims, repeated

CAPABILITY = 90
"""What kernels are compiled for, to time it, on machines without a GPU."""
SmallCalls = Callable[[Any], Mapping[str, Callable[[], Any]]]
"""Takes a small query (1, 1, 16, 64) and returns other libraries' calls on it, by name, for their host time."""


def overheads(backend: NumpyBackend, small_calls: SmallCalls | None, quick: bool) -> dict[str, Any]:
    """Measure everything that the machine allows; what it doesn't is left out.

    Parameters
    ----------
    backend : NumpyBackend
        Or `GpuBackend`.
    small_calls : callable, optional
        For comparison with the host time of a call.
    quick : bool
        Fewer kernels, shorter sequences, and no imports.
    """
    found: dict[str, Any] = {
        "import_s": {} if quick else import_times(backend.name, 3),
        "calls_us": host_times(backend),
        "others_us": other_host_times(backend, small_calls),
        "compile": compile_times(_device(backend), ["float16"] if quick else list(FLOAT_NAMES)),
    }
    if backend.name == "numpy":
        seqlen = 4096 if quick else 32768
        found["memory_mib"] = {f"1 head, N {seqlen}, D 64, causal": peak_memory(seqlen)}
    return {name: value for name, value in found.items() if value}


def _device(backend: NumpyBackend) -> Device:
    if backend.name == "numpy":
        return device_of(CAPABILITY)
    return device_info(backend.xp.cuda.runtime.getDevice())


def import_times(backend: str, runs: int) -> dict[str, float]:
    """Seconds that `import cuflash` adds to that of its array library; on a GPU also with an empty kernel cache."""
    before, compile_when = ("import cupy; cupy.empty(1)", "import") if backend == "gpu" else ("import numpy", "lazy")
    code = f"import time; {before}; begin = time.perf_counter(); import cuflash; print(time.perf_counter() - begin)"
    with tempfile.TemporaryDirectory() as folder:

        def run(when: str = compile_when) -> float:
            # Python's compiled modules are kept, whatever this process is told: a second import finds them.
            kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
            return float(_run_python(code, CUFLASH_COMPILE=when, CUPY_CACHE_DIR=folder, **kept))

        run("lazy")
        cold = run()
        times = {"warm": min(run() for _ in range(runs))}
        return {"cold": cold} | times if backend == "gpu" else times


def _run_python(code: str, *arguments: str, **variables: str) -> str:
    """What code prints in a process of its own that finds this package."""
    root = str(Path(__file__).resolve().parents[2])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True).stdout


def other_host_times(backend: NumpyBackend, small_calls: SmallCalls | None) -> dict[str, Times]:
    """Host time of a call that needs a plan of its own; of parts of a call, and of other libraries' calls."""
    xp = backend.xp
    q = xp.ones((1, 1, 16, 64), np.float32)
    calls: dict[str, Callable[[], Any]] = {f"{xp.__name__}.empty": lambda: xp.empty(q.shape, q.dtype)}
    if backend.name == "gpu":
        kernel = xp.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
        calls["RawKernel launch"] = lambda: kernel((1,), (32,), ())
    if small_calls is not None:
        calls |= small_calls(q)
    times = {name: repeated(backend, call) for name, call in calls.items()}
    return {"first call of a head_dim": new_head_dims(backend)} | times


def compile_times(device: Device, dtypes: list[str]) -> list[dict[str, Any]]:
    """Compile each row of the table at head_dim 128 for a GPU that need not be there; processor time in seconds.

    In a process of its own: where cuDNN has run, and brought the driver's compiler, NVRTC makes other code.
    """
    code = (
        "import json, sys; from cuflash.bench.overheads import compile_rows as run; "
        "print(json.dumps(run(*json.loads(sys.argv[1]))))"
    )
    rows: list[dict[str, Any]] = json.loads(_run_python(code, json.dumps([device, dtypes]), CUFLASH_COMPILE="lazy"))
    return rows


def compile_rows(device_fields: list[Any], dtypes: list[str]) -> list[dict[str, Any]]:
    """What `compile_times` returns, compiled here."""
    device = Device(*device_fields)
    if not compiles_for(device.arch):
        return []

    def compile_one(spec: KernelSpec, dtype: str) -> dict[str, Any] | None:
        shape = (4, 16, 4096, 128)
        x = ArrayInfo(None, shape, contiguous_strides(shape, DTYPES[dtype].itemsize), dtype, 0, 0, True)
        problem, _ = describe_attention(x, x, x, causal=True)
        if spec.refusal(problem.traits, device) is not None:
            return None
        plan = make_plan(problem, device, Settings(spec.name, "", False))
        resources = compile_offline(plan.program, device.arch)
        row = {"kernel": spec.name, "dtype": dtype, "head_dim": 128, "tile": str(plan.tile), "arch": device.arch}
        return row | resources._asdict()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(compile_one, spec, dtype) for spec in KERNELS for dtype in dtypes]
        rows = [job.result() for job in jobs]
    return [row for row in rows if row is not None]


def peak_memory(seqlen: int) -> float:
    """MiB that the NumPy back end takes for one head of a long sequence, beside its inputs and results."""
    q = np.ones((1, seqlen, 64), np.float32)
    out, lse = np.empty_like(q), np.empty(q.shape[:-1], np.float32)
    return peak_bytes(np, lambda: attention(q, q, q, causal=True, out=out, lse=lse)) / 2**20
