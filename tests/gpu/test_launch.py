"""A known form with other lengths is launched, byte for byte, as if it had been described and planned anew."""

from __future__ import annotations

import ctypes
import numbers
import sys
import threading
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dense
from cuflash.gpu import launch
from cuflash.gpu.workspace import split_of
from cuflash.plan.plan import make_plan
from cuflash.plan.splits import result_axes
from cuflash.plan.table import device_of
from cuflash.problem.arrays import inspect
from cuflash.problem.problem import describe_attention, result_rows
from cuflash.settings import AUTOMATIC

cupy = pytest.importorskip("cupy", reason="needs CuPy, though no GPU")


@pytest.fixture(autouse=True)
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.compile_module, "kernel_function", lambda plan, device_id: None)
    monkeypatch.setattr(launch, "device_info", lambda device_id: device_of(90))
    assert "cupy" in sys.modules


def _array(shape: tuple[int, ...], dtype: Any, order: str) -> Any:
    """Make a CuPy array over memory that does not exist; (batch, sequence, heads, feature) in memory for `swapped`."""
    memory = cupy.cuda.UnownedMemory(1 << 30, 1 << 40, None, 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    if order == "swapped":
        return cupy.ndarray((*shape[:-3], shape[-2], shape[-3], shape[-1]), dtype, pointer).swapaxes(-2, -3)
    if order == "gaps":
        return cupy.ndarray((*shape[:-1], 2 * shape[-1]), dtype, pointer)[..., : shape[-1]]
    return cupy.ndarray(shape, dtype, pointer)


def _planned(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[launch.Form, launch.Launch]:
    problem, _ = describe_attention(q, k, v, **options)
    plan = make_plan(problem, device_of(90), AUTOMATIC)
    form = launch.Form(problem, plan, 0)
    split = None
    if plan.num_splits > 1:
        split = split_of(result_axes(problem), problem, problem.out, problem.lse, plan, 0)
    rows, parts = result_rows(problem), launch._parts(form)
    return form, launch.Launch(form, plan, parts, rows, problem.seqlen_k, problem.out, problem.lse, split)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "return_lse": True},
    {"causal": "top_left", "window": (5, None)},
    {"causal": True, "query_offset": 3, "out_dtype": np.float64},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("order", ["contiguous", "swapped", "gaps"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_kv", "head_dim", "head_dim_v"),
    [
        ((), 8, 8, 64, 64),
        ((2,), 8, 2, 128, 64),
        ((2, 3), 4, 1, 8, 16),
        ((1,), 1, 1, 40, 40),
        ((2, 1, 3, 2), 6, 3, 64, 24),
    ],
)
def test_other_lengths(
    batch: tuple[int, ...],
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    head_dim_v: int,
    dtype: Any,
    order: str,
    options: Any,
) -> None:
    def arrays(n: int, m: int) -> tuple[Any, Any, Any]:
        q = _array((*batch, heads_q, n, head_dim), dtype, order)
        return q, *(_array((*batch, heads_kv, m, d), dtype, order) for d in (head_dim, head_dim_v))

    lengths = [(1, 1), (1, 70), (3, 500), (40, 41), (100, 100), (129, 1000), (2000, 17), (4096, 4096)]
    lengths += [(1, 2000), (2, 100_000), (3, 99_999)]
    planned = [_planned(*arrays(n, m), options) for n, m in lengths]
    reused = 0
    for form, _ in planned:
        if not launch._varies_by_length(form.problem, form.plan):
            continue
        for (n, m), (_, expected) in zip(lengths, planned, strict=True):
            found = form.launch(*arrays(n, m))
            if found is None:
                continue
            reused += 1
            assert found._parts == expected._parts
            assert str(found) == str(expected)
            assert found._split == expected._split
            for name in ("_out", "_lse"):
                ours, theirs = getattr(found, name), getattr(expected, name)
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    assert (ours.shape, ours.dtype, ours.strides) == (theirs.shape, theirs.dtype, theirs.strides)
    assert reused >= len(lengths)


def test_a_form_refuses_what_it_does_not_cover() -> None:
    q = _array((2, 4, 100, 64), np.float32, "contiguous")
    form, _ = _planned(q, q, q, {})
    assert form.launch(q, q, q) is not None
    short = _array((2, 4, 90, 64), np.float32, "contiguous")
    assert form.launch(q, q, short) is None, "k and v of different lengths"
    assert form.launch(q[..., ::-1], q, q) is None, "another feature stride"
    assert form.launch(q[:, :, :0], q, q) is None, "no queries"
    odd = cupy.ndarray((2, 4, 100, 64), np.float32, q.data, (4 * 66 * 400, 4 * 66 * 100, 4 * 66, 4))
    assert form.launch(odd, q, q) is None, "rows on no 16-byte boundary"
    axes = _array((2, 1, 2, 1, 1, 4, 100, 64), np.float32, "contiguous")
    merged, _ = _planned(axes, axes, axes, {})
    assert not launch._varies_by_length(merged.problem, merged.plan), "leading axes that merge"
    every_second = _array((2, 4, 100, 128), np.float32, "contiguous")[..., ::2]
    slow, _ = _planned(every_second, every_second, every_second, {})
    assert not launch._varies_by_length(slow.problem, slow.plan), "loads that aligned arrays would not need"
    one_row = _array((1, 1, 1, 4), np.float32, "contiguous")
    by_chance, _ = _planned(one_row, one_row, one_row, {"out_dtype": np.float16})
    assert not launch._varies_by_length(by_chance.problem, by_chance.plan), "result aligned for one row only"
    broadcast = cupy.ndarray((2, 4, 100, 64), np.float32, q.data, (0, 4 * 64 * 100, 4 * 64, 4))
    problem, _ = describe_attention(broadcast, q, q)
    assert not launch._varies_by_length(problem, form.plan)


def _pointers(arguments: tuple[Any, ...], count: int) -> list[int]:
    """First addresses in the struct that a launch passes by value."""
    (by_value,) = arguments
    return list((ctypes.c_uint64 * count).from_address(by_value.ptr))


def test_splits_go_through_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward kernel writes into the workspace, from its first boundary on; the second one reads from there."""
    launched: list[tuple[str, tuple[int, ...], list[int]]] = []

    def kernel_function(plan: Any, device_id: int) -> Any:
        def function(grid: Any, block: Any, arguments: Any, shared_memory: int) -> None:
            launched.append((plan.kernel, grid, _pointers(arguments, 5 if plan.kernel != "combine" else 4)))

        return function

    monkeypatch.setattr(launch.compile_module, "kernel_function", kernel_function)
    q, k = _array((2, 4, 1, 64), np.float16, "contiguous"), _array((2, 4, 9000, 64), np.float16, "contiguous")
    form, split_call = _planned(q, k, k, {"return_lse": True})
    form.get_device = lambda: 0
    plan = form.plan
    assert plan.num_splits > 1
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 45, plan.workspace + 64, None, 0), 3)
    scratch = cupy.ndarray((plan.workspace + 13,), np.uint8, memory)
    out, lse = (cupy.ndarray(shape, dtype, q.data) for shape, dtype in (((2, 4, 1, 64), np.float16), ((2, 4, 1), "f")))
    assert split_call.run([1, 2, 3, 400, 500] + [0] * 7, out, lse, scratch) == (out, lse)
    at, partial_lse = (1 << 45) + 16, (1 << 45) + 16 + plan.num_splits * 2 * 4 * 64 * 4
    (first, grid, pointers), (second, _, joined) = launched
    assert (first, grid, pointers) == (plan.kernel, (plan.num_blocks,), [1, 2, 3, at, partial_lse])
    assert (second, joined) == ("combine", [at, partial_lse, 400, 500])

    pointers = [q.data.ptr, k.data.ptr, k.data.ptr, 0, 0] + [0] * 7
    assert not split_call.takes(scratch, pointers), "not known yet how far the arrays reach"
    split_call.set_extents({name: inspect(name, x) for name, x in (("q", q), ("k", k), ("v", k))})
    assert split_call.takes(scratch, pointers)
    assert not split_call.takes(scratch[1:-13], pointers), "too small from the boundary on"
    assert not split_call.takes(scratch[::2], pointers)
    assert not split_call.takes(scratch.view(np.int8), pointers)
    assert not split_call.takes(np.empty(plan.workspace + 16, np.uint8), pointers)
    assert not split_call.takes(cupy.ndarray(scratch.shape, np.uint8, k.data + 64), pointers), "over the keys"


class _Changing:
    """A number that is equal to itself alone, as a 0-d tensor is, and changes."""

    value = 3

    def __index__(self) -> int:
        return self.value

    def __float__(self) -> float:
        return float(self.value)


numbers.Real.register(_Changing)


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What calls compute, with empty caches and without a GPU."""
    monkeypatch.setattr(launch, "_launches", {})
    monkeypatch.setattr(launch, "_forms", {})
    monkeypatch.setattr(launch.Launch, "run", lambda self, *_: self.form.problem)
    q = _array((2, 4, 100, 64), np.float16, "contiguous")
    tokens, lengths = _array((300, 4, 64), np.float16, "contiguous"), cupy.ndarray((4,), np.int32, q.data + (1 << 39))

    def problem(op: str = "attention", **options: Any) -> Any:
        if op == "attention":
            return cuflash.attention(q, q, q, **options)
        return cuflash.attention_varlen(tokens, tokens, tokens, lengths, **options)

    return problem


@pytest.mark.parametrize("op", ["attention", "attention_varlen"])
@pytest.mark.parametrize(
    ("option", "field", "build"),
    [
        ("window", "window_left", lambda x: (x, 0)),
        ("window", "window_right", lambda x: [0, x]),
        ("scale", "scale", lambda x: x),
        ("softcap", "softcap", lambda x: x),
    ],
)
def test_options_that_change_are_read_again(op: str, option: str, field: str, build: Any, problems: Any) -> None:
    changing = _Changing()
    for value in (3, 5):
        changing.value = value
        assert getattr(problems(op, **{option: build(changing)}), field) == value
    assert getattr(problems(op, **{option: build(3)}), field) == 3


EQUAL = (
    ({"causal": True}, {"causal": 1}),
    ({"causal": False}, {"causal": 0.0}),
    ({"window": (1, 0)}, {"window": (True, 0)}),
    ({"window": (1, 0)}, {"window": (1.0, 0)}),
    ({"scale": 1}, {"scale": True}),
    ({"softcap": 1.0}, {"softcap": np.True_}),
    ({"return_lse": True}, {"return_lse": 1}),
    ({"return_lse": False}, {"return_lse": 0.0}),
)


@pytest.mark.parametrize(
    ("op", "right", "wrong"),
    [
        *((op, *pair) for op in ("attention", "attention_varlen") for pair in EQUAL),
        ("attention", {"query_offset": 1}, {"query_offset": True}),
        ("attention_varlen", {"max_seqlen_q": 1}, {"max_seqlen_q": 1.0}),
    ],
    ids=str,
)
def test_equal_options_of_other_types_are_checked(op: str, right: Any, wrong: Any, problems: Any) -> None:
    for _ in range(2):
        problems(op, **right)
        with pytest.raises(TypeError, match=f"{next(iter(wrong))}.* is "):
            problems(op, **wrong)


def test_usual_options_are_described_once(problems: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual: dict[str, Any] = {
        "causal": "top_left",
        "window": [np.int64(3), None],
        "scale": np.float32(0.5),
        "softcap": 3,
    }
    usual |= {"precision": "ieee", "return_lse": np.True_, "out_dtype": np.dtype("float32")}
    described = problems(**usual)
    monkeypatch.setattr(dense, "describe_attention", None)
    assert problems(**usual) == described


def test_a_signal_handler_may_need_the_kernel_that_is_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(describe_attention(*[np.ones((2, 5, 8), np.float32)] * 3)[0], device_of(90), AUTOMATIC)
    monkeypatch.undo()
    monkeypatch.setattr(launch.compile_module, "_functions", {})
    calls: list[Any] = []

    def build(plan: Any, device_id: int) -> str:
        calls.append(None)
        return "compiled" if len(calls) > 1 else launch.compile_module.kernel_function(plan, device_id)

    monkeypatch.setattr(launch.compile_module, "_build", build)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(launch.compile_module.kernel_function(plan, 99)), daemon=True)
    thread.start()
    thread.join(10)
    assert found == ["compiled"]
