"""Kinds of calls: what is found of other lengths is what the whole way finds, and lengths that do not fit are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuflash.problem.arrays import ArrayInfo
from cuflash.problem.describe import describe_attention, describe_attention_lse, describe_varlen
from cuflash.problem.describe_cache import describe_kv_cache
from cuflash.problem.kind import Kind
from cuflash.problem.problem import ARRAYS, Problem

LENGTHS = [(5, 7), (1, 300), (300, 1), (1, 1), (7, 7), (0, 4), (4, 0), (33, 64)]
Arrays = dict[str, Any]


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def heads(n: int, m: int, dtype: Any = np.float32, batch: tuple[int, ...] = (2,)) -> Arrays:
    return {
        "q": zeros(*batch, 4, n, 8, dtype=dtype),
        "k": zeros(*batch, 2, m, 8, dtype=dtype),
        "v": zeros(*batch, 2, m, 6, dtype=dtype),
    }


def swapped(n: int, m: int) -> Arrays:
    return {
        name: np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3) for name, x in heads(n, m, np.float16).items()
    }


def given(n: int, m: int) -> Arrays:
    return heads(n, m) | {"out": zeros(2, n, 4, 6).swapaxes(1, 2), "lse": zeros(2, 4, n)}


def packed(n: int, m: int) -> Arrays:
    cu_seqlens = {"cu_seqlens_q": np.array([0, n // 2, n]), "cu_seqlens_k": np.array([0, m, m], np.uint32)}
    return {"q": zeros(n, 4, 8), "k": zeros(m, 2, 8), "v": zeros(m, 2, 6), "sinks": zeros(4), **cu_seqlens}


def cached(n: int, m: int) -> Arrays:
    arrays = heads(n, m)
    arrays |= {"k_cache": arrays.pop("k"), "v_cache": arrays.pop("v"), "seqlens_k": np.zeros(2, np.int32)}
    return arrays | {"k_new": zeros(2, 2, n, 8), "v_new": zeros(2, 2, n, 6), "causal": True}


def cached_with_room(n: int, m: int) -> Arrays:
    """A known length, and keys behind those that are appended."""
    caches = {name: np.asfortranarray(zeros(2, 2, m + n + 3, size)) for name, size in (("k_cache", 8), ("v_cache", 6))}
    return cached(n, m) | caches | {"seqlens_k": m, "mask": zeros(n, 1, dtype=bool), "bias": zeros(4, n, m + n)}


def paged(n: int, m: int) -> Arrays:
    pages = {"k_cache": zeros(m + 3, 2, 4, 8), "v_cache": zeros(m + 3, 2, 4, 6), "seqlens_k": np.zeros(2, np.uint8)}
    return {"q": zeros(2, 4, n, 8), "page_table": np.zeros((2, m), np.int64), "num_splits": 2, **pages}


KINDS: dict[str, Callable[[int, int], Arrays]] = {
    "plain": heads,
    "broadcast": lambda n, m: heads(n, m) | {"k": zeros(2, m, 8), "v": zeros(1, 2, m, 6)},
    "two_dimensions": lambda n, m: {"q": zeros(n, 8), "k": zeros(m, 8), "v": zeros(m, 6), "causal": True},
    "two_dimensions_into": lambda n, m: {"q": zeros(n, 8), "k": zeros(m, 8), "v": zeros(m, 6), "out": zeros(n, 6)},
    "swapped": swapped,
    "gaps": lambda n, m: {name: np.repeat(x, 2, -1)[..., ::2] for name, x in heads(n, m, np.float16).items()},
    "reversed": lambda n, m: {name: x[..., ::-1, :] for name, x in heads(n, m).items()},
    "given": given,
    "lse": lambda n, m: heads(n, m) | {"return_lse": True, "out_dtype": "float16"},
    "arrays": lambda n, m: (
        heads(n, m) | {"bias": zeros(4, n, m), "mask": zeros(2, 1, 1, m, dtype=bool), "sinks": zeros(4)}
    ),
    "rows": lambda n, m: heads(n, m) | {"bias": zeros(n, 1), "alibi_slopes": zeros(2, 1, dtype=np.float64)},
    "offsets": lambda n, m: heads(n, m) | {"query_offset": np.zeros(2, np.int8), "causal": True},
    "offset": lambda n, m: heads(n, m) | {"query_offset": -3, "window": (5, None), "scale": 2.0},
    "top_left": lambda n, m: heads(n, m) | {"causal": "top_left", "softcap": 3.0},
    "six_axes": lambda n, m: heads(n, m, batch=(2, 1, 3, 1, 2, 1)),
    "lse_alone": lambda n, m: {name: x for name, x in heads(n, m).items() if name != "v"},
    "lse_alone_into": lambda n, m: {
        "q": zeros(4, n, 8, dtype=np.float16),
        "k": zeros(2, m, 8, dtype=np.float16),
        "out": zeros(4, 2 * n)[:, ::2],
        "bias": zeros(n, m),
    },
    "lse_alone_two_dimensions": lambda n, m: {"q": zeros(n, 8), "k": zeros(m, 8), "out": zeros(n), "causal": True},
    "packed": packed,
    "cached": cached,
    "cached_into": lambda n, m: cached(n, m) | {"out": zeros(2, 4, n, 6), "sinks": zeros(4), "causal": "top_left"},
    "cached_int": lambda n, m: cached(n, m) | {"seqlens_k": m, "k_new": None, "v_new": None},
    "cached_with_room": cached_with_room,
    "cached_arrays": lambda n, m: (
        cached(n, m) | {"bias": zeros(4, n, m), "mask": zeros(2, 1, 1, m, dtype=bool), "alibi_slopes": zeros(4)}
    ),
    "cached_swapped": lambda n, m: {
        name: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if np.ndim(x) == 4 else x
        for name, x in cached(n, m).items()
    },
    "paged": paged,
    "paged_and_new": lambda n, m: (
        paged(n, m + n) | {"k_new": zeros(2, 2, n, 8), "v_new": zeros(2, 2, n, 6), "window": (3, 0), "return_lse": True}
    ),
    "paged_and_known": lambda n, m: paged(n, m) | {"seqlens_k": m},
    "packed_into": lambda n, m: packed(n, m) | {"out": zeros(n, 4, 6), "causal": "top_left"},
}


def described(arrays: Arrays) -> tuple[Problem, list[ArrayInfo | None]]:
    describe: Any = describe_varlen if "cu_seqlens_q" in arrays else describe_attention
    if "k_cache" in arrays:
        describe = describe_kv_cache
    elif "v" not in arrays:
        describe = describe_attention_lse
    problem, infos = describe(**arrays)
    return problem, [infos.get(name) for name in ARRAYS]


def kind_of(problem: Problem, infos: list[ArrayInfo | None]) -> Kind:
    return Kind(problem, [place for place, info in enumerate(infos) if info])


def at(kind: Kind, infos: list[ArrayInfo | None], num_keys: int | None = None) -> Problem | None:
    given = [info for info in infos if info]
    pointers = [info.pointer if info else 0 for info in infos]
    return kind.at([info.shape for info in given], [info.strides for info in given], pointers, num_keys)


@pytest.mark.parametrize("name", KINDS)
def test_other_lengths(name: str) -> None:
    kinds = [kind_of(*described(KINDS[name](*lengths))) for lengths in LENGTHS]
    for lengths in LENGTHS:
        problem, infos = described(KINDS[name](*lengths))
        assert all(at(kind, infos, problem.seqlen_k) == problem for kind in kinds)


def test_packed_sequences_may_be_more() -> None:
    kind = kind_of(*described(packed(9, 11)))
    boundaries = {"cu_seqlens_q": np.array([0, 3, 3, 9]), "cu_seqlens_k": np.array([0, 3, 4, 11], np.uint32)}
    problem, infos = described(packed(9, 11) | boundaries)
    assert problem.batch == (3,) and at(kind, infos) == problem


def test_where_queries_of_a_cache_stand() -> None:
    """Known with the length, or from the start; else each batch has a position of its own."""
    for change, offset in (({}, None), ({"seqlens_k": 1}, 1), ({"causal": "top_left"}, 0), ({"causal": False}, None)):
        problem, infos = described(cached(5, 7) | change)
        assert problem.query_offset == offset and problem.bottom_right == (change.get("causal") != "top_left")
        assert at(kind_of(problem, infos), infos) == problem


def test_traits_follow_addresses() -> None:
    kind = kind_of(*described(heads(5, 7, np.float16)))
    bytes_of_q = np.zeros(2 * 4 * 5 * 8 * 2 + 16, np.uint8)
    q = bytes_of_q[bytes_of_q.ctypes.data % 2 + 1 :][:640].view(np.float16).reshape(2, 4, 5, 8)
    problem, infos = described(heads(5, 7, np.float16) | {"q": q})
    assert problem.traits.input_alignment == 1 and at(kind, infos) == problem


def test_traits_follow_addresses_of_an_lse_alone() -> None:
    memory = np.zeros(2 * 4 * 5 * 4 + 16, np.uint8)
    out = memory[memory.ctypes.data % 2 + 1 :][:160].view(np.float32).reshape(2, 4, 5)
    arrays = {name: x for name, x in heads(5, 7, np.float16).items() if name != "v"}
    kind = kind_of(*described(arrays))
    problem, infos = described(arrays | {"out": out})
    assert (problem.traits.input_alignment, problem.traits.result_alignment) == (16, 1) and at(kind, infos) == problem


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("plain", {"v": (2, 2, 8, 6)}),
        ("given", {"out": (2, 4, 1, 6)}),
        ("given", {"lse": (2, 4, 6)}),
        ("two_dimensions_into", {"out": (1, 5, 6)}),
        ("arrays", {"bias": (4, 5, 2)}),
        ("arrays", {"mask": (2, 1, 2, 7)}),
        ("arrays", {"sinks": (3,)}),
        ("arrays", {"bias": (1, 2, 4, 5, 7)}),
        ("offsets", {"query_offset": (3,)}),
        ("lse_alone_into", {"lse": (4, 6)}),
        ("lse_alone_into", {"bias": (5, 8)}),
        ("lse_alone_two_dimensions", {"lse": (1, 5)}),
        ("packed", {"v": (8, 2, 6)}),
        ("packed", {"cu_seqlens_k": (4,)}),
        ("packed", {"cu_seqlens_q": (0,), "cu_seqlens_k": (0,)}),
        ("packed", {"cu_seqlens_q": (3, 1), "cu_seqlens_k": (3, 1)}),
        ("packed_into", {"out": (10, 4, 6)}),
        ("cached", {"v": (2, 2, 8, 6)}),
        ("cached", {"v": (2, 2, 1, 6)}),
        ("cached", {"seqlens_k": (3,)}),
        ("cached", {"seqlens_k": (1,)}),
        ("cached", {"k_new": (2, 2, 4, 8)}),
        ("cached", {"v_new": (2, 2, 6, 6)}),
        ("cached", {"k_new": (1, 2, 5, 8), "v_new": (1, 2, 5, 6)}),
        ("cached_into", {"out": (2, 4, 6, 6)}),
        ("cached_arrays", {"bias": (4, 5, 8)}),
        ("cached_arrays", {"mask": (2, 1, 1, 6)}),
        ("cached_with_room", {"bias": (4, 5, 7)}),
        ("paged", {"v": (10, 2, 5, 6)}),
        ("paged", {"v": (10, 2, 1, 6)}),
        ("paged", {"v": (9, 2, 4, 6)}),
        ("paged", {"page_table": (3, 7)}),
        ("paged", {"page_table": (1, 7)}),
        ("paged_and_new", {"k_new": (2, 1, 5, 8)}),
    ],
)
def test_lengths_that_do_not_fit(name: str, changes: dict[str, tuple[int, ...]]) -> None:
    problem, infos = described(KINDS[name](5, 7))
    for changed, shape in changes.items():
        info = infos[ARRAYS.index(changed)]
        assert info is not None
        infos[ARRAYS.index(changed)] = info._replace(shape=shape, strides=zeros(*shape).strides)
    assert at(kind_of(problem, infos), infos) is None
