"""Memory of a `KVCache`: keys and values of all layers, and lengths and pages, which host and device both have."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from .gpu.installed import why_no_gpu
from .problem.arrays import DTYPE_NAMES
from .problem.pages import Pages
from .problem.slots import Numbers, slice_of


class CacheMemory:
    """Arrays of a cache, and the accounts of whose they are. Arguments are checked before.

    Parameters
    ----------
    num_slots, num_heads, capacity, num_layers : int
        As a `KVCache` has them.
    head_dims : tuple of int
        Features of keys and of values.
    dtype : dtype
    xp : module
    pages : Pages or None
        None: each slot has its whole capacity.

    Attributes
    ----------
    keys, values, lengths, page_table
        As those of the `KVCache`. No array moves.
    num_keys : list of int
        Keys that each slot has, on the host.
    """

    def __init__(
        self,
        num_slots: int,
        num_heads: int,
        capacity: int,
        head_dims: tuple[int, int],
        num_layers: int,
        dtype: np.dtype[Any],
        xp: Any,
        pages: Pages | None,
    ) -> None:
        self.num_slots, self.num_heads, self.capacity, self.pages, self._xp = num_slots, num_heads, capacity, pages, xp
        rows = (num_slots, num_heads, capacity) if pages is None else (len(pages.users), num_heads, pages.size)
        self.keys, self.values = (
            [xp.empty((*rows, features), dtype) for _ in range(num_layers)] for features in head_dims
        )
        self.num_keys = [0] * num_slots
        self._is_behind = False
        """Whether the device may have other lengths or pages, as an interrupt came in between."""
        self._written_lengths = xp.zeros((num_slots,), np.int32)
        self._written_table: Any = None
        if pages is not None:
            self._written_table = xp.empty(pages.table.shape, np.int32)
            self._written_table[...] = -1
        self._begin()

    def _begin(self) -> None:
        self.lengths, self.page_table = _to_be_read(self._written_lengths), _to_be_read(self._written_table)
        # What is known until lengths or pages change: all layers ask the same.
        self._reserved: set[tuple[Numbers, int]] = set()
        self._views: dict[Numbers, tuple[Any, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy, or a pickle, takes along: views of memory would be memory of their own there."""
        derived = "lengths", "page_table", "_reserved", "_views"
        return {name: x for name, x in self.__dict__.items() if name not in derived} | {"_xp": self._xp.__name__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _xp=import_module(state["_xp"]))
        self._begin()

    def __str__(self) -> str:
        head_dim, head_dim_v = self.keys[0].shape[-1], self.values[0].shape[-1]
        features = f"head_dim {head_dim}" + (f", head_dim_v {head_dim_v}" if head_dim_v != head_dim else "")
        pages = ""
        if self.pages is not None:
            free = len(self.pages.free)
            pages = f"pages of {self.pages.size}: {len(self.pages.users) - free} used, {free} free, "
        size = sum(x.nbytes for x in (*self.keys, *self.values))
        return (
            f"{self.num_slots} slots, {len(self.keys)} layers, {self.num_heads} heads, {features}, "
            f"{DTYPE_NAMES[self.keys[0].dtype]}, capacity {self.capacity}, {pages}{size} bytes"
        )

    def check_room(self, got: str, num_new: int, numbers: Numbers) -> None:
        """Raise ValueError for more keys than a slot has room for."""
        for slot in numbers:
            if self.num_keys[slot] + num_new > self.capacity:
                room = self.capacity - self.num_keys[slot]
                raise ValueError(
                    f"{got} but slot {slot} has {self.num_keys[slot]} of {self.capacity}, expected at most {room}"
                )

    def reserve(self, got: str, num_new: int, numbers: Numbers) -> list[tuple[int, int, int]]:
        """Take the pages that so many keys need; return what was done, for `give_back`."""
        self._catch_up()
        if (numbers, num_new) in self._reserved:
            return []
        self.check_room(got, num_new, numbers)
        planned: list[tuple[int, int, int]] = []
        if self.pages is not None:
            pages, free = self.pages, len(self.pages.free)
            planned = pages.missing(numbers, self.num_keys, num_new)
            if len(planned) > free:
                raise ValueError(
                    f"{got} for each of {len(numbers)} slots, which need {len(planned)} more pages, but "
                    f"{free} of {len(pages.users)} are free, expected no more than that"
                )
            if planned:
                self._forget()
            for slot, place, old in planned:
                rows = self.num_keys[slot] - place * pages.size
                if old >= 0 and rows > 0:
                    self._copy(pages.free[-1], old, rows)  # before it is the slot's
                pages.take(slot, place)
            self._upload()
        self._reserved.add((numbers, num_new))
        return planned

    def give_back(self, planned: list[tuple[int, int, int]]) -> None:
        """Undo what `reserve` did just before."""
        if self.pages is not None and planned:
            self._forget()
            for slot, place, old in reversed(planned):
                self.pages.put_back(slot, place, old)
            self._upload()

    def view(self, numbers: Numbers) -> tuple[Any, Any]:
        """Lengths and page table of slots, on the device."""
        self._catch_up()
        if numbers not in self._views:
            table = self.page_table
            if isinstance(numbers, range):
                part = slice_of(numbers)
                self._views[numbers] = self.lengths[part], None if table is None else table[part]
            else:
                assert self.pages is not None, "it was checked"
                lengths = np.array([self.num_keys[slot] for slot in numbers], np.int32)
                rows = self.pages.table[np.array(numbers, np.intp)]  # a copy, which later changes do not reach
                with self._on_device():
                    self._views[numbers] = self._xp.asarray(lengths), self._xp.asarray(rows)
        return self._views[numbers]

    def grow(self, numbers: Numbers, count: int) -> None:
        """Let lengths grow."""
        adds = isinstance(numbers, range) and not self._is_behind
        self._account(numbers, [self.num_keys[slot] + count for slot in numbers])
        if not adds:
            self._write()
            return
        assert isinstance(numbers, range), "see above"
        with self._on_device():
            part = self._written_lengths[slice_of(numbers)]
            part += count
        self._forget()
        self._is_behind = False

    def share(self, origin: int, numbers: Numbers) -> None:
        """Give slots what another one has: its full pages, and a copy of the last; without pages a copy of all."""
        length, pages = self.num_keys[origin], self.pages
        if pages is None:
            self._account(numbers, [0] * len(numbers))
            for slot in numbers:
                self._copy(slot, origin, length)
        else:
            full, rows = divmod(length, pages.size)
            needed, free = len(numbers) if rows else 0, len(pages.free) + pages.used_only_by(numbers)
            if needed > free:
                raise ValueError(
                    f"targets has {needed} slots, each with a page of its own, but only {free} of {len(pages.users)} "
                    "pages are free or theirs; expected no more slots than that"
                )
            self._account(numbers, [0] * len(numbers))
            for slot in numbers:
                pages.release(slot, 0)
            for slot in numbers:
                pages.share(origin, slot, full)
                if rows:
                    self._copy(pages.take(slot, full), int(pages.table[origin, full]), rows)
        self._account(numbers, [length] * len(numbers))
        self._write()

    def truncate(self, most: int, numbers: Numbers) -> None:
        """Drop the keys behind a length, and release the pages behind it."""
        lengths = [min(self.num_keys[slot], most) for slot in numbers]
        self._account(numbers, lengths)
        if self.pages is not None:
            for slot, kept in zip(numbers, lengths, strict=True):
                self.pages.release(slot, -(-kept // self.pages.size))
        self._write()

    def _account(self, numbers: Numbers, lengths: list[int]) -> None:
        """Note lengths on the host, of all slots at once."""
        num_keys = list(self.num_keys)
        for slot, length in zip(numbers, lengths, strict=True):
            num_keys[slot] = length
        self._is_behind = True
        self.num_keys = num_keys

    def _catch_up(self) -> None:
        if self._is_behind:
            self._write()

    def _write(self) -> None:
        """Bring lengths and pages to the device, where they stay in their memory."""
        self._forget()
        with self._on_device():
            self._written_lengths[...] = self._xp.asarray(np.array(self.num_keys, np.int32))
        self._upload()
        self._is_behind = False

    def _upload(self) -> None:
        """Write pages that have changed to the device, in one copy."""
        part = None if self.pages is None else self.pages.changes()
        if part is not None:
            assert self.pages is not None, "else nothing has changed"
            with self._on_device():
                self._written_table[part] = self._xp.asarray(self.pages.table[part])
            self.pages.forget_changes()

    def _copy(self, target: int, source: int, num_keys: int) -> None:
        """Copy the first keys and values of a page, or of a slot, in all layers."""
        with self._on_device():
            for x in (*self.keys, *self.values):
                x[target, :, :num_keys] = x[source, :, :num_keys]

    def _forget(self) -> None:
        self._reserved.clear()
        self._views.clear()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the device of the cache the current one: the caller may have gone on to another."""
        return nullcontext() if self._xp is np else self.lengths.device


def _to_be_read(array: Any) -> Any:
    """The same memory; NumPy writes nothing there."""
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


def array_module_of(xp: ModuleType | None) -> Any:
    """Read which library makes the arrays, by default NumPy."""
    if xp is None:
        return np
    if not isinstance(xp, ModuleType) or xp.__name__ not in ("numpy", "cupy"):
        raise TypeError(f"xp is {xp!r}, expected the module numpy or cupy")
    if xp.__name__ == "cupy" and (missing := why_no_gpu()):
        raise RuntimeError(f"xp is cupy: {missing}")
    return xp
