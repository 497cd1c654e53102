"""Attention with a KV cache for NumPy arrays: what is appended, and the keys of each batch from where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np

from ..problem.problem import Problem
from ..settings import num_threads
from .attention import Task, compute
from .blocks import ARRAYS, Array, Sequence, sequence_of

GATHERED_BYTES = 2**26
"""Pages that are copied to lie side by side for the batches that are computed together; at least those of one."""


def attention_with_kv_cache(problem: Problem, arrays: Mapping[str, Array | None]) -> None:
    """Compute `cuflash.attention_with_kv_cache` of checked NumPy arrays.

    Parameters
    ----------
    problem : Problem
        From `describe_kv_cache`.
    arrays : mapping of str to ndarray or None
        Views broadcast to the problem's axes: q (B, Hq, Nq, D), k and v (B, Hkv, capacity, D and Dv) or (pages, Hkv,
        page_size, D and Dv), out (B, Hq, Nq, Dv), lse (B, Hq, Nq), bias and mask (B, Hq, Nq, capacity), HEAD_ARRAYS
        (B, Hq), seqlens_k (B,), page_table (B, max_pages), k_new and v_new (B, Hkv, Nnew, D and Dv). out, lse
        and what is appended to k and v are written; lse and the options may be None.
    """
    num_threads(1)  # a setting that is wrong raises before anything is written
    assert problem.cache is not None, "else there is nothing to do here"
    given, lengths = dict(arrays), arrays.get("seqlens_k")
    num_new, (batch,) = problem.cache.num_new, problem.batch
    if lengths is None:
        ends = [problem.seqlen_k] * batch
        begins = [problem.seqlen_k - num_new] * batch
    else:
        begins = [min(int(length), problem.seqlen_k) for length in lengths]
        ends = [min(begin + num_new, problem.seqlen_k) for begin in begins]
    for name in ("k", "v"):
        new = given.pop(f"{name}_new", None)
        if new is not None:
            _append(given[name], given["page_table"], new, begins, ends)
    if not problem.num_heads_q:
        return
    task, in_pages = Task.of(problem), given["page_table"] is not None
    for together in _gathered(problem, given, ends) if in_pages else [_sequences(problem, given, ends)]:
        compute(task, together)


def _append(cache: Array | None, page_table: Array | None, new: Array, begins: list[int], ends: list[int]) -> None:
    """Write new rows behind those that there are, as far as there is room."""
    assert cache is not None, "it was checked"
    for batch, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        rows = new[batch, :, : end - begin]
        if page_table is None:
            cache[batch, :, begin:end] = rows
        else:
            pages, places = np.divmod(np.arange(begin, end), cache.shape[2])
            cache[page_table[batch, pages], :, places] = rows.swapaxes(0, 1)


def _sequences(problem: Problem, arrays: dict[str, Array | None], lengths: list[int]) -> list[Sequence]:
    """Return the sequences of a contiguous cache, each batch with its own keys; equal ones are one."""
    if len(set(lengths)) == 1:
        return [_sequence(problem, arrays, lengths[0])]
    each = ({name: None if x is None else x[batch] for name, x in arrays.items()} for batch in range(len(lengths)))
    return [_sequence(problem, part, length) for part, length in zip(each, lengths, strict=True)]


def _gathered(problem: Problem, arrays: dict[str, Array | None], lengths: list[int]) -> Iterator[list[Sequence]]:
    """Yield the sequences of batches in pages, as many together as fit, and then others in the same memory."""
    caches = {name: x for name, x in arrays.items() if x is not None and name in ("k", "v")}
    table, page_size = arrays["page_table"], caches["k"].shape[2]
    assert table is not None, "contiguous caches stay where they are"
    used = [pages[: -(-length // page_size)] for pages, length in zip(table, lengths, strict=True)]
    # A page alone is taken as it lies.
    counts = [len(pages) if len(pages) > 1 else 0 for pages in used]
    page_bytes = sum(prod(cache.shape[1:]) * cache.itemsize for cache in caches.values())
    room = min(sum(counts), max(GATHERED_BYTES // page_bytes, max(counts, default=0)))
    memory = {name: np.empty((room, *cache.shape[1:]), cache.dtype) for name, cache in caches.items()}
    together: list[Sequence] = []
    first = 0
    for batch, (pages, count, length) in enumerate(zip(used, counts, lengths, strict=True)):
        if first + count > room:
            yield together
            together, first = [], 0
        part = {name: None if x is None else x[batch] for name, x in arrays.items() if name not in caches}
        for name, cache in caches.items():
            if len(pages) == 1:
                part[name] = cache[pages[0]]
                continue
            _, num_heads, _, features = cache.shape
            place = memory[name][first : first + count].reshape(num_heads, count, page_size, features)
            if count:
                _copy(cache, pages, place)
            part[name] = place.reshape(num_heads, count * page_size, features)
        first += count
        together.append(_sequence(problem, part, length))
    yield together


def _copy(cache: Array, pages: Array, place: Array) -> None:
    """Copy pages of a cache, one at least, to (heads, pages, page_size, features)."""
    _, num_heads, page_size, _ = cache.shape
    heads, by_token = np.arange(num_heads)[:, np.newaxis], cache.swapaxes(1, 2)
    if cache.flags.c_contiguous:
        _take(cache, pages.astype(np.intp) * num_heads + heads, place)
    elif by_token.flags.c_contiguous:
        tokens = pages.astype(np.intp)[:, np.newaxis] * page_size + np.arange(page_size)
        _take(by_token, tokens.ravel() * num_heads + heads, place)
    else:
        for index, page in enumerate(pages.tolist()):
            place[:, index] = cache[page]


def _take(memory: Array, rows: Array, place: Array) -> None:
    """Copy rows of contiguous memory, as long as makes them fill their place."""
    memory, places = memory.reshape(-1, place.size // rows.size), place.reshape(*rows.shape, -1)
    # "clip", or NumPy would write to memory of its own first; pages that there are not were refused.
    np.take(memory, rows, axis=0, out=places, mode="clip")


def _sequence(problem: Problem, arrays: Mapping[str, Array | None], length: int) -> Sequence:
    """Return the sequence of one batch, or of equal ones, with as many keys as there are."""
    part = {name: _first(name, arrays.get(name), length) for name in ARRAYS}
    offset = length - problem.seqlen_q if problem.bottom_right else problem.query_offset or 0
    return sequence_of(part, problem.num_heads_q // problem.num_heads_kv, offset)


def _first(name: str, x: Array | None, length: int) -> Array | None:
    """Return a view of as many keys as there are, of arrays that have them."""
    if x is None or name not in ("k", "v", "bias", "mask"):
        return x
    return x[..., :length, :] if name in ("k", "v") else x[..., :length]
