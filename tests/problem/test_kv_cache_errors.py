"""Bad input of `attention_with_kv_cache`: argument, got and expected, before anything is written."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.problem.describe_cache import describe_kv_cache

from .test_errors import ODD_FLOATS, Bad, as_bytes, not_arrays, wrong_dtypes
from .test_gated_errors import on_device

pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def arguments(**changes: Any) -> dict[str, Any]:
    """Two sequences of a contiguous cache; what is None is left out."""
    given: dict[str, Any] = {
        "q": zeros(2, 4, 3, 8), "k_cache": zeros(2, 2, 20, 8), "v_cache": zeros(2, 2, 20, 6),
        "seqlens_k": np.array([3, 5], np.int32), "k_new": zeros(2, 2, 3, 8) + 1, "v_new": zeros(2, 2, 3, 6) + 1,
        **changes,
    }  # fmt: skip
    return {name: x for name, x in given.items() if x is not None}


def paged_arguments(**changes: Any) -> dict[str, Any]:
    table = np.array([[0, 1], [2, -9]], np.int32)
    caches = {"k_cache": zeros(3, 2, 10, 8), "v_cache": zeros(3, 2, 10, 6), "page_table": table}
    return arguments(**{**caches, **changes})


def call(**changes: Any) -> Any:
    return cuflash.attention_with_kv_cache(**arguments(**changes))


def paged(**changes: Any) -> Any:
    return cuflash.attention_with_kv_cache(**paged_arguments(**changes))


READ_ONLY = zeros(2, 2, 20, 8)
READ_ONLY.flags.writeable = False
ONE_CACHE = zeros(2, 2, 20, 8)
REPEATED = np.lib.stride_tricks.as_strided(zeros(2, 20, 8), (2, 2, 20, 8), (0, 640, 32, 4))
TYPE_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"q": zeros(2, 4, 3, 8, dtype=int)}, "q has dtype int64, expected float16, bfloat16, float32 or float64"),
    ({"k_cache": zeros(2, 2, 20, 8, dtype=np.float16)}, "k_cache has dtype float16 but q has float32"),
    ({"v_new": zeros(2, 2, 3, 6, dtype=np.float64)}, "v_new has dtype float64 but q has float32"),
    ({"k_cache": [[1.0]]}, "k_cache is a list, expected a NumPy or CuPy array"),
    ({"seqlens_k": True}, "seqlens_k is True (bool), expected an int, or an integer array of shape (batch,)"),
    ({"seqlens_k": 1.5}, "seqlens_k is 1.5 (float), expected an int, or an integer array of shape (batch,)"),
    (
        {"seqlens_k": np.float64(3)},
        "(float64), expected an int, or an integer array of shape (batch,)",
    ),
    ({"seqlens_k": np.True_}, "seqlens_k is True (bool), expected an int, or an integer array of shape (batch,)"),
    ({"seqlens_k": np.ones(2)}, "seqlens_k has dtype float64, expected an int, or an integer dtype"),
    ({"seqlens_k": [3, 5]}, "of shape (batch,); pass np.asarray(x)"),
    ({"num_splits": True}, "num_splits is True (bool), expected a positive int, or None"),
    ({"split_size": 64.0}, "split_size is 64.0 (float), expected a positive multiple of 64, or None"),
    ({"num_splits": 1.5}, "num_splits is 1.5 (float), expected a positive int, or None"),
    ({"page_table": np.zeros((2, 2))}, "page_table has dtype float64, expected an integer dtype"),
    ({"mask": np.ones((3, 20), np.int32)}, "mask has dtype int32, expected bool (True = attend); if 1 is to attend"),
    ({"block_table": np.ones(3)}, "unexpected keyword argument 'block_table'; cuflash calls it page_table"),
    ({"cache_seqlens": 3}, "unexpected keyword argument 'cache_seqlens'; cuflash calls it seqlens_k"),
    ({"page_size": 16}, "unexpected keyword argument 'page_size'; a page has as many keys as axis -2 of k_cache"),
    ({"slot_mapping": np.ones(3)}, "cuflash calls it seqlens_k and page_table, which say where k_new and v_new are"),
    ({"local_window_size": 3}, "cuflash calls it window=(left, right), which counts from where"),
    ({"seq_lens": 3}, "cuflash calls it seqlens_k, without what is appended"),
    ({"query_offset": 3}, "unexpected keyword argument 'query_offset'; attention takes it"),
    ({"seqlens_k": None}, "seqlens_k is missing, expected an int, or an integer array of shape (batch,)"),
    ({"causal": 1}, "causal is 1, expected False, True, 'bottom_right' or 'top_left'"),
    ({"out": zeros(2, 4, 3, 6, dtype=int)}, "out has dtype int64, expected float16, bfloat16, float32 or float64"),
]
VALUE_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"q": zeros(4, 3, 8)}, "q has shape (4, 3, 8), expected (batch, heads, sequence, feature)"),
    ({"k_cache": zeros(2, 20, 8)}, "k_cache has shape (2, 20, 8), expected (batch, heads, capacity, feature)"),
    ({"k_new": zeros(2, 3, 8)}, "k_new has shape (2, 3, 8), expected (batch, heads, sequence, feature)"),
    ({"k_cache": zeros(3, 2, 20, 8), "v_cache": zeros(3, 2, 20, 6)}, "k_cache has batch 3 but q has 2"),
    ({"k_cache": zeros(2, 2, 20, 7)}, "k_cache has head_dim 7 but q has 8"),
    ({"v_cache": zeros(2, 2, 21, 6)}, "v_cache has shape (2, 2, 21, 6) but k_cache has (2, 2, 20, 8)"),
    ({"q": zeros(2, 4, 3, 513), "k_cache": zeros(2, 2, 20, 513)}, "q has head_dim 513, expected 1 to 512"),
    ({"v_cache": zeros(2, 2, 20, 0)}, "v_cache has head_dim 0, expected 1 to 512"),
    ({"q": zeros(2, 3, 3, 8)}, "q has 3 heads, expected a multiple of the 2 heads of k_cache"),
    (
        {"k_cache": zeros(2, 20, 2, 8), "v_cache": zeros(2, 20, 2, 6)},
        "q has 4 heads, expected a multiple of the 20 heads of k_cache; if axes are (batch, sequence,",
    ),
    ({"v_new": None}, "v_new is None but k_new is given; what is appended has both"),
    ({"k_new": None}, "k_new is None but v_new is given; what is appended has both"),
    ({"k_new": zeros(1, 2, 3, 8)}, "k_new has shape (1, 2, 3, 8), expected (2, 2, 3, 8)"),
    ({"v_new": zeros(2, 2, 4, 6)}, "v_new has shape (2, 2, 4, 6), expected (2, 2, 3, 6)"),
    ({"seqlens_k": -1}, "seqlens_k is -1, expected a non-negative int"),
    ({"seqlens_k": np.array([3, -5])}, "seqlens_k has -5 at entry 1, expected no negative length"),
    ({"seqlens_k": np.array([3])}, "seqlens_k has shape (1,), expected (2,), a length for each batch"),
    ({"seqlens_k": np.array([[3, 5]])}, "seqlens_k has shape (1, 2), expected (2,), a length for each batch"),
    ({"seqlens_k": np.array(3)}, "seqlens_k has shape (), expected (2,), a length for each batch"),
    ({"num_splits": 0}, "num_splits is 0, expected a positive int, or None"),
    ({"split_size": 0}, "split_size is 0, expected a positive multiple of 64, or None"),
    ({"split_size": 100}, "split_size is 100, expected a positive multiple of 64, or None"),
    ({"split_size": 64, "num_splits": 2}, "split_size is 64 and num_splits is 2, expected one of the two"),
    ({"k_cache": READ_ONLY}, "k_cache is read-only, expected a writeable array, as there is something to append"),
    ({"k_cache": REPEATED}, "k_cache has strides (0, 640, 32, 4) for shape (2, 2, 20, 8), so that its elements"),
    ({"k_cache": ONE_CACHE, "v_cache": ONE_CACHE, "v_new": zeros(2, 2, 3, 8)}, "k_cache overlaps v_cache in memory"),
    ({"k_cache": ONE_CACHE, "k_new": ONE_CACHE[:, :, :3]}, "k_cache overlaps k_new in memory"),
    ({"k_cache": ONE_CACHE, "q": np.concatenate([ONE_CACHE] * 2, 1)[:, :, :3], "out": ONE_CACHE}, "out has shape"),
    ({"mask": np.ones((3, 19), bool)}, "mask has shape (3, 19), expected one that broadcasts to (2, 4, 3, 20)"),
    ({"mask": np.ones((3, 8), bool)}, "broadcasts to (2, 4, 3, 20); there is a column for each key that there is room"),
    ({"mask": np.ones((3, 9), bool), "seqlens_k": 3}, "mask has shape (3, 9), expected one that broadcasts to"),
    ({"bias": zeros(3, 3, 20)}, "bias has shape (3, 3, 20), expected one that broadcasts to (2, 4, 3, 20)"),
    ({"sinks": zeros(3)}, "sinks has shape (3,), expected one that broadcasts to (2, 4)"),
    ({"out": zeros(2, 4, 3, 8)}, "out has shape (2, 4, 3, 8), expected (2, 4, 3, 6)"),
    ({"lse": zeros(4, 3)}, "lse has shape (4, 3), expected (2, 4, 3)"),
    ({"window": (-1, 0)}, "window[0] (left) is -1, expected a non-negative int"),
]  # fmt: skip
PAGED_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"page_table": np.array([[0, 1]])}, "page_table has shape (1, 2), expected (2, pages of a batch)"),
    ({"page_table": np.array([0, 1])}, "page_table has shape (2,), expected (2, pages of a batch)"),
    ({"page_table": np.array([[0, 1], [3, 0]])}, "page_table has 3 at entry (1, 0), expected 0 to 2"),
    ({"page_table": np.array([[0, 1], [-1, 0]])}, "page_table has -1 at entry (1, 0), expected 0 to 2"),
    ({"seqlens_k": np.array([3, 8])}, "page_table has -9 at entry (1, 1), expected 0 to 2"),
    ({"k_cache": zeros(3, 2, 0, 8), "v_cache": zeros(3, 2, 0, 6)}, "k_cache has pages of 0 keys (axis -2), expected"),
    (
        {"k_cache": zeros(2, 20, 8)},
        "k_cache has shape (2, 20, 8), expected (pages, heads, page_size, feature), as there",
    ),
]


@pytest.mark.parametrize(("changes", "message"), TYPE_ERRORS, ids=[message[:40] for _, message in TYPE_ERRORS])
def test_type_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        call(**changes)


@pytest.mark.parametrize(("changes", "message"), VALUE_ERRORS, ids=[message[:40] for _, message in VALUE_ERRORS])
def test_value_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**changes)
    assert not ONE_CACHE.any() and not READ_ONLY.any()


@pytest.mark.parametrize(("changes", "message"), PAGED_ERRORS, ids=[message[:40] for _, message in PAGED_ERRORS])
def test_errors_of_pages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        paged(**changes)


def test_results_apart_from_the_cache() -> None:
    k_cache = zeros(2, 4, 20, 6)
    for name, given in (("out", k_cache[:, :, 10:13]), ("lse", k_cache[..., :3, 0])):
        with pytest.raises(ValueError, match=f"{name} overlaps k_cache in memory"):
            call(k_cache=k_cache, q=zeros(2, 4, 3, 6), k_new=zeros(2, 4, 3, 6), v_cache=zeros(2, 4, 20, 6),
                 v_new=zeros(2, 4, 3, 6), **{name: given})  # fmt: skip


def test_nothing_is_written_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    k_cache, v_cache = zeros(2, 2, 20, 8), zeros(2, 2, 20, 6)
    for changes in ({"scale": "1"}, {"softcap": 0}, {"precision": "tf64"}, {"out_dtype": "int8"}, {"return_lse": 1}):
        with pytest.raises((TypeError, ValueError)):
            call(k_cache=k_cache, v_cache=v_cache, **changes)
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="CUFLASH_NUM_THREADS"):
        call(k_cache=k_cache, v_cache=v_cache)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="it needs GPU arrays"), cuflash.options(kernel="forward_mma"):
        call(k_cache=k_cache, v_cache=v_cache)
    assert not k_cache.any() and not v_cache.any()
    call(k_cache=k_cache, v_cache=v_cache)
    assert k_cache.any() and v_cache.any()


def test_caches_that_are_only_read_may_be_anything() -> None:
    call(k_cache=READ_ONLY, k_new=None, v_new=None)
    call(k_cache=REPEATED, k_new=None, v_new=None)
    call(k_cache=ONE_CACHE, v_cache=ONE_CACHE, k_new=None, v_new=None)


# Whatever is wrong, nothing is written


def check(arrays: dict[str, Any], error: type[Exception], words: str) -> None:
    """The call raises, and does so again when there are results to write into; no array is another one then."""
    with pytest.raises(error, match=words) as caught:
        cuflash.attention_with_kv_cache(**arrays)
    assert "\n" not in str(caught.value)
    arrays = {"out": np.full((2, 4, 3, 6), 7, np.float32), "lse": np.full((2, 4, 3), 7, np.float32)} | arrays
    before = {name: as_bytes(x) for name, x in arrays.items()}
    with pytest.raises((TypeError, ValueError)):
        cuflash.attention_with_kv_cache(**arrays)
    assert {name: as_bytes(x) for name, x in arrays.items()} == before


ALL_ERRORS = [
    pytest.param(make, changes, error, message, id=f"{make.__name__}-{message[:40]}")
    for make, error, errors in (
        (arguments, TypeError, TYPE_ERRORS),
        (arguments, ValueError, VALUE_ERRORS),
        (paged_arguments, ValueError, PAGED_ERRORS),
    )
    for changes, message in errors
]


@pytest.mark.parametrize(("make", "changes", "error", "message"), ALL_ERRORS)
def test_nothing_is_written(make: Any, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    check(make(**changes), error, re.escape(message))


OPTIONS = {
    "mask": zeros(2, 4, 3, 20, dtype=bool), "bias": zeros(4, 3, 20), "sinks": zeros(2, 4), "alibi_slopes": zeros(4),
}  # fmt: skip
INTEGER, FLOAT = "expected an integer dtype", "expected float16, bfloat16, float32 or float64"
ODD_INTEGERS = (np.dtype(np.int32).newbyteorder(), object)
OF_ARGUMENTS = [
    *not_arrays(("q", "k_cache", "v_cache", "k_new", "v_new", "page_table", *OPTIONS, "out", "lse", "workspace")),
    *(
        made
        for made in not_arrays(("seqlens_k",))
        if made.id.rpartition("-")[2] not in ("list", "tuple", "str", "object", "huge", "scalar")
    ),
    *(
        made
        for name, x in arguments().items()
        if name != "seqlens_k"
        for made in wrong_dtypes(name, FLOAT, ODD_FLOATS, (np.int32, np.uint8, np.bool_, np.complex64), *x.shape)
    ),
    *wrong_dtypes("seqlens_k", "expected an int, or an integer dtype", ODD_INTEGERS, (np.float32, np.bool_), 2),
    *wrong_dtypes("page_table", INTEGER, ODD_INTEGERS, (np.float32, np.bool_, np.complex64), 2, 2),
    *wrong_dtypes("mask", "expected bool (True = attend)", ODD_FLOATS, (np.uint8, np.int64, np.float32), 3, 20),
    *(
        made
        for name, shape in (("bias", (3, 20)), ("sinks", (4,)), ("alibi_slopes", (4,)))
        for made in wrong_dtypes(name, "expected a float dtype", ODD_FLOATS, (np.int64, np.bool_), *shape)
    ),
    *wrong_dtypes("out", FLOAT, ODD_FLOATS, (np.int32, np.bool_), 2, 4, 3, 6),
    *wrong_dtypes("lse", "expected float32 (q has float32)", ODD_FLOATS, (np.float16, np.float64), 2, 4, 3),
]


@pytest.mark.parametrize("case", OF_ARGUMENTS, ids=lambda case: case.id)
def test_types_of_arguments(case: Bad) -> None:
    good = arguments()
    words = ".*".join(map(re.escape, case.words))
    check(good | case.change(np, good), case.error, words)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k_new", "v_new"])
@pytest.mark.parametrize("length", [3, np.array([3, 5])], ids=["int", "array"])
def test_axes_of_arguments(name: str, length: Any) -> None:
    shape = arguments()[name].shape
    for wrong in ((), shape[3:], shape[2:], shape[1:], (1, *shape)):
        check(
            arguments(**{name: zeros(*wrong), "seqlens_k": length}), ValueError, re.escape(f"{name} has shape {wrong}")
        )
    for dtype in ("float16", "float64", "bfloat16"):
        given = arguments(**{name: arguments()[name].astype(dtype), "seqlens_k": length})
        other = f"{name} has dtype {dtype}" if name != "q" else f"k_cache has dtype float32 but q has {dtype}"
        check(given, TypeError, other)


def test_heads_of_a_cache() -> None:
    for heads in (0, 3, 8):
        caches = {"k_cache": zeros(2, heads, 20, 8), "v_cache": zeros(2, heads, 20, 6), "k_new": None, "v_new": None}
        words = f"q has 4 heads, expected a multiple of the {heads} heads of k"
        check(arguments(**caches), ValueError, words)
        check(arguments(**caches, seqlens_k=3), ValueError, words)
    for name in ("k_new", "v_new"):
        shape = arguments()[name].shape
        for wrong in ((2, 1, *shape[2:]), (2, 4, *shape[2:]), (1, *shape[1:]), (*shape[:3], shape[3] + 1)):
            words = re.escape(f"{name} has shape {wrong}, expected {shape}")
            check(arguments(**{name: zeros(*wrong)}), ValueError, words)
            check(paged_arguments(**{name: zeros(*wrong)}), ValueError, words)


@pytest.mark.parametrize("value", [-1, -(2**40), np.int8(-3)])
def test_negative_lengths(value: Any) -> None:
    for make in (arguments, paged_arguments):
        check(make(seqlens_k=value), ValueError, f"seqlens_k is {value}, expected a non-negative int")
        lengths = np.array([0, value], np.int64)
        check(make(seqlens_k=lengths), ValueError, f"seqlens_k has {value} at entry 1, expected no negative length")


@pytest.mark.parametrize("value", [-1, 3, 2**31 - 1, -(2**31)])
def test_tables_are_checked_as_far_as_they_are_used(value: int) -> None:
    """By the keys behind the call, where the length is an int and where it is an array."""
    for place, length in (((0, 0), 0), ((1, 0), 3), ((0, 1), 8), ((1, 1), 10)):
        table = np.array([[0, 1], [2, 1]], np.int32)
        table[place] = value
        words = re.escape(f"page_table has {value} at entry {place}, expected 0 to 2")
        for lengths in (length, np.array([length, length])):
            check(paged_arguments(page_table=table, seqlens_k=lengths), ValueError, words)
    table = np.array([[0, value], [2, value]])
    for lengths in (7, np.array([0, 7])):
        paged(page_table=table, seqlens_k=lengths)
        if np.ndim(lengths) == 0:
            check(paged_arguments(page_table=table, seqlens_k=8), ValueError, "page_table has")
    paged(page_table=np.full((2, 2), value), seqlens_k=0, k_new=None, v_new=None)


def results_over(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Results over the last element of an argument, and the arguments."""
    given = paged_arguments(page_table=np.array([[0, 1], [2, 0]])) | ({name: OPTIONS[name]} if name in OPTIONS else {})
    found = []
    for result, shape in (("out", (2, 4, 3, 6)), ("lse", (2, 4, 3))):
        num_bytes = given[name].nbytes
        memory = np.zeros(num_bytes + 4 * int(np.prod(shape)), np.uint8)
        shared = memory[:num_bytes].view(given[name].dtype).reshape(given[name].shape)
        shared[...] = given[name]
        over = memory[num_bytes - 4 : -4].view(np.float32).reshape(shape)
        found.append((result, given | {name: shared, result: over}))
    return found


