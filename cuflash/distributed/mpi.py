"""Ranks that are connected by MPI, through mpi4py: arrays of NumPy, and of CuPy by way of the host's memory.

A call that ends by an error leaves messages behind, which MPI goes on to read from memory and to write into it, whoever
that belongs to by then. So their memory is kept for ever, and the communicator takes no other call.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ..gpu.copies import from_host, to_host
from .agree import describe_error

KEYS, ERROR = 1, 2
"""Tags of messages."""
PIECE = 2**30
"""Bytes of a message at most: older MPIs count them in an int."""
POLL = 50e-6
"""Seconds between looks for what is not there yet."""
ERROR_BYTES = 1024


class RankError(RuntimeError):
    """Another rank has raised an error."""


_abandoned: list[Any] = []
"""Messages that nobody waits for, and their memory."""
_keyval: int | None = None
"""Under which a communicator has its channel."""


class Channel:
    """A communicator of our own beside the caller's, whose messages meet no others.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm or None
        None until all ranks have come to make it.
    broken : str
        Why there can be no other call; "" while there can.
    """

    def __init__(self) -> None:
        self.comm: Any = None
        self.broken = ""


def channel_of(comm: Any) -> Channel:
    """Return a communicator's channel, which it keeps."""
    from mpi4py import MPI

    global _keyval
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval(delete_fn=_free_channel)
    channel: Channel | None = comm.Get_attr(_keyval)
    if channel is None:
        channel = Channel()
        comm.Set_attr(_keyval, channel)
    return channel


def _free_channel(comm: Any, keyval: int, channel: Channel) -> None:
    """Called where a communicator is freed; MPI frees those that it began with itself, when nothing may be called."""
    from mpi4py import MPI

    if channel.comm is not None and not channel.broken and comm not in (MPI.COMM_WORLD, MPI.COMM_SELF):
        channel.comm.Free()


class MpiLink:
    """Ranks of an mpi4py communicator."""

    def __init__(self, comm: Any, timeout: float | None) -> None:
        from mpi4py import MPI

        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise TypeError(f"comm is {comm!r}, expected an intracommunicator")
        self._mpi, self._timeout = MPI, timeout
        self._pending: list[Any] = []
        self._channel = channel = channel_of(comm)
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.device: int | None = None
        if channel.broken:
            raise RuntimeError(f"{channel.broken}: pass another communicator, comm.Dup() for one")
        if channel.comm is None:
            # What is asked for once more by a rank that did not wait for the others would be another one.
            channel.broken = "ranks did not come to make a channel of this communicator"
            duplicate, request = comm.Idup()
            self._pending.append((duplicate, request))
            try:
                self._wait([request], "all ranks to call", None)
            except BaseException:
                _abandoned.append(self._pending)
                raise
            self._pending.clear()
            channel.comm, channel.broken = duplicate, ""

    def gather(self, record: np.ndarray) -> np.ndarray:
        """Return the records of all ranks, given one's own."""
        records = np.empty((self.size, record.size), np.uint8)
        requests = [self._channel.comm.Iallgather(record, records)]
        self._pending.append((requests, record, records))
        self._wait(requests, "all ranks to call", self._channel.comm)
        self._pending.clear()
        return records

    def exchange(self, sends: list[tuple[Any, int]], receives: list[tuple[Any, int]]) -> Exchange:
        """Begin to send and to receive arrays."""
        exchange, comm = Exchange(self, sorted({peer for _, peer in (*receives, *sends)})), self._channel.comm
        self._pending.append(exchange)
        for x, peer in receives:
            memory = x if isinstance(x, np.ndarray) else np.empty(x.shape, x.dtype)
            exchange.arriving.append((x, memory))
            exchange.requests += [comm.Irecv(piece, peer, KEYS) for piece in _pieces(memory)]
        for x, peer in sends:
            memory = x if isinstance(x, np.ndarray) else to_host(x)
            exchange.leaving.append(memory)
            exchange.requests += [comm.Isend(piece, peer, KEYS) for piece in _pieces(memory)]
        return exchange

    def progress(self, exchange: Exchange) -> None:
        """Let MPI work for messages."""
        self._mpi.Request.Testall(exchange.requests)

    def finish(self, exchange: Exchange) -> None:
        """Wait for messages."""
        self._wait(exchange.requests, f"keys from or to rank {exchange.peers}", self._channel.comm)
        self._pending.remove(exchange)

    def abort(self, error: BaseException) -> None:
        """Let the other ranks know that this one goes no further, and keep what is on its way."""
        try:
            self._tell(error)
        except BaseException:  # Ctrl-C once more, while the others wait; they may hear of it twice
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        comm = self._channel.comm
        self._channel.broken = f"an earlier call with this communicator ended by {type(error).__name__}"
        told = np.zeros(ERROR_BYTES, np.uint8)
        text = describe_error(error).encode()[:ERROR_BYTES]
        told[: len(text)] = np.frombuffer(text, np.uint8)
        # Errors of other ranks are known to all.
        others = [] if isinstance(error, RankError) else [rank for rank in range(self.size) if rank != self.rank]
        _abandoned.append((self._pending, told, [comm.Isend(told, rank, ERROR) for rank in others]))

    def _wait(self, requests: list[Any], what: str, comm: Any) -> None:
        """Wait for messages; an error if they don't come, or another rank has one.

        Looks again and again, so that Ctrl-C gets through.
        """
        began = time.monotonic()
        while True:
            arrived = self._mpi.Request.Testall(requests)
            # Also when all is there: of a rank that has failed it may be anything.
            if comm is not None and comm.Iprobe(self._mpi.ANY_SOURCE, ERROR):
                self._raise_other(comm)
            if arrived:
                return
            if self._timeout is not None and time.monotonic() - began > self._timeout:
                raise TimeoutError(
                    f"rank {self.rank} waited for {what} for {self._timeout:g} seconds: another one has ended, or is "
                    "busy; where ranks are started by python -m mpi4py, an exception on one of them ends all"
                )
            time.sleep(POLL)

    def _raise_other(self, comm: Any) -> None:
        told, status = np.empty(ERROR_BYTES, np.uint8), self._mpi.Status()
        comm.Recv(told, self._mpi.ANY_SOURCE, ERROR, status)
        text = told.tobytes().rstrip(b"\0").decode()
        raise RankError(f"rank {status.Get_source()} raised {text}")


class Exchange:
    """Messages on their way, and the memory that they need."""

    def __init__(self, link: MpiLink, peers: list[int]) -> None:
        self._link = link
        self.peers = ", ".join(map(str, peers))
        self.requests: list[Any] = []
        self.arriving: list[tuple[Any, np.ndarray]] = []
        """Arrays and what is received for them, which are the same unless they are on a GPU."""
        self.leaving: list[np.ndarray] = []

    def progress(self) -> None:
        """Let MPI work: most do nothing for messages while nobody calls them."""
        self._link.progress(self)

    def wait(self) -> None:
        """Wait until all has been sent and received."""
        self._link.finish(self)
        for x, memory in self.arriving:
            if x is not memory:
                from_host(memory, x)


def _pieces(x: np.ndarray) -> list[np.ndarray]:
    flat = x.reshape(-1).view(np.uint8)
    return [flat[begin : begin + PIECE] for begin in range(0, flat.size, PIECE)]
