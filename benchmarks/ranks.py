"""Attention of several GPUs beside that of one: times, memory, and when keys travel.

mpiexec -n 2 python benchmarks/ranks.py [--seqlen 32768 131072] [--heads 16] [--head-dim 128] [--dtype bfloat16]

Each rank takes the next GPU of its machine and NCCL connects them; `--backend numpy` tries the script out without. The
time is that of the slowest rank, the least of some calls. Behind it, for one more call, when each step's products and
transfers began and ended.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUFLASH_COMPILE", "lazy")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from mpi4py import MPI

import cuflash
from cuflash.distributed import attention, ring
from cuflash.gpu.nccl import communicator_by_mpi
from cuflash.problem.arrays import DTYPES

WORLD = MPI.COMM_WORLD
REPEATS = 5


class Gpu:
    """Arrays, clocks and memory of this rank's GPU."""

    def __init__(self) -> None:
        self.comm = communicator_by_mpi(WORLD)
        import cupy

        self.xp = cupy

    def wait(self) -> None:
        self.xp.cuda.runtime.deviceSynchronize()

    def now(self) -> Any:
        """A point in time of the current stream."""
        return self.xp.cuda.get_current_stream().record()

    def milliseconds(self, first: Any, second: Any) -> float:
        elapsed: float = self.xp.cuda.get_elapsed_time(first, second)
        return elapsed

    def begin_memory(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()
        self._before = self.xp.get_default_memory_pool().used_bytes()

    def memory(self) -> int:
        """Bytes that the pool has asked the driver for beside what there was."""
        total: int = self.xp.get_default_memory_pool().total_bytes()
        return total - self._before


class Host:
    """The same of NumPy, without memory."""

    comm, xp = WORLD, np

    def wait(self) -> None:
        pass

    def now(self) -> Any:
        return time.perf_counter()

    def milliseconds(self, first: Any, second: Any) -> float:
        return 1e3 * float(second - first)

    def begin_memory(self) -> None:
        pass

    def memory(self) -> int:
        return 0


def seconds(device: Gpu | Host, function: Any, alone: bool) -> float:
    """Least time of some calls, of all ranks together or of rank 0 alone."""
    found = []
    for _ in range(REPEATS + 1):
        if not alone:
            WORLD.Barrier()
        began = time.perf_counter()
        function()
        device.wait()
        found.append(time.perf_counter() - began)
    least = min(found[1:])
    return least if alone else WORLD.allreduce(least, op=MPI.MAX)


def timeline(device: Gpu | Host, function: Any) -> list[tuple[str, float, float]]:
    """What one call does when, in milliseconds: products of each step, and what arrives."""
    marks: list[tuple[str, Any, Any]] = []
    begin, meet = ring._begin, ring._meet

    def marked_begin(task: Any, link: Any, step: int) -> Any:
        first = device.now()
        exchange, keys = begin(task, link, step)
        wait = exchange.wait

        class Marked:
            progress = staticmethod(exchange.progress)

            @staticmethod
            def wait() -> None:
                wait()
                # Of NCCL the event behind the transfers themselves; MPI is known to be done only when it is asked.
                marks.append((f"transfer {step}", first, getattr(exchange, "arrived", None) or device.now()))

        return Marked, keys

    def marked_meet(*given: Any) -> None:
        first = device.now()
        meet(*given)
        marks.append(("products", first, device.now()))

    ring._begin, ring._meet = marked_begin, marked_meet
    try:
        device.wait()
        zero = device.now()
        function()
        device.wait()
    finally:
        ring._begin, ring._meet = begin, meet
    return [(name, device.milliseconds(zero, a), device.milliseconds(zero, b)) for name, a, b in marks]


def draw(device: Gpu | Host, chosen: argparse.Namespace, seqlen: int) -> list[Any]:
    rng, shape = np.random.default_rng(WORLD.rank), (chosen.heads, seqlen, chosen.head_dim)
    drawn = (device.xp.asarray(rng.standard_normal(shape, dtype=np.float32)) for _ in range(3))
    return [x.astype(DTYPES[chosen.dtype]) for x in drawn]


def measure_together(
    device: Gpu | Host, chosen: argparse.Namespace, seqlen: int, causal: bool
) -> tuple[float, int, list[tuple[str, float, float]]]:
    """Seconds of all ranks together, bytes beside the arrays, and the timeline."""
    q, k, v = draw(device, chosen, seqlen // WORLD.size)
    out = device.xp.empty_like(q)
    layout: Any = "zigzag" if causal else "contiguous"

    def together() -> None:
        attention(q, k, v, device.comm, layout=layout, causal=causal, out=out)

    device.begin_memory()
    together()
    device.wait()
    memory = device.memory()
    return seconds(device, together, alone=False), memory, timeline(device, together)


def measure(device: Gpu | Host, chosen: argparse.Namespace, seqlen: int, causal: bool) -> None:
    """Measure all ranks and one, and print both."""
    together, memory, marks = measure_together(device, chosen, seqlen, causal)
    if WORLD.rank == 0:
        q, k, v = draw(device, chosen, seqlen)
        out = device.xp.empty_like(q)
        alone = seconds(device, lambda: cuflash.attention(q, k, v, causal=causal, out=out), alone=True)
        flops = 4 * chosen.heads * seqlen**2 * chosen.head_dim / (2 if causal else 1)
        parts = memory / (2 * (q.nbytes // WORLD.size))
        kind = "causal, zigzag" if causal else "full"
        print(f"{chosen.dtype} H{chosen.heads} N{seqlen} D{chosen.head_dim} {kind}, {WORLD.size} ranks")
        print(f"  one {1e3 * alone:.2f} ms, {flops / alone / 1e12:.1f} TFLOP/s; all {1e3 * together:.2f} ms")
        print(f"  {alone / together:.3f} times as fast; {parts:.2f} parts of keys and values beside the arrays")
        for name, first, last in marks:
            print(f"    {name:<12} {first:8.2f} to {last:8.2f} ms")
    WORLD.Barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[32768, 131072], help="queries and keys of all ranks")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32", "float64"], default="bfloat16")
    parser.add_argument("--backend", choices=["gpu", "numpy"], default="gpu")
    chosen = parser.parse_args()
    device = Gpu() if chosen.backend == "gpu" else Host()
    for seqlen in chosen.seqlen:
        for causal in (False, True):
            measure(device, chosen, seqlen, causal)


if __name__ == "__main__":
    main()
