"""How arrays are read: layouts, overlaps, arrays of other libraries, stand-ins."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.problem.arrays import (
    HOST,
    contiguous_strides,
    extent,
    inspect,
    overlaps_itself,
    share_memory,
    stand_in,
    strides_like,
)

SHAPES = [(5,), (3, 4), (1, 4), (4, 1), (2, 3, 4), (2, 1, 4), (2, 3, 4, 5), (1, 3, 1, 5), (2, 1, 3, 1, 4)]


def index_of_axes(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Strides of the axes that have more than one index; the others' mean nothing."""
    return [stride for length, stride in zip(shape, strides, strict=True) if length > 1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_contiguous_strides_are_numpys(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape, 8) == np.empty(shape, np.float64).strides


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strides_like_are_those_of_empty_like(shape: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(len(shape))):
        x = np.empty([shape[axis] for axis in order], np.float32).transpose(np.argsort(order))
        assert x.shape == shape
        for view in (x, x[..., ::-1], x[::-1]):
            expected = np.empty_like(view).strides
            found = strides_like(shape, view.strides, 4)
            assert index_of_axes(shape, found) == index_of_axes(shape, expected), (order, view.strides)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5)], ids=str)
def test_strides_like_of_another_last_axis(shape: tuple[int, ...]) -> None:
    """Results have head_dim_v where the query has head_dim, and the lse has no such axis."""
    wider, without = (*shape[:-1], 7), shape[:-1]
    for order in itertools.permutations(range(len(shape))):
        x = np.empty([shape[axis] for axis in order], np.float32).transpose(np.argsort(order))
        expected = np.empty([wider[axis] for axis in order], np.float32).transpose(np.argsort(order)).strides
        assert strides_like(wider, x.strides, 4) == expected
        assert strides_like(without, x.strides[:-1], 4) == np.empty_like(x[..., 0]).strides


def test_strides_like_leaves_repeated_axes_in_place() -> None:
    x = np.broadcast_to(np.empty((3, 5), np.float32).T, (2, 5, 3))
    assert x.strides[0] == 0
    assert strides_like((2, 5, 3), x.strides, 4) == (60, 4, 20)
    assert strides_like((2, 5, 3), (0, 0, 0), 4) == (60, 12, 4)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)], ids=str)
def test_strides_like_of_empty_arrays(shape: tuple[int, ...]) -> None:
    assert len(strides_like(shape, np.empty(shape, np.float32).strides, 4)) == len(shape)


MEMORY = np.zeros(48, np.uint8)


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """Views of one small memory: any strides that stay inside it."""
    itemsize = draw(st.sampled_from([1, 2, 4]))
    dtype = {1: np.bool_, 2: np.float16, 4: np.float32}[itemsize]
    num_axes = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(0, 4)) for _ in range(num_axes))
    strides = tuple(draw(st.integers(-12, 12)) for _ in range(num_axes))
    low = sum(min(0, (length - 1) * stride) for length, stride in zip(shape, strides, strict=True) if length)
    high = sum(max(0, (length - 1) * stride) for length, stride in zip(shape, strides, strict=True) if length)
    room = MEMORY.size - itemsize - high + low
    if room < 0:
        shape, strides, low, room = (), (), 0, MEMORY.size - itemsize
    return np.ndarray(shape, dtype, MEMORY, -low + draw(st.integers(0, room)), strides)


def bytes_of(x: np.ndarray) -> list[int]:
    """Address of every byte of every element, repeated as often as it is used."""
    start = x.__array_interface__["data"][0]
    return [
        start + sum(i * stride for i, stride in zip(index, x.strides, strict=True)) + byte
        for index in np.ndindex(*x.shape)
        for byte in range(x.itemsize)
    ]


@settings(max_examples=500, deadline=None)
@given(views(), views())
def test_share_memory_is_exact(a: np.ndarray, b: np.ndarray) -> None:
    expected = bool(set(bytes_of(a)) & set(bytes_of(b)))
    assert expected == np.shares_memory(a, b)
    assert share_memory(inspect("a", a), inspect("b", b)) == expected


@settings(max_examples=500, deadline=None)
@given(views())
def test_overlaps_itself_misses_nothing(x: np.ndarray) -> None:
    used = bytes_of(x)
    if len(set(used)) < len(used):
        assert overlaps_itself(x.shape, x.strides, x.itemsize)


@settings(max_examples=500, deadline=None)
@given(views())
def test_extent(x: np.ndarray) -> None:
    low, high = extent(x.__array_interface__["data"][0], x.shape, x.strides, x.itemsize)
    used = bytes_of(x)
    assert (low, high) == (min(used), max(used) + 1) if used else low == high


