"""Calls of a kernel on the CPU that between them miss every guard and every barrier of the CUDA sources.

Each takes an emulator and raises AssertionError if the kernel does what it must not. They are few, as every one may
compile a kernel: a case of the matrix for each way through the sources, and what no case of the matrix shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from cases import CASES_BY_NAME, fitting
from kernels import test_pairs, test_points
from kernels.test_forward_mma import (
    alibi,
    alibi_scales,
    alibi_with_few_registers,
    bias_of_no_numbers,
    softcap,
    softcap_of_low_scores,
    steps_of_heads,
    turns,
)
from kernels.test_forward_wgmma import walks
from kernels.test_precise import assert_precise, draw

from cuflash import attention, attention_with_kv_cache, reference
from cuflash.problem.arrays import DTYPES
from cuflash.problem.describe import describe_attention
from cuflash.problem.describe_cache import describe_kv_cache
from cuflash.testing import Case, check, describe, make_data, run
from emulator.emulator import Emulator, merge
from emulator.test_kernels import MALFORMED, malformed, malformed_cache

Call = Callable[[Emulator], None]


def _name(emulator: Emulator, dtype: str = "float16") -> str:
    """A type that the kernel serves: that one, or the first of its own."""
    return dtype if dtype in emulator.spec.dtypes else emulator.spec.dtypes[0]


def _type(emulator: Emulator) -> Any:
    return DTYPES[_name(emulator)]


def _is_one(out: np.ndarray) -> bool:
    """Whether weights of ones add up to one: sums of weights and of weighted values differ by the last digits."""
    bound = 5e-7 if out.dtype == np.float32 else 1e-15  # tensor cores truncate what they add
    return bool((np.abs(out.astype(np.float64) - 1) <= bound).all())


def _pinned(emulator: Emulator, tile: str) -> Emulator:
    """With a tile, or the one that precise_wgmma has for a call."""
    tile = "" if emulator.spec.name == "precise_wgmma" else tile
    return Emulator(emulator.spec.name, tile, emulator.device, emulator.seed, emulator.sources)


def _no_lse(emulator: Emulator) -> None:
    x = np.ones((2, 70, 32), _type(emulator))
    assert _is_one(emulator.attention(x, x, x))
    assert _is_one(emulator.attention_varlen(x, x, x, np.array([0, 2])))


def _hidden_rows(emulator: Emulator) -> None:
    """Rows of k and v that no query of the last tile may see hold NaN, or none of the first one."""
    rng, dtype = np.random.default_rng(0), _type(emulator)
    for seqlen_q, hidden in ((70, 70), (200, 128)):
        q, k, v = (rng.standard_normal((length, 32)).astype(dtype) for length in (seqlen_q, 200, 200))
        exact, _ = reference.attention(q, k, v, causal="top_left")
        k[hidden:], v[hidden:] = np.nan, np.nan
        out = emulator.attention(q, k, v, causal="top_left")
        np.testing.assert_allclose(out[:hidden].astype(np.float64), exact[:hidden], atol=3e-3)


def _huge_offsets(emulator: Emulator) -> None:
    """Far beyond all keys, or in front of them, whatever the integer type."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((4, 1, 20, 16)).astype(_type(emulator)) for _ in range(3))
    options: list[dict[str, Any]] = [{"causal": True}, {"window": (5, None)}, {"window": (None, 5)}]
    for dtype in (np.int64, np.uint64):
        limits = np.iinfo(dtype)
        offsets = np.array([limits.min, limits.max, limits.max // 2, 3], dtype)
        for option in options:
            out = emulator.attention(q, k, v, query_offset=offsets, **option)
            expected = attention(q, k, v, query_offset=offsets, **option)
            np.testing.assert_allclose(out.astype(np.float64), expected.astype(np.float64), atol=3e-3)


def _tail_with_sinks(emulator: Emulator) -> None:
    """Tokens behind the last sequence are 0, their lse is -inf and not the sink."""
    x = np.ones((100, 2, 16), _type(emulator))
    boundaries = np.array([0, 40, 70])
    out, lse = emulator.attention_varlen(x, x, x, boundaries, boundaries, sinks=np.ones(2, np.float32), return_lse=True)
    assert (out[70:] == 0).all() and np.isneginf(lse[70:]).all() and np.isfinite(lse[:70]).all()


def _no_visible_key(emulator: Emulator) -> None:
    """Nothing may be on its way at the end, not even to a tile whose Q would stay in shared memory."""
    x = np.ones((5, 256), _type(emulator))
    assert (emulator.attention(x, x, x, causal=True, query_offset=-1000) == 0).all()


def _tall_tiles(emulator: Emulator) -> None:
    """Packed sequences with several warps per block, however few rows there are."""
    case = fitting(CASES_BY_NAME["packed-plain-True"], emulator.spec)
    problem = describe(case, _name(emulator))
    tile = str(emulator.spec.tiles(problem.traits, emulator.device)[0])
    run(case, make_data(case, _name(emulator)), np, _pinned(emulator, tile).function(case))


def _in_splits(name: str, emulator: Emulator) -> None:
    """Windows that begin and end inside of key tiles, with sinks; splits of packed sequences too."""
    emulator.num_splits = 3
    _case(name, "float16", "", emulator)


def _split_window(emulator: Emulator) -> None:
    """A split that begins inside of a tile of keys, behind NaN, and ends with keys that all rows see."""
    emulator.num_splits = 3
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((length, 32)).astype(_type(emulator)) for length in (20, 1000))
    options: dict[str, Any] = {"window": (400, 0), "query_offset": 980}
    exact, _ = reference.attention(q, k, k, **options)
    k[:580] = np.nan
    out = emulator.attention(q, k, k, **options)
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=2e-3)


