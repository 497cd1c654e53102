"""What ranks tell each other before a call: lengths, what has to be alike, and errors, so that all raise or none."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

import numpy as np

RECORD_BYTES = 2048
"""What each rank sends; fixed, as nobody knows the others' lengths."""
MAX_MESSAGE = 900
"""Characters of an error that other ranks are told; in JSON each takes two bytes at most."""


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

    def abort(self, error: BaseException) -> None:
        """End a call by an error after `gather` has begun: let other ranks know, and keep what is on its way."""


class Call(NamedTuple):
    """One rank's part of a call."""

    seqlen_q: int
    seqlen_k: int
    columns: dict[str, int]
    """Lengths of the last axes of bias and mask, those there are."""
    common: dict[str, Any]
    """What has to be the same on all ranks."""


def describe_error(error: BaseException) -> str:
    """Type and message of an error, in characters that take one byte each."""
    try:
        text = str(error)
    except Exception:
        text = "an error that cannot be printed"
    text = f"{type(error).__name__}: {text}"
    return "".join(c if c.isascii() and c.isprintable() else " " if c.isspace() else "?" for c in text)


def record_of(call: Call | None, error: BaseException | None) -> np.ndarray:
    """What a rank tells the others: its call, or the error that it has instead."""
    if call is None or error is not None:
        told: dict[str, Any] = {"error": describe_error(error or RuntimeError())[:MAX_MESSAGE]}
    else:
        told = call._asdict()
    text = json.dumps(told).encode()
    record = np.zeros(RECORD_BYTES, np.uint8)
    record[: len(text)] = np.frombuffer(text, np.uint8)
    return record


def agree(records: np.ndarray, error: BaseException | None) -> list[Call]:
    """Read the records of all ranks; return their calls.

    Raises
    ------
    BaseException
        This rank's own error; ValueError if another rank has one, or calls differ. Then every rank raises.
    """
    found = [json.loads(row.tobytes().rstrip(b"\0")) for row in records]
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
        for name, columns in theirs.columns.items():
            if columns not in (1, total):
                raise ValueError(
                    f"{name} of rank {rank} has {columns} columns, expected {total}, one for each key of all ranks, "
                    "or 1"
                )
    return calls
