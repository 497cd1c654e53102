"""`KVCache`: keys and values that are kept from call to call, and its checks; what it holds is a `CacheMemory`.

What is decided - lengths, and which pages a slot has - is known on the host; arrays on the device are only written.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import numpy as np

from .cache_memory import CacheMemory, array_module_of
from .kv_cache import attention_with_kv_cache
from .problem.arrays import DTYPES, inspect, shape_of
from .problem.checks import MAX_HEAD_DIM, dtype_name
from .problem.hints import check_options, explains_unknown_names, passes_options_to
from .problem.pages import Pages
from .problem.signatures import Causal, FloatDtype
from .problem.slots import Slots, integer_of, slice_of, slot_numbers

if TYPE_CHECKING:
    from .problem.signatures import AnyArray, NumpyArray, Pair, SlotOptions, SlotResults, Unpack, WithoutLse

_HELD_HERE = ("k_cache", "v_cache", "seqlens_k", "page_table")


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
    num_keys : tuple of int
        Keys that each slot has, known to the host.
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
        slots, heads = integer_of("num_slots", num_slots, 1), integer_of("num_heads_kv", num_heads_kv, 1)
        features = features_v = integer_of("head_dim", head_dim, 1, MAX_HEAD_DIM)
        if head_dim_v is not None:
            features_v = integer_of("head_dim_v", head_dim_v, 1, MAX_HEAD_DIM)
        room, layers = integer_of("capacity", capacity, 1), integer_of("num_layers", num_layers, 1)
        size = None if page_size is None else integer_of("page_size", page_size, 1)
        if size is None and num_pages is not None:
            raise ValueError(f"num_pages is {num_pages} but page_size is None, expected both or no num_pages")
        number = None if num_pages is None else integer_of("num_pages", num_pages, 1)
        kind, module, pages = DTYPES[dtype_name("dtype", dtype)], array_module_of(xp), None
        if size is not None:
            most = -(-room // size)
            pages = Pages(slots, most, slots * most if number is None else number, size)
        self._memory = CacheMemory(slots, heads, room, (features, features_v), layers, kind, module, pages)

    @property
    def keys(self) -> list[Any]:
        """Of all slots, layer by layer."""
        return self._memory.keys

    @property
    def values(self) -> list[Any]:
        """Likewise."""
        return self._memory.values

    @property
    def lengths(self) -> Any:
        """Keys that each slot has, on the device."""
        return self._memory.lengths

    @property
    def page_table(self) -> Any:
        """Pages of each slot, on the device; None without pages."""
        return self._memory.page_table

    @property
    def num_free_pages(self) -> int | None:
        """Pages that no slot uses; None without pages."""
        return None if self._memory.pages is None else len(self._memory.pages.free)

    @property
    def num_keys(self) -> tuple[int, ...]:
        """Keys that each slot has, as the host knows them: for positions of new tokens, without waiting for a GPU."""
        return tuple(self._memory.num_keys)

    def __repr__(self) -> str:
        return f"KVCache({self._memory})"

    # fmt: off
    @overload
    def attention(
        self, q: NumpyArray, k_new: AnyArray | None = None, v_new: AnyArray | None = None,
        *, layer: SupportsIndex = 0, slots: Slots = None, return_lse: Literal[False] = False, lse: None = None,
        **options: Unpack[SlotOptions],
    ) -> NumpyArray | WithoutLse: ...
    @overload
    def attention(
        self, q: NumpyArray, k_new: AnyArray | None = None, v_new: AnyArray | None = None,
        *, layer: SupportsIndex = 0, slots: Slots = None, return_lse: Literal[True], lse: AnyArray | None = None,
        **options: Unpack[SlotOptions],
    ) -> tuple[NumpyArray, Any]: ...
    @overload
    def attention(
        self, q: NumpyArray, k_new: AnyArray | None = None, v_new: AnyArray | None = None,
        *, layer: SupportsIndex = 0, slots: Slots = None, return_lse: bool = False, lse: AnyArray,
        **options: Unpack[SlotOptions],
    ) -> tuple[NumpyArray, Any]: ...
    @overload
    def attention(
        self, q: NumpyArray, k_new: AnyArray | None = None, v_new: AnyArray | None = None,
        *, layer: SupportsIndex = 0, slots: Slots = None, return_lse: bool, lse: None = None,
        **options: Unpack[SlotOptions],
    ) -> NumpyArray | WithoutLse | tuple[NumpyArray, Any]: ...
    @overload
    def attention(
        self, q: AnyArray, k_new: AnyArray | None = None, v_new: AnyArray | None = None,
        *, layer: SupportsIndex = 0, slots: Slots = None, return_lse: Literal[False] = False, lse: None = None,
        **options: Unpack[SlotResults],
    ) -> Any | WithoutLse: ...
    @overload
    def attention(
        self, q: AnyArray, k_new: AnyArray | None = None, v_new: AnyArray | None = None,
        *, layer: SupportsIndex = 0, slots: Slots = None, return_lse: Literal[True], lse: AnyArray | None = None,
        **options: Unpack[SlotResults],
    ) -> Pair: ...
    @overload
    def attention(
        self, q: AnyArray, k_new: AnyArray | None = None, v_new: AnyArray | None = None,
        *, layer: SupportsIndex = 0, slots: Slots = None, return_lse: bool = False, lse: AnyArray,
        **options: Unpack[SlotResults],
    ) -> Pair: ...
    @overload
    def attention(
        self, q: AnyArray, k_new: AnyArray | None = None, v_new: AnyArray | None = None,
        *, layer: SupportsIndex = 0, slots: Slots = None, return_lse: bool, lse: None = None,
        **options: Unpack[SlotResults],
    ) -> Any | WithoutLse | Pair: ...
    # fmt: on
    @passes_options_to(attention_with_kv_cache, but=_HELD_HERE)
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
        memory = self._memory
        numbers = slot_numbers("slots", slots, memory.num_slots)
        if memory.pages is None and type(numbers) is tuple:
            raise ValueError(
                f"slots is a {type(slots).__name__}, expected None, an int or a slice: rows of a contiguous cache "
                "could not be written in place; with page_size any slots will do"
            )
        at = integer_of("layer", layer, 0, len(self.keys) - 1)
        check_options("KVCache.attention", options)
        num_new = self._num_new(q, k_new, len(numbers))
        planned = memory.reserve(f"k_new has {num_new} keys", num_new, numbers)
        lengths, table = memory.view(numbers)
        k, v = self.keys[at], self.values[at]
        if memory.pages is None and numbers != range(memory.num_slots):
            k, v = k[slice_of(numbers)], v[slice_of(numbers)]
        try:
            return attention_with_kv_cache(
                q, k, v, seqlens_k=lengths, k_new=k_new, v_new=v_new, page_table=table, causal=causal, **options
            )
        except Exception:
            # Other arguments are checked there: if one is refused, no page was taken.
            memory.give_back(planned)
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
        memory = self._memory
        count, numbers = integer_of("num_new", num_new, 0), slot_numbers("slots", slots, memory.num_slots)
        memory.check_room(f"num_new is {count}", count, numbers)
        for slot in numbers if memory.pages is not None else ():
            assert memory.pages is not None, "there are slots to look at"
            room = memory.pages.held[slot] * memory.pages.size - memory.num_keys[slot]
            if count > room:
                raise ValueError(
                    f"num_new is {count} but slot {slot} has pages for {room} further keys, expected no more than were "
                    "appended by attention() or reserved"
                )
        if count and numbers:
            memory.grow(numbers, count)

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
        self._memory.reserve(f"num_new is {count}", count, slot_numbers("slots", slots, self._memory.num_slots))

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
        num_slots = self._memory.num_slots
        origin = integer_of("source", source, 0, num_slots - 1)
        if targets is None:
            raise TypeError("targets is None, expected an int, a slice or a sequence of int")
        numbers = slot_numbers("targets", targets, num_slots)
        if origin in numbers:
            raise ValueError(f"targets has slot {origin}, expected other slots than source")
        self._memory.share(origin, numbers)

    def truncate(self, length: SupportsIndex, slots: Slots = None) -> None:
        """Drop the keys behind a length, and return pages behind it that nobody else uses, reserved ones too.

        Parameters
        ----------
        length : int
            Keys that each of the slots keeps; one that has fewer keeps them all.
        slots : None, int, slice or sequence of int, optional
        """
        kept, numbers = integer_of("length", length, 0), slot_numbers("slots", slots, self._memory.num_slots)
        self._memory.truncate(kept, numbers)

    def free(self, slots: Slots = None) -> None:
        """Make slots empty, and return pages that nobody else uses.

        Parameters
        ----------
        slots : None, int, slice or sequence of int, optional
        """
        self.truncate(0, slots)

    def _num_new(self, q: Any, k_new: Any, batch: int) -> int:
        """Return how many keys there are to append; raise for axes that do not go with the slots."""
        shape = shape_of(q)
        if len(shape) == 4 and shape[0] != batch:
            raise ValueError(f"q has batch {shape[0]}, expected {batch}, one for each of the slots")
        if k_new is None:
            return 0
        shape, num_heads, head_dim = shape_of(k_new), self._memory.num_heads, self.keys[0].shape[-1]
        if len(shape) != 4 or shape != (batch, num_heads, shape[2], head_dim):
            shape = inspect("k_new", k_new).shape
            expected = f"({batch}, {num_heads}, new keys, {head_dim})"
            raise ValueError(f"k_new has shape {shape}, expected {expected}")
        num_new: int = shape[2]
        return num_new