def _window_in_pages(emulator: Emulator) -> None:
    """Pages in front of a window hold NaN, which begins inside of a warp's keys."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, 2, 32)).astype(_type(emulator))
    pages = rng.standard_normal((64, 2, 16, 32)).astype(_type(emulator))
    table = rng.permutation(64).astype(np.uint8)[np.newaxis]
    options: dict[str, Any] = {"page_table": table, "seqlens_k": 1000, "window": (400, 0)}
    problem = describe_kv_cache(q, pages, pages.copy(), **options)[0]
    if emulator.refuses(problem):
        return
    exact, _ = reference.attention_with_kv_cache(q, pages, pages, **options)
    pages[table[0, : 590 // 16]] = np.nan
    out = emulator.run(*describe_kv_cache(q, pages, pages.copy(), **options))
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=2e-3)


def _empty_split_of_pages(emulator: Emulator) -> None:
    """A split that has no keys, as the others have them all, would begin behind the table."""
    rng = np.random.default_rng(0)
    q, pages = (rng.standard_normal(shape).astype(_type(emulator)) for shape in ((1, 2, 1, 32), (36, 1, 16, 32)))
    options: dict[str, Any] = {"page_table": rng.permutation(36).astype(np.int32)[np.newaxis], "seqlens_k": 36 * 16}
    call = describe_kv_cache(q, pages, pages.copy(), num_splits=8, **options)
    if emulator.refuses(call[0]):
        return
    lowest = _pinned(emulator, "64x64x2") if emulator.spec.name == "forward_wgmma" else emulator
    exact, _ = reference.attention_with_kv_cache(q, pages, pages, **options)
    np.testing.assert_allclose(lowest.run(*call).astype(np.float64), exact, atol=2e-3)


def _no_such_pages(emulator: Emulator) -> None:
    """Of pages that there are not the nearest one is read, and nothing is written."""
    q, new = np.ones((2, 1, 1, 32), _type(emulator)), np.full((2, 1, 1, 32), np.nan, _type(emulator))
    keys = np.ones((3, 1, 16, 32), q.dtype)
    values = keys * np.arange(3, dtype=q.dtype).reshape(3, 1, 1, 1)
    table = np.zeros((2, 1), np.int64)
    problem, infos = describe_kv_cache(
        q, keys, values, seqlens_k=np.full(2, 5, np.int32), k_new=new, v_new=new, page_table=table
    )
    if emulator.refuses(problem):
        return
    table[:, 0] = 2**40, -(2**60)  # past the checks
    out = emulator.run(problem, infos)
    assert (out[0] == 2).all() and (out[1] == 0).all() and (keys == 1).all() and not np.isnan(values).any()


def _splits_of_a_size(emulator: Emulator) -> None:
    """Splits of a size of their own have the same keys, however much room a cache has behind them."""
    rng = np.random.default_rng(0)
    q, keys, values = (rng.standard_normal((1, 1, length, 32)).astype(_type(emulator)) for length in (1, 190, 190))
    found = []
    for capacity in (200, 700):
        k, v = (np.zeros((1, 1, capacity, 32), _type(emulator)) for _ in range(2))
        k[:, :, :190], v[:, :, :190] = keys, values
        out = emulator.attention_with_kv_cache(q, k, v, seqlens_k=np.array([190], np.int32), split_size=128)
        found.append(out.tobytes())
    assert found[0] == found[1]


def _splits_of_lengths(emulator: Emulator) -> None:
    """As many splits as the caller says, of batches that are nearly as long as the cache, and short."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 1, length, 32)).astype(_type(emulator)) for length in (1, 200, 200))
    options: dict[str, Any] = {"seqlens_k": np.array([190, 30])}
    exact, _ = reference.attention_with_kv_cache(q, k, v, **options)
    out = emulator.attention_with_kv_cache(q, k, v, num_splits=3, **options)
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=4e-3)


