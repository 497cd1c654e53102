"""What a call means, as plain data: a hashable tuple without pointers.

The plan, the CPU back end and the printed explanation are made from a `Problem`. What of it a compiled kernel may
depend on are its `Traits`; lengths and strides stand beside them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .arrays import ITEMSIZE, computed_dtype


class Strides(NamedTuple):
    """The arrays of a call by the names of its arguments, which are those of the kernels' addresses, too.

    Each is seen as broadcast to the problem's axes: bytes from element to element, one number per axis, 0 where the
    array is repeated.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...] | None = None
    out: tuple[int, ...] | None = None
    lse: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    alibi_slopes: tuple[int, ...] | None = None
    sinks: tuple[int, ...] | None = None
    query_offset: tuple[int, ...] | None = None
    """Where it is an array."""
    seqlens_k: tuple[int, ...] | None = None
    """Likewise."""
    page_table: tuple[int, ...] | None = None
    k_new: tuple[int, ...] | None = None
    v_new: tuple[int, ...] | None = None
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None


ARRAYS = Strides._fields
"""Names of a call's arrays."""


class Dtypes(NamedTuple):
    """Element types, by their NumPy names, of arrays that kernels read in whatever type they have; "" for none."""

    alibi_slopes: str = ""
    sinks: str = ""
    query_offset: str = ""
    seqlens_k: str = ""
    page_table: str = ""
    k_new: str = ""
    v_new: str = ""
    cu_seqlens_q: str = ""
    cu_seqlens_k: str = ""


class Operand(NamedTuple):
    """One array of partial results, or what they are merged into."""

    dtype: str
    """NumPy name of the element type."""
    strides: tuple[int, ...]
    """Bytes from element to element, one per axis."""
    alignment: int
    """Largest power of two up to 16 that divides the address and every stride but the last."""


FARTHEST_ROWS = 2**24
"""Bytes between neighbouring rows of keys and values up to which they may be copied as tiles."""


class Traits(NamedTuple):
    """All that a build may depend on: no length, no stride, and of the values only the cap."""

    op: str
    """`"attention"`, `"attention_varlen"`, `"attention_lse"` or `"attention_with_kv_cache"`."""
    dtype: str
    out_dtype: str
    precision: str
    head_dim: int
    head_dim_v: int
    """0 where there are no values, and the lse is all that is computed."""
    softcap: float
    """0.0 when off."""
    window: bool
    """Whether positions hide keys, as `causal` does, too."""
    bias: str
    """Its element type, "" when there is none."""
    mask: bool
    alibi_slopes: bool
    sinks: bool
    query_offset: bool
    """Whether it is an array."""
    seqlens_k: bool
    """Likewise: each batch has a length of its own."""
    page_table: bool
    """Whether keys and values lie in pages."""
    input_alignment: int
    """16 if q, k and v can move in 16-byte vectors, 1 if an element of any input lies on no boundary, else its size."""
    result_alignment: int
    """The same of what is written."""
    keys_are_tiles: bool
    """Whether rows of k and of v are 0 to `FARTHEST_ROWS` bytes apart, in steps of 16."""

    @property
    def is_varlen(self) -> bool:
        """Whether sequences of their own lengths lie packed behind each other."""
        return self.op == "attention_varlen"

    @property
    def has_values(self) -> bool:
        """Whether there are values, and an output."""
        return self.head_dim_v != 0

    @property
    def num_arrays(self) -> int:
        """Arrays that are read for every logit."""
        return (self.bias != "") + self.mask

    @property
    def num_terms(self) -> int:
        """What else makes a logit of a score."""
        return (self.softcap != 0) + self.alibi_slopes

    @property
    def has_row_offset(self) -> bool:
        """Whether all logits of a row are lower by something that they have in common."""
        return self.alibi_slopes

    @property
    def alignment(self) -> int:
        """Of all arrays."""
        return min(self.input_alignment, self.result_alignment)

    @property
    def lse_dtype(self) -> str:
        """Type of the computation, of the lse and of partial results."""
        return computed_dtype(self.dtype)


