"""What a planned call checks again when it has other addresses. Pure Python; needs no GPU."""

from __future__ import annotations

import random
from typing import Any

from cuflash.gpu.launch import Launch


class _Planned(Launch):
    """Arrays that reach so far from their addresses, and nothing else of a call."""

    __slots__ = ()

    def __init__(self, extents: list[tuple[int, int, int, bool]]) -> None:
        self._extents = extents


def _shared(spans: list[tuple[int, int, bool]]) -> bool:
    """Whether something written shares a byte with another array, byte by byte."""
    rest = list(spans)
    while rest:
        low, high, written = rest.pop()
        if any((written or other) and set(range(low, high)) & set(range(begin, end)) for begin, end, other in rest):
            return True
    return False


def test_results_apart() -> None:
    rng = random.Random(0)
    found: dict[bool, int] = {True: 0, False: 0}
    for _ in range(3000):
        extents: list[Any] = []
        for place in range(rng.randint(1, 6)):
            low = rng.randint(-3, 0)
            extents.append((place, low, rng.randint(low + 1, 4), rng.random() < 0.4))
        pointers = [rng.randint(100, 140) for _ in range(8)]
        apart = _Planned(extents).results_apart(pointers)
        assert apart == (not _shared([(pointers[i] + low, pointers[i] + high, x) for i, low, high, x in extents]))
        found[apart] += 1
    assert min(found.values()) > 500