def _splits_without_lse(emulator: Emulator) -> None:
    emulator.num_splits = 2
    x = np.ones((2, 200, 32), _type(emulator))
    assert _is_one(emulator.attention(x, x, x))


def _merge(width: int, emulator: Emulator) -> None:
    """Three parts of ones or, where they have seen no key, of NaN; rows that fill no block."""
    outs, lses = np.ones((3, 5, width), np.float32), np.zeros((3, 5), np.float32)
    lses[0, 1:] = lses[:, 3] = -np.inf
    outs[np.isneginf(lses)] = np.nan
    # One of them has its rows along the last axis.
    for parts in ((outs, lses), (list(outs), list(lses)), ([np.asfortranarray(outs[0]), *outs[1:]], list(lses))):
        out, lse = merge(*parts, emulator.sources)
        np.testing.assert_allclose(out, np.where(np.arange(5) == 3, 0, np.ones((width, 5))).T, rtol=1e-6)
        np.testing.assert_allclose(
            lse, np.log([3, 2, 2, 0, 2], where=[1, 1, 1, 0, 1], out=np.full(5, -np.inf)), rtol=1e-6
        )


def _merge_many(width: int, emulator: Emulator) -> None:
    """More parts than a warp takes at a time, and rows that do not fill the last block."""
    num_parts, rows = 21, 5
    outs = np.broadcast_to(np.arange(num_parts, dtype=np.float32)[:, np.newaxis, np.newaxis], (num_parts, rows, width))
    out, lse = merge(outs.copy(), np.zeros((num_parts, rows), np.float32), emulator.sources)
    np.testing.assert_allclose(out, (num_parts - 1) / 2, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(num_parts), rtol=1e-6)


def _alibi_far_away(num_splits: int, emulator: Emulator) -> None:
    """Behind all keys and in front of them, where distances from the position itself would be all alike."""
    emulator.num_splits = num_splits
    x = np.random.default_rng(0).standard_normal((70, 32)).astype(_type(emulator))
    for offset in (10**8, -(10**9)):
        options: dict[str, Any] = {"query_offset": offset, "alibi_slopes": np.array([0.1])}
        out, lse = emulator.attention(x, x, x, return_lse=True, **options)
        exact, exact_lse = reference.attention(x, x, x, **options)
        np.testing.assert_allclose(out.astype(np.float64), exact, atol=4e-3)
        np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