@pytest.mark.parametrize("name", [*paged_arguments(), *OPTIONS])
def test_results_over_an_argument(name: str) -> None:
    for result, given in results_over(name):
        check(given, ValueError, f"{result} overlaps {name} in memory, expected an array of its own")


def test_results_over_each_other_and_over_themselves() -> None:
    memory = zeros(144)
    out, lse = memory.reshape(2, 4, 3, 6), memory[-24:].reshape(2, 4, 3)
    check(arguments(out=out, lse=lse), ValueError, "lse overlaps out in memory")
    for name, shape in (("out", (2, 4, 3, 6)), ("lse", (2, 4, 3))):
        repeated = np.lib.stride_tricks.as_strided(memory, shape, (4,) * len(shape))
        check(arguments(**{name: repeated}), ValueError, f"{name} has strides .*, so that its elements overlap")
        fixed = zeros(*shape)
        fixed.flags.writeable = False
        check(arguments(**{name: fixed}), ValueError, f"{name} is read-only, expected a writeable array")


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("seqlens_k", [3, np.array([3, 5])], ids=["int", "array"])
def test_caches_that_cannot_be_appended_to(name: str, seqlens_k: Any) -> None:
    """With pages likewise."""
    for make in (arguments, paged_arguments):
        x = make()[name]
        fixed = x.copy()
        fixed.flags.writeable = False
        check(make(seqlens_k=seqlens_k, **{name: fixed}), ValueError, f"{name} is read-only, expected a writeable")
        rows = np.lib.stride_tricks.as_strided(x, x.shape, (*x.strides[:2], 4, 4))
        words = f"{name} has strides .*, so that its elements overlap each other"
        check(make(seqlens_k=seqlens_k, **{name: rows}), ValueError, words)
        for other in ("q", "k_new", "v_new", *(["seqlens_k"] if np.ndim(seqlens_k) else [])):
            given = make(seqlens_k=seqlens_k)
            memory = given[name].ravel()
            size = given[other].nbytes // 4
            shared = memory[3 : 3 + size].view(given[other].dtype).reshape(given[other].shape)
            shared[...] = given[other]
            check(given | {other: shared}, ValueError, f"{name} overlaps {other} in memory, expected an array of its")


