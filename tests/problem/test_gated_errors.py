"""Every bad input of the gated delta rule is an error that names argument, got and expected, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cuflash import chunk_gated_delta_rule, chunk_gated_output, recurrent_gated_delta_rule
from cuflash.problem import describe_gated
from cuflash.problem.arrays import ArrayInfo, inspect

from .test_errors import (
    ARRAY,
    FLOATS,
    ODD_FLOATS,
    Arguments,
    Bad,
    Change,
    as_bytes,
    astype,
    bad,
    given,
    not_arrays,
    read_only,
    reshaped,
    wrong_dtypes,
    zeros,
)

pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")


def good_arguments(function: Callable[..., Any], xp: Any) -> Arguments:
    """Draw arguments that the function takes: 2 heads of q and k with 8 features, 4 of v with 6."""
    rng = np.random.default_rng(0)
    lead = (9,) if function is chunk_gated_output else (2, 9)

    def normal(*shape: int) -> Any:
        return xp.asarray(rng.standard_normal(shape), np.float32)

    q, k, v = normal(*lead, 2, 8), normal(*lead, 2, 8), normal(*lead, 4, 6)
    gates = xp.asarray(-rng.random((*lead, 4)), np.float32)
    if function is chunk_gated_output:
        boundaries = xp.asarray([0, 3, 9], np.int32)
        return {"q": q, "k": k, "v_new": v, "h": normal(3, 4, 8, 6), "log_g_cumsum": gates, "cu_seqlens": boundaries}
    good = {"q": q, "k": k, "v": v, "log_g": gates, "beta": xp.asarray(rng.random((*lead, 4)), np.float32)}
    name = "initial_state" if function is chunk_gated_delta_rule else "state"
    return {**good, name: normal(2, 4, 8, 6)}


def out_shape(function: Callable[..., Any]) -> tuple[int, ...]:
    return (9, 4, 6) if function is chunk_gated_output else (2, 9, 4, 6)


def gate_at(name: str, place: tuple[int, ...], value: float) -> Change:
    def change(xp: Any, good: Arguments) -> Arguments:
        gates = good[name].copy()
        gates[place] = value
        return {name: gates}

    return change


def over(written: str, shape: tuple[int, ...], name: str) -> Change:
    """Put what is written over the memory of an input, which begins where the last element of the other one lies."""

    def change(xp: Any, good: Arguments) -> Arguments:
        x, size = good[name], int(np.prod(shape))
        memory = xp.zeros(size + x.size, np.float32)
        shared = memory[size - 1 : size - 1 + x.size].view(x.dtype).reshape(x.shape)
        shared[...] = x
        return {written: memory[:size].reshape(shape), name: shared}

    return change


def over_itself(*shape: int) -> Change:
    return lambda xp, good: np.lib.stride_tricks.as_strided(np.zeros(99, np.float32), shape, (4,) * len(shape))


def boundaries(values: list[int], dtype: Any = np.int32) -> Change:
    return given(cu_seqlens=lambda xp, good: xp.asarray(values, dtype))


def common(v: str, log_g: str, lead: tuple[int, ...], axes: str) -> list[Bad]:
    """What all three functions refuse; values and gates go by the names `v` and `log_g`."""
    rows = (*lead, 4)
    tokens = (*lead[:-1], 8)
    return [
        *not_arrays(("q", "k", v, log_g, "out")),
        bad("q-None", TypeError, ("q is None", ARRAY), given(q=None)),
        *(
            made
            for name, shape in (("q", (*lead, 2, 8)), ("k", (*lead, 2, 8)), (v, (*lead, 4, 6)), (log_g, rows))
            for made in wrong_dtypes(name, FLOATS, ODD_FLOATS, (np.int32, np.bool_, np.complex64), *shape)
        ),
        *(
            bad(
                f"{name}-mixed-{dtype}",
                TypeError,
                (f"{name} has dtype {dtype} but q has float32; q, k and {v} share one dtype, convert with .astype()",),
                astype(name, dtype),
            )
            for name in ("k", v)
            for dtype in ("float16", "float64", "bfloat16")
        ),
        *(
            bad(
                f"{name}-{len(shape)}d",
                ValueError,
                (f"{name} has shape {shape}, expected {axes}",),
                reshaped(name, *shape),
            )
            for name in ("q", "k", v)
            for shape in ((), (8,), (2, 8), (1, 1, *lead, 8))
        ),
        bad("k-tokens", ValueError, ("k has 8 tokens but q has 9",), reshaped("k", *tokens, 2, 8)),
        bad("v-tokens", ValueError, (f"{v} has 8 tokens but q has 9",), reshaped(v, *tokens, 4, 6)),
        bad("k-head_dim", ValueError, ("k has head_dim 96 but q has 8",), reshaped("k", *lead, 2, 96)),
        *(
            bad(
                f"q-head_dim-{dim}",
                ValueError,
                (f"q has head_dim {dim}, expected 1 to 256",),
                given(q=zeros(*lead, 2, dim), k=zeros(*lead, 2, dim)),
            )
            for dim in (0, 257)
        ),
        *(
            bad(
                f"v-head_dim-{dim}",
                ValueError,
                (f"{v} has head_dim {dim}, expected 1 to 256",),
                reshaped(v, *lead, 4, dim),
            )
            for dim in (0, 257)
        ),
        bad("k-heads", ValueError, ("k has 4 heads but q has 2",), reshaped("k", *lead, 4, 8)),
        bad(
            "v-heads",
            ValueError,
            (f"{v} has 3 heads, expected a multiple of the 2 heads of q and k",),
            reshaped(v, *lead, 3, 6),
        ),
        bad(
            "no-heads",
            ValueError,
            (f"{v} has 4 heads, expected a multiple of the 0 heads of q and k",),
            given(q=zeros(*lead, 0, 8), k=zeros(*lead, 0, 8)),
        ),
        *(
            bad(
                f"{log_g}-{shape}",
                ValueError,
                (f"{log_g} has shape {shape}, expected {rows}",),
                reshaped(log_g, *shape),
            )
            for shape in (lead, (*lead, 2), (4, *lead), (*lead, 4, 1))
        ),
        *(
            bad(
                f"{log_g}-{value}",
                ValueError,
                (f"{log_g}[{', '.join(map(str, place))}] is {value}, expected at most 0", "logarithm of a decay"),
                gate_at(log_g, place, value),
                host_only=True,
            )
            for place in (tuple(0 for _ in rows), tuple(n - 1 for n in rows))
            for value in (0.5, np.inf, np.nan)
        ),
        *(
            bad(f"scale-{value}", ValueError, (f"scale is {value}", "finite real number"), given(scale=value))
            for value in (np.nan, np.inf)
        ),
        bad("scale-str", TypeError, ("scale is '1'", "finite real number"), given(scale="1")),
        bad("scale-large", ValueError, ("scale is 2e+30, expected at most 1e+30 in magnitude",), given(scale=2e30)),
        *outputs(v, (*lead, 4, 6), ("q", "k", v, log_g)),
    ]


def outputs(v: str, shape: tuple[int, ...], names: tuple[str, ...]) -> list[Bad]:
    """What is refused for `out`."""
    return [
        *wrong_dtypes("out", "expected float32 as q has", ODD_FLOATS, (np.int32, np.float16, np.float64), *shape),
        *(
            bad(
                f"out-shape-{wrong}",
                ValueError,
                (f"out has shape {wrong}, expected {shape}",),
                given(out=zeros(*wrong)),
            )
            for wrong in (shape[1:], (*shape[:-1], 8), (1, *shape))
        ),
        bad("out-read-only", ValueError, ("out is read-only",), given(out=read_only(*shape)), host_only=True),
        bad(
            "out-over-itself",
            ValueError,
            ("out has strides", f"for shape {shape}", "overlap each other"),
            given(out=over_itself(*shape)),
            host_only=True,
        ),
        *(
            bad(f"out-over-{name}", ValueError, (f"out overlaps {name} in memory",), over("out", shape, name))
            for name in names
        ),
    ]


def chunk_sizes() -> list[Bad]:
    expected = "expected 16, 32, 64 or 128"
    return [
        *(
            bad(f"chunk_size-{value}", ValueError, (f"chunk_size is {value}, {expected}",), given(chunk_size=value))
            for value in (0, -64, 48, 256, np.int64(8))
        ),
        *(
            bad(f"chunk_size-{value!r}", TypeError, (f"chunk_size is {value!r}", expected), given(chunk_size=value))
            for value in (64.0, "64", None)
        ),
        bad("chunk_size-True", TypeError, ("chunk_size is True (bool)", expected), given(chunk_size=True)),
    ]


def malformed_boundaries() -> list[Bad]:
    return [
        *not_arrays(("cu_seqlens",)),
        *wrong_dtypes(
            "cu_seqlens",
            "expected an integer dtype",
            (np.dtype(np.int32).newbyteorder(),),
            (np.float32, np.bool_),
            3,
        ),
        *(
            bad(
                f"cu_seqlens-shape-{shape}",
                ValueError,
                (f"cu_seqlens has shape {shape}, expected (number of sequences + 1,)",),
                given(cu_seqlens=zeros(*shape, dtype=np.int32)),
            )
            for shape in ((), (0,), (3, 1))
        ),
        *(
            bad(f"cu_seqlens-{words}", ValueError, (f"cu_seqlens {words}",), boundaries(values, dtype), host_only=True)
            for words, values, dtype in (
                ("begins with 1, expected 0", [1, 3, 9], np.int32),
                ("begins with -1, expected 0", [-1, 3, 9], np.int64),
                ("falls from 5 to 4 at entry 2, expected no decrease", [0, 5, 4], np.uint8),
                ("ends with 10 but q has 9 tokens", [0, 3, 10], np.int32),
                ("ends with 18446744073709551615 but q has 9 tokens", [0, 3, 2**64 - 1], np.uint64),
            )
        ),
    ]


def states(name: str, shape: tuple[Any, ...], expected: str) -> list[Bad]:
    """What is refused for states of float32, of (first axis, 4, 8, 6)."""
    swapped = (shape[0], 4, 6, 8)
    return [
        *not_arrays((name,)),
        *(
            bad(
                f"{name}-{wrong}",
                ValueError,
                (f"{name} has shape {wrong}, expected {expected}",),
                reshaped(name, *wrong),
            )
            for wrong in ((), (4, 8, 6), (shape[0], 2, 8, 6), (shape[0], 4, 8, 7), (*shape, 1))
        ),
        bad(
            f"{name}-swapped",
            ValueError,
            (f"{name} has shape {swapped}, expected {expected}; if", f"pass {name}.swapaxes(-1, -2)"),
            reshaped(name, *swapped),
        ),
    ]


def of_computation(name: str) -> list[Bad]:
    """What is refused for the dtype of states."""
    return [
        *wrong_dtypes(name, "expected float32 (q has float32)", ODD_FLOATS, (np.float16, np.float64), 2, 4, 8, 6),
        bad(
            f"{name}-float32-for-float64",
            TypeError,
            (f"{name} has dtype float32, expected float64 (q has float64)",),
            lambda xp, good: {x: good[x].astype(np.float64) for x in ("q", "k", "v")},
        ),
    ]


DELTA_RULE = [
    *common("v", "log_g", (2, 9), "(batch, tokens, heads, feature)"),
    *not_arrays(("beta",)),
    *wrong_dtypes("beta", FLOATS, ODD_FLOATS, (np.int32, np.bool_), 2, 9, 4),
    bad("beta-shape", ValueError, ("beta has shape (2, 9, 2), expected (2, 9, 4)",), reshaped("beta", 2, 9, 2)),
    bad("k-batch", ValueError, ("k has batch 3 but q has 2",), reshaped("k", 3, 9, 2, 8)),
    bad("v-batch", ValueError, ("v has batch 1 but q has 2",), reshaped("v", 1, 9, 4, 6)),
    bad("out-over-beta", ValueError, ("out overlaps beta in memory",), over("out", (2, 9, 4, 6), "beta")),
]


def packed(change: Change) -> Change:
    """Spoil a call with packed sequences."""

    def spoilt(xp: Any, good: Arguments) -> Arguments:
        whole = {name: x[:1] for name, x in good.items() if name != "initial_state"}
        good = {**good, **whole, "cu_seqlens": xp.asarray([0, 3, 9], np.int32)}
        return {**good, **change(xp, good)}

    return spoilt


CHUNKS = [
    *DELTA_RULE,
    *chunk_sizes(),
    *(case._replace(change=packed(case.change)) for case in malformed_boundaries()),
    *states("initial_state", (2, 4, 8, 6), "(2, 4, 8, 6)"),
    *of_computation("initial_state"),
    bad(
        "initial_state-count",
        ValueError,
        ("(3, 4, 8, 6), expected (2, 4, 8, 6)",),
        reshaped("initial_state", 3, 4, 8, 6),
    ),
    bad(
        "out-over-initial_state",
        ValueError,
        ("out overlaps initial_state",),
        over("out", (2, 9, 4, 6), "initial_state"),
    ),
    bad("cu_seqlens-batch", ValueError, ("q has batch 2, expected 1 with cu_seqlens",), boundaries([0, 3, 9])),
    bad(
        "initial_state-of-sequences",
        ValueError,
        ("initial_state has shape (2, 4, 8, 6), expected (3, 4, 8, 6)",),
        packed(boundaries([0, 3, 9, 9])),
    ),
    *(
        bad(
            f"output_final_state-{value!r}",
            TypeError,
            (f"output_final_state is {value!r}, expected True or False",),
            given(output_final_state=value),
        )
        for value in (1, None, "yes")
    ),
    bad(
        "log_g-in-a-sequence",
        ValueError,
        ("log_g[0, 2, 1] is 1.0",),
        packed(gate_at("log_g", (0, 2, 1), 1)),
        host_only=True,
    ),
]

RECURRENT = [
    *DELTA_RULE,
    *states("state", (2, 4, 8, 6), "(2, 4, 8, 6)"),
    *of_computation("state"),
    bad(
        "state-None",
        TypeError,
        ("state is None", ARRAY, "zeros of shape (B, Hv, K, V), here (2, 4, 8, 6), and dtype float32 to"),
        given(state=None),
    ),
    bad("state-read-only", ValueError, ("state is read-only",), given(state=read_only(2, 4, 8, 6)), host_only=True),
    bad(
        "state-over-itself",
        ValueError,
        ("state has strides", "overlap each other"),
        given(state=over_itself(2, 4, 8, 6)),
        host_only=True,
    ),
    *(
        bad(f"state-over-{name}", ValueError, (f"state overlaps {name} in memory",), over("state", (2, 4, 8, 6), name))
        for name in ("q", "k", "v", "log_g", "beta")
    ),
    bad("out-over-state", ValueError, ("out overlaps state in memory",), over("out", (2, 9, 4, 6), "state")),
]

OUTPUT = [
    *common("v_new", "log_g_cumsum", (9,), "(tokens, heads, feature)"),
    *chunk_sizes(),
    *malformed_boundaries(),
    bad("cu_seqlens-None", TypeError, ("cu_seqlens is None", ARRAY), given(cu_seqlens=None)),
    *states("h", (3, 4, 8, 6), "(number of chunks, 4, 8, 6)"),
    *wrong_dtypes("h", FLOATS, ODD_FLOATS, (np.int32, np.bool_), 3, 4, 8, 6),
    bad("out-over-h", ValueError, ("out overlaps h in memory",), over("out", (9, 4, 6), "h")),
    *(
        bad(
            f"h-{rows}-states",
            ValueError,
            (f"h has {rows} states, expected at least 2, one for each chunk of 64 tokens or fewer",),
            reshaped("h", rows, 4, 8, 6),
            host_only=True,
        )
        for rows in (0, 1)
    ),
    bad(
        "h-states-of-long-sequences",
        ValueError,
        ("h has 3 states, expected at least 4, one for each chunk of 16 tokens or fewer",),
        lambda xp, good: {
            "chunk_size": 16,
            "cu_seqlens": xp.asarray([0, 17, 17, 34]),
            **{name: xp.zeros((40, *good[name].shape[1:]), np.float32) for name in ("q", "k", "v_new", "log_g_cumsum")},
        },
        host_only=True,
    ),
]

FUNCTIONS = {chunk_gated_output: OUTPUT, chunk_gated_delta_rule: CHUNKS, recurrent_gated_delta_rule: RECURRENT}
CASES = [
    pytest.param(function, case, id=f"{function.__name__}-{case.id}")
    for function, cases in FUNCTIONS.items()
    for case in cases
]
DEVICE_CASES = [case for case in CASES if not case.values[1].host_only]


def check(function: Callable[..., Any], case: Bad, xp: ModuleType) -> None:
    good = good_arguments(function, xp)
    arguments = {**good, **case.change(xp, good)}
    before = {name: as_bytes(x) for name, x in arguments.items()}
    with pytest.raises(case.error, match=".*".join(map(re.escape, case.words))) as caught:
        function(**arguments)
    assert "\n" not in str(caught.value)

    # Once more with a result to write into: whatever is found first, nothing may have been written by then.
    arguments.setdefault("out", xp.full(out_shape(function), 7, np.float32))
    before.setdefault("out", as_bytes(arguments["out"]))
    with pytest.raises((TypeError, ValueError)):
        function(**arguments)
    assert {name: as_bytes(x) for name, x in arguments.items()} == before


@pytest.mark.parametrize(("function", "case"), CASES)
def test_numpy(function: Callable[..., Any], case: Bad) -> None:
    check(function, case, np)


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "case"), DEVICE_CASES)
def test_cupy(function: Callable[..., Any], case: Bad) -> None:
    import cupy

    check(function, case, cupy)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("xp_name", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_the_call_that_is_spoilt_is_good(function: Callable[..., Any], xp_name: str) -> None:
    xp = pytest.importorskip(xp_name)
    good = good_arguments(function, xp)
    out = xp.full(out_shape(function), 7, np.float32)
    assert function(**good, out=out) is out
    assert not (out == 7).any()


def test_gates_behind_the_last_sequence_are_not_looked_at() -> None:
    good = good_arguments(chunk_gated_output, np)
    good["log_g_cumsum"][8:] = np.nan
    with pytest.raises(ValueError, match=r"log_g_cumsum\[8, 0\] is nan"):
        chunk_gated_output(**good)
    chunk_gated_output(**{**good, "cu_seqlens": np.array([0, 3, 8])})


def test_what_the_other_forms_do_not_take() -> None:
    chunks, recurrent = (good_arguments(f, np) for f in (chunk_gated_delta_rule, recurrent_gated_delta_rule))
    with pytest.raises(TypeError, match="unexpected keyword argument 'cu_seqlens'"):
        recurrent_gated_delta_rule(**recurrent, cu_seqlens=np.array([0, 9]))
    with pytest.raises(TypeError, match="unexpected keyword argument 'state'"):
        chunk_gated_delta_rule(**chunks, state=recurrent["state"])


@pytest.mark.parametrize(
    ("function", "name", "hint"),
    [
        (chunk_gated_delta_rule, "g", "cuflash calls it log_g, the natural logarithm"),
        (chunk_gated_delta_rule, "use_qk_l2norm_in_kernel", "by sqrt((x * x).sum(-1, keepdims=True) + 1e-6)"),
        (chunk_gated_delta_rule, "head_first", "(batch, tokens, heads, feature); x.swapaxes(1, 2) makes them so"),
        (chunk_gated_output, "head_first", "(tokens, heads, feature); x.swapaxes(0, 1) makes them so"),
        (chunk_gated_delta_rule, "query", "cuflash calls it q"),
        (chunk_gated_delta_rule, "use_gate_in_kernel", "log_g = -exp(A_log) * logaddexp(0, g + dt_bias)"),
        (recurrent_gated_delta_rule, "state_v_first", "state.swapaxes(-1, -2)"),
        (chunk_gated_delta_rule, "causal", "expected one of beta, chunk_size, "),
        (chunk_gated_output, "g", "cuflash calls it log_g_cumsum"),
        (recurrent_gated_delta_rule, "initial_state", "cuflash calls it state, which is updated in place"),
        (recurrent_gated_delta_rule, "cu_seqlens", "chunk_gated_delta_rule takes it"),
    ],
)
def test_other_names_are_explained(function: Any, name: str, hint: str) -> None:
    with pytest.raises(TypeError) as error:
        function(**{name: None})
    assert str(error.value).startswith(f"{function.__name__}() got an unexpected keyword argument {name!r}; ")
    assert hint in str(error.value)


def test_what_is_missing_is_named() -> None:
    good = good_arguments(recurrent_gated_delta_rule, np)
    del good["state"]
    with pytest.raises(TypeError, match=r"state is missing, expected a NumPy or CuPy array.*zeros of shape"):
        recurrent_gated_delta_rule(**good)


# Where arrays are


def on_device(x: np.ndarray, device: int) -> ArrayInfo:
    """What is known of an array on a GPU, where there is none."""
    return inspect("x", x)._replace(device=device)


DESCRIBE = {function: getattr(describe_gated, f"describe_{function.__name__}") for function in FUNCTIONS}
PLACES = [
    pytest.param(function, name, id=f"{function.__name__}-{name}")
    for function in FUNCTIONS
    for name in (*good_arguments(function, np), "out", *(["cu_seqlens"] if function is chunk_gated_delta_rule else []))
    if name != "q"
]


def elsewhere(function: Callable[..., Any], name: str, devices: tuple[int, int]) -> Arguments:
    """Good arguments on one device, but for one of them."""
    arguments = good_arguments(function, np)
    if name == "out":
        arguments["out"] = np.zeros(out_shape(function), np.float32)
    elif name not in arguments:
        arguments = packed(boundaries([0, 3, 9]))(np, arguments)
    return {x: on_device(y, devices[x == name]) for x, y in arguments.items()}


@pytest.mark.parametrize(("function", "name"), PLACES)
def test_numpy_mixed_with_gpu(function: Callable[..., Any], name: str) -> None:
    for devices, words in (((0, -1), "a NumPy array but q is a GPU"), ((-1, 0), "a GPU array but q is a NumPy")):
        with pytest.raises(TypeError, match=f"{name} is {words}"):
            DESCRIBE[function](**elsewhere(function, name, devices))


@pytest.mark.parametrize(("function", "name"), PLACES)
def test_two_gpus(function: Callable[..., Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is on GPU 1 but q is on GPU 0"):
        DESCRIBE[function](**elsewhere(function, name, (0, 1)))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_no_value_of_a_gpu_is_read(function: Callable[..., Any]) -> None:
    arguments = good_arguments(function, np)
    arguments["log_g_cumsum" if function is chunk_gated_output else "log_g"][...] = np.nan
    if function is chunk_gated_output:
        arguments |= {"h": arguments["h"][:0], "cu_seqlens": np.array([5, 3, 99])}
    DESCRIBE[function](**{name: on_device(x, 0) for name, x in arguments.items()})