def _sinks_far_away(num_splits: int, emulator: Emulator) -> None:
    """Behind all keys: above all logits, about as high, or none."""
    emulator.num_splits = num_splits
    x = np.random.default_rng(0).standard_normal((3, 70, 32)).astype(_type(emulator))
    options: dict[str, Any] = {"query_offset": 10**6, "alibi_slopes": np.full(3, 0.5)}
    options["sinks"] = np.array([1.3, -499980.5, -np.inf])
    out, lse = emulator.attention(x, x, x, return_lse=True, **options)
    exact, exact_lse = reference.attention(x, x, x, **options)
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=4e-3)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


def _tail_with_slopes(emulator: Emulator) -> None:
    """Slopes of every sequence and none of tokens that belong to none."""
    x, boundaries = np.ones((100, 2, 16), _type(emulator)), np.array([0, 40, 70])
    slopes = np.ones((2, 2), np.float32)
    emulator.num_splits = 2  # partial results need the slope of a row at its end, too
    out = emulator.attention_varlen(x, x, x, boundaries, boundaries, alibi_slopes=slopes)
    assert _is_one(out[:70]) and (out[70:] == 0).all()
    emulator.num_splits = 1
    out = emulator.attention_varlen(x, x[:0], x[:0], boundaries[:1], boundaries[:1], alibi_slopes=slopes[:0])
    assert (out == 0).all()


def _parts_without_keys(emulator: Emulator) -> None:
    """Rows of which the first part sees no key, far away."""
    emulator.num_splits = 2
    x, mask = np.ones((200, 16), _type(emulator)), np.arange(200) >= np.array([[0], [150]])
    options: dict[str, Any] = {"query_offset": 10**8, "alibi_slopes": np.array([0.1]), "mask": mask}
    out, lse = emulator.attention(x[:2], x, x, return_lse=True, **options)
    assert _is_one(out)
    np.testing.assert_allclose(lse, reference.attention(x[:2], x, x, **options)[1], rtol=1e-6)


def _rounds_once(emulator: Emulator) -> None:
    """One key, whose value of float64 lies above the middle of two results, or in it."""
    q, v = np.ones((1, 16)), np.full((1, 16), 1 + 2.0**-11)
    if emulator.refuses(describe_attention(q, q, v)[0]):
        return
    v[0, ::2] += 2.0**-40
    out = emulator.attention(q, q, v, out_dtype="float16")
    assert (out[0, ::2] == 1 + 2.0**-10).all() and (out[0, 1::2] == 1).all()


def _many_threads(emulator: Emulator) -> None:
    """More threads than a tile of keys has pieces of 16 bytes."""
    x = np.ones((140, 16), _type(emulator))
    for tile in ("64x32", "128x32x2", "128x16"):
        if tile in map(str, emulator.spec.tiles(describe_attention(x, x, x)[0].traits, emulator.device)):
            assert _is_one(_pinned(emulator, tile).attention(x, x, x))


def _last_digits(emulator: Emulator) -> None:
    """More keys than a sum in double precision takes."""
    if emulator.spec.dtypes == ("float64",):
        arrays = draw("normal", "float64", 4, 4096, 16)
        assert_precise("normal", emulator.attention(*arrays), arrays)


def _quotients(emulator: Emulator) -> None:
    """Thirds of whole numbers, rounded once, and infinite values."""
    if emulator.spec.dtypes == ("float64",):
        v = np.random.default_rng(0).integers(0, 1000, (3, 64)).astype(np.float64)
        v[0, 0] = np.inf
        assert (emulator.attention(np.zeros((1, 16)), np.zeros((3, 16)), v) == v.sum(0) / 3).all()


