"""Attention of several GPUs beside that of one: times, memory, and when keys travel.

mpiexec -n 2 python benchmarks/ranks.py [--seqlen 32768 131072] [--heads 16] [--head-dim 128] [--dtype bfloat16]

Each rank takes the next GPU of its machine and NCCL connects them; `--backend numpy` tries the script out without. The
time is that of the slowest rank, of calls that follow one another; in turn with them one GPU does it all. Behind it,
for one more call, when each step's products and transfers began and ended.
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
ROUNDS, SECONDS = 3, 0.4


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

    def peak_of(self, function: Any) -> int:
        """Bytes in use, at most, during a call beside what there was."""
        pool, peak = self.xp.get_default_memory_pool(), 0
        before: int = pool.used_bytes()

        class Peak(self.xp.cuda.MemoryHook):  # type: ignore[misc,name-defined]
            name = "peak"

            def malloc_postprocess(self, **_: Any) -> None:
                nonlocal peak
                peak = max(peak, pool.used_bytes())

        with Peak():
            function()
        return peak - before


class Host:
    """The same of NumPy, without memory."""

    comm, xp = WORLD, np

    def wait(self) -> None:
        pass

    def now(self) -> Any:
        return time.perf_counter()

    def milliseconds(self, first: Any, second: Any) -> float:
        return 1e3 * float(second - first)

    def peak_of(self, function: Any) -> int:
        return 0


def seconds(device: Gpu | Host, together: Any, alone: Any) -> tuple[float, float]:
    """Median times of a call of all ranks together, the slowest one's, and of rank 0 alone, which take turns.

    Calls follow one another for a while, as those of a model's layers do: what a GPU's clock makes of a burst behind a
    pause is another thing, and it is slower when it has worked for long, so neither may be measured before the other.
    """
    found: list[tuple[float, float]] = []
    once = WORLD.allreduce(_seconds(device, together, 1), op=MPI.MAX)
    num_calls = max(2, min(50, round(SECONDS / once)))
    for _ in range(ROUNDS):
        WORLD.Barrier()
        both = WORLD.allreduce(_seconds(device, together, num_calls), op=MPI.MAX)
        own = _seconds(device, alone, num_calls) if WORLD.rank == 0 else 0.0
        found.append((both, own))
    middle = [sorted(times)[ROUNDS // 2] for times in zip(*found, strict=True)]
    return middle[0], middle[1]


def _seconds(device: Gpu | Host, function: Any, num_calls: int) -> float:
    function()
    device.wait()
    began = time.perf_counter()
    for _ in range(num_calls):
        function()
    device.wait()
    return (time.perf_counter() - began) / num_calls


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
        WORLD.Barrier()
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


def measure(device: Gpu | Host, chosen: argparse.Namespace, seqlen: int, causal: bool) -> None:
    """Measure all ranks and one, and print both."""
    mine = draw(device, chosen, seqlen // WORLD.size)
    out = device.xp.empty_like(mine[0])
    layout: Any = "zigzag" if causal else "contiguous"

    def together() -> None:
        attention(*mine, device.comm, layout=layout, causal=causal, out=out)

    together()
    memory = device.peak_of(together)
    whole = draw(device, chosen, seqlen) if WORLD.rank == 0 else []
    whole_out = device.xp.empty_like(whole[0]) if whole else None
    both, one = seconds(device, together, lambda: cuflash.attention(*whole, causal=causal, out=whole_out))
    marks = timeline(device, together)
    if WORLD.rank == 0:
        flops = 4 * chosen.heads * seqlen**2 * chosen.head_dim / (2 if causal else 1)
        parts = memory / (mine[1].nbytes + mine[2].nbytes)
        kind = "causal, zigzag" if causal else "full"
        print(f"{chosen.dtype} H{chosen.heads} N{seqlen} D{chosen.head_dim} {kind}, {WORLD.size} ranks")
        print(f"  one {1e3 * one:.2f} ms, {flops / one / 1e12:.1f} TFLOP/s; all {1e3 * both:.2f} ms")
        print(f"  {one / both:.3f} times as fast; {parts:.2f} parts of keys and values beside the arrays")
        for name, first, last in marks:
            print(f"    {name:<12} {first:8.2f} to {last:8.2f} ms", flush=True)


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
