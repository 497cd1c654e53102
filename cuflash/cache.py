"""`KVCache`: keys and values that are kept from call to call, and the accounts of whose they are.

What is decided - lengths, and which pages a slot has - is known on the host; arrays on the device are only written.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, SupportsIndex

import numpy as np

from .kv_cache import attention_with_kv_cache
from .problem.arrays import DTYPE_NAMES, FLOAT_NAMES, inspect
from .problem.checks import MAX_HEAD_DIM
from .problem.pages import Pages
from .problem.signatures import Causal, FloatDtype, explains_unknown_names
from .problem.slots import Numbers, Slots, integer_of, slice_of, slot_numbers

_HELD_HERE = ("seqlens_k", "page_table")


class KVCache:
    """Keys and values of all layers for sequences that grow, contiguous or in pages.

    Parameters
    ----------
    num_slots : int
        Sequences that there is a place for; their numbers begin with 0.
    num_heads_kv : int
        Heads of keys and values.
    head_dim : int
        Features of a key, 1 to 512.
    capacity : int
        Keys that a slot can have at most, in each layer.
    head_dim_v : int, optional
        Features of a value, 1 to 512; default `head_dim`.
    num_layers : int, optional
        Layers of the model, each with keys and values of its own. Slots, lengths and pages are the same for all.
    page_size : int, optional
        Keys of a page. Slots then take pages as they need them, and `fork` shares them. By default there are no pages:
        each slot has its whole capacity.
    num_pages : int, optional
        Pages of all slots together; default as many as full slots need.
    dtype : dtype, optional
        float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64: that of queries, keys and values.
    xp : module, optional
        ``numpy`` (the default), or ``cupy`` for arrays on its current device.

    Attributes
    ----------
    keys : list of arrays, shape (num_slots, num_heads_kv, capacity, head_dim)
        One for each layer, of shape (num_pages, num_heads_kv, page_size, head_dim) with pages. What no key was written
        to is not initialised.
    values : list of arrays, shape (num_slots, num_heads_kv, capacity, head_dim_v)
        Likewise, (num_pages, num_heads_kv, page_size, head_dim_v) with pages.
    lengths : int32 array, shape (num_slots,)
        Keys that each slot has. To be read only, which NumPy insists on: the host has a copy. Always the same memory.
    page_table : int32 array, shape (num_slots, ceil(capacity / page_size)), or None
        Pages of each slot in the order of its keys, behind them -1. Likewise; None without pages.
    num_free_pages : int or None
        Pages that no slot uses; None without pages.

    Raises
    ------
    TypeError, ValueError
        Here and in all methods: argument, got and expected, before anything is changed.

    See Also
    --------
    attention_with_kv_cache : What `attention` calls, for caches that are kept in another way.

    Notes
    -----
    Slots are named by None (all), a number, a slice, or a sequence of numbers on the host. Nothing is ever read back
    from a GPU, so no method waits for it; what is written there is put in the current stream. A captured CUDA graph of
    `attention` stays valid, as no array moves: call `reserve` before it is captured or replayed, which may need more
    pages, and `advance` after it, outside of the capture.

    Pages are those of [1]_. One that several slots share is copied before it is written to.

    References
    ----------
    .. [1] W. Kwon et al., "Efficient memory management for large language model serving with PagedAttention", 2023,
       arXiv:2309.06180.

    Examples
    --------
    Two layers, a prompt of 20 tokens for two slots, then three more tokens one by one:

    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> cache = cuflash.KVCache(3, 4, 64, capacity=100, num_layers=2, page_size=16, dtype=np.float32)
    >>> for num_new in (20, 1, 1, 1):
    ...     for layer in range(2):
    ...         q, k, v = rng.standard_normal((3, 2, 4, num_new, 64), dtype=np.float32)
    ...         out = cache.attention(q, k, v, layer=layer, slots=slice(0, 2))
    ...     cache.advance(num_new, slice(0, 2))
    >>> cache.fork(1, 2)  # another continuation of the second one
    >>> cache.lengths
    array([23, 23, 23], dtype=int32)
    >>> cache
    KVCache(3 slots, 2 layers, 4 heads, head_dim 64, float32, capacity 100, pages of 16: 5 used, 16 free, 1376256 bytes)
    """

    keys: list[Any]
    values: list[Any]
    lengths: Any
    page_table: Any

    @explains_unknown_names
    def __init__(
        self,
        num_slots: SupportsIndex,
        num_heads_kv: SupportsIndex,
        head_dim: SupportsIndex,
        capacity: SupportsIndex,
        *,
        head_dim_v: SupportsIndex | None = None,
        num_layers: SupportsIndex = 1,
        page_size: SupportsIndex | None = None,
        num_pages: SupportsIndex | None = None,
        dtype: FloatDtype = np.float16,
        xp: ModuleType | None = None,
    ) -> None:
        self._num_slots = integer_of("num_slots", num_slots, 1)
        self._num_heads = integer_of("num_heads_kv", num_heads_kv, 1)
        self._head_dim = integer_of("head_dim", head_dim, 1, MAX_HEAD_DIM)
        self._head_dim_v = self._head_dim
        if head_dim_v is not None:
            self._head_dim_v = integer_of("head_dim_v", head_dim_v, 1, MAX_HEAD_DIM)
        self._capacity = integer_of("capacity", capacity, 1)
        count, size = integer_of("num_layers", num_layers, 1), None
        if page_size is not None:
            size = integer_of("page_size", page_size, 1)
            most = -(-self._capacity // size)
            number = self._num_slots * most
            if num_pages is not None:
                number = integer_of("num_pages", num_pages, 1)
        elif num_pages is not None:
            raise ValueError(f"num_pages is {num_pages} but page_size is None, expected both or no num_pages")
        self._dtype = _float_dtype(dtype)
        self._xp = _array_module(xp)
        rows = (self._num_slots, self._num_heads, self._capacity) if size is None else (number, self._num_heads, size)
        self.keys = [self._xp.empty((*rows, self._head_dim), self._dtype) for _ in range(count)]
        self.values = [self._xp.empty((*rows, self._head_dim_v), self._dtype) for _ in range(count)]
        self._written_lengths = self._xp.zeros((self._num_slots,), np.int32)
        self.lengths = _to_be_read(self._written_lengths)
        self._lengths = [0] * self._num_slots
        self._pages: Pages | None = None
        self.page_table = None
        if size is not None:
            self._pages = Pages(self._num_slots, most, number, size)
            self._written_table = self._xp.empty(self._pages.table.shape, np.int32)
            self._written_table[...] = -1
            self.page_table = _to_be_read(self._written_table)
        # What is known until lengths or pages change: all layers ask the same.
        self._reserved: set[tuple[Numbers, int]] = set()
        self._views: dict[Numbers, tuple[Any, Any]] = {}

    @property
    def num_free_pages(self) -> int | None:
        """Pages that no slot uses; None without pages."""
        return None if self._pages is None else len(self._pages.free)

    @property
    def num_keys(self) -> tuple[int, ...]:
        """Keys that each slot has, as the host knows them: for positions of new tokens, without waiting for a GPU."""
        return tuple(self._lengths)

    def __repr__(self) -> str:
        features = f"head_dim {self._head_dim}"
        if self._head_dim_v != self._head_dim:
            features += f", head_dim_v {self._head_dim_v}"
        pages = ""
        if self._pages is not None:
            free = len(self._pages.free)
            pages = f"pages of {self._pages.size}: {len(self._pages.users) - free} used, {free} free, "
        size = sum(x.nbytes for x in (*self.keys, *self.values))
        return (
            f"KVCache({self._num_slots} slots, {len(self.keys)} layers, {self._num_heads} heads, {features}, "
            f"{DTYPE_NAMES[self._dtype]}, capacity {self._capacity}, {pages}{size} bytes)"
        )

    def attention(
        self,
        q: Any,
        k_new: Any = None,
        v_new: Any = None,
        *,
        layer: SupportsIndex = 0,
        slots: Slots = None,
        causal: Causal = True,
        **options: Any,
    ) -> Any:
        """Append to a layer behind the present lengths, and attend to it; lengths stay as they are until `advance`.

        Parameters
        ----------
        q : array, shape (B, Hq, Nq, head_dim)
            Queries; ``B`` counts the slots, in their order.
        k_new : array, shape (B, num_heads_kv, Nnew, head_dim), optional
            Keys that are written to the layer. Pages that they need are reserved, for all layers at once.
        v_new : array, shape (B, num_heads_kv, Nnew, head_dim_v), optional
            Values, likewise; both or none.
        layer : int, optional
            Counted from 0.
        slots : None, int, slice, or, with pages, sequence of int, optional
            Different ones. A sequence costs two small copies to the device for each new length, and cannot be captured
            in a graph.
        causal : bool or {"bottom_right", "top_left"}, optional
            As in `attention_with_kv_cache`; on by default: the last query stands at the last key.
        **options
            The other ones of `attention_with_kv_cache`. A `bias` or `mask` has as many columns as a slot has room for:
            `capacity`, with pages the next multiple of `page_size`.

        Returns
        -------
        out : array, shape (B, Hq, Nq, head_dim_v)
        lse : array, shape (B, Hq, Nq)
            Only with `return_lse` or `lse`.

        Raises
        ------
        TypeError, ValueError
            As in `attention_with_kv_cache`; for more keys than a slot has room for, or there are free pages for.
        """
        numbers = slot_numbers("slots", slots, self._num_slots)
        if self._pages is None and type(numbers) is tuple:
            raise ValueError(
                f"slots is a {type(slots).__name__}, expected None, an int or a slice: rows of a contiguous cache "
                "could not be written in place; with page_size any slots will do"
            )
        at = integer_of("layer", layer, 0, len(self.keys) - 1)
        for name in _HELD_HERE:
            if name in options:
                raise TypeError(f"KVCache.attention() got {name}, expected no such option: it is the cache's own")
        num_new = self._num_new(q, k_new, len(numbers))
        planned = self._reserve(f"k_new has {num_new} keys", num_new, numbers)
        lengths, table = self._view(numbers)
        k, v = self.keys[at], self.values[at]
        if self._pages is None and numbers != range(self._num_slots):
            k, v = k[slice_of(numbers)], v[slice_of(numbers)]
        try:
            return attention_with_kv_cache(
                q, k, v, seqlens_k=lengths, k_new=k_new, v_new=v_new, page_table=table, causal=causal, **options
            )
        except Exception:
            # Other arguments are checked there: if one is refused, no page was taken.
            self._give_back(planned)
            raise

    def advance(self, num_new: SupportsIndex, slots: Slots = None) -> None:
        """Let lengths grow, after all layers have appended.

        Parameters
        ----------
        num_new : int
            Keys that each layer has appended to each of the slots.
        slots : None, int, slice or sequence of int, optional

        Raises
        ------
        TypeError, ValueError
            For more keys than a slot has room for, or has pages for.
        """
        count, numbers = integer_of("num_new", num_new, 0), slot_numbers("slots", slots, self._num_slots)
        self._check_room(f"num_new is {count}", count, numbers)
        pages = self._pages
        for slot in numbers if pages is not None else ():
            assert pages is not None, "there are slots to look at"
            room = pages.held[slot] * pages.size - self._lengths[slot]
            if count > room:
                raise ValueError(
                    f"num_new is {count} but slot {slot} has pages for {room} further keys, expected no more than were "
                    "appended by attention() or reserved"
                )
        if not count or not numbers:
            return
        for slot in numbers:
            self._lengths[slot] += count
        if isinstance(numbers, range):
            with self._on_device():
                part = self._written_lengths[slice_of(numbers)]
                part += count
            self._forget()
        else:
            self._write_lengths()

    def reserve(self, num_new: SupportsIndex, slots: Slots = None) -> None:
        """Make sure of pages for further keys, so that appending them needs no change of the table.

        Parameters
        ----------
        num_new : int
            Keys for each of the slots, behind its present length. Without pages there is always room.
        slots : None, int, slice or sequence of int, optional

        Raises
        ------
        TypeError, ValueError
            For more keys than a slot has room for, or there are free pages for; no slot has more pages then.
        """
        count = integer_of("num_new", num_new, 0)
        self._reserve(f"num_new is {count}", count, slot_numbers("slots", slots, self._num_slots))

    def fork(self, source: SupportsIndex, targets: Slots) -> None:
        """Make slots copies of another one, whatever they held before.

        Full pages are shared, one that is partly filled is copied. Without pages keys and values are copied.

        Parameters
        ----------
        source : int
            The slot that is copied.
        targets : int, slice or sequence of int
            Other slots.

        Raises
        ------
        TypeError, ValueError
            If `source` is among `targets`, or there are too few free pages, those of `targets` included.
        """
        origin = integer_of("source", source, 0, self._num_slots - 1)
        if targets is None:
            raise TypeError("targets is None, expected an int, a slice or a sequence of int")
        numbers, length, pages = slot_numbers("targets", targets, self._num_slots), self._lengths[origin], self._pages
        if origin in numbers:
            raise ValueError(f"targets has slot {origin}, expected other slots than source")
        if pages is None:
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
            for slot in numbers:
                pages.release(slot, 0)
            for slot in numbers:
                pages.share(origin, slot, full)
                if rows:
                    self._copy(pages.take(slot, full), int(pages.table[origin, full]), rows)
        self._set_lengths(numbers, [length] * len(numbers))

    def truncate(self, length: SupportsIndex, slots: Slots = None) -> None:
        """Drop the keys behind a length, and return pages behind it that nobody else uses, reserved ones too.

        Parameters
        ----------
        length : int
            Keys that each of the slots keeps; one that has fewer keeps them all.
        slots : None, int, slice or sequence of int, optional
        """
        kept, numbers = integer_of("length", length, 0), slot_numbers("slots", slots, self._num_slots)
        lengths = [min(self._lengths[slot], kept) for slot in numbers]
        if self._pages is not None:
            for slot, kept in zip(numbers, lengths, strict=True):
                self._pages.release(slot, -(-kept // self._pages.size))
        self._set_lengths(numbers, lengths)

    def free(self, slots: Slots = None) -> None:
        """Make slots empty, and return pages that nobody else uses.

        Parameters
        ----------
        slots : None, int, slice or sequence of int, optional
        """
        self.truncate(0, slots)

    def _num_new(self, q: Any, k_new: Any, batch: int) -> int:
        """Return how many keys there are to append; raise for axes that do not go with the slots."""
        shape = tuple(getattr(q, "shape", ()))
        if len(shape) == 4 and shape[0] != batch:
            raise ValueError(f"q has batch {shape[0]}, expected {batch}, one for each of the slots")
        if k_new is None:
            return 0
        shape = tuple(getattr(k_new, "shape", ()))
        if len(shape) != 4 or shape != (batch, self._num_heads, shape[2], self._head_dim):
            shape = inspect("k_new", k_new).shape
            expected = f"({batch}, {self._num_heads}, new keys, {self._head_dim})"
            raise ValueError(f"k_new has shape {shape}, expected {expected}")
        num_new: int = shape[2]
        return num_new

    def _check_room(self, got: str, num_new: int, numbers: Numbers) -> None:
        for slot in numbers:
            if self._lengths[slot] + num_new > self._capacity:
                room = self._capacity - self._lengths[slot]
                raise ValueError(
                    f"{got} but slot {slot} has {self._lengths[slot]} of {self._capacity}, expected at most {room}"
                )

    def _reserve(self, got: str, num_new: int, numbers: Numbers) -> list[tuple[int, int, int]]:
        """Take the pages that so many keys need; return what was done, for `_give_back`."""
        if (numbers, num_new) in self._reserved:
            return []
        self._check_room(got, num_new, numbers)
        planned: list[tuple[int, int, int]] = []
        if self._pages is not None:
            pages, free = self._pages, len(self._pages.free)
            planned = pages.missing(numbers, self._lengths, num_new)
            if len(planned) > free:
                raise ValueError(
                    f"{got} for each of {len(numbers)} slots, which need {len(planned)} more pages, but "
                    f"{free} of {len(pages.users)} are free, expected no more than that"
                )
            if planned:
                self._forget()
            for slot, place, old in planned:
                page, rows = pages.take(slot, place), self._lengths[slot] - place * pages.size
                if old >= 0 and rows > 0:
                    self._copy(page, old, rows)
            self._upload()
        self._reserved.add((numbers, num_new))
        return planned

    def _give_back(self, planned: list[tuple[int, int, int]]) -> None:
        """Undo what `_reserve` did just before."""
        if self._pages is not None and planned:
            for slot, place, old in reversed(planned):
                self._pages.put_back(slot, place, old)
            self._upload()
            self._forget()

    def _view(self, numbers: Numbers) -> tuple[Any, Any]:
        """Lengths and page table of slots, on the device."""
        if numbers not in self._views:
            table = self.page_table
            if isinstance(numbers, range):
                part = slice_of(numbers)
                self._views[numbers] = self.lengths[part], None if table is None else table[part]
            else:
                assert self._pages is not None, "it was checked"
                lengths = np.array([self._lengths[slot] for slot in numbers], np.int32)
                rows = self._pages.table[np.array(numbers, np.intp)]  # a copy, which later changes do not reach
                with self._on_device():
                    self._views[numbers] = self._xp.asarray(lengths), self._xp.asarray(rows)
        return self._views[numbers]

    def _set_lengths(self, numbers: Numbers, lengths: list[int]) -> None:
        for slot, length in zip(numbers, lengths, strict=True):
            self._lengths[slot] = length
        self._write_lengths()

    def _write_lengths(self) -> None:
        """Bring lengths and pages to the device, where they stay in their memory."""
        self._forget()
        with self._on_device():
            self._written_lengths[...] = self._xp.asarray(np.array(self._lengths, np.int32))
        self._upload()

    def _upload(self) -> None:
        """Write pages that have changed to the device, in one copy."""
        part = None if self._pages is None else self._pages.changes()
        if part is not None:
            assert self._pages is not None, "else nothing has changed"
            with self._on_device():
                self._written_table[part] = self._xp.asarray(self._pages.table[part])
            self._pages.forget_changes()

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


def _float_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        found: np.dtype[Any] | None = None if dtype is None else np.dtype(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or DTYPE_NAMES.get(found) not in FLOAT_NAMES:
        got = dtype if found is None else found
        raise TypeError(f"dtype is {got!r}, expected float16, bfloat16, float32 or float64")
    return found


def _array_module(xp: ModuleType | None) -> Any:
    if xp is None:
        return np
    if not isinstance(xp, ModuleType) or xp.__name__ not in ("numpy", "cupy"):
        raise TypeError(f"xp is {xp!r}, expected the module numpy or cupy")
    return xp
