"""Launches without a GPU: their arguments by name, splits through the workspace, and when calls are remembered."""

from __future__ import annotations

import ctypes
import logging
import numbers
import struct
import sys
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from emulator.emulator import tile_map

import cuflash
from cuflash import dense, kv_cache, log, states
from cuflash.gpu import arguments, execute, launch, workspace
from cuflash.gpu import compile as compile_module
from cuflash.gpu import states as gpu_states
from cuflash.gpu.arguments import VALUES
from cuflash.gpu.tensor_maps import MAP_BYTES
from cuflash.plan.plan import make_plan
from cuflash.plan.table import device_of
from cuflash.problem.describe import describe_attention, describe_attention_lse
from cuflash.problem.describe_cache import describe_kv_cache
from cuflash.problem.states import State
from cuflash.settings import AUTOMATIC

cupy = pytest.importorskip("cupy", reason="needs CuPy, though no GPU")


@pytest.fixture(autouse=True)
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (launch, workspace):
        monkeypatch.setattr(module, "kernel_function", lambda program, device_id: None)
    for module in (launch, execute):
        monkeypatch.setattr(module, "device_info", lambda device_id: device_of(90))
    monkeypatch.setattr(workspace, "can_overlap", lambda compute_capability: False)
    monkeypatch.setattr(arguments, "tile_map", tile_map)
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


def _launch(q: Any, k: Any, v: Any, **options: Any) -> launch.Launch:
    problem, _ = describe_attention(q, k, v, **options)
    return launch.Launch(problem, make_plan(problem, device_of(90), AUTOMATIC), 0)


def _fields(packed: bytes) -> dict[str, tuple[float, ...]]:
    """What stands behind the addresses of a struct."""
    found, offset = {}, 0
    for name, code in VALUES:
        found[name] = struct.unpack_from("=" + code, packed, offset)
        offset += struct.calcsize("=" + code)
    assert len(packed) - offset in (0, 2 * MAP_BYTES)
    return found


@pytest.mark.parametrize("order", ["contiguous", "swapped", "gaps"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (2, 1, 3, 2)])
def test_arguments_are_those_of_the_arrays(batch: tuple[int, ...], order: str) -> None:
    """By name, whatever was packed before: what is remembered must not hold lengths."""
    for n, m in ((1, 1), (3, 500), (129, 1000), (2000, 17), (1, 2000), (2000, 17)):
        q, k = (_array((*batch, heads, length, 64), np.float16, order) for heads, length in ((8, n), (2, m)))
        mask = _array((*batch, 1, 1, m), np.bool_, "contiguous")
        slopes = _array((8,), np.float32, "contiguous")
        found = _launch(q, k, k, mask=mask, alibi_slopes=slopes, scale=n, window=(m, None))
        (((blocks,), packed, offsets),) = found._parts
        fields = _fields(packed)
        assert blocks == found.plan.num_blocks and offsets is None
        assert (fields["seqlen_q"], fields["seqlen_k"], fields["query_offset_value"]) == ((n,), (m,), (m - n,))
        steps = (0,) * (4 - len(batch)) + k.strides
        assert fields["outer_strides"][3:6] == steps[:3] and fields["k_strides"] == steps[3:]
        assert fields["mask_strides"][-1] == (m > 1) and fields["mask_strides"][1:3] == (0, 0)
        assert fields["alibi_slopes_strides"] == (0, 4, 0, 0) and fields["alibi_slopes_dtype"] == (3,)
        assert fields["bias_strides"] == fields["sinks_strides"] == (0,) * 4 and fields["sinks_dtype"] == (0,)
        shape = [*fields["outer_shape"][::2], fields["batch_shape"][0]]
        assert shape == [1] * (4 - len(batch)) + list(batch)
        assert (fields["scale"], fields["window_left"]) == ((n,), (m,)) and fields["group_size"][0] == 4
        assert fields["num_splits"][0] == found.plan.num_splits
        tiles = fields["num_m_blocks"][0] * fields["head_tiles"][0] * fields["num_batches"][0]
        assert tiles * found.plan.num_splits == blocks