def _huge_logits(emulator: Emulator) -> None:
    """So large that the rounding of their products with log2(e) is beyond all exponents."""
    x = np.random.default_rng(0).standard_normal((70, 32)).astype(_type(emulator))
    out = emulator.attention(x, x, x, bias=np.full((70, 70), -1e30, np.float32), scale=1e-9)
    np.testing.assert_allclose(out.astype(np.float64), [x.astype(np.float64).mean(0)] * 70, atol=2e-3)


def _extreme_softcaps(emulator: Emulator) -> None:
    """So small that scores of 0 are what matters, and so large that it makes no difference."""
    x = np.random.default_rng(0).standard_normal((70, 32)).astype(_type(emulator))
    out = emulator.attention(np.zeros_like(x), x, x, softcap=1e-40, scale=100)
    np.testing.assert_allclose(out.astype(np.float64), [x.astype(np.float64).mean(0)] * 70, atol=2e-3)
    out, exact = emulator.attention(x, x, x, softcap=1e7), reference.attention(x, x, x)[0]
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=5e-3)
    for cap, scale in ((1e-6, 1e6), (300, 0.2), (300, 40)):
        q, options = np.zeros_like(x) if cap < 1 else x, {"softcap": cap, "scale": scale}
        out, exact = emulator.attention(q, x, x, **options), reference.attention(q, x, x, **options)[0]
        np.testing.assert_allclose(out.astype(np.float64), exact, atol=5e-3)


def _hidden_for_long(emulator: Emulator) -> None:
    """A row that sees none of more keys than one sum takes."""
    q, k = np.ones((2, 16), _type(emulator)), np.ones((4200, 16), _type(emulator))
    out = emulator.attention(q, k, k, mask=np.array([[False], [True]]))
    assert (out[0] == 0).all() and _is_one(out[1])


def _packed_heads(emulator: Emulator) -> None:
    """Several tiles of rows, low ones and high ones, that stand for more heads than one, whole tiles of keys."""
    for seqlen_q in (6, 20):
        q, k = (np.random.default_rng(0).standard_normal(shape) for shape in ((8, seqlen_q, 16), (1, 128, 16)))
        q, k = q.astype(_type(emulator)), k.astype(_type(emulator))
        out, exact = emulator.attention(q, k, k, causal=True), reference.attention(q, k, k, causal=True)[0]
        np.testing.assert_allclose(out.astype(np.float64), exact, atol=3e-3)


def _ping_pong_copies(emulator: Emulator) -> None:
    """Halves of a block that copy K and V: neither as wide nor as far from row to row."""
    dtype = _type(emulator)
    for width, width_v in ((248, 256), (256, 248), (256, 256)):
        q, k, memory = np.ones((70, width), dtype), np.ones((130, width), dtype), np.full((130, 512), np.nan)
        memory[:, :width_v] = 1
        v = memory.astype(dtype)[:, :width_v]
        if "128x64x2" in map(str, emulator.spec.tiles(describe_attention(q, k, v)[0].traits, emulator.device)):
            assert _is_one(_pinned(emulator, "128x64x2").attention(q, k, v))


