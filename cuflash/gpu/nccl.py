"""Ranks that are connected by NCCL: one process and GPU each, arrays from GPU to GPU."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

POLL = 20e-6
"""Seconds between looks for what is not there yet; waking takes longer."""
EAGER = 1e-3
"""Seconds to look all the time, before that."""
_streams = threading.local()
"""Of a thread, by device: messages of calls that take turns may share one."""
_abandoned: list[Any] = []
"""Messages of calls that ended by an error, with their memory."""


def communicator_of(comm: Any) -> Any:
    """Return the NCCL communicator that an object is or has; None if it is another one."""
    try:
        from cupy.cuda import nccl
    except ImportError:
        return None
    own = getattr(comm, "_comm", comm)  # cupyx.distributed.NCCLBackend has no other way to its communicator
    communicator = getattr(nccl, "NcclCommunicator", None)
    return own if communicator is not None and isinstance(own, communicator) else None


def communicator_by_mpi(comm: Any) -> Any:
    """Make an NCCL communicator of an mpi4py one; each rank takes the next GPU of its machine."""
    import cupy
    from cupy.cuda import nccl
    from mpi4py import MPI

    beside = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cupy.cuda.Device(beside.rank % cupy.cuda.runtime.getDeviceCount()).use()
    beside.Free()
    return nccl.NcclCommunicator(comm.size, comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None), comm.rank)


class NcclLink:
    """Ranks of an NCCL communicator.

    Messages travel on a stream of their own. Where NCCL reports that a rank has failed, or messages don't come in
    time, the communicator is aborted, so that nothing waits for them any longer.
    """

    def __init__(self, communicator: Any, timeout: float | None) -> None:
        import cupy

        self._cupy, self._comm, self._timeout = cupy, communicator, timeout
        self._pending: list[Exchange] = []
        self.rank: int = communicator.rank_id()
        self.size: int = communicator.size()
        self.device: int | None = communicator.device_id()
        self._device = cupy.cuda.Device(self.device)
        self._gathering: Any = None
        streams = vars(_streams)
        if str(self.device) not in streams:
            with self._device:
                # Above the products, whose blocks would all go first: meanwhile the other rank's wait on its GPU.
                streams[str(self.device)] = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self._stream = streams[str(self.device)]

    def gather(self, record: np.ndarray) -> np.ndarray:
        """Return the records of all ranks, given one's own."""
        import cupyx
        from cupy.cuda import nccl

        shape = self.size, record.size
        found: np.ndarray = cupyx.empty_pinned(shape, np.uint8)
        found[self.rank] = record
        with self._device, self._stream:
            records = self._cupy.empty(shape, np.uint8)
            self._gathering = found, records
            mine = records[self.rank]
            mine.set(found[self.rank], self._stream)
            self._comm.allGather(mine.data.ptr, records.data.ptr, record.size, nccl.NCCL_UINT8, self._stream.ptr)
            records.get(self._stream, out=found, blocking=False)
            self.wait(self._stream.record(), "all ranks to call")
        self._gathering = None
        return found

    def wait(self, event: Any, what: str) -> None:
        """Wait for messages; an error if they don't come. Looks again and again, so that Ctrl-C gets through."""
        began = time.monotonic()
        while not event.done:
            self._comm.check_async_error()
            waited = time.monotonic() - began
            if self._timeout is not None and waited > self._timeout:
                raise TimeoutError(
                    f"rank {self.rank} waited for {what} for {self._timeout:g} seconds: another one has ended, or is "
                    "busy"
                )
            if waited > EAGER:
                time.sleep(POLL)

    def exchange(self, sends: list[tuple[Any, int]], receives: list[tuple[Any, int]]) -> Exchange:
        """Begin to send and to receive arrays, behind what the current stream has been given."""
        from cupy.cuda import nccl

        exchange = Exchange(self, [*sends, *receives])
        self._pending.append(exchange)
        with self._device:
            if sends or receives:
                self._stream.wait_event(self._cupy.cuda.get_current_stream().record())
                nccl.groupStart()
                try:
                    for x, peer in sends:
                        self._comm.send(x.data.ptr, x.nbytes, nccl.NCCL_UINT8, peer, self._stream.ptr)
                    for x, peer in receives:
                        self._comm.recv(x.data.ptr, x.nbytes, nccl.NCCL_UINT8, peer, self._stream.ptr)
                finally:  # else the thread's next communicator would be made inside of this group
                    nccl.groupEnd()
            exchange.arrived = self._stream.record()
        return exchange

    def finish(self, exchange: Exchange) -> None:
        """Wait for messages, on the host so that a rank that has ended is noticed, and let the current stream do so."""
        self.wait(exchange.arrived, f"keys from or to rank {exchange.peers}")
        with self._device:
            self._cupy.cuda.get_current_stream().wait_event(exchange.arrived)
        self._pending.remove(exchange)

    def abort(self, error: BaseException) -> None:
        """Abort the communicator, so that other ranks do not wait, and keep the memory of what was on its way."""
        _abandoned.append((self._pending, self._gathering))
        vars(_streams).pop(str(self.device), None)
        self._comm.abort()


class Exchange:
    """Messages on their way, and the memory that they need."""

    def __init__(self, link: NcclLink, messages: list[tuple[Any, int]]) -> None:
        self._link, self._messages = link, messages
        self.arrived: Any = None
        """The event behind them."""

    @property
    def peers(self) -> str:
        """Ranks at the other end."""
        return ", ".join(map(str, sorted({peer for _, peer in self._messages})))

    def progress(self) -> None:
        """Nothing is needed: the GPU works by itself."""

    def wait(self) -> None:
        """Wait until all has been sent and received, which is so long before the products at hand are done."""
        self._link.finish(self)
