"""From a call of `attention_with_kv_cache` to its `Problem`: the cache, what is appended, and lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import FLOAT_NAMES, HOST, INTEGER_NAMES, ArrayInfo, inspect
from .checks import MAX_HEAD_DIM, check_heads, check_written, optional_array, parse_integer, same_device
from .describe import first_keys, problem_with_options
from .problem import ARRAYS, Cache, Problem, cache_shapes

_CONTIGUOUS, _PAGES = (
    "(batch, heads, capacity, feature)",
    "(pages, heads, page_size, feature), as there is a page_table",
)


def describe_kv_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    seqlens_k: Any,
    k_new: Any = None,
    v_new: Any = None,
    page_table: Any = None,
    num_splits: Any = None,
    split_size: Any = None,
    bias: Any = None,
    mask: Any = None,
    **options: Any,
) -> tuple[Problem, dict[str, ArrayInfo]]:
    """Check a call of `attention_with_kv_cache`; return its meaning and the arrays that it names.

    Raises
    ------
    TypeError, ValueError
        With argument, got and expected, for anything that the contract excludes.
    """
    if (k_new is None) != (v_new is None):
        given, missing = ("k_new", "v_new") if v_new is None else ("v_new", "k_new")
        raise ValueError(f"{missing} is None but {given} is given; what is appended has both")
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    if k_new is not None:
        named |= {"k_new": k_new, "v_new": v_new}
    infos = _operands(named, page_table is not None)
    batch, heads, head_dims = _axes(infos, page_table is not None)
    pages = _check_page_table(infos, page_table, batch[0]) if page_table is not None else (0, 0, 0)
    capacity = pages[1] * pages[2] if page_table is not None else infos["k_cache"].shape[2]
    num_new = infos["k_new"].shape[2] if k_new is not None else 0
    seqlen_k, num_new = _check_lengths(infos, seqlens_k, batch, capacity, num_new)
    _check_pages(infos, num_new, seqlen_k)
    caches = {name: infos[name] for name in ("k_cache", "v_cache")}
    cache = Cache(num_new, *pages, *_parse_splits(num_splits, split_size))
    seqlens = infos["q"].shape[2], seqlen_k
    shapes = dict(zip(ARRAYS, cache_shapes(batch, heads, seqlens, head_dims, cache), strict=True))
    for name, x, dtypes in (("bias", bias, FLOAT_NAMES), ("mask", mask, ("bool",))):
        if x is not None:
            # Where the length is known, the keys of a cache that is not full need no columns.
            info = inspect(name, x)
            columns = capacity if info.shape[-1:] == (capacity,) else seqlen_k
            hint = "; there is a column for each key that there is room for" if columns == capacity else ""
            optional_array(infos, name, x, dtypes, (*shapes[name][:-1], columns), hint=hint)
            if columns != seqlen_k:
                array = None if info.array is None else info.array[..., :seqlen_k]
                infos[name] = info._replace(array=array, shape=(*info.shape[:-1], seqlen_k))
    bottom_right = None if "seqlens_k" in infos else seqlen_k - seqlens[0]
    op = "attention_with_kv_cache"
    problem = problem_with_options(op, infos, shapes, batch, heads, seqlens, bottom_right, cache, **options)
    if num_new:
        others = {name: info for name, info in infos.items() if name not in ("k", "v")}
        _check_what_is_written(caches, caches | others)
    return problem, infos


def _parse_splits(num_splits: Any, split_size: Any) -> tuple[int | None, int | None]:
    """Check into how many parts keys are split, or after how many."""
    if num_splits is not None:
        num_splits = parse_integer("num_splits", num_splits, "a positive int, or None")
        if num_splits < 1:
            raise ValueError(f"num_splits is {num_splits}, expected a positive int, or None for as many as help")
    if split_size is not None:
        if num_splits is not None:
            raise ValueError(f"split_size is {split_size} and num_splits is {num_splits}, expected one of the two")
        split_size = parse_integer("split_size", split_size, "a positive multiple of 64, or None")
        if split_size < 1 or split_size % 64:
            raise ValueError(f"split_size is {split_size}, expected a positive multiple of 64, or None")
    return num_splits, split_size


def _operands(named: dict[str, Any], paged: bool) -> dict[str, ArrayInfo]:
    """Check types and numbers of axes of queries, caches and what is appended."""
    infos = {name: inspect(name, x) for name, x in named.items()}
    q = infos["q"]
    for name, info in infos.items():
        if info.dtype not in FLOAT_NAMES:
            raise TypeError(f"{name} has dtype {info.dtype}, expected float16, bfloat16, float32 or float64")
        if len(info.shape) != 4:
            is_cache = name.endswith("_cache")
            expected = (_PAGES if paged else _CONTIGUOUS) if is_cache else "(batch, heads, sequence, feature)"
            raise ValueError(f"{name} has shape {info.shape}, expected {expected}")
        same_device(name, info, "q", q)
        if info.dtype != q.dtype:
            raise TypeError(
                f"{name} has dtype {info.dtype} but q has {q.dtype}; queries and cache share one dtype, convert with "
                f".astype() or make the cache of {q.dtype}"
            )
    return infos


def _axes(infos: dict[str, ArrayInfo], paged: bool) -> tuple[tuple[int, ...], tuple[int, int], tuple[int, int]]:
    """Check shapes; return leading axes, heads and head dimensions."""
    q, k, v = (infos[name] for name in ("q", "k_cache", "v_cache"))
    batch, num_heads, _, head_dim = q.shape
    head_dim_v = v.shape[3]
    for name, dim in (("q", head_dim), ("v_cache", head_dim_v)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has head_dim {dim}, expected 1 to {MAX_HEAD_DIM}")
    if k.shape[3] != head_dim:
        raise ValueError(f"k_cache has head_dim {k.shape[3]} but q has {head_dim}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v_cache has shape {v.shape} but k_cache has {k.shape}, expected the same but for features")
    if not paged and k.shape[0] != batch:
        raise ValueError(f"k_cache has batch {k.shape[0]} but q has {batch}; a cache in pages needs page_table")
    if paged and k.shape[2] < 1:
        raise ValueError("k_cache has pages of 0 keys (axis -2), expected at least 1")
    hint = "; if axes are (batch, sequence, heads, feature), pass x.swapaxes(1, 2) of q, k_cache and v_cache, views"
    keys = f"k_cache{hint if k.shape[1] > k.shape[2] else ''}"
    check_heads(num_heads, k.shape[1], None, q.device, keys=keys)
    if "k_new" in infos:
        num_new = infos["k_new"].shape[2]
        for name, dim in (("k_new", head_dim), ("v_new", head_dim_v)):
            expected = (batch, k.shape[1], num_new, dim)
            if infos[name].shape != expected:
                raise ValueError(f"{name} has shape {infos[name].shape}, expected {expected}")
    return (batch,), (num_heads, k.shape[1]), (head_dim, head_dim_v)


def _check_page_table(infos: dict[str, ArrayInfo], page_table: Any, batch: int) -> tuple[int, int, int]:
    """Enter the table in `infos`; return the number of pages, their size, and how many a batch may have."""
    info = inspect("page_table", page_table)
    if info.dtype not in INTEGER_NAMES:
        raise TypeError(f"page_table has dtype {info.dtype}, expected an integer dtype")
    if len(info.shape) != 2 or info.shape[0] != batch:
        raise ValueError(f"page_table has shape {info.shape}, expected ({batch}, pages of a batch)")
    same_device("page_table", info, "q", infos["q"])
    infos["page_table"] = info
    num_pages, _, page_size, _ = infos["k_cache"].shape
    return num_pages, page_size, info.shape[1]


def _check_lengths(
    infos: dict[str, ArrayInfo], seqlens_k: Any, batch: tuple[int, ...], capacity: int, num_new: int
) -> tuple[int, int]:
    """Return how many keys a batch has at most, and how many new ones there is room for; NumPy's lengths are read."""
    if isinstance(seqlens_k, (int, np.generic)) or not hasattr(seqlens_k, "dtype"):
        before = parse_integer("seqlens_k", seqlens_k, "an int, or an integer array of shape (batch,)")
        if before < 0:
            raise ValueError(f"seqlens_k is {before}, expected a non-negative int")
        before = min(before, capacity)
        seqlen_k = min(before + num_new, capacity)
        num_new = seqlen_k - before
        infos |= {name: first_keys(infos[name], num_new) for name in ("k_new", "v_new") if name in infos}
        return seqlen_k, num_new
    info = inspect("seqlens_k", seqlens_k)
    if info.dtype not in INTEGER_NAMES:
        raise TypeError(f"seqlens_k has dtype {info.dtype}, expected an int, or an integer dtype")
    if info.shape != batch:
        raise ValueError(f"seqlens_k has shape {info.shape}, expected {batch}, a length for each batch")
    same_device("seqlens_k", info, "q", infos["q"])
    infos["seqlens_k"] = info
    if info.device == HOST and info.array is not None and (info.array < 0).any():
        at = int(np.flatnonzero(info.array < 0)[0])
        raise ValueError(f"seqlens_k has {info.array[at]} at entry {at}, expected no negative length")
    return capacity, num_new