def _prepared(emulator: Emulator) -> None:
    """Rows that another launch has made ready: of heads and batches, behind the last one, and unfit ones."""
    if emulator.spec.preparing is None:
        return
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype("f") for shape in ((2, 4, 70, 40), (2, 2, 150, 40), (2, 2, 150, 40)))
    k[0, 0, 3], k[0, 1, 70, ::2], v[1, 0, 90], v[1, 1, 149] = 0, 1e-30, 1e30, 1e-38
    v = np.concatenate([v, v], axis=-1)[..., 4:44]  # with strides of its own
    for tile, poison in (("64x32p", 0xFF), ("64x64p", 0x38)):
        pinned = _pinned(emulator, tile)
        pinned.poison = poison  # rows of no numbers are multiplied one by one, as they came; others look right
        out, lse = pinned.attention(q, k, v, causal=True, return_lse=True)
        exact, exact_lse = reference.attention(q, k, v, causal=True)
        sizes = np.abs(exact).max(-1, keepdims=True)
        assert (np.abs(out - exact) <= 3e-6 * sizes).all()
        np.testing.assert_allclose(lse, exact_lse, atol=3e-6)
    # Two leading axes, which keys have in another order than values.
    shapes = (2, 3, 1, 9, 40), (3, 2, 1, 70, 40), (2, 3, 1, 70, 40)
    q, k, v = (rng.standard_normal(shape).astype("f") for shape in shapes)
    k = k.swapaxes(0, 1)
    out = _pinned(emulator, "64x32p").attention(q, k, v)
    np.testing.assert_allclose(out, reference.attention(q, k, v)[0], atol=3e-6)


def _prepared_tokens(emulator: Emulator) -> None:
    """Where packed sequences begin, also where all tokens of an array are one."""
    if emulator.spec.preparing is None:
        return
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((160, heads, 40)).astype("f") for heads in (4, 2, 2))
    boundaries = np.array([0, 30, 30, 111, 150])
    one_k, one_v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))
    for keys, values in ((k, v), (one_k, v), (k, one_v), (one_k, one_v)):
        out = _pinned(emulator, "64x32p").attention_varlen(q, keys, values, boundaries, boundaries, causal=True)
        exact, _ = reference.attention_varlen(q, keys, values, boundaries, boundaries, causal=True)
        np.testing.assert_allclose(out, exact, atol=3e-6)


def _of_all_sizes(emulator: Emulator) -> None:
    """Rows and elements that pairs of 16-bit numbers hold, and that they do not."""
    if emulator.spec.dtypes != ("float32",):
        return
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((rows, 24)).astype("f") for rows in (20, 70, 70)]
    for sizes in ((1e-37, 1e8, 1), (1e8, 1e-37, 1), (1e36, 1e-8, 1), (1e-8, 1e36, 1), (1, 1, 1e-37), (1, 1, 3e37)):
        q, k, v = (x * np.float32(size) for x, size in zip(arrays, sizes, strict=True))
        _assert_digits(emulator, q, k, v, scale=0.3 / (sizes[0] * sizes[1]))
    q, k, v = arrays
    small = np.arange(70) % 2 == 0
    v[small] *= np.float32(1e-12)
    _assert_digits(emulator, q, k, v, mask=small)  # as if there were no larger ones beside them
    # Where one operand is large the other is zero: what decides are tiny elements.
    for tiny, zero in ((q, k), (k, q)):
        tiny[:, 0], zero[:, 0] = 1, 0
        tiny[:, 1:] *= np.float32(1e-11)
        _assert_digits(emulator, q, k, v, scale=3e10)
        tiny[:, 1:] *= np.float32(1e11)


def _assert_digits(emulator: Emulator, q: Any, k: Any, v: Any, **options: Any) -> None:
    exact, exact_lse = reference.attention(q, k, v, **options)
    for tile in ("64x64", "64x32p"):
        out, lse = _pinned(emulator, tile).attention(q, k, v, return_lse=True, **options)
        assert (np.abs(out - exact) <= 2e-6 * np.abs(exact).max(-1, keepdims=True)).all()
        np.testing.assert_allclose(lse, exact_lse, atol=4e-6)


def _lse_alone(emulator: Emulator) -> None:
    x = np.random.default_rng(0).standard_normal((150, 32)).astype(_type(emulator))
    if "attention_lse" in emulator.spec.operations:
        lse = emulator.attention_lse(x, x, causal=True)
        np.testing.assert_allclose(lse, reference.attention_lse(x, x, causal=True), atol=2e-3)


