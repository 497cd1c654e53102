"""Ranks that are threads of one process: what they send each other lies in a list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash.distributed import dense


class ThreadLink:
    """A rank of some, in place of an MPI or NCCL one; keeps account of what it sends."""

    def __init__(self, rank: int, size: int, shared: dict[Any, Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._shared, self._barrier, self._step = rank, size, shared, barrier, 0
        self.device = None
        self.sent: list[tuple[int, int]] = []
        """Rank and bytes."""

    def gather(self, record: np.ndarray) -> np.ndarray:
        self._shared["record", self.rank] = record
        self._barrier.wait()
        records = np.stack([self._shared["record", rank] for rank in range(self.size)])
        self._barrier.wait()
        return records

    def exchange(self, sends: list[tuple[Any, int]], receives: list[tuple[Any, int]]) -> ThreadLink:
        self._step += 1
        for x, _ in receives:
            x.view(np.uint8).fill(0xFF)  # NaN, until it is there
        self._receives = receives
        self._shared["sent", self._step, self.rank] = [(x, to) for x, to in sends]
        self.sent += [(to, x.nbytes) for x, to in sends]
        return self

    def abort(self, error: BaseException) -> None:
        self._barrier.abort()

    def progress(self) -> None:
        pass

    def wait(self) -> None:
        self._barrier.wait()
        for x, source in self._receives:
            mail = self._shared["sent", self._step, source]
            found = mail.pop(0)[0]
            assert found.flags.c_contiguous and found.shape == x.shape and found.dtype == x.dtype
            x[...] = found
        self._barrier.wait()
        assert not self._shared["sent", self._step, self.rank], "something was sent that nobody waits for"


def run_ranks(size: int, function: Callable[[int, Any], Any]) -> tuple[list[Any], list[ThreadLink]]:
    """Call `function(rank, comm)` in a thread for each rank; return what all return.

    Where all raise TypeError or ValueError, these are what is returned; any other error is raised.
    """
    shared: dict[Any, Any] = {}
    barrier = threading.Barrier(size, timeout=60)
    links = [ThreadLink(rank, size, shared, barrier) for rank in range(size)]
    found: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = function(rank, links[rank])
        except BaseException as error:
            errors[rank] = error
            if not isinstance(error, (TypeError, ValueError)):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if all(isinstance(error, (TypeError, ValueError)) for error in errors):
        return errors, links
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return found, links


def use_links(monkeypatch: Any) -> None:
    """Let `attention` take links in place of communicators."""
    monkeypatch.setattr(dense, "_link", lambda comm, timeout: (comm, None))