def test_ordinary_views_do_not_overlap_themselves() -> None:
    x = np.zeros((4, 5, 6), np.float32)
    for order in itertools.permutations(range(3)):
        y = x.transpose(order)
        for view in (y, y[::2], y[:, ::-1, ::3], y[1:, :1], y[:, None], y[..., 1:3], y[:0], y.reshape(-1)[::7]):
            assert not overlaps_itself(view.shape, view.strides, view.itemsize), (order, view.shape, view.strides)
    empty, repeated = np.broadcast_to(x[:1, :0], (4, 0, 6)), np.broadcast_to(x[:1], (4, 5, 6))
    assert not overlaps_itself(empty.shape, empty.strides, empty.itemsize)
    assert overlaps_itself(repeated.shape, repeated.strides, repeated.itemsize)
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(9, np.float32), 3)
    assert overlaps_itself(windows.shape, windows.strides, windows.itemsize)


def test_share_memory_of_interleaved_and_far_views() -> None:
    x = np.zeros((64, 64), np.float32)
    even, odd = inspect("a", x[:, ::2]), inspect("b", x[:, 1::2])
    assert not share_memory(even, odd)
    assert share_memory(even, inspect("b", x[:, ::-3]))
    assert not share_memory(inspect("a", x[:32]), inspect("b", x[32:]))
    assert not share_memory(even, even._replace(device=0)), "the same address on another device is other memory"