def _lone_keys(emulator: Emulator) -> None:
    """Rows that see one key each, wherever it lies: they return its value to the bit."""
    if emulator.spec.dtypes != ("float32",):
        return
    q, v = np.ones((70, 40), np.float32), np.random.default_rng(0).standard_normal((70, 40)).astype("f")
    v[5], v[9, ::2], v[13], v[17, ::3] = 1e30, 1e-30, 3e-39, 0
    keys = np.random.default_rng(1).permutation(70)
    for tile in ("64x64", "64x32p", "16x16"):
        out = _pinned(emulator, tile).attention(q, q, v, mask=np.arange(70) == keys[:, np.newaxis])
        np.testing.assert_array_equal(out, v[keys])


def _appended_rows(emulator: Emulator) -> None:
    """Rows that lie in vectors where they come from, where they go to, both or none, of whole vectors or not."""
    rng, dtype, width = np.random.default_rng(0), _type(emulator), min(32, emulator.spec.max_head_dim)
    for from_step, to_step, features in ((1, 1, width), (2, 1, width), (1, 2, width), (2, 2, width), (1, 1, width - 4)):
        new = rng.standard_normal((3, 1, 2, 3, 64)).astype(dtype)[..., : features * from_step : from_step]
        caches = np.ones((2, 2, 1, 2, 40, 64), dtype)[..., : features * to_step : to_step]
        for call, cache in zip((emulator.attention_with_kv_cache, attention_with_kv_cache), caches, strict=True):
            call(new[0], *cache, seqlens_k=np.array([5]), k_new=new[1], v_new=new[2])
        assert (caches[0] == caches[1]).all()


_CASES_BY_NAME = CASES_BY_NAME | {
    "broad": Case("broad", (70, 192), (150, 192), options={"causal": True}),
    "broad-window": Case("broad-window", (140, 160), (170, 160), options={"window": (10, 10)}),
    "broad-keys-4096": Case("broad-keys-4096", (5, 160), (4096, 160), value_mean=1.0),
}
"""Where warps share their rows, with as little work as there can be over several tiles of keys."""


def _case(name: str, dtype: str, tile: str, emulator: Emulator) -> None:
    dtype = _name(emulator, dtype)
    case = fitting(_CASES_BY_NAME[name], emulator.spec)
    problem = describe(case, dtype)
    data = make_data(case, dtype)
    if emulator.refuses(problem):
        return
    if tile:
        if tile not in map(str, emulator.spec.tiles(problem.traits, emulator.device)):
            return
        emulator = _pinned(emulator, tile)
    check(case, data, run(case, data, np, emulator.function(case)), rounds_weights=emulator.spec.rounds_weights)


_CASES = (
    "lengths-63x65 float16", "causal-63x65 float16", "head_dim-17-17 float16", "head_dim-17-17 float16 32x32",
    "head_dim-40-40 float16", "broad float16 128x64x2", "broad float16", "broad float16 64x64",
    "broad-window float16 128x64x2", "heads-8-1-3x70 float16", "lengths-5x0 float32", "out_dtype-float32 float16",
    "out_dtype-into float16", "out_dtype-odd float16", "out_dtype-float64 float16", "scale-negative float16",
    "softcap-huge float32",
    "lengths-63x65 float32", "layout-gaps float16", "layout-swapped float16", "head_dim-160-160 float16",
    "head_dim-16-512 float16 32x64x2", "head_dim-16-512 float32 32x16",
    "causal-200x131 float16 64x64", "causal-200x131 float16 128x64x2",
    "head_dim-128-128 float16 128x64x2", "window-3-None float16", "window-5-7 float16 128x64x2",
    "window-100-0 float16", "packed-tail-True float16", "packed-plain-True float16", "packed-top_left float16",
    "bias-mask-odd float16", "bias-float32 float16", "bias-float16 float16", "mask-keys float16",
    "mask-scalar float16", "packed-many-True float16", "keys-4090 float16", "keys-8192 float16", "keys-9000 float16",
    "wide-window-160 float16 64x32x2", "cache-no-room float16", "cache-gaps float16", "cache-one-head float16",
    "cache-top_left float16", "paged-no-room float16", "paged-everything float16", "paged-gaps float16",
    "paged-wide float16",
)  # fmt: skip
"""Cases of the matrix, their dtypes and, for some, their tiles."""
_SPLIT_CASES = ("lengths-17x200", "window-100-0", "sinks-float32", "packed-alibi-sinks", "everything")