@pytest.mark.parametrize(
    ("name", "hint"),
    {
        "block_table": "cuflash calls it page_table",
        "page_tables": "did you mean page_table?",
        "num_split": "did you mean num_splits?",
        "seqlen_k": "did you mean seqlens_k?",
        "softmax_scale": "cuflash calls it scale",
        "window_size": "cuflash calls it window=(left, right)",
        "attn_mask": "cuflash calls it mask (bool, True = attend)",
        "is_causal": "cuflash calls it causal",
        "return_softmax_lse": "cuflash calls it return_lse",
        "cu_seqlens_q": "attention_varlen takes it",
        "query_offset": "attention takes it",
        "dropout_p": "cuflash has no dropout, leave it out",
        "rotary_cos": "cuflash rotates nothing: rotate q and k before the call",
        "cache_leftpad": "cuflash counts keys from the first row of a cache; mask hides those in front",
        "cache_position": "cuflash calls it seqlens_k, the keys in front of those that are appended",
        "kv_cache": "cuflash calls it k_cache and v_cache, its two halves",
        "kv_indptr": "cuflash calls it page_table",
        "kv_lens": "cuflash calls it seqlens_k, without what is appended",
        "past_key_values": "cuflash calls it k_cache and v_cache",
        "position_ids": "cuflash rotates nothing: rotate q and k before the call; the last query stands at",
        "nothing_like_it": "expected one of alibi_slopes, bias, causal, k_cache,",
    }.items(),
)
def test_unknown_options(name: str, hint: str) -> None:
    words = f"attention_with_kv_cache() got an unexpected keyword argument '{name}'; {hint}"
    check(arguments(**{name: 3}), TypeError, re.escape(words))