def test_share_memory_gives_up_on_the_safe_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlap of arbitrary strides is an integer program; without an answer in time it counts as overlap."""

    def too_hard(*args: Any, **options: Any) -> bool:
        assert options["max_work"] > 0
        raise np.exceptions.TooHardError

    monkeypatch.setattr(np, "shares_memory", too_hard)
    x = np.zeros((64, 64), np.float32)
    assert share_memory(inspect("a", x[:, ::2]), inspect("b", x[:, 1::2]))
    assert not share_memory(inspect("a", x[:32]), inspect("b", x[32:]))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float16, "float16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.float32, "float32"),
        (np.float64, "float64"),
        (np.bool_, "bool"),
        (np.intc, "int32"),
        (np.longlong, "int64"),
        (np.uint8, "uint8"),
    ],
)
def test_inspect_numpy(dtype: Any, name: str) -> None:
    x = np.zeros((4, 6), dtype)[::-2, 1::2]
    info = inspect("x", x)
    assert (info.shape, info.strides, info.dtype, info.device) == (x.shape, x.strides, name, HOST)
    assert info.pointer == x.__array_interface__["data"][0]
    assert info.writeable
    assert not inspect("x", np.broadcast_to(x, (2, 2, 3))).writeable
    assert inspect("x", info) is info


def test_inspect_subclass_without_its_own_meaning(tmp_path: Any) -> None:
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, 3))
    info = inspect("x", x)
    assert type(info.array) is np.ndarray and info.pointer == x.__array_interface__["data"][0]


class Obstinate(np.ndarray):
    """Gives copies where arrays give views, and calls itself empty."""

    def __getitem__(self, index: Any) -> Any:
        return np.array(np.asarray(self)[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        raise RuntimeError("read only, says the subclass")

    def astype(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no")

    shape = property(lambda self: (0,))  # type: ignore[assignment]
    swapaxes = transpose = reshape = astype  # type: ignore[assignment]


@pytest.mark.parametrize("is_2d", [False, True])
@pytest.mark.parametrize("op", ["attention", "attention_varlen", "merge_attention_states"])
def test_subclasses_are_read_and_written_past_their_methods(op: str, is_2d: bool, rng: np.random.Generator) -> None:
    def obstinate(x: np.ndarray) -> Any:
        return x.view(Obstinate)

    q, k, v = rng.standard_normal((3, 2, 300, 2), dtype=np.float32)[:, 0 if is_2d else slice(None)]
    sinks = np.ones(1 if is_2d else 2, np.float32)
    if op == "merge_attention_states":
        outs, lses = [q, k], [v[..., 0], v[..., 1]]
        right = cuflash.merge_attention_states(outs, lses)
        found = cuflash.merge_attention_states([*map(obstinate, outs)], [*map(obstinate, lses)])
    elif op == "attention_varlen":
        q, k, v = (np.ascontiguousarray(x.reshape(-1, 1, 2)) for x in (q, k, v))
        lengths = np.array([0, 7, len(q)])
        right = cuflash.attention_varlen(q, k, v, lengths, sinks=sinks[:1], return_lse=True)
        found = tuple(obstinate(np.full_like(x, 7)) for x in right)
        inputs = map(obstinate, (q, k, v, lengths))
        results = cuflash.attention_varlen(*inputs, sinks=obstinate(sinks[:1]), out=found[0], lse=found[1])
        assert results[0] is found[0] and results[1] is found[1]
    else:
        bias, mask = np.ones((300, 300)), rng.random((300, 300)) < 0.9
        right = cuflash.attention(q, k, v, bias=bias, mask=mask, sinks=sinks, return_lse=True)
        found = tuple(obstinate(np.full_like(x, 7)) for x in right)
        options = {"bias": obstinate(bias), "mask": obstinate(mask), "sinks": obstinate(sinks)}
        results = cuflash.attention(*map(obstinate, (q, k, v)), **options, out=found[0], lse=found[1])
        assert results[0] is found[0] and results[1] is found[1]
    for ours, theirs in zip(found, right, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)


class Described:
    """A stand-in."""

    def __init__(self, shape: Any, dtype: Any, **more: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.__dict__.update(more)


def test_stand_in() -> None:
    info = stand_in("q", Described([2, np.int64(3)], "float16"), 0)
    assert (info.array, info.shape, info.strides, info.dtype, info.pointer, info.device) == (
        None,
        (2, 3),
        (6, 2),
        "float16",
        0,
        0,
    )
    assert stand_in("q", Described((2, 3), ml_dtypes.bfloat16, strides=(2, 4)), 3).strides == (2, 4)
    assert stand_in("q", Described((2,), np.complex64), 0).dtype == "complex64"


def test_stand_in_made_of_a_real_array_keeps_what_the_call_would_see() -> None:
    x = np.zeros(9, np.float32)[1:].reshape(2, 4)
    x.flags.writeable = False
    assert stand_in("q", x, 0) == inspect("q", x)._replace(device=0)
    with pytest.raises(TypeError, match=r"q is a numpy\.ma\.MaskedArray"):
        stand_in("q", np.ma.zeros(3), 0)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (Described((2, 1.5), np.float32), TypeError, "q is a stand-in that NumPy cannot read: 'float'"),
        (Described(2, np.float32), TypeError, "q is a stand-in that NumPy cannot read: 'int'"),
        (Described((2,), "float31"), TypeError, "q is a stand-in that NumPy cannot read: data type 'float31'"),
        (Described((2,), SimpleNamespace()), TypeError, "q is a stand-in that NumPy cannot read"),
        (Described((2, -1), np.float32), ValueError, r"q is a stand-in with shape \(2, -1\)"),
        (Described((2, 3), np.float32, strides=(4,)), ValueError, r"strides \(4,\), expected .*one stride each"),
        (Described(None, np.float32), TypeError, "q is a .*Described, expected a NumPy or CuPy array"),
        ([1.0], TypeError, "q is a list, expected"),
    ],
)
def test_bad_stand_in(x: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        stand_in("q", x, 0)


@pytest.mark.gpu
def test_inspect_cupy() -> None:
    import cupy

    x = cupy.zeros((4, 6), np.float16)[::-2, 1::2]
    info = inspect("x", x)
    assert info.array is x
    assert (info.shape, info.strides, info.dtype) == (x.shape, x.strides, "float16")
    assert (info.pointer, info.device, info.writeable) == (x.data.ptr, x.device.id, True)


class OnlyInterface:
    """A GPU array of a library that knows `__cuda_array_interface__` alone."""

    def __init__(self, x: Any, read_only: bool) -> None:
        self.owner = x
        self.__cuda_array_interface__ = {**x.__cuda_array_interface__, "data": (x.data.ptr, read_only)}


class OnlyDlpack:
    """A GPU array of a library that knows DLPack alone."""

    def __init__(self, x: Any) -> None:
        self.owner = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.owner.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.owner.__dlpack_device__()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "bool", "int32"])
def test_inspect_gpu_arrays_of_other_libraries(dtype: str) -> None:
    import cupy

    x = cupy.zeros((4, 6), np.dtype(dtype))[::2, 1::2]
    takes = [OnlyDlpack(x)]
    if dtype != "bfloat16":
        takes.append(OnlyInterface(x, read_only=False))
    for foreign in takes:
        info = inspect("x", foreign)
        assert (info.shape, info.strides, info.dtype) == (x.shape, x.strides, dtype)
        assert (info.pointer, info.device, info.writeable) == (x.data.ptr, x.device.id, True)
    if dtype != "bfloat16":
        assert not inspect("x", OnlyInterface(x, read_only=True)).writeable


@pytest.mark.gpu
def test_inspect_gpu_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        x = torch.zeros(4, 6, dtype=dtype, device="cuda")[::2, 1::2]
        info = inspect("x", x)
        assert (info.shape, info.dtype, info.pointer) == ((2, 3), name, x.data_ptr())
        assert info.strides == tuple(step * x.element_size() for step in x.stride())
    with pytest.raises(TypeError, match=r"x is a torch\.Tensor that could not be taken as a GPU array"):
        inspect("x", torch.zeros(2, device="cuda", requires_grad=True))
