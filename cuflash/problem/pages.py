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

    Notes
    -----
    What slots have, `table` and `held`, is the truth. Where an interrupt came between two steps of a change, users and
    free pages are counted by it. To look at them changes nothing, as a signal's handler may in the middle of a change.
    """

    def __init__(self, num_slots: int, most: int, num_pages: int, size: int) -> None:
        self.size = size
        self.table = np.full((num_slots, most), -1, np.int32)
        self.held = [0] * num_slots
        self._users = np.zeros(num_pages, np.int32)
        self._free = list(range(num_pages))[::-1]
        self._are_counted = True
        self._changed: list[tuple[int, int, int]] = []

    @property
    def users(self) -> np.ndarray:
        """How many slots have each page."""
        return self._users if self._are_counted else self._count()[0]

    @property
    def free(self) -> list[int]:
        """Pages that no slot has, the next one to take last."""
        return self._free if self._are_counted else self._count()[1]

    def _count(self) -> tuple[np.ndarray, list[int]]:
        """Count users and list free pages by what slots have."""
        users = np.zeros_like(self._users)
        for slot, count in enumerate(self.held):
            users[self.table[slot, :count]] += 1  # those of one slot are different
        return users, np.flatnonzero(users == 0)[::-1].tolist()

    def _begin_change(self, slot: int, begin: int, end: int) -> tuple[np.ndarray, list[int]]:
        """Note which places of a slot change; return users and free pages, which are to change, too."""
        if not self._are_counted:
            self._users, self._free = self._count()
            for other, count in enumerate(self.held):
                self._changed.append((other, count, self.table.shape[1]))
                self.table[other, count:] = -1
        self._changed.append((slot, begin, end))
        self._are_counted = False
        return self._users, self._free

    def missing(self, numbers: Iterable[int], lengths: list[int], num_new: int) -> list[tuple[int, int, int]]:
        """List slot and place of the pages to take before keys are written, and which page was there (-1: none).

        Also those in place of a page that others use, too. The last of its users to leave may keep it.
        """
        missing: list[tuple[int, int, int]] = []
        left: dict[int, int] = {}
        for slot in numbers if num_new else ():
            begin, end = lengths[slot] // self.size, -(-(lengths[slot] + num_new) // self.size)
            for place in range(begin, end):
                page = -1
                if place < self.held[slot]:
                    page = int(self.table[slot, place])
                    if self.users[page] - left.get(page, 0) == 1:
                        continue
                    left[page] = left.get(page, 0) + 1
                missing.append((slot, place, page))
        return missing

    def take(self, slot: int, place: int) -> int:
        """Give a slot a free page, behind those it has or in place of one that it shares; return its number."""
        users, free = self._begin_change(slot, place, place + 1)
        page, old = free.pop(), int(self.table[slot, place])
        users[page] = 1
        self.table[slot, place] = page
        if place < self.held[slot]:
            users[old] -= 1
        else:
            self.held[slot] = place + 1
        self._are_counted = True
        return page

    def put_back(self, slot: int, place: int, old: int) -> None:
        """Undo `take`, the latest one first."""
        users, free = self._begin_change(slot, place, place + 1)
        page = int(self.table[slot, place])
        if old >= 0:
            users[old] += 1
        else:
            self.held[slot] = place
        self.table[slot, place] = old
        users[page] = 0
        free.append(page)
        self._are_counted = True

    def share(self, source: int, target: int, count: int) -> None:
        """Give the first pages of a slot to one that has none."""
        if not count:
            return
        users, _ = self._begin_change(target, 0, count)
        pages = self.table[source, :count]
        users[pages] += 1
        self.table[target, :count] = pages
        self.held[target] = count
        self._are_counted = True

    def release(self, slot: int, kept: int) -> None:
        """Take the pages behind some from a slot; those that nobody uses then are free."""
        end = self.held[slot]
        kept = min(kept, end)
        if kept == end and self._are_counted:
            return
        users, free = self._begin_change(slot, kept, end)
        pages = self.table[slot, kept:end].copy()
        self.held[slot] = kept
        self.table[slot, kept:end] = -1
        users[pages] -= 1
        free += pages[users[pages] == 0][::-1].tolist()
        self._are_counted = True

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
