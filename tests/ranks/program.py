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


def fail_in_the_middle(error: BaseException) -> None:
    """One rank ends while keys travel: the others hear of it, and nothing is written into memory that is freed."""
    from cuflash.distributed import ring

    rows = 2000  # too many for a message to be copied at once
    x = np.ones((2, rows, 8))
    meet = ring._meet

    def meet_or_fail(*given: Any) -> None:
        if comm.rank == 1:
            raise error
        time.sleep(0.2)
        meet(*given)

    ring._meet = meet_or_fail
    began = time.monotonic()
    try:
        distributed.attention(x, x, x, comm)
        print("went on")
    except BaseException as raised:
        print(f"{type(raised).__name__}: {raised}")
    ring._meet = meet
    x[:] = 777
    others = [np.full((2, rows, 8), 7.0) for _ in range(20)]
    time.sleep(0.5)
    assert all((y == 7).all() for y in others) and time.monotonic() - began < 30
    try:
        distributed.attention(x, x, x, comm)
    except RuntimeError as raised:
        print(raised)
    assert (distributed.attention(x[:, :9], x[:, :9], x[:, :9], comm.Dup()) == 777).all()
    leave()


def leave() -> None:
    """End, whatever MPI is still busy with."""
    sys.stdout.flush()
    comm.Barrier()
    os._exit(0)


def memory() -> None:
    fail_in_the_middle(MemoryError("no more"))


def interrupt() -> None:
    fail_in_the_middle(KeyboardInterrupt())


def late() -> None:
    """A rank that comes when the others have given up; and what they do then."""
    x = np.ones((2, 10, 8))
    assert (distributed.attention(x, x, x, comm) == 1).all()
    for _ in range(2):
        if comm.rank == 1:
            time.sleep(1)
        try:
            distributed.attention(x, x, x, comm, timeout=0.5)
        except (RuntimeError, TimeoutError) as raised:
            print(raised)
    leave()


def first() -> None:
    """The same in the first call of a communicator."""
    x = np.ones((2, 10, 8))
    for _ in range(2):
        if comm.rank == 0:
            try:
                distributed.attention(x, x, x, comm, timeout=0.5)
            except (RuntimeError, TimeoutError) as raised:
                print(raised)
    leave()


def stuck() -> None:
    """A rank that says it has keys, and does not send them."""
    from cuflash.distributed import ring

    x = np.ones((2, 10, 8))
    if comm.rank == 1:
        begin = ring._begin

        def begin_late(*given: Any) -> Any:
            time.sleep(2)
            return begin(*given)

        ring._begin = begin_late
    try:
        distributed.attention(x, x, x, comm, timeout=0.5)
    except (RuntimeError, TimeoutError) as raised:
        print(raised)
    leave()


def dies() -> None:
    """A rank whose process ends in the middle: the launcher ends the others."""
    from cuflash.distributed import ring

    x = np.ones((2, 10, 8))
    if comm.rank == 1:
        ring._begin = lambda *given: os._exit(3)
    distributed.attention(x, x, x, comm)
    print("went on")


def wrong() -> None:
    """Arguments of one rank that are wrong in ways that keep others from having an array even."""

    class Unreadable:
        def __index__(self) -> int:
            raise OSError("no number")

    x = np.ones((2, 10, 8))
    for options in (
        {"timeout": 0},
        {"timeout": "5"},
        {"workspace": x},
        {"is_causal": True},
        {"num_parts": Unreadable()},
    ):
        given: dict[str, Any] = dict(options) if comm.rank == 1 else {}
        try:
            distributed.attention(x, x, x, comm, **given)
        except Exception as raised:
            if comm.rank == 0:
                print(raised)
        assert (distributed.attention(x, x, x, comm) == 1).all()


def communicators() -> None:
    """Others than the world: messages of their own, and no end of them; what is none."""
    x = np.ones((2, 10, 8))
    memory = np.zeros(8)
    request = comm.Irecv(memory)  # from anybody, whatever it is
    for _ in range(1100):  # more than MPI has, if ours were not freed, too
        duplicate = comm.Dup()
        assert (distributed.attention(x, x, x, duplicate) == 1).all()
        duplicate.Free()
    comm.Send(np.ones(8), 1 - comm.rank)
    request.Wait()
    assert (memory == 1).all()
    alone = comm.Split(comm.rank)
    assert (distributed.attention(x, x, x, alone) == 1).all()
    for no_group in (MPI.COMM_NULL, alone.Create_intercomm(0, comm, 1 - comm.rank), MPI.Comm):
        try:
            distributed.attention(x, x, x, no_group)
        except TypeError as raised:
            print(str(raised).partition(",")[2])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