def test_settings_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice in ({"kernel": "forward_mma"}, {"tile": "64x64"}):
        with cuflash.options(**choice):
            check(arguments(), ValueError, "cannot serve this call")
            check(paged_arguments(seqlens_k=3), ValueError, "cannot serve this call")
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "many")
    check(arguments(), ValueError, "CUFLASH_NUM_THREADS")


# Where arrays are


def placed(make: Any, name: str, devices: tuple[int, int]) -> dict[str, Any]:
    """What is known of arrays on one device, but for one of them."""
    results = {"out": zeros(2, 4, 3, 6), "lse": zeros(2, 4, 3), "workspace": zeros(64, dtype=np.uint8)}
    given = make() | OPTIONS | results
    return {x: on_device(y, devices[x == name]) for x, y in given.items()}


PLACES = [name for name in placed(paged_arguments, "q", (0, 0)) if name != "q"]


@pytest.mark.parametrize("name", PLACES)
def test_arrays_elsewhere(name: str) -> None:
    for make in (arguments, paged_arguments):
        if name not in placed(make, name, (0, 0)):
            continue
        with pytest.raises(TypeError, match=f"{name} is a NumPy array but q is a GPU array"):
            describe_kv_cache(**placed(make, name, (0, -1)))
        with pytest.raises(TypeError, match=f"{name} is a GPU array but q is a NumPy array"):
            describe_kv_cache(**placed(make, name, (-1, 0)))
        with pytest.raises(ValueError, match=f"{name} is on GPU 1 but q is on GPU 0"):
            describe_kv_cache(**placed(make, name, (0, 1)))


