"""mpiexec -n 2 python -m cuflash.distributed --try: whether ranks on this machine find each other, and how fast."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import cuflash

from ..bench.command import positive_int
from ..gpu.installed import choose_backend
from ..gpu.nccl import communicator_by_mpi
from ..settings import num_threads
from . import attention, shard, unshard


def main(arguments: list[str] | None = None) -> int:
    """Run one attention on all ranks and on one, compare, and print times."""
    parser = argparse.ArgumentParser(prog="python -m cuflash.distributed", description=__doc__)
    parser.add_argument("--try", action="store_true", required=True, help="attention of all ranks, compared with one's")
    parser.add_argument("--backend", choices=["auto", "numpy", "gpu"], default="auto", help="auto: GPUs if there are")
    parser.add_argument("--seqlen", type=positive_int, default=4096, help="queries and keys of all ranks")
    parser.add_argument("--heads", type=positive_int, default=4)
    parser.add_argument("--head-dim", type=positive_int, default=64)
    parser.add_argument("--dtype", choices=["float16", "float32", "float64"], default="float32")
    parser.add_argument("--layout", choices=["contiguous", "zigzag"], default="zigzag")
    parser.add_argument("--full", action="store_true", help="without causal")
    chosen = parser.parse_args(arguments)
    try:
        from mpi4py import MPI
    except ImportError:
        parser.error("mpi4py cannot be imported: pip install 'cuflash[distributed]'")
    except RuntimeError as error:
        parser.error(f"mpi4py finds no MPI: pip install mpich ({str(error).splitlines()[0]})")
    world = MPI.COMM_WORLD
    try:
        on_gpu = choose_backend(chosen.backend) is not np
    except RuntimeError as error:
        parser.error(str(error))
    comm: Any = communicator_by_mpi(world) if on_gpu else world
    return _try(world, comm, chosen, on_gpu)


def _try(world: Any, comm: Any, chosen: argparse.Namespace, on_gpu: bool) -> int:
    rng = np.random.default_rng(0)
    shape = chosen.heads, chosen.seqlen, chosen.head_dim
    whole = [rng.standard_normal(shape).astype(chosen.dtype) for _ in range(3)]
    mine: list[Any] = [shard(x, world.rank, world.size, layout=chosen.layout) for x in whole]
    if on_gpu:
        import cuflash.gpu.copies as copies

        mine = [copies.on_gpu(x) for x in mine]
    causal = not chosen.full

    def together() -> Any:
        world.Barrier()
        out = attention(mine[0], mine[1], mine[2], comm, layout=chosen.layout, causal=causal)
        return copies.to_host(out) if on_gpu else out

    seconds, out = _seconds(together)
    parts = world.gather(out)
    if world.rank:
        return 0
    by = "NCCL and GPUs" if on_gpu else "MPI and NumPy"
    print(f"{world.size} rank{'s'[: world.size > 1]}, {by}: {chosen.dtype}, heads: {chosen.heads}")
    print(f"{chosen.seqlen} queries and keys of {chosen.head_dim} features, {'causal' if causal else 'full'}")
    on_cores = "" if on_gpu else f", threads of each: {num_threads(2**20)}"
    print(f"all ranks together {1e3 * seconds:.1f} ms{on_cores}")
    alone_seconds, alone = _seconds(lambda: cuflash.attention(*whole, causal=causal))
    error = float(np.abs(unshard(parts, layout=chosen.layout).astype(np.float64) - alone).max())
    print(f"rank 0 alone, with NumPy, {1e3 * alone_seconds:.1f} ms; results differ by {error:.1e} at most")
    right = error <= 8 * np.finfo(chosen.dtype).eps
    print("all is well" if right else "WRONG: results differ by more than rounding")
    return 0 if right else 1


def _seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Time of a call that is not the first, and what it returns."""
    function()
    began = time.perf_counter()
    found = function()
    return time.perf_counter() - began, found


if __name__ == "__main__":
    raise SystemExit(main())
