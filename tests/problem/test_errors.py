"""Every bad input is a TypeError or ValueError that names argument, got and expected, before anything is written."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import attention, attention_lse, attention_varlen, options

pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")

Arguments = dict[str, Any]
Change = Callable[[Any, Arguments], Arguments]


class Bad(NamedTuple):
    """One way to spoil a good call."""

    id: str
    error: type[Exception]
    words: tuple[str, ...]
    """Parts of the message, in order."""
    change: Change
    """From array module and good arguments to the arguments that replace or join them."""
    host_only: bool = False
    """CuPy has no such array."""


def bad(id: str, error: type[Exception], words: tuple[str, ...], change: Change, **flags: bool) -> Bad:
    return Bad(id, error, words, change, **flags)


def zeros(*shape: int, dtype: Any = np.float32) -> Change:
    return lambda xp, good: xp.zeros(shape, dtype)


def given(**changes: Any) -> Change:
    """Replace arguments by values, or by what functions of (xp, good arguments) return."""
    return lambda xp, good: {name: x(xp, good) if isinstance(x, FunctionType) else x for name, x in changes.items()}


def astype(name: str, dtype: Any) -> Change:
    return lambda xp, good: {name: good[name].astype(np.dtype(dtype))}


def reshaped(name: str, *shape: int) -> Change:
    return lambda xp, good: {name: xp.ones(shape, good[name].dtype)}


def read_only(*shape: int) -> Change:
    def make(xp: Any, good: Arguments) -> np.ndarray:
        x = np.zeros(shape, np.float32)
        x.flags.writeable = False
        return x

    return make


class HostTensor:
    """An array of another library in host memory."""

    shape = (2, 4, 5, 8)
    dtype = np.dtype(np.float32)

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("must not be asked for its data")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class NowhereTensor(HostTensor):
    def __dlpack_device__(self) -> tuple[int, int]:
        raise ValueError("this device has no DLPack number")


class Table:
    """What has data and can be a NumPy array, such as a column of a table."""

    shape = (2, 4, 5, 8)
    dtype = np.dtype(np.float32)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("must not be asked for its data")


class Sparse:
    """A sparse matrix: NumPy would make an array of one object of it."""

    shape = (5, 8)
    dtype = np.dtype(np.float32)

    def toarray(self) -> Any:
        raise AssertionError("must not be asked for its data")


TORCH_HALF = type("dtype", (), {"__repr__": lambda _: "torch.half"})()
ARRAY = "expected a NumPy or CuPy array, or a GPU array with __dlpack__"
WRITTEN = "out", "lse", "workspace", "state", "k_cache", "v_cache"
FLOATS = "expected float16, bfloat16, float32 or float64"
STAND_IN = SimpleNamespace(shape=(2, 4, 5, 8), dtype=np.dtype(np.float32))


def not_arrays(names: tuple[str, ...]) -> list[Bad]:
    """What must be refused for any argument that is an array."""
    made = []
    for name in names:
        for what, x, got in (
            ("list", [[1.0]], "a list"),
            ("tuple", ((1.0,),), "a tuple"),
            ("str", "abc", "'abc'"),
            ("scalar", np.float32(1), "a numpy.float32"),
            ("object", object(), "<object object"),
            ("class", np.float32, "the class float32"),
            ("huge", 10**5000, "an int of 16610 bits"),
            ("host_tensor", HostTensor(), "not on a CUDA device"),
            ("nowhere_tensor", NowhereTensor(), "not on a CUDA device"),
            ("stand_in", STAND_IN, "stand-ins are for explain() and warmup()"),
        ):
            words = (name, got) if what == "stand_in" else (name, got, ARRAY)
            made.append(bad(f"{name}-{what}", TypeError, words, given(**{name: x})))
        # Nobody would find what is written in a copy.
        table, sparse = ("; pass np.asarray(x)", "; pass x.toarray()") if name not in WRITTEN else ("", "")
        for what, x, words in (
            ("table", Table(), ("Table, ", f"{ARRAY}{table}")),
            ("sparse", Sparse(), ("Sparse, ", f"{ARRAY}{sparse}")),
        ):
            made.append(bad(f"{name}-{what}", TypeError, (name, *words), given(**{name: x})))
        for what, make, got in (
            ("masked", lambda xp, good: np.ma.zeros((2, 2), np.float32), "numpy.ma.MaskedArray"),
            ("matrix", lambda xp, good: np.asmatrix(np.zeros((2, 2), np.float32)), "numpy.matrix"),
        ):
            made.append(bad(f"{name}-{what}", TypeError, (name, got, ARRAY), given(**{name: make})))
    return made


def wrong_dtypes(name: str, expected: str, host: tuple[Any, ...], both: tuple[Any, ...], *shape: int) -> list[Bad]:
    return [
        bad(
            f"{name}-{np.dtype(dtype).name}",
            TypeError,
            (f"{name} has dtype", "byte-swapped" if not np.dtype(dtype).isnative else str(np.dtype(dtype)), expected),
            given(**{name: zeros(*shape, dtype=dtype)}),
            host_only=host_only,
        )
        for dtypes, host_only in ((host, True), (both, False))
        for dtype in dtypes
    ]


SWAPPED_FLOAT = np.dtype(np.float32).newbyteorder()
ODD_FLOATS = (SWAPPED_FLOAT, object, ml_dtypes.float8_e4m3fn, "M8[s]")
if np.dtype(np.longdouble).itemsize > 8:
    ODD_FLOATS += (np.longdouble,)

REQUIRED = [
    bad("q-None", TypeError, ("q is None", ARRAY), given(q=None)),
    bad("k-float", TypeError, ("k is 1.5", ARRAY), given(k=1.5)),
    *not_arrays(("q", "k", "v")),
    *(
        made
        for name, shape in (("q", (2, 4, 8)), ("k", (2, 4, 8)), ("v", (2, 4, 8)))
        for made in wrong_dtypes(name, FLOATS, ODD_FLOATS, (np.int32, np.uint8, np.bool_, np.complex64), *shape)
    ),
    bad(
        "q-points",
        ValueError,
        ("q has shape (9,), expected", "if each row has one feature, pass q[:, None]"),
        given(q=zeros(9)),
    ),
    bad("q-integers", TypeError, (FLOATS, "; pass q.astype(np.float32)"), given(q=zeros(2, 4, 8, dtype=np.int64))),
    bad(
        "v-swapped",
        TypeError,
        (FLOATS, "; pass v.astype(v.dtype.newbyteorder('='))"),
        given(v=zeros(2, 4, 8, dtype=SWAPPED_FLOAT)),
        host_only=True,
    ),
    *(
        bad(f"{name}-mixed-{dtype}", TypeError, (f"{name} has dtype {dtype} but q has float32",), astype(name, dtype))
        for name in ("k", "v")
        for dtype in ("float16", "float64", "bfloat16")
    ),
    *(
        bad(f"{name}-{len(shape)}d", ValueError, (f"{name} has shape {shape}, expected (",), reshaped(name, *shape))
        for name in ("q", "k", "v")
        for shape in ((), (8,))
    ),
]

SCALARS = [
    bad("scale-0d", TypeError, ("scale is", "pass float(x), which waits for a GPU"), given(scale=np.array(2.0))),
    *(
        bad(f"scale-{value}", ValueError, (f"scale is {value}", "expected a finite real number"), given(scale=value))
        for value in (np.nan, np.inf, -np.inf)
    ),
    *(
        bad(
            f"scale-{type(value).__name__}-{got}",
            TypeError,
            ("scale is", got, "finite real number"),
            given(scale=value),
        )
        for value, got in (
            (1j, "1j"),
            (np.complex64(1), "1+0j"),
            ("1", "'1'"),
            (True, "True"),
            ([1.0], "[1.0]"),
            ([10**5000], "a list"),
            (np.float32, "the class float32"),
            (np.ones(1, np.float32), "a ndarray of shape (1,)"),
        )
    ),
    bad("scale-0d", TypeError, ("scale is", "of shape ()", "finite real number"), given(scale=zeros())),
    *(
        bad(
            f"scale-{value}",
            ValueError,
            (f"scale is {value}, expected at most 1e+30 in magnitude for float32 arrays",),
            given(scale=value),
        )
        for value in (1.1e30, -1.1e30, 3e38, 1e39, -1e300)
    ),
    *(
        bad(
            f"scale-{value}-{dtype}",
            ValueError,
            (f"scale is {value}, expected at most {most} in magnitude for {dtype} arrays",),
            lambda xp, good, dtype=dtype, value=value: {
                "scale": value,
                **{name: good[name].astype(np.dtype(dtype)) for name in ("q", "k", "v")},
            },
        )
        for dtype, most, value in (
            ("float16", "1e+30", 1.1e30),
            ("bfloat16", "1e+30", -2e30),
            ("float64", "1e+300", 1.1e300),
            ("float64", "1e+300", -1.7e308),
        )
    ),
    bad("scale-overflow", ValueError, ("scale is an int of 1329 bits", "finite real number"), given(scale=10**400)),
    bad(
        "window-huge", ValueError, ("window[0] (left) is an int of 16610 bits", "None"), given(window=(-(10**5000), 1))
    ),
    *(
        bad(f"softcap-{value}", ValueError, (f"softcap is {value}", "expected", "None"), given(softcap=value))
        for value in (0, 0.0, -2.5, np.nan, np.inf)
    ),
    *(
        bad(f"softcap-{type(value).__name__}", TypeError, ("softcap is", "above 0, or None"), given(softcap=value))
        for value in (False, True, "30", 1j, [30], np.ones(2))
    ),
    *(
        bad(
            f"causal-{value}", ValueError, (f"causal is '{value}'", "'bottom_right' or 'top_left'"), given(causal=value)
        )
        for value in ("", "yes", "TOP_LEFT", "bottom-right")
    ),
    *(
        bad(f"causal-{type(value).__name__}", TypeError, ("causal is", "expected False, True"), given(causal=value))
        for value in (1, None, 0.0, [True], np.ones(1, bool))
    ),
    *(
        bad(f"{name}-timedelta{unit}", TypeError, (f"{name} is {value!r}, expected",), given(**{name: value}))
        for unit, value in (("", np.timedelta64(1)), ("-s", np.timedelta64(1, "s")), ("-ns", np.timedelta64(1, "ns")))
        for name in ("scale", "softcap", "causal", "return_lse")
    ),
    bad("return_lse", TypeError, ("return_lse is 'no', expected True or False",), given(return_lse="no")),
    bad("causal-None-in-words", TypeError, ("causal is None, expected False, True",), given(causal=None)),
    bad("softcap-fraction", ValueError, ("softcap is -0.5", "above 0", "None"), given(softcap=Fraction(-1, 2))),
    bad("precision-name", ValueError, ("precision is 'fp32'", "None, 'ieee' or 'tf32'"), given(precision="fp32")),
    bad("precision-int", ValueError, ("precision is 32", "None, 'ieee' or 'tf32'"), given(precision=32)),
    bad("precision-list", ValueError, ("precision is ['tf32']", "None, 'ieee' or 'tf32'"), given(precision=["tf32"])),
    *(
        bad(
            f"precision-tf32-{dtype}",
            ValueError,
            ("precision='tf32' is for float32", f"q has dtype {dtype}"),
            lambda xp, good, dtype=dtype: {
                "precision": "tf32",
                **{name: good[name].astype(np.dtype(dtype)) for name in ("q", "k", "v")},
            },
        )
        for dtype in ("float16", "bfloat16", "float64")
    ),
    *(
        bad(f"window-{type(value).__name__}", TypeError, ("window is", "(left, right)"), given(window=value))
        for value in (3, True, 3.5, "ab", {1: 2}, np.ones(2, int))
    ),
    *(
        bad(
            f"window-{len(value)}-sides",
            ValueError,
            (f"window has {len(value)} entries", "(left, right)"),
            given(window=value),
        )
        for value in ((), (1,), (1, 2, 3))
    ),
    bad("window-True", TypeError, ("window[0] (left) is True (bool)", "non-negative int"), given(window=(True, 1))),
    bad("window-False", TypeError, ("window[1] (right) is False", "non-negative int"), given(window=(1, np.False_))),
    bad("window-float", TypeError, ("window[0] (left) is 1.5 (float)", "None"), given(window=(1.5, None))),
    bad("window-str", TypeError, ("window[1] (right) is '1'", "None"), given(window=(None, "1"))),
    bad("window-left-negative", ValueError, ("window[0] (left) is -1", "None"), given(window=(-1, 0))),
    bad("window-right-negative", ValueError, ("window[1] (right) is -1", "None leaves"), given(window=(0, -1))),
    bad("window-list-negative", ValueError, ("window[0] (left) is -2", "None"), given(window=[-2, None])),
]


def overlapping(name: str) -> Change:
    """Put `out`, which is larger than the input `name`, over the same memory."""

    def change(xp: Any, good: Arguments) -> Arguments:
        x, out = good[name], good["shapes"]["out"]
        memory = xp.zeros(int(np.prod(out)) + x.size, x.dtype)
        memory[: x.size] = x.ravel()
        shared = memory[: x.size].reshape(x.shape)
        return {name: shared, "out": memory[x.size - 1 :][: int(np.prod(out))].reshape(out)}

    return change


def out_over_lse(xp: Any, good: Arguments) -> Arguments:
    out, lse = good["shapes"]["out"], good["shapes"]["lse"]
    memory = xp.zeros(int(np.prod(out)), np.float32)
    return {"out": memory.reshape(out), "lse": memory[-int(np.prod(lse)) :].reshape(lse)}


def results(out: tuple[int, ...], lse: tuple[int, ...]) -> list[Bad]:
    """What must be refused for the results of a function that returns these shapes."""
    fewer, longer = out[1:], (*out[:-1], out[-1] + 1)
    made = [
        *not_arrays(("out", "lse")),
        *(
            bad(
                f"out-shape-{len(shape)}-{shape[-1]}",
                ValueError,
                (f"out has shape {shape}, expected {out}",),
                given(out=zeros(*shape)),
            )
            for shape in (fewer, longer, (1, *out))
        ),
        bad("lse-shape", ValueError, (f"lse has shape {out}, expected {lse}",), given(lse=zeros(*out))),
        bad(
            "lse-transposed", ValueError, (f"lse has shape {lse[::-1]}, expected {lse}",), given(lse=zeros(*lse[::-1]))
        ),
        *wrong_dtypes("out", FLOATS, ODD_FLOATS, (np.int32, np.bool_, np.complex64), *out),
        *wrong_dtypes("lse", "expected float32 (q has float32)", ODD_FLOATS, (np.int32, np.float16, np.float64), *lse),
        bad(
            "lse-float32-for-float64",
            TypeError,
            ("lse has dtype float32, expected float64 (q has float64)",),
            lambda xp, good: {
                "lse": xp.zeros(lse, np.float32),
                **{name: good[name].astype(np.float64) for name in ("q", "k", "v")},
            },
        ),
        bad(
            "out-disagrees",
            TypeError,
            ("out has dtype float32, expected float16 as out_dtype says",),
            given(out=zeros(*out), out_dtype=np.float16),
        ),
        bad("out-read-only", ValueError, ("out is read-only", "writeable"), given(out=read_only(*out)), host_only=True),
        bad("lse-read-only", ValueError, ("lse is read-only", "writeable"), given(lse=read_only(*lse)), host_only=True),
        *(
            bad(f"out-over-{name}", ValueError, (f"out overlaps {name} in memory", "its own"), overlapping(name))
            for name in ("q", "k", "v")
        ),
        bad("lse-over-out", ValueError, ("lse overlaps out in memory", "its own"), out_over_lse),
        bad(
            "out-over-itself",
            ValueError,
            ("out has strides", f"for shape {out}", "overlap each other"),
            given(out=lambda xp, good: np.lib.stride_tricks.as_strided(np.zeros(99, np.float32), out, (4,) * len(out))),
            host_only=True,
        ),
        bad("out_dtype-int", TypeError, ("out_dtype is int32", FLOATS), given(out_dtype=np.int32)),
        bad("out_dtype-number", TypeError, ("out_dtype is ", FLOATS), given(out_dtype=np.float32(1))),
        bad("out_dtype-float8", TypeError, ("out_dtype is float8", FLOATS), given(out_dtype=ml_dtypes.float8_e5m2)),
        bad("out_dtype-swapped", TypeError, ("out_dtype is >f4", FLOATS), given(out_dtype=">f4")),
        bad("out_dtype-unknown", TypeError, ("out_dtype is 'float31'", FLOATS), given(out_dtype="float31")),
        bad("out_dtype-foreign", TypeError, ("out_dtype is torch.half", FLOATS), given(out_dtype=TORCH_HALF)),
        bad("out_dtype-object", TypeError, ("out_dtype is", FLOATS), given(out_dtype=object())),
        bad(
            "out_dtype-malformed", TypeError, ("out_dtype is", FLOATS), given(out_dtype={"names": ["a"], "formats": []})
        ),
    ]
    return made


def broadcastable(name: str, target: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> list[Bad]:
    """Shapes that do not broadcast to `target`."""
    return [
        bad(
            f"{name}-shape-{'x'.join(map(str, shape))}",
            ValueError,
            (f"{name} has shape {shape}, expected one that broadcasts to {target}",),
            given(**{name: zeros(*shape, dtype=bool if name == "mask" else np.float32)}),
        )
        for shape in shapes
    ]


def per_head(target: tuple[int, ...]) -> list[Bad]:
    return [
        made
        for name in ("alibi_slopes", "sinks")
        for made in (
            *not_arrays((name,)),
            *broadcastable(name, target, ((3,), (5, 4), (1, 2, 4), (2,), (4, 1), (0,))),
            *wrong_dtypes(name, "expected a float dtype", ODD_FLOATS, (np.int64, np.bool_, np.complex64), 4),
        )
    ]


# q (2, 4, 5, 8), k (2, 2, 7, 8), v (2, 2, 7, 6): see dense_arguments.
DENSE = [
    *REQUIRED,
    *SCALARS,
    *results((2, 4, 5, 6), (2, 4, 5)),
    *per_head((2, 4)),
    bad(
        "q-head_dim-0",
        ValueError,
        ("q has head_dim 0, expected 1 to 512",),
        given(q=zeros(2, 4, 5, 0), k=zeros(2, 2, 7, 0)),
    ),
    bad(
        "q-head_dim-513",
        ValueError,
        ("q has head_dim 513, expected 1 to 512",),
        given(q=zeros(2, 4, 5, 513), k=zeros(2, 2, 7, 513)),
    ),
    bad("v-head_dim-0", ValueError, ("v has head_dim 0, expected 1 to 512",), reshaped("v", 2, 2, 7, 0)),
    bad("v-head_dim-513", ValueError, ("v has head_dim 513, expected 1 to 512",), reshaped("v", 2, 2, 7, 513)),
    bad("k-head_dim", ValueError, ("k has head_dim 96 but q has 8",), reshaped("k", 2, 2, 7, 96)),
    bad("v-seqlen", ValueError, ("v has 8 keys (axis -2) but k has 7",), reshaped("v", 2, 2, 8, 6)),
    bad("v-seqlen-1", ValueError, ("v has 1 keys (axis -2) but k has 7",), reshaped("v", 2, 2, 1, 6)),
    bad("v-heads", ValueError, ("v has 1 heads but k has 2",), reshaped("v", 2, 1, 7, 6)),
    bad("q-heads", ValueError, ("q has 3 heads, expected a multiple of the 2 heads",), reshaped("q", 2, 3, 5, 8)),
    bad(
        "sequence-before-heads",
        ValueError,
        ("q has 9 heads, expected a multiple of the 7 heads", "if axes are (batch, sequence, heads,", "pass x.swap"),
        given(q=zeros(2, 9, 4, 8), k=zeros(2, 7, 2, 8), v=zeros(2, 7, 2, 6)),
    ),
    bad("q-heads-2d", ValueError, ("q has 1 heads, expected a multiple of the 2 heads",), reshaped("q", 5, 8)),
    bad(
        "k-heads-0",
        ValueError,
        ("q has 4 heads, expected a multiple of the 0 heads",),
        given(k=zeros(2, 0, 7, 8), v=zeros(2, 0, 7, 6)),
    ),
    bad("k-batch", ValueError, ("k has leading axes (3,)", "not broadcast with (2,)"), reshaped("k", 3, 2, 7, 8)),
    bad("v-batch", ValueError, ("v has leading axes (5, 3)", "not broadcast with (2,)"), reshaped("v", 5, 3, 2, 7, 6)),
    *not_arrays(("bias", "mask")),
    *broadcastable(
        "bias", (2, 4, 5, 7), ((8,), (5, 1, 7), (7, 5), (2, 5, 7), (3, 4, 5, 7), (1, 2, 4, 5, 7), (2, 4, 5, 0))
    ),
    *broadcastable("mask", (2, 4, 5, 7), ((8,), (7, 5), (2, 1, 7), (1, 2, 4, 5, 7))),
    *(
        bad(
            f"{name}-{np.dtype(dtype)}-hint",
            TypeError,
            (f"{name} has dtype", hint),
            given(**{name: zeros(5, 7, dtype=dtype)}),
        )
        for name, dtype, hint in (
            ("mask", np.float32, "expected bool (True = attend); what is added to the scores goes in as bias"),
            ("mask", np.int64, "expected bool (True = attend); if 1 is to attend, pass mask.astype(bool)"),
            ("bias", bool, "expected a float dtype; what hides where it is False goes in as mask"),
            ("bias", np.int32, "expected a float dtype; pass bias.astype(np.float32)"),
        )
    ),
    *(
        bad(
            f"{name}-of-{len(shape)}-axes-{shape[1]}",
            ValueError,
            (f"{name} has shape {shape}, expected one that broadcasts to {(2, 4, 5, 7)}; ", f"pass {name}[{index}]"),
            given(**{name: zeros(*shape, dtype=dtype)}),
        )
        for name, dtype in (("mask", bool), ("bias", np.float32))
        for shape, index in (
            ((2, 7), ":, None, None, :"),
            ((2, 5, 7), ":, None, :, :"),
            ((2, 1, 7), ":, None, :, :"),
            ((2, 4, 7), "..., None, :"),
        )
    ),
    bad(
        "mask-of-tokens-that-lie-where-heads-do",
        ValueError,
        ("mask has shape (4, 4), expected one that broadcasts to (2, 4, 5, 7); if the", "pass x.swapaxes(-3, -2)"),
        given(mask=zeros(4, 4, dtype=bool)),
    ),
    bad(
        "bias-of-all-heads",
        ValueError,
        ("bias has shape (8, 5, 7)", "pass bias.reshape(2, 4, 5, 7)"),
        given(bias=zeros(8, 5, 7)),
    ),
    bad(
        "sinks-4d",
        ValueError,
        ("sinks has shape (1, 4, 1, 1)", "pass sinks[..., 0, 0]"),
        given(sinks=zeros(1, 4, 1, 1)),
    ),
    *wrong_dtypes("bias", "expected a float dtype", ODD_FLOATS, (np.int32, np.bool_, np.complex64), 5, 7),
    *wrong_dtypes("mask", "expected bool (True = attend)", ODD_FLOATS, (np.uint8, np.int64, np.float32), 5, 7),
    *not_arrays(("workspace",)),
    bad("workspace-dtype", TypeError, ("workspace has dtype float32", "1-D uint8"), given(workspace=zeros(64))),
    bad(
        "workspace-2d",
        TypeError,
        ("workspace has", "shape (8, 8)", "1-D uint8"),
        given(workspace=zeros(8, 8, dtype=np.uint8)),
    ),
    bad(
        "workspace-strided",
        TypeError,
        ("workspace has", "contiguous 1-D uint8"),
        given(workspace=lambda xp, good: xp.zeros(64, np.uint8)[::2]),
    ),
    bad(
        "workspace-read-only",
        ValueError,
        ("workspace is read-only",),
        given(workspace=lambda xp, good: np.frombuffer(bytes(64), np.uint8)),
        host_only=True,
    ),
    bad(
        "workspace-over-q",
        ValueError,
        ("workspace overlaps q",),
        given(workspace=lambda xp, good: good["q"].view(np.uint8).ravel()),
    ),
    *(
        bad(
            f"query_offset-{type(value).__name__}",
            TypeError,
            ("query_offset is", "expected an int, or an integer array"),
            given(query_offset=value),
        )
        for value in (1.0, True, np.True_, np.float64(2), "1", [1, 2], 1j)
    ),
    *wrong_dtypes(
        "query_offset", "expected an integer dtype or an int", ODD_FLOATS, (np.float32, np.bool_, np.complex64), 2
    ),
    *(
        bad(
            f"query_offset-shape-{len(shape)}-{shape[-1]}",
            ValueError,
            (f"query_offset has shape {shape}, expected one that broadcasts to (2,)",),
            given(query_offset=zeros(*shape, dtype=np.int32)),
        )
        for shape in ((3,), (4,), (2, 1), (1, 2))
    ),
    *(
        bad(
            f"{name}-with-query_offset",
            ValueError,
            (f"causal='{name}'", "query_offset must be None, got", got),
            given(causal=name, query_offset=offset),
        )
        for name, offset, got in (
            ("top_left", 0, "0"),
            ("bottom_right", 3, "3"),
            ("top_left", zeros(2, dtype=np.int32), "ndarray of shape (2,)"),
        )
    ),
    *(
        bad(f"out-over-{name}", ValueError, (f"out overlaps {name} in memory",), change)
        for name, change in (
            ("bias", lambda xp, good: {"out": good["out_memory"], "bias": good["out_memory"][..., :1]}),
            ("mask", lambda xp, good: {"out": good["out_memory"], "mask": good["out_memory"].view(bool)[..., :1]}),
            ("sinks", lambda xp, good: {"out": good["out_memory"], "sinks": good["out_memory"][0, :, 2, 2]}),
            (
                "alibi_slopes",
                lambda xp, good: {"out": good["out_memory"], "alibi_slopes": good["out_memory"][0, :, 2, 2]},
            ),
            (
                "query_offset",
                lambda xp, good: {
                    "out": good["out_memory"],
                    "query_offset": good["out_memory"].view(np.int32)[:, 0, 0, 0],
                },
            ),
        )
    ),
]


def boundaries(name: str, values: list[int], dtype: Any = np.int32) -> Change:
    return lambda xp, good: {name: xp.asarray(values, dtype)}


# q (9, 4, 8), k (11, 2, 8), v (11, 2, 6), boundaries of 3 sequences: see varlen_arguments.
VARLEN = [
    *REQUIRED,
    *SCALARS,
    *results((9, 4, 6), (9, 4)),
    *per_head((3, 4)),
    *(
        bad(
            f"{name}-{len(shape)}d-tokens",
            ValueError,
            (f"{name} has shape {shape}", "(tokens, heads, feature)"),
            reshaped(name, *shape),
        )
        for name in ("q", "k", "v")
        for shape in ((4, 8), (1, 9, 4, 8))
    ),
    bad(
        "q-head_dim-513",
        ValueError,
        ("q has head_dim 513, expected 1 to 512",),
        given(q=zeros(9, 4, 513), k=zeros(11, 2, 513)),
    ),
    bad("v-head_dim-0", ValueError, ("v has head_dim 0, expected 1 to 512",), reshaped("v", 11, 2, 0)),
    bad("k-head_dim", ValueError, ("k has head_dim 9 but q has 8",), reshaped("k", 11, 2, 9)),
    bad("v-tokens", ValueError, ("v has 10 tokens (axis 0) but k has 11",), reshaped("v", 10, 2, 6)),
    bad("v-heads", ValueError, ("v has 4 heads but k has 2",), reshaped("v", 11, 4, 6)),
    bad("q-heads", ValueError, ("q has 5 heads, expected a multiple of the 2 heads",), reshaped("q", 9, 5, 8)),
    *not_arrays(("cu_seqlens_q", "cu_seqlens_k")),
    bad("cu_seqlens_q-None", TypeError, ("cu_seqlens_q is None", ARRAY), given(cu_seqlens_q=None)),
    *(
        made
        for name in ("cu_seqlens_q", "cu_seqlens_k")
        for made in (
            *wrong_dtypes(
                name,
                "expected an integer dtype",
                (np.dtype(np.int32).newbyteorder(),),
                (np.float32, np.float64, np.bool_),
                4,
            ),
            *(
                bad(
                    f"{name}-shape-{len(shape)}d",
                    ValueError,
                    (f"{name} has shape {shape}", "(number of sequences + 1,)"),
                    given(**{name: zeros(*shape, dtype=np.int32)}),
                )
                for shape in ((), (0,), (2, 4))
            ),
            bad(
                f"{name}-begins-1",
                ValueError,
                (f"{name} begins with 1, expected 0",),
                boundaries(name, [1, 3, 7, 9]),
                host_only=True,
            ),
            bad(
                f"{name}-begins-negative",
                ValueError,
                (f"{name} begins with -1, expected 0",),
                boundaries(name, [-1, 3, 7, 9]),
                host_only=True,
            ),
            bad(
                f"{name}-falls",
                ValueError,
                (f"{name} falls from 7 to 3 at entry 2, expected no decrease",),
                boundaries(name, [0, 7, 3, 9]),
                host_only=True,
            ),
            bad(
                f"{name}-negative",
                ValueError,
                (f"{name} falls from 0 to -2 at entry 1",),
                boundaries(name, [0, -2, 3, 9], np.int64),
                host_only=True,
            ),
        )
    ),
    bad(
        "cu_seqlens_q-beyond",
        ValueError,
        ("cu_seqlens_q ends with 10 but q has 9 tokens",),
        boundaries("cu_seqlens_q", [0, 3, 7, 10]),
        host_only=True,
    ),
    bad(
        "cu_seqlens_k-beyond",
        ValueError,
        ("cu_seqlens_k ends with 12 but k has 11 tokens",),
        boundaries("cu_seqlens_k", [0, 3, 7, 12]),
        host_only=True,
    ),
    bad(
        "cu_seqlens_q-huge",
        ValueError,
        ("cu_seqlens_q ends with 18446744073709551615",),
        boundaries("cu_seqlens_q", [0, 3, 7, 2**64 - 1], np.uint64),
        host_only=True,
    ),
    bad(
        "cu_seqlens_k-entries",
        ValueError,
        ("cu_seqlens_k has 3 entries but cu_seqlens_q has 4",),
        boundaries("cu_seqlens_k", [0, 3, 7]),
    ),
    *(
        bad(
            f"{name}-{value}",
            error,
            (f"{name} is {value!r}", "expected a non-negative int or None"),
            given(**{name: value}),
        )
        for name in ("max_seqlen_q", "max_seqlen_k")
        for value, error in ((-1, ValueError), (2.0, TypeError), (True, TypeError), ("5", TypeError))
    ),
    *(
        bad(f"out-over-{name}", ValueError, (f"out overlaps {name} in memory",), change)
        for name, change in (
            (
                "cu_seqlens_q",
                lambda xp, good: {
                    "out": good["out_memory"],
                    "cu_seqlens_q": good["out_memory"].view(np.int32)[:4, 0, 0],
                },
            ),
            (
                "cu_seqlens_k",
                lambda xp, good: {
                    "out": good["out_memory"],
                    "cu_seqlens_k": good["out_memory"].view(np.int32)[0, :, 1],
                },
            ),
            ("sinks", lambda xp, good: {"out": good["out_memory"], "sinks": good["out_memory"][8, :, 5]}),
        )
    ),
    bad("query_offset", TypeError, ("query_offset", "attention takes it"), given(query_offset=0)),
]

OTHER_NAMES = {
    "attn_bias": "cuflash calls it bias",
    "attention_chunk": "cuflash has no chunked attention",
    "attn_mask": "cuflash calls it mask (bool, True = attend), or bias",
    "attn_sink": "cuflash calls it sinks",
    "casual": "did you mean causal?",
    "cu_seqlens": "cuflash calls it cu_seqlens_q and cu_seqlens_k, which attention_varlen takes",
    "deterministic": "results are always repeatable to the bit, leave it out",
    "dropout_p": "cuflash has no dropout, leave it out",
    "enable_gqa": "k and v may always have fewer heads than q, leave it out",
    "is_causal": "cuflash calls it causal (",
    "head_mask": "cuflash leaves out no heads: multiply the output by it",
    "return_aux": "cuflash calls it return_lse",
    "seqused_q": "cuflash calls it mask (bool, True = attend, shape (B, 1, Nq, 1))",
    "softmax_precision": "scores and weights are float32 already, float64 for float64: leave it out",
    "key_padding_mask": "cuflash calls it mask (bool, True = attend, shape (B, 1, 1, Nk)): ~key_padding_mask[",
    "local_window_size": "cuflash calls it window=(left, right), query_offset=0 (or causal='top_left'); an int w is",
    "seq_lens": "cuflash calls it mask (bool, True = attend, shape (B, 1, 1, Nk)); attention_with_kv_cache takes",
    "logits_soft_cap": "cuflash calls it softcap",
    "num_splits": "cuflash splits the keys where that helps, leave it out",
    "op": "cuflash chooses a kernel itself",
    "query": "cuflash calls it q",
    "q_num_heads": "heads are an axis of q",
    "query_seq_lengths": "cuflash calls it mask (bool, True = attend, shape (B, 1, Nq, 1))",
    "return_softmax_lse": "cuflash calls it return_lse",
    "s_aux": "cuflash calls it sinks",
    "sm_scale": "cuflash calls it scale",
    "softmax_scale": "cuflash calls it scale",
    "window_size": "cuflash calls it window=(left, right), in which None leaves a side open, not -1",
    "alibi_bias": "cuflash calls it alibi_slopes",
    "attn_logit_softcapping": "cuflash calls it softcap",
    "attn_mask_type": "cuflash calls it causal: True for causal_bottom_right, 'top_left' for causal",
    "bottom_right_diagonal": "cuflash calls it causal (",
    "cache_position": "cuflash calls it query_offset",
    "core_attention_bias": "cuflash calls it bias",
    "cu_seq_lens_q": "cuflash calls it cu_seqlens_q, which attention_varlen takes",
    "kv_cache": "cuflash calls it k_cache and v_cache, its two halves, which attention_with_kv_cache takes",
    "kv_indptr": "cuflash calls it cu_seqlens_k, which attention_varlen takes",
    "kv_lens": "cuflash calls it mask (bool, True = attend, shape (B, 1, 1, Nk)); attention_with_kv_cache takes",
    "kv_page_indptr": "cuflash calls it page_table, which attention_with_kv_cache takes",
    "max_length_k": "cuflash calls it max_seqlen_k, which attention_varlen takes",
    "num_key_value_groups": "heads are counted from the arrays, leave it out",
    "past_key_value": "cuflash calls it cuflash.KVCache, or k_cache and v_cache, which attention_with_kv_cache takes",
    "past_key_values": "cuflash calls it cuflash.KVCache, or k_cache and v_cache, which attention_with_kv_cache takes",
    "position_ids": "cuflash rotates nothing: rotate q and k before the call; where queries stand is query_offset",
    "qkv_format": "axes are (..., heads, sequence, feature)",
    "qo_indptr": "cuflash calls it cu_seqlens_q, which attention_varlen takes",
    "scaling": "cuflash calls it scale",
    "slopes": "cuflash calls it alibi_slopes",
    "softmax_aux": "cuflash calls it sinks",
    "softmax_offset": "cuflash calls it sinks",
    "softmax_type": "cuflash calls it sinks (zeros for off-by-one)",
    "zzz": "expected one of alibi_slopes, ",
}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (attention, "q, k, v"),
        (attention_lse, "q, k"),
        (attention_varlen, "q, k, v, cu_seqlens_q, cu_seqlens_k"),
        (cuflash.attention_with_kv_cache, "q, k_cache, v_cache"),
        (cuflash.chunk_gated_delta_rule, "q, k, v, log_g, beta"),
        (cuflash.recurrent_gated_delta_rule, "q, k, v, log_g, beta, state"),
        (cuflash.chunk_gated_output, "q, k, v_new, h, log_g_cumsum, cu_seqlens"),
    ],
)
def test_options_by_position(function: Any, names: str) -> None:
    """As PyTorch takes a mask, and others new keys; neither arrays nor other options are looked at then."""
    count = len(names.split(", "))
    words = f"{function.__name__}() takes {count} positional arguments ({names}) but {count + 2} were given; name the"
    with pytest.raises(TypeError, match=re.escape(words)) as caught:
        function(*[None] * count, None, True, nonsense=3)
    others = str(caught.value).rpartition("of ")[2].split(", ")
    assert {*names.split(", "), *others} == set(inspect.signature(function).parameters)


def unknown_options(function: str, hints: dict[str, str]) -> list[Bad]:
    return [
        bad(
            f"unknown-{name}",
            TypeError,
            (f"{function}() got an unexpected keyword argument '{name}'; {hint}",),
            given(**{name: None}),
        )
        for name, hint in hints.items()
    ]


DENSE += unknown_options(
    "attention",
    {
        **OTHER_NAMES,
        "cu_seqlens_q": "attention_varlen takes it",
        "head_first": "axes are (..., heads, sequence, feature)",
        "max_seqlen_k": "attention_varlen takes it",
    },
)
VARLEN += unknown_options(
    "attention_varlen",
    {
        **OTHER_NAMES,
        "attn_bias": "cuflash calls it bias, or causal, window or mask for what only hides; attention_varlen takes",
        "attention_mask": f"{OTHER_NAMES['attn_mask']} if it is added to the scores; attention_varlen takes no mask",
        "bias": "attention takes it",
        **dict.fromkeys(("head_first", "qkv_format"), "axes are (tokens, heads, feature)"),
        "core_attention_bias": "cuflash calls it bias; attention_varlen takes no bias",
        "cu_seq_lens_q": "cuflash calls it cu_seqlens_q",
        "kv_indptr": "cuflash calls it cu_seqlens_k",
        "kv_lens": "cuflash calls it cu_seqlens_k: np.concatenate([[0], np.cumsum(kv_lens)])",
        "max_length_k": "cuflash calls it max_seqlen_k",
        "position_ids": "cuflash rotates nothing: rotate q and k before the call; where a sequence",
        "qo_indptr": "cuflash calls it cu_seqlens_q",
        "query_seq_lengths": "cuflash calls it cu_seqlens_q: np.concatenate([[0], np.cumsum(query_seq_lengths)])",
        "seqused_q": "cuflash calls it cu_seqlens_q, as sequences lie one behind another without a gap",
        "local_window_size": "cuflash calls it window=(left, right), which counts from where",
        "seq_lens": "cuflash calls it cu_seqlens_q and cu_seqlens_k: np.concatenate([[0], np.cumsum(seq_lens)])",
        "mask": "attention takes it",
    },
)


def good_arguments(function: Callable[..., Any], xp: Any) -> Arguments:
    """Arguments that the function takes, plus, under names that it does not know, what changes are made from."""
    rng = np.random.default_rng(0)
    if function is attention_varlen:
        shapes = {"q": (9, 4, 8), "k": (11, 2, 8), "v": (11, 2, 6), "out": (9, 4, 6), "lse": (9, 4)}
        others = {"cu_seqlens_q": xp.asarray([0, 3, 7, 9]), "cu_seqlens_k": xp.asarray([0, 3, 7, 11])}
    else:
        shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 6), "out": (2, 4, 5, 6), "lse": (2, 4, 5)}
        others = {}
    if function is attention_lse:
        shapes["out"] = shapes.pop("lse")
    arrays = {name: xp.asarray(rng.standard_normal(shapes[name]), np.float32) for name in ("q", "k", "v")}
    return {**arrays, **others, "shapes": shapes, "out_memory": xp.zeros(shapes["out"], np.float32)}


def taken(function: Callable[..., Any], good: Arguments) -> Arguments:
    """Those of the arguments that the function takes."""
    unknown = ("shapes", "out_memory", "v") if function is attention_lse else ("shapes", "out_memory")
    return {name: x for name, x in good.items() if name not in unknown}


def without_values(cases: list[Bad]) -> list[Bad]:
    """What is wrong in calls of `attention` that has nothing to do with values or results."""
    good, kept = good_arguments(attention, np), []
    for case in cases:
        changed = set(case.change(np, good))
        if (
            not case.id.startswith("unknown-")
            and not changed & {"out", "lse", "return_lse", "out_dtype"}
            and changed != {"v"}
        ):
            kept.append(case)
    return kept


LSE = [
    *without_values(DENSE),
    bad("k-mixed-hint", TypeError, ("k has dtype float64", "; q and k share one dtype,"), astype("k", np.float64)),
    bad("q-heads-of-k", ValueError, ("q has 3 heads", "of the 2 heads of k"), reshaped("q", 2, 3, 5, 8)),
    *not_arrays(("out",)),
    *(
        bad(
            f"out-shape-{len(shape)}-{shape[-1]}",
            ValueError,
            (f"out has shape {shape}, expected (2, 4, 5)",),
            given(out=zeros(*shape)),
        )
        for shape in ((4, 5), (2, 4, 6), (2, 4, 5, 8), (5, 4, 2))
    ),
    *wrong_dtypes("out", "expected float32 (q has float32)", ODD_FLOATS, (np.int32, np.float16, np.float64), 2, 4, 5),
    bad(
        "out-float32-for-float64",
        TypeError,
        ("out has dtype float32, expected float64 (q has float64)",),
        lambda xp, good: {
            "out": xp.zeros((2, 4, 5), np.float32),
            **{name: good[name].astype(np.float64) for name in ("q", "k")},
        },
    ),
    bad("out-read-only", ValueError, ("out is read-only", "writeable"), given(out=read_only(2, 4, 5)), host_only=True),
    bad("out-over-q", ValueError, ("out overlaps q in memory",), lambda xp, good: {"out": good["q"][..., 0]}),
    *(
        bad(f"out-over-{name}", ValueError, (f"out overlaps {name} in memory",), change)
        for name, change in (
            ("k", lambda xp, good: {"out": good["k"].ravel()[:40].reshape(2, 4, 5)}),
            ("bias", lambda xp, good: {"out": good["out_memory"], "bias": good["out_memory"][..., None]}),
            ("sinks", lambda xp, good: {"out": good["out_memory"], "sinks": good["out_memory"][..., 2]}),
        )
    ),
    bad(
        "out-over-itself",
        ValueError,
        ("out has strides", "for shape (2, 4, 5)", "overlap each other"),
        given(out=lambda xp, good: np.lib.stride_tricks.as_strided(np.zeros(99, np.float32), (2, 4, 5), (4, 4, 4))),
        host_only=True,
    ),
    bad(
        "workspace-over-out",
        ValueError,
        ("workspace overlaps out in memory",),
        lambda xp, good: {"out": good["out_memory"], "workspace": good["out_memory"].view(np.uint8).ravel()},
    ),
    *unknown_options(
        "attention_lse",
        {
            **OTHER_NAMES,
            **dict.fromkeys(("return_lse", "lse", "out_dtype"), "attention takes it"),
            "value": "cuflash calls it v; attention_lse takes no v",
        },
    ),
]

CASES = [
    pytest.param(function, case, id=f"{function.__name__}-{case.id}")
    for function, cases in ((attention, DENSE), (attention_varlen, VARLEN), (attention_lse, LSE))
    for case in cases
]
DEVICE_CASES = [case for case in CASES if not case.values[1].host_only]


def as_bytes(x: Any) -> bytes:
    return x.tobytes() if hasattr(x, "tobytes") and not isinstance(x, type) else b""


def check(function: Callable[..., Any], case: Bad, xp: ModuleType) -> None:
    good = good_arguments(function, xp)
    shapes = good["shapes"]
    changed = case.change(xp, good)
    arguments = taken(function, {**good, **changed})
    with pytest.raises(case.error, match=".*".join(map(re.escape, case.words))) as caught:
        function(**arguments)
    assert "\n" not in str(caught.value)

    # Once more with results to write into: whatever is found first, nothing may have been written by then.
    for name in {"out", "lse"} & set(shapes):
        arguments.setdefault(name, xp.full(shapes[name], 7, np.float32))
    before = {name: as_bytes(x) for name, x in arguments.items()}
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


@pytest.mark.parametrize("function", [attention, attention_varlen], ids=lambda function: function.__name__)
@pytest.mark.parametrize("xp_name", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_the_call_that_is_spoilt_is_good(function: Callable[..., Any], xp_name: str) -> None:
    xp = pytest.importorskip(xp_name)
    good = good_arguments(function, xp)
    shapes = good.pop("shapes")
    out = good.pop("out_memory")
    lse = xp.full(shapes["lse"], 7, np.float32)
    result = function(**good, out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    assert not (lse == 7).any()


@pytest.mark.parametrize("xp_name", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_the_call_without_values_is_good(xp_name: str) -> None:
    xp = pytest.importorskip(xp_name)
    good = good_arguments(attention_lse, xp)
    out = xp.full(good["shapes"]["out"], 7, np.float32)
    assert attention_lse(**taken(attention_lse, good), out=out) is out
    assert not (out == 7).any()


class OnlyDlpack:
    """A GPU array of a library that has no `__cuda_array_interface__`."""

    def __init__(self, device: tuple[int, int]) -> None:
        self.device = device

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("cannot export")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.mark.parametrize("device_type", [2, 13])
def test_gpu_array_that_cannot_be_taken(device_type: int) -> None:
    pytest.importorskip("cupy")
    good = np.zeros((2, 3), np.float32)
    with pytest.raises(TypeError, match=r"k is a \w+\.OnlyDlpack that could not be taken as a GPU array: "):
        attention(good, OnlyDlpack((device_type, 0)), good)


@pytest.mark.parametrize("device_type", [2, 13])
def test_gpu_array_without_cupy_says_what_to_install(device_type: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    good = np.zeros((2, 3), np.float32)
    with pytest.raises(TypeError, match=r"k is a \w+\.OnlyDlpack on a GPU, which needs CuPy: pip install"):
        attention(good, OnlyDlpack((device_type, 0)), good)


class TorchTensor(HostTensor):
    """What of a torch tensor on a CPU can be seen without torch."""

    def __init__(self, dtype: str = "float32", device: str = "cpu", requires_grad: bool = False) -> None:
        self.dtype = type("dtype", (), {"__str__": lambda _: f"torch.{dtype}"})()
        self.device = SimpleNamespace(type=device)
        self.requires_grad = requires_grad

    def numpy(self) -> np.ndarray:
        raise AssertionError("must not be asked for its data")


def test_few_heads_are_not_taken_for_a_sequence() -> None:
    q, k = np.ones((2, 3, 7, 8), np.float32), np.ones((2, 2, 7, 8), np.float32)
    with pytest.raises(ValueError, match=r"of the 2 heads of k and v$"):
        attention(q, k, k)


TORCH_HINTS = [
    ({}, "pass x.numpy()"),
    ({"requires_grad": True}, "pass x.detach().numpy()"),
    ({"dtype": "bfloat16"}, "pass x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)"),
    (
        {"dtype": "bfloat16", "requires_grad": True},
        "pass x.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)",
    ),
    ({"device": "mps"}, "pass x.cpu().numpy()"),
    ({"device": "meta"}, "a tensor on meta has no data"),
]


@pytest.mark.parametrize(("how", "hint"), TORCH_HINTS, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "out"])
def test_tensor_that_is_not_on_a_gpu(how: dict[str, Any], hint: str, name: str) -> None:
    good = dict.fromkeys(("q", "k", "v"), np.zeros((2, 3), np.float32))
    words = f"TorchTensor that is not on a CUDA device, {ARRAY}; {hint}"
    with pytest.raises(TypeError, match=rf"{name} is a \w+\.{re.escape(words)}$"):
        attention(**{**good, name: TorchTensor(**how)})


def test_numbers_of_numpy_are_on_no_gpu() -> None:
    q = np.zeros((1, 2, 3, 4), np.float32)
    for name, value in (("scale", np.True_), ("softcap", np.datetime64("2026-01-01"))):
        with pytest.raises(TypeError, match=f"{name} is") as error:
            cuflash.attention(q, q, q, **{name: value})
        assert "GPU" not in str(error.value)


@pytest.mark.parametrize("how", [how for how, _ in TORCH_HINTS if how.get("device") != "mps"], ids=str)
def test_hints_for_torch_are_good(how: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 3, **{**how, "dtype": getattr(torch, how.get("dtype", "float32"))})
    with pytest.raises(TypeError, match=r"q is a torch\.Tensor that is not on a CUDA device") as caught:
        attention(x, x, x)
    hint = str(caught.value).rpartition("; ")[2]
    if how.get("device") == "meta":
        assert hint == "a tensor on meta has no data"
        return
    array = eval(hint.removeprefix("pass "), {"torch": torch, "ml_dtypes": ml_dtypes, "x": x})
    assert (attention(array, array, array) == 1).all()


@pytest.mark.parametrize(
    "function", [attention, attention_varlen, attention_lse], ids=lambda function: function.__name__
)
@pytest.mark.parametrize("choice", [{"kernel": "forward_scalar"}, {"tile": "64x64"}], ids=str)
def test_numpy_arrays_on_a_gpu_kernel(function: Callable[..., Any], choice: dict[str, str]) -> None:
    good = good_arguments(function, np)
    shapes, good = good["shapes"], taken(function, good)
    out = np.full(shapes["out"], 7, np.float32)
    ((name, value),) = choice.items()
    with options(**choice), pytest.raises(ValueError, match=f"{name} '{value}' cannot serve this call: .*NumPy"):
        function(**good, out=out)
    assert (out == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("function", [attention, attention_varlen], ids=lambda function: function.__name__)
@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"kernel": "cpu"}, "kernel 'cpu' cannot serve this call: it computes NumPy arrays"),
        ({"tile": "63x64"}, "tile '63x64' cannot serve this call: kernel "),
    ],
)
def test_gpu_arrays_on_what_cannot_serve_them(function: Callable[..., Any], choice: dict[str, str], words: str) -> None:
    import cupy

    good = good_arguments(function, cupy)
    shapes = good.pop("shapes")
    del good["out_memory"]
    out = cupy.full(shapes["out"], 7, np.float32)
    with options(**choice), pytest.raises(ValueError, match=re.escape(words)):
        function(**good, out=out)
    assert (out == 7).all()


OTHERS = {
    attention_lse: ("k", "bias", "mask", "alibi_slopes", "sinks", "query_offset", "out", "workspace"),
    attention: ("k", "v", "bias", "mask", "alibi_slopes", "sinks", "query_offset", "out", "lse", "workspace"),
    attention_varlen: ("k", "v", "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "sinks", "out", "lse"),
}
DTYPES = {"mask": bool, "query_offset": np.int32, "workspace": np.uint8}


def one_elsewhere(function: Callable[..., Any], name: str, xp: Any, other: Any) -> Arguments:
    """Good arguments of which one comes from another array module."""
    good = good_arguments(function, xp)
    shapes, good = good["shapes"], taken(function, good)
    if name in good:
        return {**good, name: other.asarray(good[name].get() if hasattr(good[name], "get") else good[name])}
    shape = shapes.get(name, (64,) if name == "workspace" else (2, 4, 5, 1) if name in ("bias", "mask") else (1,))
    return {**good, name: other.zeros(shape, DTYPES.get(name, np.float32))}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function, names in OTHERS.items() for name in names]
)
def test_numpy_mixed_with_gpu(function: Callable[..., Any], name: str) -> None:
    import cupy

    with pytest.raises(TypeError, match=f"{name} is a NumPy array but q is a GPU array"):
        function(**one_elsewhere(function, name, cupy, np))
    with pytest.raises(TypeError, match=f"{name} is a GPU array but q is a NumPy array"):
        function(**one_elsewhere(function, name, np, cupy))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function, names in OTHERS.items() for name in names]
)
def test_two_gpus(function: Callable[..., Any], name: str) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")

    class Second:
        @staticmethod
        def asarray(x: Any) -> Any:
            with cupy.cuda.Device(1):
                return cupy.array(x)

        @staticmethod
        def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
            with cupy.cuda.Device(1):
                return cupy.zeros(shape, dtype)

    with pytest.raises(ValueError, match=f"{name} is on GPU 1 but q is on GPU 0"):
        function(**one_elsewhere(function, name, cupy, Second))


@pytest.mark.gpu
def test_malformed_cu_seqlens_on_a_gpu_do_not_raise() -> None:
    import cupy

    good = good_arguments(attention_varlen, cupy)
    del good["shapes"], good["out_memory"]
    for values in ([1, 3, 7, 9], [0, 7, 3, 9], [0, 3, 7, 100], [-5, 3, 7, 9]):
        assert cupy.isfinite(attention_varlen(**{**good, "cu_seqlens_q": cupy.asarray(values)})).all()
