"""What ranks tell each other before a call: lengths, what has to be alike, and errors, so that all raise or none."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

import numpy as np

RECORD_BYTES = 2048
"""What each rank sends; fixed, as nobody knows the others' lengths."""
MAX_MESSAGE = 800
"""Characters of an error that other ranks are told."""


class Link(Protocol):
    """How ranks are connected."""

    rank: int
    size: int
    device: int | None
    """GPU that arrays have to be on, if there is one."""

    def gather(self, record: np.ndarray) -> np.ndarray:
        """Return the records (size, bytes) of all ranks, given one's own; waits for all."""

    def exchange(self, sends: list[tuple[Any, int]], receives: list[tuple[Any, int]]) -> Any:
        """Begin to send arrays to ranks and to receive others; the result has `wait()` and `progress()`.

        Arrays are contiguous. Those that are received may be read after `wait`, those that are sent written.
        """


class Call(NamedTuple):
    """One rank's part of a call."""

    seqlen_q: int
    seqlen_k: int
    columns: tuple[int, ...]
    """Lengths of the last axes of bias and mask, those there are."""
    common: dict[str, Any]
    """What has to be the same on all ranks."""


def agree(link: Link, call: Call | None, error: Exception | None) -> list[Call]:
    """Tell all ranks of one's call, or of the error that it has instead; return the calls of all.

    Raises
    ------
    Exception
        This rank's own error; ValueError if another rank has one, or calls differ. Then every rank raises.
    """
    message = f"{type(error).__name__}: {error}".encode("ascii", "replace")[:MAX_MESSAGE].decode()
    told: dict[str, Any] = {"error": message} if call is None else call._asdict()
    text = json.dumps(told).encode()
    record = np.zeros(RECORD_BYTES, np.uint8)
    record[: len(text)] = np.frombuffer(text, np.uint8)
    found = [json.loads(row.tobytes().rstrip(b"\0")) for row in link.gather(record)]
    if error is not None:
        raise error
    for rank, theirs in enumerate(found):
        if "error" in theirs:
            raise ValueError(f"rank {rank} raised {theirs['error']}")
    calls = [Call(**theirs) for theirs in found]
    for rank, theirs in enumerate(calls):
        for name, expected in calls[0].common.items():
            if theirs.common[name] != expected:
                raise ValueError(f"{name} is {theirs.common[name]} on rank {rank}, expected {expected} as on rank 0")
    total = sum(theirs.seqlen_k for theirs in calls)
    for rank, theirs in enumerate(calls):
        for columns in theirs.columns:
            if columns not in (1, total):
                raise ValueError(
                    f"bias or mask of rank {rank} has {columns} columns, expected {total}, one for each key of all "
                    "ranks, or 1"
                )
    return calls