def _check_pages(infos: dict[str, ArrayInfo], num_new: int, seqlen_k: int) -> None:
    """Raise if NumPy's table names pages that there are not and that are used, a GPU's if there are none."""
    table, lengths = infos.get("page_table"), infos.get("seqlens_k")
    if table is None:
        return
    num_pages, _, page_size, _ = infos["k_cache"].shape
    if table.device != HOST or table.array is None:
        if num_pages == 0 and seqlen_k > 0:
            raise ValueError(f"k_cache has no pages but page_table has {table.shape[1]} of each batch")
        return
    for batch, pages in enumerate(table.array):
        length = seqlen_k if lengths is None else min(int(lengths.array[batch]) + num_new, seqlen_k)
        used = pages[: -(-length // page_size)]
        wrong = np.flatnonzero((used < 0) | (used >= num_pages))
        if wrong.size:
            at = int(wrong[0])
            expected = f"expected 0 to {num_pages - 1}" if num_pages else "but k_cache has no pages"
            raise ValueError(f"page_table has {used[at]} at entry ({batch}, {at}), {expected}")


def _check_what_is_written(caches: dict[str, ArrayInfo], infos: dict[str, ArrayInfo]) -> None:
    """Check that caches can be appended to, apart from all other arrays of the call."""
    for name, info in caches.items():
        if not info.writeable:
            raise ValueError(f"{name} is read-only, expected a writeable array, as there is something to append")
        check_written(name, info, [item for item in infos.items() if item[0] != name])
