"""Pages of a cache: which sequence has which of them, and which are free. All of it is known on the host."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Pages:
    """Which pages each slot has, and how many slots each page.

    Parameters
    ----------
    num_slots : int
    most : int
        Pages that a slot can have.
    num_pages : int
    size : int
        Keys of a page.

    Attributes
    ----------
    table : ndarray of int32, shape (num_slots, most)
        Pages of each slot, behind them -1.
    held : list of int
        How many each slot has.
    users : ndarray of int32, shape (num_pages,)
        How many slots have a page.
    free : list of int
        Pages that no slot has.

    Notes
    -----
    What changes does so in an order in which an interrupt, between any two steps, loses a page at worst: none is free
    and in use, or thought to be used by fewer than use it.
    """

    def __init__(self, num_slots: int, most: int, num_pages: int, size: int) -> None:
        self.size = size
        self.table = np.full((num_slots, most), -1, np.int32)
        self.held = [0] * num_slots
        self.users = np.zeros(num_pages, np.int32)
        self.free = list(range(num_pages))[::-1]
        self._changed: list[tuple[int, int, int]] = []

    def missing(self, numbers: Iterable[int], lengths: list[int], num_new: int) -> list[tuple[int, int, int]]:
        """List slot and place of the pages to take before keys are written, and which page was there (-1: none).

        Also those in place of a page that others use, too. The last of its users to leave may keep it.
        """
        missing: list[tuple[int, int, int]] = []
        left: dict[int, int] = {}
        for slot in numbers if num_new else ():
            begin, end = lengths[slot] // self.size, -(-(lengths[slot] + num_new) // self.size)
            for place in range(begin, end):
                page = int(self.table[slot, place])
                if place < self.held[slot]:
                    if self.users[page] - left.get(page, 0) == 1:
                        continue
                    left[page] = left.get(page, 0) + 1
                missing.append((slot, place, page))
        return missing

    def take(self, slot: int, place: int) -> int:
        """Give a slot a free page, behind those it has or in place of one that it shares; return its number."""
        self._changed.append((slot, place, place + 1))
        page, old = self.free.pop(), int(self.table[slot, place])
        self.users[page] = 1
        self.table[slot, place] = page
        if place < self.held[slot]:
            self.users[old] -= 1
        else:
            self.held[slot] = place + 1
        return page

    def put_back(self, slot: int, place: int, old: int) -> None:
        """Undo `take`, the latest one first."""
        self._changed.append((slot, place, place + 1))
        page = int(self.table[slot, place])
        if old >= 0:
            self.users[old] += 1
        else:
            self.held[slot] = place
        self.table[slot, place] = old
        self.users[page] = 0
        self.free.append(page)

    def share(self, source: int, target: int, count: int) -> None:
        """Give the first pages of a slot to one that has none."""
        if count:
            self._changed.append((target, 0, count))
        pages = self.table[source, :count]
        self.users[pages] += 1  # those of one slot are different
        self.table[target, :count] = pages
        self.held[target] = count

    def release(self, slot: int, kept: int) -> None:
        """Take the pages behind some from a slot; those that nobody uses then are free."""
        end = self.held[slot]
        if kept >= end:
            return
        self._changed.append((slot, kept, end))
        pages = self.table[slot, kept:end].copy()
        self.held[slot] = kept
        self.table[slot, kept:end] = -1
        self.users[pages] -= 1
        self.free += pages[self.users[pages] == 0][::-1].tolist()

    def used_only_by(self, numbers: Iterable[int]) -> int:
        """Count the pages that would be free without these slots."""
        users = self.users.copy()
        for slot in numbers:
            users[self.table[slot, : self.held[slot]]] -= 1
        return int(np.count_nonzero((users == 0) & (self.users > 0)))

    def changes(self) -> tuple[slice, slice] | None:
        """Return the part of the table that has changed since `forget_changes`, and what lies between."""
        if not self._changed:
            return None
        slots, begins, ends = zip(*self._changed, strict=True)
        return slice(min(slots), max(slots) + 1), slice(min(begins), max(ends))

    def forget_changes(self) -> None:
        """Call it when they are written elsewhere."""
        self._changed.clear()
