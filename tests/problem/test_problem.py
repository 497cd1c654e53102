"""What a call means: defaults, the folding of options, and how each array is seen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.problem.arrays import DTYPES, HOST, contiguous_strides
from cuflash.problem.checks import FLOAT32_MAX, FLOAT32_TINY
from cuflash.problem.describe import describe_attention, describe_varlen
from cuflash.problem.problem import Dtypes, Problem, Strides, Traits


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def dense(**changes: Any) -> Problem:
    arguments = {"q": zeros(2, 4, 5, 8), "k": zeros(2, 2, 7, 8), "v": zeros(2, 2, 7, 6), **changes}
    return describe_attention(**arguments)[0]


def varlen(**changes: Any) -> Problem:
    arguments = {
        "q": zeros(9, 4, 8),
        "k": zeros(11, 2, 8),
        "v": zeros(11, 2, 6),
        "cu_seqlens_q": np.array([0, 3, 7, 9]),
        "cu_seqlens_k": np.array([0, 3, 7, 11], np.int32),
        **changes,
    }
    return describe_varlen(**arguments)[0]


def test_dense_defaults() -> None:
    assert dense() == Problem(
        traits=Traits(
            op="attention",
            dtype="float32",
            out_dtype="float32",
            precision="ieee",
            head_dim=8,
            head_dim_v=6,
            softcap=0.0,
            window=False,
            bias="",
            mask=False,
            alibi_slopes=False,
            sinks=False,
            query_offset=False,
            seqlens_k=False,
            page_table=False,
            input_alignment=4,
            result_alignment=4,
            keys_are_tiles=False,
        ),
        batch=(2,),
        num_heads_q=4,
        num_heads_kv=2,
        seqlen_q=5,
        seqlen_k=7,
        window_left=None,
        window_right=None,
        query_offset=2,
        bottom_right=True,
        scale=8**-0.5,
        strides=Strides(q=(640, 160, 32, 4), k=(448, 224, 32, 4), v=(336, 168, 24, 4), out=(480, 120, 24, 4)),
        dtypes=Dtypes(),
        is_2d=False,
    )


def test_varlen_defaults() -> None:
    defaults = dense()
    assert varlen() == defaults._replace(
        traits=defaults.traits._replace(op="attention_varlen", keys_are_tiles=True),
        batch=(3,),
        seqlen_q=9,
        seqlen_k=11,
        query_offset=None,
        strides=Strides(
            q=(128, 32, 4), k=(64, 32, 4), v=(48, 24, 4), out=(96, 24, 4), cu_seqlens_q=(8,), cu_seqlens_k=(4,)
        ),
        dtypes=Dtypes(cu_seqlens_q="int64", cu_seqlens_k="int32"),
    )


def test_traits_hold_what_a_build_may_depend_on() -> None:
    """Options show in the traits, lengths, strides and other values do not."""
    arrays = {"bias": zeros(5, 7, dtype=np.float64), "mask": zeros(7, dtype=bool), "alibi_slopes": zeros(4)}
    everything = dense(**arrays, sinks=zeros(4), softcap=30, window=(3, 0), query_offset=np.zeros(2, int)).traits
    assert (everything.bias, everything.softcap) == ("float64", 30.0)
    flags = everything.mask, everything.alibi_slopes, everything.sinks, everything.window, everything.query_offset
    assert all(flags) and everything.num_arrays == everything.num_terms == 2
    longer = dense(q=zeros(3, 4, 50, 8), k=zeros(3, 2, 70, 8), v=zeros(3, 2, 70, 6), scale=3)
    assert longer.traits == dense().traits
    assert dense(window=(None, None)).traits == dense().traits != dense(causal=True).traits
    wide = describe_attention(*(zeros(2, 9, 8) for _ in range(3)), out_dtype=np.float16)[0].traits
    assert (wide.input_alignment, wide.result_alignment, wide.alignment, wide.lse_dtype) == (16, 16, 16, "float32")
    narrow = describe_attention(*(zeros(2, 9, 8) for _ in range(3)), out=zeros(2, 9, 16)[..., ::2])[0].traits
    assert (narrow.input_alignment, narrow.result_alignment, narrow.alignment) == (16, 4, 4)


def test_varlen_uses_the_queries_boundaries_for_the_keys() -> None:
    x = zeros(9, 2, 8)
    problem, infos = describe_varlen(x, x, x, np.array([0, 9]))
    assert infos["cu_seqlens_k"] == infos["cu_seqlens_q"]
    assert problem.strides.cu_seqlens_k == problem.strides.cu_seqlens_q
    assert problem.dtypes.cu_seqlens_k == problem.dtypes.cu_seqlens_q
    assert problem.batch == (1,)


@pytest.mark.parametrize("empty", [np.zeros(1, np.uint8), np.zeros(5, np.int64)], ids=len)
def test_varlen_without_tokens(empty: np.ndarray) -> None:
    x = zeros(0, 2, 8)
    assert describe_varlen(x, x, x, empty)[0].batch == (len(empty) - 1,)


@pytest.mark.parametrize("describe", [dense, varlen])
@pytest.mark.parametrize(
    ("scale", "expected"),
    [(None, 8**-0.5), (0, 0.0), (-2, -2.0), (np.float16(0.5), 0.5), (Fraction(1, 4), 0.25), (np.int8(3), 3.0)]
    + [(ml_dtypes.bfloat16(0.5), 0.5), (np.longdouble(2), 2.0)],
    ids=str,
)
def test_scale(describe: Callable[..., Problem], scale: Any, expected: float) -> None:
    found = describe(scale=scale).scale
    assert found == expected and type(found) is float


@pytest.mark.parametrize(
    ("dtype", "most"), [("float16", 1e30), ("bfloat16", 1e30), ("float32", 1e30), ("float64", 1e300)]
)
def test_largest_scale(dtype: str, most: float) -> None:
    arrays = {name: zeros(2, 3, dtype=np.dtype(dtype)) for name in "qkv"}
    for scale in (most, -most):
        assert describe_attention(**arrays, scale=scale)[0].scale == scale
        with pytest.raises(ValueError, match=r"scale is .*, expected at most"):
            describe_attention(**arrays, scale=np.nextafter(scale, scale * 2))


@pytest.mark.parametrize(
    ("softcap", "dtype", "expected"),
    [
        (None, np.float32, 0.0),
        (30, np.float32, 30.0),
        (np.float16(0.5), np.float16, 0.5),
        (1e300, np.float32, 0.0),
        (FLOAT32_MAX, np.float32, FLOAT32_MAX),
        (1e-300, np.float32, FLOAT32_TINY),
        (1e300, np.float64, 1e300),
        (1e-300, np.float64, 1e-300),
    ],
)
def test_softcap(softcap: Any, dtype: Any, expected: float) -> None:
    arrays = {name: zeros(2, 3, dtype=dtype) for name in "qkv"}
    found = describe_attention(**arrays, softcap=softcap)[0].traits.softcap
    assert found == expected and type(found) is float


@pytest.mark.parametrize("describe", [dense, varlen])
@pytest.mark.parametrize(
    ("environment", "dtype", "precision", "expected"),
    [
        (None, np.float32, None, "ieee"),
        ("0", np.float32, None, "ieee"),
        ("1", np.float32, None, "tf32"),
        ("1", np.float32, "ieee", "ieee"),
        ("1", np.float64, None, "ieee"),
        ("1", np.float16, None, "ieee"),
        (None, np.float32, "tf32", "tf32"),
        (None, np.float16, "ieee", "ieee"),
        (None, np.float64, "ieee", "ieee"),
    ],
)
def test_precision(
    describe: Callable[..., Problem],
    environment: str | None,
    dtype: Any,
    precision: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if environment is not None:
        monkeypatch.setattr("cuflash.problem.checks.FLOAT32_PRECISION", "tf32" if environment == "1" else "ieee")
    arrays = {"q": zeros(9, 2, 8), "k": zeros(11, 2, 8), "v": zeros(11, 2, 6)}
    if describe is dense:
        arrays = {"q": zeros(5, 8), "k": zeros(7, 8), "v": zeros(7, 6)}
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    assert describe(**arrays, precision=precision).traits.precision == expected


@pytest.mark.parametrize(
    ("options", "left", "right", "offset"),
    [
        ({}, None, None, 2),
        ({"causal": False}, None, None, 2),
        ({"causal": True}, None, 0, 2),
        ({"causal": np.True_}, None, 0, 2),
        ({"causal": "bottom_right"}, None, 0, 2),
        ({"causal": "top_left"}, None, 0, 0),
        ({"causal": True, "query_offset": 9}, None, 0, 9),
        ({"causal": True, "query_offset": 0}, None, 0, 0),
        ({"query_offset": -3}, None, None, -3),
        ({"query_offset": np.int8(-3)}, None, None, -3),
        ({"query_offset": np.uint64(2**63)}, None, None, 2**60),
        ({"query_offset": 2**80}, None, None, 2**60),
        ({"query_offset": -(2**80)}, None, None, -(2**60)),
        ({"window": (None, None)}, None, None, 2),
        ({"window": (3, None)}, 3, None, 2),
        ({"window": (None, 4)}, None, 4, 2),
        ({"window": (0, 0)}, 0, 0, 2),
        ({"window": [3, 4]}, 3, 4, 2),
        ({"window": (np.int64(3), np.uint8(4))}, 3, 4, 2),
        ({"window": (2**80, 2**80)}, 2**61, 2**61, 2),
        ({"window": (3, 4), "causal": True}, 3, 0, 2),
        ({"window": (3, None), "causal": True}, 3, 0, 2),
        ({"window": (None, None), "causal": "top_left"}, None, 0, 0),
        ({"window": (1, 2), "query_offset": 5}, 1, 2, 5),
    ],
    ids=str,
)
def test_causal_window_and_offset(
    options: dict[str, Any], left: int | None, right: int | None, offset: int | None
) -> None:
    problem = dense(**options)
    assert (problem.window_left, problem.window_right, problem.query_offset) == (left, right, offset)
    assert problem.strides.query_offset is None
    if "query_offset" not in options:
        packed = varlen(**options)
        assert (packed.window_left, packed.window_right) == (left, right)
        assert packed.query_offset == (0 if options.get("causal") == "top_left" else None)


def test_query_offset_is_an_array() -> None:
    problem = dense(query_offset=np.array([3, 4], np.uint16), causal=True)
    assert problem.query_offset is None
    assert (problem.dtypes.query_offset, problem.strides.query_offset) == ("uint16", (2,))
    for offset in (np.array(3), np.array([3])):
        problem = dense(query_offset=offset)
        assert (problem.dtypes.query_offset, problem.strides.query_offset) == ("int64", (0,))
    problem = describe_attention(zeros(5, 8), zeros(7, 8), zeros(7, 6), query_offset=np.array(3))[0]
    assert (problem.dtypes.query_offset, problem.strides.query_offset) == ("int64", ())


def test_query_offset_may_stand_beyond_the_keys() -> None:
    assert dense(k=zeros(2, 2, 3, 8), v=zeros(2, 2, 3, 6)).query_offset == -2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype: str) -> None:
    arrays = {name: zeros(3, 8, dtype=DTYPES[dtype]) for name in "qkv"}
    problem = describe_attention(**arrays, return_lse=True)[0]
    lse = "float64" if dtype == "float64" else "float32"
    assert (problem.traits.dtype, problem.traits.out_dtype, problem.traits.lse_dtype) == (dtype, dtype, lse)
    assert problem.strides.lse is not None


@pytest.mark.parametrize("describe", [dense, varlen])
@pytest.mark.parametrize(
    ("out_dtype", "name"),
    [
        (np.float16, "float16"),
        ("bfloat16", "bfloat16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(np.float64), "float64"),
        ("f4", "float32"),
        (float, "float64"),
    ],
    ids=str,
)
def test_out_dtype(describe: Callable[..., Problem], out_dtype: Any, name: str) -> None:
    shape = (2, 4, 5, 6) if describe is dense else (9, 4, 6)
    out = zeros(*shape, dtype=DTYPES[name])
    plain = describe(out_dtype=out_dtype)
    assert plain.traits.out_dtype == name
    assert plain.strides.out == out.strides
    assert describe(out=out) == describe(out=out, out_dtype=out_dtype) == plain


def test_lse_implies_the_tuple() -> None:
    assert dense().strides.lse is None
    assert dense(return_lse=True).strides.lse == dense(lse=zeros(2, 4, 5), return_lse=False).strides.lse == (80, 20, 4)


def test_given_results_keep_their_strides() -> None:
    memory = zeros(2, 5, 4, 12)
    out, lse = memory.swapaxes(1, 2)[..., ::-2], zeros(5, 4, 6).T[::-3]
    problem = dense(out=out, lse=lse)
    assert problem.strides.out == out.strides and problem.traits.result_alignment == 4
    assert out.strides == (960, 48, 192, -8)
    assert problem.strides.lse is not None and problem.strides.lse == lse.strides


def test_batch_broadcasts_like_matmul() -> None:
    q, k, v = zeros(3, 1, 4, 5, 8), zeros(2, 2, 7, 8), zeros(1, 1, 1, 2, 7, 6)
    problem = dense(q=q, k=k, v=v, bias=zeros(3, 1, 1, 5, 1), mask=zeros(7, dtype=bool))
    assert problem.batch == (1, 3, 2)
    assert problem.strides.q == (0, q.strides[0], 0, *q.strides[2:])
    assert problem.strides.k == (0, 0, *k.strides)
    assert problem.strides.v == (0, 0, 0, *v.strides[3:])
    assert problem.strides.out == contiguous_strides((1, 3, 2, 4, 5, 6), 4)
    assert problem.strides.bias is not None and problem.strides.bias == (0, 20, 0, 0, 4, 0)
    assert problem.strides.mask is not None and problem.strides.mask == (0, 0, 0, 0, 0, 1)


def test_2d_is_one_head() -> None:
    problem = describe_attention(zeros(5, 8), zeros(7, 8), zeros(7, 6), lse=zeros(5), out=zeros(5, 6))[0]
    assert problem.is_2d and problem.batch == () and (problem.num_heads_q, problem.num_heads_kv) == (1, 1)
    assert problem.strides.q == (0, 32, 4) and problem.strides.out == (0, 24, 4)
    assert problem.strides.lse is not None and problem.strides.lse == (0, 4)
    mixed = describe_attention(zeros(5, 8), zeros(3, 1, 7, 8), zeros(7, 6))[0]
    assert not mixed.is_2d and mixed.batch == (3,)
    assert (mixed.strides.q, mixed.strides.k) == ((0, 0, 32, 4), (224, 224, 32, 4))


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (7,), (1,), (), (5, 1)], ids=str)
def test_2d_bias(shape: tuple[int, ...]) -> None:
    problem = describe_attention(zeros(5, 8), zeros(7, 8), zeros(7, 6), bias=zeros(*shape))[0]
    assert problem.strides.bias is not None
    expected = np.broadcast_to(zeros(*shape), (1, 5, 7)).strides
    assert problem.strides.bias[1:] == expected[1:]


def test_options_per_head_broadcast() -> None:
    for shape, strides in (((), (0, 0)), ((4,), (0, 4)), ((1,), (0, 0)), ((2, 4), (16, 4)), ((2, 1), (4, 0))):
        problem = dense(alibi_slopes=zeros(*shape), sinks=zeros(*shape, dtype=np.float64))
        assert problem.strides.alibi_slopes == strides
        assert (problem.dtypes.alibi_slopes, problem.dtypes.sinks) == ("float32", "float64")
        assert problem.strides.sinks == tuple(2 * stride for stride in strides)


def test_negative_and_zero_strides_are_read_in_place() -> None:
    x = zeros(2, 4, 5, 8)
    q = x[::-1, :, ::-1, ::-1]
    k = np.broadcast_to(zeros(7, 8), (2, 2, 7, 8))
    problem, infos = describe_attention(q, k, k)
    assert problem.strides.q == q.strides == (-640, 160, -32, -4)
    assert problem.strides.k == (0, 0, 32, 4)
    assert infos["q"].pointer == q.__array_interface__["data"][0]


def alignment_of_inputs(q: np.ndarray) -> int:
    return dense(q=q, v=zeros(2, 2, 7, 8)).traits.input_alignment


@pytest.mark.parametrize(
    ("start", "step", "alignment"), [(0, 8, 16), (1, 8, 4), (2, 8, 4), (4, 8, 16), (0, 9, 4), (0, 10, 4), (0, 12, 16)]
)
def test_alignment_holds_for_address_and_rows(start: int, step: int, alignment: int) -> None:
    memory = np.zeros(4096, np.float32)
    offset = -memory.__array_interface__["data"][0] % 16 // 4
    q = memory[offset + start :][: 2 * 4 * 5 * step].reshape(2, 4, 5, step)[..., :8]
    assert alignment_of_inputs(q) == alignment


def test_alignment_of_bytes_that_lie_anywhere() -> None:
    memory = np.zeros(4096, np.uint8)
    offset = -memory.__array_interface__["data"][0] % 16
    q = memory[offset + 1 :][: 4 * 320].view(np.float32).reshape(2, 4, 5, 8)
    assert alignment_of_inputs(q) == 1
    rows = np.ndarray((2, 4, 5, 8), np.float32, memory, offset, (0, 0, 38, 4))
    assert alignment_of_inputs(rows) == 1


def test_alignment_ignores_axes_without_a_second_index() -> None:
    q = np.ndarray((1, 4, 1, 8), np.float32, np.zeros(64, np.float64), 0, (7, 32, 13, 4))
    x = zeros(1, 4, 7, 8)
    assert dense(q=q, k=x, v=x).traits.input_alignment == 16
    strided = np.ndarray((1, 4, 2, 8), np.float32, np.zeros(64, np.float64), 0, (7, 32, 36, 4))
    assert dense(q=strided, k=x, v=x).traits.input_alignment == 4


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_new_results_lie_in_memory_as_the_query_does(order: tuple[int, ...]) -> None:
    shape = (2, 4, 5, 8)
    q = np.zeros([shape[axis] for axis in order], np.float32).transpose(np.argsort(order))
    problem = dense(q=q, v=zeros(2, 2, 7, 8), return_lse=True)
    assert problem.strides.out == np.empty_like(q).strides
    assert problem.strides.lse is not None and problem.strides.lse == np.empty_like(q[..., 0]).strides
    rows = [step for step, length in zip(problem.strides.out[:-1], shape, strict=False) if length > 1]
    assert problem.traits.result_alignment == (16 if all(step % 16 == 0 for step in rows) else 4)


def test_swapping_back_is_free() -> None:
    x = np.zeros((2, 5, 4, 8), np.float32)
    q = x.swapaxes(-3, -2)
    out = cuflash.attention(q, q, q)
    assert out.swapaxes(-3, -2).flags.c_contiguous


@pytest.mark.parametrize("describe", [dense, varlen])
def test_problem_is_plain_data(describe: Callable[..., Problem]) -> None:
    problem = describe(return_lse=True, softcap=30.0, window=(3, 0))
    assert problem == describe(return_lse=True, softcap=30.0, window=(3, 0))
    assert len({problem, describe(return_lse=True, softcap=30.0, window=(3, 0)), describe()}) == 2

    def holds_no_array(x: Any) -> bool:
        return all(map(holds_no_array, x)) if isinstance(x, tuple) else isinstance(x, (str, int, float, type(None)))

    assert holds_no_array(problem)


def test_addresses_are_not_part_of_the_problem() -> None:
    memory = np.zeros(4096, np.float32)
    offset = -memory.__array_interface__["data"][0] % 16 // 4
    first, second = (memory[start:][:320].reshape(2, 4, 5, 8) for start in (offset, offset + 1024))
    assert dense(q=first) == dense(q=second)


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (dense, "attention float32, batch 2, heads 4/2, 5 x 7, head_dim 8/6"),
        (varlen, "attention_varlen float32, batch 3, heads 4/2, 9 x 11, head_dim 8/6"),
    ],
)
def test_prints_as_one_line(problem: Callable[..., Problem], line: str) -> None:
    assert str(problem()) == line


def test_prints_every_option() -> None:
    problem = dense(
        causal=True,
        window=(3, None),
        softcap=30,
        bias=zeros(5, 7),
        mask=zeros(5, 7, dtype=bool),
        alibi_slopes=zeros(4),
        sinks=zeros(4),
        return_lse=True,
        out_dtype=np.float16,
    )
    assert str(problem) == (
        "attention float32->float16, batch 2, heads 4/2, 5 x 7, head_dim 8/6, window (3, 0), "
        "bias, mask, alibi_slopes, sinks, lse, softcap 30"
    )
    assert str(dense(q=zeros(5, 8), k=zeros(7, 8), v=zeros(7, 6))).startswith("attention float32, batch 1, heads 1/1,")
    assert "batch 3x1x2," in str(dense(q=zeros(3, 1, 2, 4, 5, 8)))
    assert str(dense(causal=True, query_offset=-3, scale=3)).endswith("window (None, 0), query_offset -3, scale 3")
    assert str(dense(causal="top_left")).endswith("window (None, 0), query_offset 0")


def test_infos_name_every_array_of_the_call() -> None:
    arrays = {
        "bias": zeros(5, 7),
        "mask": zeros(5, 7, dtype=bool),
        "alibi_slopes": zeros(4),
        "sinks": zeros(4),
        "query_offset": np.array([1, 2]),
        "out": zeros(2, 4, 5, 6),
        "lse": zeros(2, 4, 5),
        "workspace": np.zeros(8, np.uint8),
    }
    _, infos = describe_attention(zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 6), **arrays)
    assert set(infos) == {"q", "k", "v", *arrays}
    assert all(infos[name].array is x and infos[name].device == HOST for name, x in arrays.items())


def test_zero_lengths_are_calls_too() -> None:
    for shape_q, shape_k in (((2, 4, 0, 8), (2, 4, 7, 8)), ((2, 4, 5, 8), (2, 4, 0, 8)), ((0, 4, 5, 8), (0, 4, 7, 8))):
        problem = dense(q=zeros(*shape_q), k=zeros(*shape_k), v=zeros(*shape_k))
        assert (problem.seqlen_q, problem.seqlen_k, problem.batch) == (shape_q[2], shape_k[2], shape_q[:1])
    problem = dense(q=zeros(2, 0, 5, 8), k=zeros(2, 0, 7, 8), v=zeros(2, 0, 7, 8))
    assert (problem.num_heads_q, problem.num_heads_kv) == (0, 0)