@pytest.mark.parametrize("length", [None, 25])
def test_no_value_of_a_gpu_is_read(length: int | None) -> None:
    for make in (arguments, paged_arguments):
        given = placed(make, "", (0, 0))
        given["seqlens_k"] = on_device(np.array([-5, 2**60]), 0) if length is None else length
        if "page_table" in given:
            given["page_table"] = on_device(np.array([[-1, 99], [3, -(2**40)]]), 0)
        problem, _ = describe_kv_cache(**given)
        assert problem.seqlen_k == 20 and problem.traits.seqlens_k == (length is None)


def test_options_apart_from_a_cache_that_is_written() -> None:
    """Also from rows of it that the call does not use; where nothing is appended, they may lie where they like."""
    k_cache = zeros(2, 2, 20, 8)
    for options in (
        {"bias": k_cache[0, 0, :3, :1]},
        {"sinks": k_cache[0, 0, 15, :4]},
        {"alibi_slopes": k_cache[0, 0, 0, :4]},
    ):
        (name,) = options
        for lengths in (3, np.array([3, 5], np.int32)):
            with pytest.raises(ValueError, match=f"k_cache overlaps {name} in memory"):
                call(k_cache=k_cache, seqlens_k=lengths, **options)
            call(k_cache=k_cache, seqlens_k=lengths, k_new=None, v_new=None, **options)
    for lengths in (3, np.array([3, 5], np.int32)):
        with pytest.raises(ValueError, match="out overlaps k_cache in memory"):
            call(
                k_cache=k_cache[..., :6], seqlens_k=lengths, q=zeros(2, 2, 3, 6), k_new=zeros(2, 2, 3, 6),
                out=k_cache[:, :, 15:18, :6],
            )  # fmt: skip
    assert not k_cache.any()


def test_what_is_no_array_is_named() -> None:
    class Foreign:
        shape, dtype = (2, 2, 20, 6), np.dtype(np.float32)

        def __dlpack__(self) -> None: ...
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    for lengths in (3, np.array([3, 5], np.int32)):
        with pytest.raises(TypeError, match=r"v_cache is a .*Foreign that is not on a CUDA device"):
            call(v_cache=Foreign(), seqlens_k=lengths)
