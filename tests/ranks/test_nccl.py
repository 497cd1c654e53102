"""How ranks wait for each other's keys by NCCL, without a GPU: its events and communicator are stand-ins."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash.gpu import nccl


class Event:
    """Is there when it has been looked at some times."""

    def __init__(self, num_looks: float) -> None:
        self.left = num_looks

    @property
    def done(self) -> bool:
        self.left -= 1
        return self.left < 0


class Waits:
    """A communicator and a stream: what is waited for, and whether it was given up."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.waited_for, self.aborted = error, [], False

    def check_async_error(self) -> None:
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        self.aborted = True

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)


def exchange_of(waits: Waits, event: Event) -> tuple[Any, nccl.Exchange]:
    link = object.__new__(nccl.NcclLink)
    link._comm, link._timeout, link.rank, link.device, link._pending, link._gathering = waits, 0.05, 0, 7, [], None
    link._device = nullcontext()
    link._cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: waits))
    exchange = nccl.Exchange(link, [(np.ones(3), 2), (np.ones(2), 1)])
    exchange.arrived = event
    link._pending.append(exchange)
    return link, exchange


def test_keys_come() -> None:
    waits, event = Waits(), Event(5)
    link, exchange = exchange_of(waits, event)
    exchange.wait()
    assert waits.waited_for == [event] and event.left < 0
    assert link._pending == [], "their memory is kept no longer"


def test_keys_do_not_come() -> None:
    waits = Waits()
    link, exchange = exchange_of(waits, Event(np.inf))
    with pytest.raises(TimeoutError, match=r"rank 0 waited for keys from or to rank 1, 2 for 0.05 seconds"):
        exchange.wait()
    assert waits.waited_for == []
    abandoned = len(nccl._abandoned)
    link.abort(TimeoutError())
    assert waits.aborted and nccl._abandoned[abandoned:] == [([exchange], None)]
    del nccl._abandoned[abandoned:]


def test_a_group_ends_and_its_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens while messages are given to NCCL: the next communicator is not to be made inside."""
    pytest.importorskip("cupy")
    library = import_module("cupy.cuda.nccl")

    def fail(*given: Any) -> None:
        raise KeyboardInterrupt

    depth: list[int] = []
    monkeypatch.setattr(library, "groupStart", lambda: depth.append(1), raising=False)
    monkeypatch.setattr(library, "groupEnd", lambda: depth.append(-1), raising=False)
    monkeypatch.setattr(library, "NCCL_UINT8", 1, raising=False)
    waits = Waits()
    link, _ = exchange_of(waits, Event(0))
    link._pending.clear()
    link._comm = SimpleNamespace(send=fail, recv=fail)
    waits.record = lambda: None
    link._stream = SimpleNamespace(wait_event=lambda event: None, ptr=0)
    x = SimpleNamespace(data=SimpleNamespace(ptr=0), nbytes=8)
    with pytest.raises(KeyboardInterrupt):
        link.exchange([(x, 1)], [])
    assert sum(depth) == 0 and depth and [exchange._messages for exchange in link._pending] == [[(x, 1)]]


def test_nccl_reports_a_failure() -> None:
    _, exchange = exchange_of(Waits(RuntimeError("remote process exited")), Event(np.inf))
    with pytest.raises(RuntimeError, match="remote process exited"):
        exchange.wait()
