"""Speed of `cuflash.attention` on a GPU beside its peers, after a check against float64; host time per call; import
time.

python benchmarks/forward.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from peers import peers

import cuflash
from cuflash import launch
from cuflash.arrays import DTYPES


class Problem(NamedTuple):
    """One line of the table."""

    dtype: str
    head_dim: int
    causal: bool
    seqlen: int = 4096
    tokens: int = 8192
    hidden: int = 1024

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, sequence, feature)."""
        return max(1, self.tokens // self.seqlen), max(1, self.hidden // self.head_dim), self.seqlen, self.head_dim

    @property
    def flops(self) -> float:
        """Two products of N x N x D, half of them visible when causal."""
        batch, heads, seqlen, head_dim = self.shape
        return 4.0 * batch * heads * seqlen * seqlen * head_dim / (2 if self.causal else 1)


PROBLEMS = [
    Problem(dtype, d, causal)
    for dtype in ("float32", "float64")
    for d in (32, 64, 128, 256)
    for causal in (False, True)
]
PROBLEMS += [Problem(dtype, d, False) for dtype in ("float16", "bfloat16") for d in (64, 128)]
PROBLEMS += [
    Problem("float32", 512, False),
    Problem("float32", 64, True, seqlen=512),
    Problem("float32", 64, False, seqlen=16384, tokens=16384),
]


def seconds(function: Callable[[], Any], repeats: int, flush: Any) -> float:
    """Median time on the GPU, the L2 cache filled with something else before each run (by reading)."""
    function()
    times = []
    for _ in range(repeats):
        flush.sum()
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e-3)
    return float(np.median(times))


def relative_error(out: Any, q: Any, k: Any, v: Any, causal: bool) -> float:
    """Error of the last 64 queries of the first head, which see all keys, against float64."""
    rows = slice(q.shape[-2] - 64, None)
    wide = [x[0, 0].astype(np.float64) for x in (q[:, :, rows], k, v)]
    scores = wide[0] @ wide[1].T * q.shape[-1] ** -0.5
    if causal:
        scores = cupy.where(cupy.tri(64, k.shape[-2], k.shape[-2] - 64, dtype=bool), scores, -cupy.inf)
    weights = cupy.exp(scores - scores.max(-1, keepdims=True))
    exact = weights @ wide[2] / weights.sum(-1, keepdims=True)
    return float(cupy.linalg.norm(out[0, 0, rows].astype(np.float64) - exact) / cupy.linalg.norm(exact))


ALLOWED = {"float16": 4e-4, "bfloat16": 3e-3, "float32": 2e-6, "float64": 2e-15}


def measure(problem: Problem, repeats: int, flush: Any) -> dict[str, Any]:
    """Time one problem with cuflash and every peer that serves it."""
    rng = cupy.random.default_rng(0)
    q, k, v = (rng.standard_normal(problem.shape, dtype=np.float32).astype(DTYPES[problem.dtype]) for _ in range(3))
    out = cupy.empty_like(q)
    error = relative_error(cuflash.attention(q, k, v, causal=problem.causal), q, k, v, problem.causal)
    if not error <= ALLOWED[problem.dtype]:
        raise SystemExit(
            f"{problem}: relative error {error:.1e}, allowed {ALLOWED[problem.dtype]:.0e}; no speed is reported"
        )
    plan = cuflash.explain(cuflash.attention, q, k, v, causal=problem.causal)
    speeds = {
        "cuflash": problem.flops
        / seconds(lambda: cuflash.attention(q, k, v, causal=problem.causal, out=out), repeats, flush)
        * 1e-12
    }
    for name, prepare in peers().items():
        try:
            speeds[name] = problem.flops / seconds(prepare(q, k, v, problem.causal), repeats, flush) * 1e-12
        except Exception as refusal:  # a peer may refuse a dtype or run out of memory, each with its own exception
            print(f"  {name}: {type(refusal).__name__}", file=sys.stderr)
    return {**problem._asdict(), "kernel": plan.kernel, "tile": plan.tile, "error": error, "tflops": speeds}


def host_times() -> dict[str, float]:
    """Microseconds of host time per call: the same form again, a new length, and parts for comparison."""
    q = cupy.ones((1, 1, 16, 64), np.float32)
    lengths = [cupy.ones((1, 1, 17 + i, 64), np.float32) for i in range(200)]

    def best(function: Callable[[], Any], calls: int, per_call: int = 1) -> float:
        times = []
        for _ in range(9):
            cupy.cuda.Device().synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            times.append((time.perf_counter() - begin) / calls / per_call)
        return min(times) * 1e6

    def new_lengths() -> None:
        launch._launches.clear()
        for x in lengths:
            cuflash.attention(x, x, x)

    times = {
        "repeated call": best(lambda: cuflash.attention(q, q, q), 300),
        "new length": best(new_lengths, 1, len(lengths)),
        "cupy.empty": best(lambda: cupy.empty(q.shape, q.dtype), 300),
    }
    kernel = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    times["RawKernel launch"] = best(lambda: kernel((1,), (32,), ()), 300)
    if "torch flash" in peers():
        import torch

        t = torch.from_dlpack(q)
        times["torch SDPA call"] = best(lambda: torch.nn.functional.scaled_dot_product_attention(t, t, t), 300)
    return times


def import_times() -> dict[str, float]:
    """Seconds that `import cuflash` adds to `import cupy; cupy.empty(1)`, kernel cache empty and filled."""
    import os
    import tempfile

    code = "import time, cupy; cupy.empty(1); b = time.perf_counter(); import cuflash; print(time.perf_counter() - b)"
    root = str(Path(__file__).resolve().parent.parent)
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "CUPY_CACHE_DIR": folder,
            "PYTHONPATH": root + os.pathsep + os.environ.get("PYTHONPATH", ""),
        }

        def run() -> float:
            result = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            )
            return float(result.stdout)

        return {"cold": run(), "warm": min(run() for _ in range(3))}


def main() -> int:
    """Run, print a Markdown table and, if asked, store everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the problems, three repeats")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    flush = cupy.zeros(64 << 20, np.float32)
    problems = PROBLEMS[::4] if arguments.quick else PROBLEMS
    rows = [measure(problem, 3 if arguments.quick else 7, flush) for problem in problems]
    names = list(dict.fromkeys(name for row in rows for name in row["tflops"]))
    print("TFLOP/s | " + " | ".join(names) + " | relative error\n" + "|".join(["---"] * (len(names) + 2)))
    for row in rows:
        label = f"{row['dtype']} D{row['head_dim']} N{row['seqlen']} {'causal' if row['causal'] else 'full'}"
        speeds = [f"{row['tflops'][name]:.1f}" if name in row["tflops"] else "-" for name in names]
        print(" | ".join([label, *speeds, f"{row['error']:.1e}"]))
    host, imports = host_times(), import_times()
    print("host time, us: " + ", ".join(f"{name} {value:.1f}" for name, value in host.items()))
    print("import, s above cupy: " + ", ".join(f"{name} {value:.2f}" for name, value in imports.items()))
    if arguments.json:
        device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        arguments.json.write_text(
            json.dumps({"device": device, "problems": rows, "host_us": host, "import_s": imports}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
