"""Attention with a KV cache for NumPy arrays: what is appended, and the keys of each batch from where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
    together: list[Sequence] = []
    task, num_bytes = Task.of(problem), 0
    for sequence in _sequences(problem, given, ends):
        if given["page_table"] is not None:
            size = sequence.k.nbytes + sequence.v.nbytes
            if together and num_bytes + size > GATHERED_BYTES:
                compute(task, together)
                together, num_bytes = [], 0
            num_bytes += size
        together.append(sequence)
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


def _sequences(problem: Problem, arrays: dict[str, Array | None], lengths: list[int]) -> Iterator[Sequence]:
    """Yield the sequences of all batches, each with its own keys; equal ones of a contiguous cache are one."""
    group_size = problem.num_heads_q // problem.num_heads_kv
    page_table = arrays["page_table"]
    if page_table is None and len(set(lengths)) == 1:
        part = {name: _first(name, arrays.get(name), lengths[0]) for name in ARRAYS}
        yield sequence_of(part, group_size, _offset(problem, lengths[0]))
        return
    for batch, length in enumerate(lengths):
        part = {}
        for name in ARRAYS:
            x = arrays.get(name)
            if x is not None and page_table is not None and name in ("k", "v"):
                part[name] = _gathered(x, page_table[batch], length)
            else:
                part[name] = _first(name, None if x is None else x[batch], length)
        yield sequence_of(part, group_size, _offset(problem, length))


def _offset(problem: Problem, length: int) -> int:
    return length - problem.seqlen_q if problem.bottom_right else problem.query_offset or 0


def _first(name: str, x: Array | None, length: int) -> Array | None:
    """Return a view of as many keys as there are, of arrays that have them."""
    if x is None or name not in ("k", "v", "bias", "mask"):
        return x
    return x[..., :length, :] if name in ("k", "v") else x[..., :length]


def _gathered(cache: Array, pages: Array, length: int) -> Array:
    """Copy the keys of a batch from their pages."""
    _, num_heads, page_size, features = cache.shape
    used = cache[pages[: -(-length // page_size)]].swapaxes(0, 1)
    return used.reshape(num_heads, -1, features)[:, :length]