class Cache(NamedTuple):
    """How keys and values lie in a cache, and what is appended to them."""

    num_new: int
    """Keys that each batch has appended before it is attended to."""
    num_pages: int
    page_size: int
    """Keys of a page; 0 where each batch has its keys in one piece."""
    max_pages: int
    """Of a batch."""
    num_splits: int | None
    """Blocks that share the keys of one tile, if the call says so."""
    split_size: int | None
    """Keys of each of them, likewise."""


class Problem(NamedTuple):
    """Everything about a call that decides its result, except the values in the arrays."""

    traits: Traits
    batch: tuple[int, ...]
    """Broadcast leading axes; for packed sequences `(number of sequences,)`."""
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    """Queries per head; for packed sequences the total over all sequences."""
    seqlen_k: int
    """Keys per head, likewise; where `seqlens_k` is an array the most that there may be."""
    window_left: int | None
    """Key j is visible only if j >= p - window_left (None: open). p is the query's key position."""
    window_right: int | None
    """Key j is visible only if j <= p + window_right (None: open). `causal` is already folded in here."""
    query_offset: int | None
    """Key position of query 0. None: that of the array, or Nk - Nq of each sequence, whose lengths are in an array."""
    bottom_right: bool
    """The offset is Nk - Nq because nothing else was asked for, so it follows the lengths."""
    scale: float
    strides: Strides
    dtypes: Dtypes
    is_2d: bool
    """q, k and v were 2-D, so the results have no head axis."""
    cache: Cache | None = None
    """Where keys and values lie in one."""

    def __str__(self) -> str:
        return describe_in_words(self)


PAIR_ARRAYS = ("bias", "mask")
"""Arguments with a value for each pair of a query and a key."""
HEAD_ARRAYS = ("alibi_slopes", "sinks")
"""Arguments with a value for each query head."""

Shapes = tuple[tuple[int, ...], ...]
"""Of a call's arrays, in the order of `ARRAYS`; () for those that the operation does not take."""


def dense_shapes(
    batch: tuple[int, ...], heads: tuple[int, int], seqlens: tuple[int, int], head_dims: tuple[int, int]
) -> Shapes:
    """Shapes to which the arrays of a dense call broadcast; each pair is of the queries and of the keys."""
    of_heads = (*batch, heads[0])
    of_keys = (*batch, heads[1], seqlens[1])
    lse = (*of_heads, seqlens[0])
    scores = (*lse, seqlens[1])
    return (
        (*lse, head_dims[0]), (*of_keys, head_dims[0]), (*of_keys, head_dims[1]), (*lse, head_dims[1]), lse, scores,
        scores, of_heads, of_heads, batch, (), (), (), (), (), (),
    )  # fmt: skip


def varlen_shapes(
    batch: tuple[int, ...], heads: tuple[int, int], totals: tuple[int, int], head_dims: tuple[int, int]
) -> Shapes:
    """Shapes to which the arrays of a call with packed sequences broadcast."""
    lse, of_keys, of_heads, boundaries = (totals[0], heads[0]), (totals[1], heads[1]), (*batch, heads[0]), batch[0] + 1
    return (
        (*lse, head_dims[0]), (*of_keys, head_dims[0]), (*of_keys, head_dims[1]), (*lse, head_dims[1]), lse, (), (),
        of_heads, of_heads, (), (), (), (), (), (boundaries,), (boundaries,),
    )  # fmt: skip


def cache_shapes(
    batch: tuple[int, ...], heads: tuple[int, int], seqlens: tuple[int, int], head_dims: tuple[int, int], cache: Cache
) -> Shapes:
    """Shapes to which the arrays of a call with a cache broadcast."""
    q, k, v, *others = dense_shapes(batch, heads, seqlens, head_dims)
    table: tuple[int, ...] = ()
    if cache.page_size:
        pages = cache.num_pages, heads[1], cache.page_size
        k, v, table = (*pages, head_dims[0]), (*pages, head_dims[1]), (*batch, cache.max_pages)
    new = *batch, heads[1], cache.num_new
    return (q, k, v, *others[:7], batch, table, (*new, head_dims[0]), (*new, head_dims[1]), (), ())