def _of_kernels(names: tuple[str, ...], call: Call, emulator: Emulator) -> None:
    if emulator.spec.name in names:
        call(emulator)


CALLS: dict[str, Call] = {
    **{name: partial(_case, *name.split()[:2], "".join(name.split()[2:])) for name in _CASES},
    "no_lse": _no_lse,
    "hidden_rows": _hidden_rows,
    "huge_offsets": _huge_offsets,
    "packed-tail-sinks": _tail_with_sinks,
    "no_visible_key": _no_visible_key,
    "tall_tiles": _tall_tiles,
    "many_threads": _many_threads,
    "huge_logits": _huge_logits,
    "last_digits": _last_digits,
    "quotients": _quotients,
    "alibi far away": partial(_alibi_far_away, 1),
    "alibi far away in splits": partial(_alibi_far_away, 2),
    "sinks far away": partial(_sinks_far_away, 1),
    "sinks far away in splits": partial(_sinks_far_away, 2),
    "packed-tail-slopes": _tail_with_slopes,
    "parts_without_keys": _parts_without_keys,
    "rounds_once": _rounds_once,
    "extreme_softcaps": _extreme_softcaps,
    "hidden_for_long": _hidden_for_long,
    "packed_heads": _packed_heads,
    "ping_pong_copies": _ping_pong_copies,
    "prepared": _prepared,
    "prepared tokens": _prepared_tokens,
    "of_all_sizes": _of_all_sizes,
    "lone_keys": _lone_keys,
    "lse_alone": _lse_alone,
    "turns": turns,
    "walks": walks,
    "steps_of_heads": steps_of_heads,
    "alibi": alibi,
    "alibi_few": alibi_with_few_registers,
    "alibi_scales": alibi_scales,
    "bias_of_no_numbers": bias_of_no_numbers,
    "softcap": softcap,
    "softcap_of_low_scores": softcap_of_low_scores,
    **{f"splits {name}": partial(_in_splits, name) for name in _SPLIT_CASES},
    "split_window": _split_window,
    "window_in_pages": _window_in_pages,
    "empty_split_of_pages": _empty_split_of_pages,
    "no_such_pages": _no_such_pages,
    "splits_of_a_size": _splits_of_a_size,
    "splits_of_lengths": _splits_of_lengths,
    "splits_without_lse": _splits_without_lse,
    **{call.__name__: partial(_of_kernels, (test_points.KERNEL,), call) for call in test_points.CALLS},
    **{f"pairs {call.__name__}": partial(_of_kernels, test_pairs.KERNELS, call) for call in test_pairs.CALLS},
    "merge-odd": partial(_merge, 17),
    "merge-narrow": partial(_merge, 132),
    "merge-wide": partial(_merge, 600),
    "merge-many": partial(_merge_many, 132),
    "merge-many-wide": partial(_merge_many, 600),
    **{f"malformed-{name}": lambda emulator, v=values: malformed(emulator, v) for name, values in MALFORMED.items()},
    "appended_rows": _appended_rows,
    "malformed-cache": lambda emulator: malformed_cache(emulator, (-5, 2**63 - 1, 39), None),
    "malformed-pages": lambda emulator: malformed_cache(emulator, (-5, 2**63 - 1, 39), (-1, 2**40, 7)),
    # The longest by far, for the few mutants that are left: keys of one sum, and some more.
    "broad-keys-4096": partial(_case, "broad-keys-4096", "float16", "128x64x2"),
    "wide-keys-4200": partial(_case, "wide-keys-4200", "float16", "128x64x2"),
}