def test_maps_are_those_of_keys_and_values() -> None:
    """Of their rows, features and the tile, whatever was packed before."""
    for n, head_dim_v, order in ((3, 64, "contiguous"), (500, 64, "swapped"), (129, 32, "gaps"), (500, 128, "swapped")):
        q, k = (_array((2, 3, heads, n, 64), np.float16, order) for heads in (8, 2))
        v = _array((2, 3, 2, n, head_dim_v), np.float16, order)
        found = _launch(q, k, v)
        maps = found._parts[0][1][-2 * MAP_BYTES :]
        for i, x in enumerate((k, v)):
            numbers = struct.unpack_from("=3Q", maps, i * MAP_BYTES)
            assert numbers == (x.strides[-2], x.shape[-1], found.plan.tile.block_n)


def _pointers(by_values: tuple[Any, ...], count: int) -> list[int]:
    """First addresses in the struct that a launch passes by value."""
    by_value, _ = by_values
    return list((ctypes.c_uint64 * count).from_address(by_value.ptr))


Launched = list[tuple[str, tuple[int, ...], list[int]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Kernel, grid and first addresses of what would be launched."""
    launched: list[tuple[str, tuple[int, ...], list[int]]] = []

    def kernel_function(program: Any, device_id: int) -> Any:
        def function(grid: Any, block: Any, by_values: Any, shared_memory: int) -> None:
            launched.append((program.kernel, grid, _pointers(by_values, 4 if program.kernel == "merge" else 5)))

        return function

    for module in (launch, workspace):
        monkeypatch.setattr(module, "kernel_function", kernel_function)
    return launched


def test_splits_go_through_the_workspace(launched: Launched) -> None:
    """The forward kernel writes into the workspace, from its first boundary on; the second one reads from there."""
    q, k = _array((2, 4, 1, 64), np.float16, "contiguous"), _array((2, 4, 9000, 64), np.float16, "contiguous")
    split_call = _launch(q, k, k, return_lse=True)
    split_call._get_device = lambda: 0
    plan = split_call.plan
    assert plan.num_splits > 1
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 45, plan.workspace + 64, None, 0), 3)
    scratch = cupy.ndarray((plan.workspace + 13,), np.uint8, memory)
    out, lse = (cupy.ndarray(shape, dtype, q.data) for shape, dtype in (((2, 4, 1, 64), np.float16), ((2, 4, 1), "f")))
    assert split_call.run([1, 2, 3, 400, 500] + [0] * 11, out, lse, scratch) == (out, lse)
    at, partial_lse = (1 << 45) + 16, (1 << 45) + 16 + plan.num_splits * 2 * 4 * 64 * 4
    (first, grid, pointers), (second, _, joined) = launched
    assert (first, grid, pointers) == (plan.kernel, (plan.num_blocks,), [1, 2, 3, at, partial_lse])
    assert (second, joined) == ("merge", [at, partial_lse, 400, 500])

    pointers = [q.data.ptr, k.data.ptr, k.data.ptr, 0, 0] + [0] * 11
    assert split_call.takes(scratch, pointers)
    assert not split_call.takes(scratch[1:-13], pointers), "too small from the boundary on"
    assert not split_call.takes(scratch[::2], pointers)
    assert not split_call.takes(scratch.view(np.int8), pointers)
    assert not split_call.takes(np.empty(plan.workspace + 16, np.uint8), pointers)
    assert not split_call.takes(cupy.ndarray(scratch.shape, np.uint8, k.data + 64), pointers), "over the keys"


def test_keys_are_appended_before_all_else(launched: Launched) -> None:
    """With the same addresses, also where the results of splits go elsewhere; a step later nothing is planned anew."""
    step, cached = (2, 4, 1, 64), (2, 4, 9000, 64)
    shapes = ((2, 8, 1, 64), np.float16), (cached, np.float16), (cached, np.float16), (step, np.float16), ((2,), "i")
    found = [_array(shape, dtype, "contiguous") for shape, dtype in shapes]
    apart = [cupy.ndarray(x.shape, x.dtype, x.data + (i << 25)) for i, x in enumerate(found)]
    q, cache, values, new, lengths = apart
    problem, _ = describe_kv_cache(q, cache, values, seqlens_k=lengths, k_new=new, v_new=new)
    call = launch.Launch(problem, make_plan(problem, device_of(90), AUTOMATIC), 0)
    call._get_device = lambda: 0
    plan = call.plan
    assert plan.num_splits > 1 and plan.append is not None and plan.append.num_blocks == 2 * 2 * 4 * 32 // 128
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 45, plan.workspace, None, 0), 0)
    scratch = cupy.ndarray((plan.workspace,), np.uint8, memory)
    assert call.run([1, 2, 3, 400, 0] + [0] * 11, q, None, scratch) is q
    (first, grid, pointers), (second, _, others), (third, *_) = launched
    assert (first, second, third) == ("append_keys", plan.kernel, "merge")
    assert grid == (plan.append.num_blocks,) and pointers == [1, 2, 3, 400, 0] and others[:3] == [1, 2, 3]


def test_splits_without_values_have_sums_alone_in_the_workspace(launched: Launched) -> None:
    q, k = _array((2, 4, 1, 64), np.float16, "contiguous"), _array((2, 4, 9000, 64), np.float16, "contiguous")
    problem, _ = describe_attention_lse(q, k)
    call = launch.Launch(problem, make_plan(problem, device_of(90), AUTOMATIC), 0)
    call._get_device = lambda: 0
    assert call.plan.num_splits > 1 and call.plan.workspace == call.plan.num_splits * 2 * 4 * 3 * 4
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 45, call.plan.workspace, None, 0), 0)
    scratch, out = cupy.ndarray((call.plan.workspace,), np.uint8, memory), cupy.ndarray((2, 4, 1), "f", q.data)
    assert call.takes(scratch, [q.data.ptr, k.data.ptr, *[0] * 14])
    assert call.run([1, 2, 0, 0, 500] + [0] * 11, None, out, scratch) is out
    at = 1 << 45
    assert [pointers for *_, pointers in launched] == [[1, 2, 0, at, at], [at, at, 0, 500]]


def _state(rows: tuple[int, ...], width: int, place: int) -> State:
    out, sums = _array((*rows, width), np.float32, "contiguous"), _array((*rows, 3), np.float32, "contiguous")
    return State(cupy.ndarray(out.shape, "f", out.data + place), cupy.ndarray(sums.shape, "f", out.data + place + 64))


def test_states_are_written_where_they_belong(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel itself, or by what merges its splits; merged states go where the first one is."""
    monkeypatch.setattr(cupy.cuda, "Device", lambda device_id: nullcontext())
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(gpu_states, "kernel_function", launch.kernel_function)
    monkeypatch.setattr(gpu_states, "device_info", lambda device_id: device_of(90))
    monkeypatch.setattr(cupy, "empty", lambda size, dtype: _array((size,), dtype, "contiguous"))
    monkeypatch.setattr(workspace, "is_capturing", lambda cupy: False)
    keys, base = _array((2, 4, 9000, 64), np.float16, "contiguous"), 1 << 30
    for seqlen_q in (30000, 1):
        q, state = _array((2, 4, seqlen_q, 64), np.float16, "contiguous"), _state((2, 4, seqlen_q), 64, 4096)
        found = states.attend(q, keys, keys, into=state, window=(None, 5), query_offset=8990)
        assert found is state
        *_, (kernel, _, pointers) = launched
        results = pointers[2:] if kernel == "merge" else pointers[3:]
        assert (kernel == "merge") == (seqlen_q == 1) and results == [base + 4096, base + 4096 + 64]
        other = _state((2, 4, seqlen_q), 64, 8192)
        assert states.merge([state, other], state) is state
        assert launched[-1][0] == "merge"
        out, lse = _array((2, 4, seqlen_q, 64), np.float16, "contiguous"), _array((2, 4, seqlen_q), "f", "contiguous")
        states.finish(state, None, out, lse)
        states.finish(state, None, out, None)
    assert [kernel for kernel, *_ in launched].count("merge") == 7


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
    monkeypatch.setattr(execute, "_launches", {})
    monkeypatch.setattr(launch.Launch, "run", lambda self, *_: self._problem)
    q = _array((2, 4, 100, 64), np.float16, "contiguous")
    tokens, lengths = _array((300, 4, 64), np.float16, "contiguous"), cupy.ndarray((4,), np.int32, q.data + (1 << 39))

    def problem(op: str = "attention", **options: Any) -> Any:
        if op == "attention":
            return cuflash.attention(q, q, q, **options)
        if op == "attention_lse":
            return cuflash.attention_lse(q, q, **options)
        return cuflash.attention_varlen(tokens, tokens, tokens, lengths, **options)

    return problem


@pytest.mark.parametrize("op", ["attention", "attention_varlen", "attention_lse"])
@pytest.mark.parametrize(
    ("option", "field", "build"),
    [
        ("window", lambda problem: problem.window_left, lambda x: (x, 0)),
        ("window", lambda problem: problem.window_right, lambda x: [0, x]),
        ("scale", lambda problem: problem.scale, lambda x: x),
        ("softcap", lambda problem: problem.traits.softcap, lambda x: x),
    ],
)
def test_options_that_change_are_read_again(op: str, option: str, field: Any, build: Any, problems: Any) -> None:
    changing = _Changing()
    for value in (3, 5):
        changing.value = value
        assert field(problems(op, **{option: build(changing)})) == value
    assert field(problems(op, **{option: build(3)})) == 3


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
        *(("attention_lse", *pair) for pair in EQUAL if "return_lse" not in pair[0]),
        ("attention", {"query_offset": 1}, {"query_offset": True}),
        ("attention_lse", {"query_offset": 1}, {"query_offset": True}),
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
    problem, _ = describe_attention(*[np.ones((2, 5, 8), np.float32)] * 3)
    program = make_plan(problem, device_of(90), AUTOMATIC).program
    monkeypatch.setattr(compile_module, "_functions", {})
    calls: list[Any] = []

    def build(program: Any, device_id: int) -> str:
        calls.append(None)
        return "compiled" if len(calls) > 1 else compile_module.kernel_function(program, device_id)

    monkeypatch.setattr(compile_module, "_build", build)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(compile_module.kernel_function(program, 99)), daemon=True)
    thread.start()
    thread.join(10)
    assert found == ["compiled"]


KINDS: dict[str, Any] = {
    "plain": lambda n, x: {},
    "out": lambda n, x: {"out": x(2, 4, n, 64)},
    "lse": lambda n, x: {"lse": x(2, 4, n, dtype=np.float32), "causal": True},
    "bias": lambda n, x: {"bias": x(4, n, n)},
    "mask": lambda n, x: {"mask": x(2, 1, 1, n, dtype=np.bool_)},
    "sinks": lambda n, x: {"sinks": x(4), "window": (3, 0)},
    "workspace": lambda n, x: {"workspace": x(1 << 20, dtype=np.uint8)},
}


@pytest.fixture
def apart() -> Any:
    """Make arrays that share no memory."""
    at = [1 << 40]

    def new(*shape: int, dtype: Any = np.float16) -> Any:
        at[0] += 1 << 30
        memory = cupy.cuda.UnownedMemory(at[0], 1 << 30, None, 0)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    return new


@pytest.mark.parametrize("kind", KINDS)
def test_other_lengths_are_not_checked_again(
    kind: str, problems: Any, apart: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(n: int) -> Any:
        arrays = [apart(2, 4, n, 64) for _ in range(3)]
        return cuflash.attention(*arrays, **KINDS[kind](n, apart))

    expected = {n: call(n) for n in (100, 1, 301)}
    monkeypatch.setattr(execute, "_launches", {})
    monkeypatch.setattr(dense, "describe_attention", None)
    assert {n: call(n) for n in expected} == expected


def _packed(n: int, x: Any) -> Any:
    boundaries = x(n % 7 + 2, dtype=np.int32)
    return cuflash.attention_varlen(*(x(n, 4, 64) for _ in range(3)), boundaries, causal=True, sinks=x(4))


def _cached(n: int, x: Any) -> Any:
    cache, new = [x(2, 4, 9000 + n, 64) for _ in range(2)], [x(2, 4, n % 5 + 1, 64) for _ in range(2)]
    return cuflash.attention_with_kv_cache(
        x(2, 8, 1, 64), *cache, seqlens_k=x(2, dtype=np.int32), k_new=new[0], v_new=new[1]
    )


def _paged(n: int, x: Any) -> Any:
    cache, table = [x(900, 4, 16 + n % 3, 64) for _ in range(2)], x(2, n, dtype=np.int32)
    return cuflash.attention_with_kv_cache(
        x(2, 8, 1, 64), *cache, seqlens_k=x(2, dtype=np.int32), page_table=table, causal=True
    )


def _paged_and_known(n: int, x: Any) -> Any:
    cache, new = [x(900, 4, 16, 64) for _ in range(2)], [x(2, 4, n % 5 + 1, 64) for _ in range(2)]
    return cuflash.attention_with_kv_cache(
        x(2, 8, 1, 64), *cache, seqlens_k=8 * n, k_new=new[0], v_new=new[1], page_table=x(2, n + 1, dtype=np.int32)
    )


def _six_axes(n: int, x: Any) -> Any:
    q = x(2, 1, 3, 2, 2, 4, n, 64)
    return cuflash.attention(q, q if n % 2 else cupy.broadcast_to(q[:1, :, :1], q.shape), x(*q.shape))


CALLS: dict[str, Any] = {
    **{
        name: lambda n, x, options=options: cuflash.attention(*(x(2, 4, n, 64) for _ in range(3)), **options(n, x))
        for name, options in KINDS.items()
    },
    "few_queries": lambda n, x: cuflash.attention(x(4, n % 9, 64), *(x(2, 1000 + 9 * n, 64) for _ in range(2))),
    "packed": _packed, "cached": _cached, "paged": _paged, "paged_and_known": _paged_and_known,
    "six_axes": _six_axes,
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_what_is_remembered_holds_no_lengths(kind: str, problems: Any, apart: Any, monkeypatch: Any) -> None:
    """Arguments are those of a call that is the first one, whichever tiles the others took."""
    monkeypatch.setattr(launch.Launch, "run", lambda self, *_: self)
    monkeypatch.setattr(execute, "_calls", {})
    for n in (700, 1, 2, 129, 60, 300, 128):
        found = CALLS[kind](n, apart)
        alone = launch.Launch(found._problem, found.plan, 0)
        assert found._parts == alone._parts and found._append == alone._append
    assert len(execute._calls) == 1 and len(execute._launches) == 7


def test_known_lengths_of_pages_are_told_apart(problems: Any, apart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No array shows them."""

    def call(length: Any, num_new: int = 1) -> Any:
        q, cache, table = apart(2, 8, 1, 64), apart(900, 4, 16, 64), apart(2, 40, dtype=np.int32)
        new = apart(2, 4, num_new, 64)
        options = {"seqlens_k": length, "k_new": new, "v_new": new, "page_table": table}
        return cuflash.attention_with_kv_cache(q, cache, apart(900, 4, 16, 64), **options)

    first = {(n, num_new): call(n, num_new) for n in (100, 0, 639) for num_new in (1, 0)}
    assert {key: found.seqlen_k for key, found in first.items()} == {(n, new): n + new for n, new in first}
    assert call(apart(2, dtype=np.int32)).seqlen_k == 640
    cut = call(639, 3)
    assert (cut.seqlen_k, cut.cache.num_new) == (640, 1)
    monkeypatch.setattr(kv_cache, "describe_kv_cache", None)
    assert {key: call(*key) for key in first} == first and call(77).seqlen_k == 78


def test_caches_that_do_not_fit_are_refused_whatever_came_before(problems: Any, apart: Any) -> None:
    q, cache = apart(2, 8, 1, 64), apart(2, 4, 96, 64)
    table, lengths = apart(2, 9, dtype=np.int32), apart(2, dtype=np.int32)
    call = cuflash.attention_with_kv_cache
    call(q, cache, apart(2, 4, 96, 64), seqlens_k=50)
    with pytest.raises(ValueError, match=r"v_cache has shape \(2, 4, 90, 64\) but k_cache has \(2, 4, 96, 64\)"):
        call(q, cache, apart(2, 4, 90, 64), seqlens_k=50)
    call(q, cache, cache, seqlens_k=lengths, page_table=table)
    with pytest.raises(ValueError, match=r"page_table has shape \(\), expected"):
        call(q, cache, cache, seqlens_k=lengths, page_table=apart(dtype=np.int32))
    new = apart(2, 4, 1, 64)
    call(q, cache, apart(2, 4, 96, 64), seqlens_k=lengths, k_new=new, v_new=apart(2, 4, 1, 64))
    with pytest.raises(ValueError, match=r"k_new has shape \(64,\), expected"):
        call(q, cache, apart(2, 4, 96, 64), seqlens_k=lengths, k_new=new[0, 0, 0], v_new=new)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lse"])
def test_other_lengths_without_values_are_not_checked_again(
    kind: str, problems: Any, apart: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(n: int) -> Any:
        options = KINDS[kind](n, apart) if kind != "out" else {"out": apart(2, 4, n, dtype=np.float32)}
        return cuflash.attention_lse(apart(2, 4, n, 64), apart(2, 4, n, 64), **options)

    expected = {n: call(n) for n in (100, 1, 301)}
    assert all(problem.traits.op == "attention_lse" and problem.strides.v is None for problem in expected.values())
    monkeypatch.setattr(execute, "_launches", {})
    monkeypatch.setattr(dense, "describe_attention_lse", None)
    assert {n: call(n) for n in expected} == expected


def test_axes_that_are_missing_are_no_lengths(problems: Any, apart: Any) -> None:
    q, k, cu_seqlens = apart(5, 8), apart(7, 8), apart(3, dtype=np.int32)
    cuflash.attention(q, k, k)
    for wrong in ((q[0], k, k), (q, k[0], k), (q, k, k[0]), (q[0, 0], k, k)):
        with pytest.raises(ValueError, match=r"has shape .*, expected \(\.\.\., heads, sequence, feature\)"):
            cuflash.attention(*wrong)
    cuflash.attention_lse(q, k)
    for wrong_pair in ((q[0], k), (q, k[0]), (q[0, 0], k)):
        with pytest.raises(ValueError, match=r"has shape .*, expected \(\.\.\., heads, sequence, feature\)"):
            cuflash.attention_lse(*wrong_pair)
    x = apart(9, 2, 8)
    cuflash.attention_varlen(x, x, x, cu_seqlens)
    for packed in ((x[0], x, x), (x, x[0, 0], x), (x, x, x[0, 0, 0])):
        with pytest.raises(ValueError, match="has shape"):
            cuflash.attention_varlen(*packed, cu_seqlens)
    with pytest.raises(ValueError, match="cu_seqlens_q has shape"):
        cuflash.attention_varlen(x, x, x, cu_seqlens[0])


def test_results_of_other_lengths_are_looked_at(problems: Any, apart: Any) -> None:
    def call(n: int, **results: Any) -> Any:
        return cuflash.attention(q[:, :, :n], k, k, **results)

    q, k, out = (apart(2, 4, 100, 64) for _ in range(3))
    call(100, out=out)
    call(50, out=out[:, :, :50])
    with pytest.raises(ValueError, match=r"out has shape \(2, 4, 100, 64\), expected \(2, 4, 60, 64\)"):
        call(60, out=out)
    with pytest.raises(ValueError, match="out overlaps q in memory"):
        call(60, out=q[:, :, 40:])
    with pytest.raises(ValueError, match="its elements overlap each other"):
        call(60, out=cupy.broadcast_to(out[:1, :, :60], (2, 4, 60, 64)))


def test_launches_are_logged(launched: Launched, caplog: pytest.LogCaptureFixture) -> None:
    q, k = _array((2, 4, 1, 64), np.float16, "contiguous"), _array((2, 2, 300, 64), np.float16, "contiguous")
    log._log_once.cache_clear()
    with caplog.at_level(logging.DEBUG, "cuflash"):
        call = _launch(q, k, k)
        call._get_device = lambda: 0
        for _ in range(2):
            call.run([1, 2, 3, 4, 0] + [0] * 11, q, None, cupy.ndarray((1 << 30,), np.uint8, q.data))
    plan, *calls = caplog.messages
    assert plan == f"new: {call._problem} -> {call.plan}"
    shapes = "q (2, 4, 1, 64), k (2, 2, 300, 64), v (2, 2, 300, 64), out (2, 4, 1, 64)"
    assert calls == [f"call: {call._problem} -> {call.plan}; {shapes}"] * 2


@pytest.mark.parametrize("batch", [(2,), (2, 3, 2, 3, 2)])
@pytest.mark.parametrize("lse", [0, 500])
def test_both_ways_to_pack_a_merge_agree(batch: tuple[int, ...], lse: int) -> None:
    """Of one launch, and of several for axes beyond those that it walks."""
    q = _array((*batch, 64, 1, 64), np.float16, "swapped" if len(batch) > 1 else "contiguous")
    k = _array((*batch, 1, 9000, 64), np.float16, "contiguous")
    problem, _ = describe_attention(q, k, k, return_lse=True)
    merge = workspace.merge_of_splits(problem, 7)
    assert merge.pieces
    assert merge.arguments_of_stacked(100, 200, 300, lse) == merge.arguments([100], [200], 300, lse)