def shapes_of(problem: Problem) -> Shapes:
    """Shapes to which the arrays of a problem broadcast."""
    p, traits = problem, problem.traits
    heads, seqlens = (p.num_heads_q, p.num_heads_kv), (p.seqlen_q, p.seqlen_k)
    head_dims = traits.head_dim, traits.head_dim_v
    if p.cache is not None:
        return cache_shapes(p.batch, heads, seqlens, head_dims, p.cache)
    find = varlen_shapes if traits.is_varlen else dense_shapes
    return find(p.batch, heads, seqlens, head_dims)


def array_shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Those of the arrays that the call has, and of its results, by name."""
    named = zip(ARRAYS, shapes_of(problem), problem.strides, strict=True)
    return {name: shape for name, shape, strides in named if strides is not None}


def itemsizes(problem: Problem) -> tuple[int, ...]:
    """Bytes of an element of each array in the order of `ARRAYS`, 0 for those whose type is not known."""
    traits = problem.traits
    dtype = traits.dtype
    return _itemsizes(dtype, dtype, dtype, traits.out_dtype, traits.lse_dtype, traits.bias, "bool", *problem.dtypes)


@lru_cache(maxsize=256)
def _itemsizes(*dtypes: str) -> tuple[int, ...]:
    return tuple([ITEMSIZE[name] if name else 0 for name in dtypes])


def alignment_of(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the largest power of two up to 16 that divides the address and every stride but the last."""
    bits = pointer | 16
    for stride in strides[:-1]:
        bits |= stride
    if bits & 15:  # strides of axes with one element say nothing
        bits = pointer | 16
        for length, stride in zip(shape[:-1], strides, strict=False):
            if length > 1:
                bits |= stride
    return bits & -bits


def written_places(appends: bool) -> tuple[int, ...]:
    """Places in `ARRAYS` of what a call writes; one that appends to a cache writes its keys and values."""
    return _CACHES_AND_RESULTS if appends else _RESULTS


_RESULTS = ARRAYS.index("out"), ARRAYS.index("lse")
_CACHES_AND_RESULTS = (ARRAYS.index("k"), ARRAYS.index("v"), *_RESULTS)


def result_axes(problem: Problem) -> tuple[int, ...]:
    """Lengths of the axes that `out` and `lse` share, of one head also that of its head."""
    if problem.traits.is_varlen:
        return problem.seqlen_q, problem.num_heads_q
    return *problem.batch, problem.num_heads_q, problem.seqlen_q


def result_rows(problem: Problem) -> tuple[int, ...]:
    """Shape of the lse, which is that of the output without its features."""
    return result_axes(problem)[problem.is_2d :]


def describe_in_words(problem: Problem) -> str:
    """One line that says what is computed."""
    p, traits = problem, problem.traits
    axes = "x".join(map(str, p.batch)) or "1"
    other_dim = traits.has_values and traits.head_dim_v != traits.head_dim
    parts = [
        f"{traits.op} {traits.dtype}" + (f"->{traits.out_dtype}" if traits.out_dtype != traits.dtype else ""),
        f"batch {axes}, heads {p.num_heads_q}/{p.num_heads_kv}, {p.seqlen_q} x {p.seqlen_k}",
        f"head_dim {traits.head_dim}" + (f"/{traits.head_dim_v}" if other_dim else ""),
    ]
    if traits.window:
        parts.append(f"window ({p.window_left}, {p.window_right})")
        if p.query_offset is not None and not p.bottom_right:
            parts.append(f"query_offset {p.query_offset}")
    if p.scale != traits.head_dim**-0.5:
        parts.append(f"scale {p.scale:g}")
    if p.cache is not None and traits.page_table:
        parts.append(f"{p.cache.num_pages} pages of {p.cache.page_size}")
    if p.cache is not None and p.cache.num_new:
        parts.append(f"{p.cache.num_new} new")
    parts += [name for name in _NAMED if getattr(p.strides, name) is not None]
    if traits.softcap:
        parts.append(f"softcap {traits.softcap:g}")
    return ", ".join(parts)


_NAMED = ("seqlens_k", *PAIR_ARRAYS, *HEAD_ARRAYS, "lse")
