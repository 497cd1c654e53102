"""What tests let several processes do: mpiexec -n 2 python program.py TASK. Prints what the test looks for."""

from __future__ import annotations

import os
import sys
import time
from typing import Any
from zlib import crc32

import numpy as np
from mpi4py import MPI

import cuflash
from cuflash import distributed
from cuflash.distributed import shard, unshard
from cuflash.problem.arrays import DTYPES

comm = MPI.COMM_WORLD


def bits() -> None:
    """All types, layouts and kinds of options: right, and the same bits for 1, 2 and 4 ranks."""
    rng = np.random.default_rng(0)
    digest = 0
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        arrays = [
            rng.standard_normal((2, heads, n, 16)).astype(DTYPES[dtype]) for heads, n in ((4, 64), (2, 160), (2, 160))
        ]
        for layout in ("contiguous", "zigzag"):
            for options in ({}, {"causal": True}, {"window": (20, 5)}, {"alibi_slopes": np.arange(4.0)}):
                kinds: dict[str, Any] = dict(options)
                mine = [shard(x, comm.rank, comm.size, layout=layout) for x in arrays]  # type: ignore[arg-type]
                out = distributed.attention(*mine, comm, layout=layout, num_parts=4 // comm.size, **kinds)  # type: ignore[arg-type]
                outs = comm.gather(out)
                if comm.rank == 0:
                    found = unshard(outs, layout=layout)  # type: ignore[arg-type]
                    one = cuflash.attention(*arrays, **kinds)
                    eps = 2.0 ** -{"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[dtype]
                    assert np.abs(found.astype(np.float64) - one.astype(np.float64)).max() <= 16 * eps
                    digest = crc32(found.tobytes(), digest)
    if comm.rank == 0:
        print(f"digest {digest}")


def large() -> None:
    """Messages of several pieces."""
    from cuflash.distributed import mpi

    mpi.PIECE = 1000
    x = np.random.default_rng(comm.rank).standard_normal((2, 100, 8))
    whole = unshard(comm.allgather(x))
    out = distributed.attention(x, x, x, comm)
    expected = shard(cuflash.attention(whole, whole, whole), comm.rank, comm.size)
    assert np.abs(out - expected).max() < 1e-14
    print("right")


def error() -> None:
    """One rank's arrays don't fit; all go on afterwards."""
    x = np.ones((2, 10, 8))
    try:
        distributed.attention(x, x[:, : 10 - comm.rank], x, comm)
    except ValueError as raised:
        print(raised)
    assert (distributed.attention(x, x, x, comm) == 1).all()


def late() -> None:
    """A rank that does not come."""
    x = np.ones((2, 10, 8))
    if comm.rank == 0:
        began = time.monotonic()
        try:
            distributed.attention(x, x, x, comm, timeout=0.5)
        except TimeoutError as raised:
            print(raised)
        assert time.monotonic() - began < 5
    sys.stdout.flush()
    comm.Barrier() if comm.rank else None
    os._exit(0)


def stuck() -> None:
    """A rank that says it has keys, and never sends them."""
    from cuflash.distributed import ring

    x = np.ones((2, 10, 8))
    if comm.rank == 1:
        ring_begin = ring._begin
        ring._begin = lambda *given: time.sleep(2) or ring_begin(*given)  # type: ignore[func-returns-value]
    try:
        distributed.attention(x, x, x, comm, timeout=0.5)
    except TimeoutError as raised:
        print(raised)
    sys.stdout.flush()
    os._exit(0)


def dies() -> None:
    """A rank whose process ends in the middle: the launcher ends the others."""
    from cuflash.distributed import ring

    x = np.ones((2, 10, 8))
    if comm.rank == 1:
        ring._begin = lambda *given: os._exit(3)
    distributed.attention(x, x, x, comm)
    print("went on")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
