"""What chunks cost: times of `cuflash.dask.attention` beside those of `cuflash.attention`, as docs/dask.md has them.

python benchmarks/dask_chunks.py
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dask.array as da
import numpy as np

import cuflash.dask

PROBLEMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], type, bool, list[tuple[int, int]]]] = {
    "2048 queries, 262144 keys, 8 features, float64": (
        (1, 2048, 8), (1, 262144, 8), np.float64, False,
        [(2048, 65536), (2048, 16384), (2048, 4096), (2048, 1024), (512, 16384), (128, 16384)],
    ),
    "8 heads, 4096 queries and keys, 64 features, float32, causal": (
        (8, 4096, 64), (8, 4096, 64), np.float32, True, [(2048, 2048), (1024, 1024), (512, 512), (256, 256), (128, 128)]
    ),
}  # fmt: skip


def quickest(*runs: Callable[[], Any], times: int = 5) -> list[float]:
    """Seconds of the quickest run of each, which take turns, as other programs may disturb them."""
    seconds = [math.inf] * len(runs)
    for _ in range(times):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            seconds[i] = min(seconds[i], time.perf_counter() - start)
    return seconds


def main() -> None:
    rng = np.random.default_rng(0)
    for title, (shape_q, shape_k, dtype, causal, sizes) in PROBLEMS.items():
        q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in (shape_q, shape_k, shape_k))
        plain = partial(cuflash.attention, q, k, v, causal=causal)
        whole = plain()
        print(f"\n| {title}: chunks | tasks | time |\n|---|---|---|")
        for length_q, length_k in sizes:
            lazy = [da.from_array(x, chunks=(-1, n, -1)) for x, n in ((q, length_q), (k, length_k), (v, length_k))]
            out = cuflash.dask.attention(*lazy, causal=causal)
            assert abs(out.compute() - whole).max() < 1e-4
            attends = sum(key[0].startswith("attention-attend") for key in out.__dask_graph__())
            seconds = quickest(partial(out.compute, scheduler="threads"), plain)
            print(f"| {length_q} x {length_k} | {attends} | {seconds[0] / seconds[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
