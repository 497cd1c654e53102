"""Problems of attention: what a call is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import attention, attention_lse, attention_varlen, attention_with_kv_cache


class Cached(NamedTuple):
    """Of a case: how its keys get into a cache, as many as `shape_k` says that there is room for."""

    lengths: int | tuple[int, ...]
    """Keys of each batch before the call; an int is passed as it is."""
    num_new: int = 0
    """Keys that the call appends."""
    page_size: int = 0
    """0: there are no pages."""

    def ends(self, capacity: int) -> Any:
        """Keys of each batch behind the call, an int32 or int64 array, for caches with so much room."""
        return np.minimum(np.minimum(self.lengths, capacity) + self.num_new, capacity)


class Case(NamedTuple):
    """One problem: shapes, layout and options, without data."""

    name: str
    """With the seed it decides what is drawn."""
    shape_q: tuple[int, ...]
    """As the case's function takes it."""
    shape_k: tuple[int, ...]
    """Likewise; with `cached` the keys that there is room for."""
    head_dim_v: int | None = None
    """None: that of q. 0: there are no values, and the lse is all that is asked for."""
    options: Mapping[str, Any] = {}
    """Keyword arguments that are not arrays."""
    arrays: Mapping[str, tuple[tuple[int, ...], str]] = {}
    """Shape and dtype of array options by name."""
    layout: str = "contiguous"
    """How q, k, v (and out, if given) lie in memory: a key of `LAYOUTS`."""
    give_out: bool = False
    """Pass `out` and `lse` in the same layout instead of having them allocated."""
    cu_seqlens: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Packed sequences."""
    value_mean: float = 0.0
    """Of v, whose deviation is 1."""
    cached: Cached | None = None
    """A cache of keys and values."""

    @property
    def function(self) -> Any:
        """The public function that the case calls."""
        if self.cu_seqlens is not None:
            return attention_varlen
        if self.cached is not None:
            return attention_with_kv_cache
        return attention_lse if self.head_dim_v == 0 else attention


class Data(NamedTuple):
    """The NumPy arrays of a case, C-ordered."""

    q: np.ndarray
    """Of `Case.shape_q`."""
    k: np.ndarray
    """Of `Case.shape_k`."""
    v: np.ndarray
    """As `k`, with `Case.head_dim_v` features."""
    options: dict[str, np.ndarray]
    """Those of `Case.arrays`, by name."""
