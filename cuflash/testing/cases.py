"""Problems of attention: what a call is given, and what is drawn for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import attention, attention_lse, attention_varlen, attention_with_kv_cache
from ..problem.arrays import DTYPES


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


def make_data(case: Case, dtype: str, seed: int = 0) -> Data:
    """Draw the arrays of a case; the seed and the case's name decide them.

    Parameters
    ----------
    case : Case
    dtype : str
        Of q, k and v: "float16", "bfloat16", "float32" or "float64".
    seed : int, optional

    Returns
    -------
    Data
        Normal numbers, v around `Case.value_mean`; a bias is -inf here and there, a mask hides two pairs of five.
    """
    rng = np.random.default_rng([seed, *case.name.encode()])
    element = DTYPES[dtype]
    head_dim_v = case.shape_q[-1] if case.head_dim_v is None else case.head_dim_v
    q = rng.standard_normal(case.shape_q).astype(element)
    k = rng.standard_normal(case.shape_k).astype(element)
    v = (case.value_mean + rng.standard_normal((*case.shape_k[:-1], head_dim_v))).astype(element)
    if case.layout == "broadcast":
        q, k, v = (np.broadcast_to(x[(0,) * (x.ndim - 2)] if x.size else x, x.shape) for x in (q, k, v))
    options = {}
    for name, (shape, option_dtype) in case.arrays.items():
        if name == "mask":
            visible = np.asarray(rng.random(shape) < 0.6)
            if shape and shape[-1] > 70:
                visible[..., :66] &= rng.random((*shape[:-1], 1)) < 0.5  # whole leading tiles hidden from some queries
            values: np.ndarray = visible
        elif name == "query_offset":
            values = rng.integers(0 if option_dtype.startswith("u") else -20, 40, shape)
        elif name == "alibi_slopes":
            values = 2.0 ** -rng.uniform(0, 6, shape)
        else:
            values = rng.standard_normal(shape)
            if name == "bias":
                values = np.where(rng.random(shape) < 0.2, -np.inf, values)
        options[name] = np.asarray(values).astype(DTYPES[option_dtype])
    return Data(q, k, v, options)
