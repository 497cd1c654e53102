"""Ranks that are connected by MPI, through mpi4py: arrays of NumPy, and of CuPy by way of the host's memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..gpu.copies import from_host, to_host

TAG = 7171
PIECE = 2**30
"""Bytes of a message at most: older MPIs count them in an int."""
POLL = 50e-6
"""Seconds between looks for what is not there yet."""


class MpiLink:
    """Ranks of an mpi4py communicator."""

    def __init__(self, comm: Any, timeout: float | None) -> None:
        from mpi4py import MPI

        self._comm, self._mpi, self._timeout = comm, MPI, timeout
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.device: int | None = None

    def gather(self, record: np.ndarray) -> np.ndarray:
        """Return the records of all ranks, given one's own."""
        records = np.empty((self.size, record.size), np.uint8)
        self._wait([self._comm.Iallgather(record, records)], "all ranks to call")
        return records

    def exchange(self, sends: list[tuple[Any, int]], receives: list[tuple[Any, int]]) -> Exchange:
        """Begin to send and to receive arrays."""
        requests, kept, stores = [], [], []
        for x, peer in receives:
            memory = x if isinstance(x, np.ndarray) else np.empty(x.shape, x.dtype)
            requests += [self._comm.Irecv(piece, peer, TAG) for piece in _pieces(memory)]
            if memory is not x:
                stores.append((x, memory))
        for x, peer in sends:
            memory = x if isinstance(x, np.ndarray) else to_host(x)
            requests += [self._comm.Isend(piece, peer, TAG) for piece in _pieces(memory)]
            kept.append(memory)
        peers = ", ".join(str(peer) for peer in sorted({peer for _, peer in (*receives, *sends)}))
        what = f"keys from or to rank {peers}"
        return Exchange(self._mpi, requests, kept, stores, lambda: self._wait(requests, what))

    def _wait(self, requests: list[Any], what: str) -> None:
        """Wait for messages, TimeoutError if they don't come. Looks again and again, so that Ctrl-C gets through."""
        began = time.monotonic()
        while not self._mpi.Request.Testall(requests):
            if self._timeout is not None and time.monotonic() - began > self._timeout:
                raise TimeoutError(f"rank {self.rank} waited for {what} for {self._timeout:g} seconds")
            time.sleep(POLL)


_abandoned: list[Exchange] = []
"""Messages that nobody waits for: what comes late must not be written into memory that is somebody else's."""


class Exchange:
    """Messages on their way, and the memory that they need."""

    def __init__(
        self, mpi: Any, requests: list[Any], kept: list[Any], stores: list[Any], wait: Callable[[], None]
    ) -> None:
        self._mpi, self._requests, self._kept, self._stores, self._wait = mpi, requests, kept, stores, wait

    def progress(self) -> None:
        """Let MPI work: most do nothing for messages while nobody calls them."""
        self._mpi.Request.Testall(self._requests)

    def wait(self) -> None:
        """Wait until all has been sent and received."""
        try:
            self._wait()
        except BaseException:
            _abandoned.append(self)
            raise
        for x, memory in self._stores:
            from_host(memory, x)


def _pieces(x: np.ndarray) -> list[np.ndarray]:
    flat = x.reshape(-1).view(np.uint8)
    return [flat[begin : begin + PIECE] for begin in range(0, flat.size, PIECE)]
