"""Keys and values that a launch makes ready for another: when, where they lie, and what happens without memory."""

from __future__ import annotations

import ctypes
from itertools import product
from typing import Any

import numpy as np
import pytest
from emulator.emulator import Emulator, compiler
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import reference
from cuflash.gpu import launch, workspace
from cuflash.plan.plan import Plan, make_plan
from cuflash.plan.table import KERNELS, device_of
from cuflash.problem.describe import describe_attention, describe_attention_lse
from cuflash.settings import AUTOMATIC, Settings
from plan.test_plan import H200, dense, gpu, packed, six_axes, square

SPEC = next(spec for spec in KERNELS if spec.name == "precise_float32")
emulated = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")


def _plan(problem: Any, **options: Any) -> Plan:
    return make_plan(problem, H200, AUTOMATIC, **options)


def test_many_rows_have_their_keys_prepared() -> None:
    plan = _plan(square("float32", 64))  # 4 batches of 16 heads, 4096 tokens
    preparation = plan.preparation
    assert plan.tile.prepared and str(plan.tile).endswith("p") and preparation is not None
    assert preparation.program.kernel == "prepare_pairs"
    assert (preparation.offset_k, preparation.offset_v) == (0, 4 * 16 * 4096 * (4 * 64 + 16))
    assert plan.workspace == 2 * preparation.offset_v
    assert preparation.num_blocks == 2 * 4 * 16 * 4096 // 32
    assert f"({plan.workspace} bytes of workspace)" in str(plan)


def test_a_few_rows_are_not_worth_it() -> None:
    for queries, keys in ((1, 65536), (16, 4096), (64, 64)):
        plan = _plan(dense(gpu((1, 8, queries, 64), "float32"), gpu((1, 8, keys, 64), "float32")))
        assert plan.preparation is None and not plan.tile.prepared


def test_rows_of_tf32_are_half_as_long() -> None:
    plan, half = (_plan(square("float32", 128, precision=name)) for name in ("ieee", "tf32"))
    assert half.preparation is not None and half.workspace == 4 * 16 * 4096 * 2 * (2 * 128 + 16) < plan.workspace


def test_without_values_only_keys_are_prepared() -> None:
    x = gpu((4, 16, 4096, 64), "float32")
    plan = _plan(describe_attention_lse(x, x)[0])
    assert plan.preparation is not None and plan.preparation.num_blocks == 4 * 16 * 4096 // 32
    assert plan.workspace == 4 * 16 * 4096 * (4 * 64 + 16)


def test_packed_sequences_are_prepared_as_one() -> None:
    plan = _plan(packed(8, 16384, 16, 4, 64, "float32"))
    assert plan.preparation is not None and plan.workspace == 2 * 4 * 16384 * (4 * 64 + 16)


def test_splits_and_preparation_share_a_workspace() -> None:
    problem = dense(gpu((1, 1, 100, 64), "float32"), gpu((1, 1, 4099, 64), "float32"))
    plan = make_plan(problem, H200, Settings("precise_float32", "64x64p", False), 3)
    assert plan.preparation is not None and plan.preparation.offset_k == 3 * 100 * (64 + 3) * 4
    assert plan.workspace == plan.preparation.offset_k + 2 * 4099 * (4 * 64 + 16)


@given(st.integers(1, 3), st.integers(1, 300), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_parts_of_a_workspace_begin_on_boundaries(heads: int, queries: int, splits: int) -> None:
    problem = dense(gpu((heads, queries, 40), "float32"), gpu((heads, 200, 40), "float32"))
    plan = make_plan(problem, H200, Settings("precise_float32", "64x64p", False), splits + 1)
    assert plan.preparation is not None
    assert plan.preparation.offset_k % 16 == plan.preparation.offset_v % 16 == 0


def test_what_cannot_have_a_launch_before_it() -> None:
    problem = square("float32", 64)
    assert _plan(problem, prepares=False).preparation is None
    named = Settings("precise_float32", "64x64p", False)
    with pytest.raises(ValueError, match=r"tile .64x64p. cannot serve this call: .* takes a workspace"):
        make_plan(problem, H200, named, prepares=False)
    apart = six_axes()._replace(seqlen_q=4096, seqlen_k=4096)
    plan = _plan(apart)
    assert plan.outer_axes and plan.preparation is None
    with pytest.raises(ValueError, match=r"tile .64x64p. cannot serve this call: .* no more than 4 leading axes"):
        make_plan(apart, H200, named)


def test_there_are_prepared_tiles_for_every_width_that_is_served() -> None:
    for capability, head_dim in product((80, 90), (17, 32, 64, 96, 128, 192, 256, 320, 512)):
        tiles = SPEC.tiles(square("float32", head_dim).traits, device_of(capability))
        assert any(tile.prepared for tile in tiles), (capability, head_dim)


def test_nothing_is_prepared_for_no_rows() -> None:
    for shapes in (((2, 0, 64), (2, 70, 64)), ((2, 70, 64), (2, 0, 64)), ((0, 70, 64), (0, 70, 64))):
        problem = dense(*(gpu(shape, "float32") for shape in shapes))
        plan = make_plan(problem, H200, Settings("precise_float32", "64x64p", False))
        assert plan.preparation is None and plan.workspace == 0


def test_without_memory_blocks_prepare_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", reason="launches need CuPy")
    launched: list[str] = []

    def kernel_function(program: Any, device_id: int) -> Any:
        return lambda *arguments: launched.append(dict(program.macros).get("PREPARED", program.kernel))

    def empty(size: int, dtype: Any) -> Any:
        raise cupy.cuda.memory.OutOfMemoryError(size, 0)

    for module in (launch, workspace):
        monkeypatch.setattr(module, "kernel_function", kernel_function)
    monkeypatch.setattr(launch, "device_info", lambda device_id: H200)
    monkeypatch.setattr(launch, "is_capturing", lambda cupy: False)
    monkeypatch.setattr(cupy, "empty", empty)
    monkeypatch.setattr(launch.Launch, "run", _on_device(launch.Launch.run))
    problem = square("float32", 64)
    call, out = launch.Launch(problem, _plan(problem), 0), object()
    assert call.run([1] * 16, out, None) is out and launched == ["precise_float32"]


def _on_device(run: Any) -> Any:
    """`Launch.run`, where no driver says which device is the current one."""

    def wrapped(call: Any, *arguments: Any) -> Any:
        call._get_device = lambda: call.device_id
        return run(call, *arguments)

    return wrapped


def test_it_is_launched_first_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", reason="launches need CuPy")
    launched: list[tuple[str, tuple[int, ...], list[int], bytes]] = []

    def kernel_function(program: Any, device_id: int) -> Any:
        def function(grid: Any, block: Any, arguments: Any, shared_memory: int) -> None:
            by_value, _ = arguments
            pointers = list((ctypes.c_uint64 * 18).from_address(by_value.ptr))
            rest = bytes((ctypes.c_char * 1000).from_address(by_value.ptr + 18 * 8))
            launched.append((program.kernel, grid, pointers, rest))

        return function

    for module in (launch, workspace):
        monkeypatch.setattr(module, "kernel_function", kernel_function)
    problem = square("float32", 64)
    plan = _plan(problem)
    call = launch.Launch(problem, plan, 0)
    monkeypatch.setattr(call, "_get_device", lambda: 0)
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 45, plan.workspace + 64, None, 0), 3)
    scratch = cupy.ndarray((plan.workspace + 13,), np.uint8, memory)
    out = cupy.ndarray((4, 16, 4096, 64), "f", memory)
    assert call.run([1, 2, 3, 400] + [0] * 12, out, None, scratch) is out
    assert plan.preparation is not None
    prepared = [(1 << 45) + 16 + offset for offset in (plan.preparation.offset_k, plan.preparation.offset_v)]
    (first, grid, pointers, rest), (second, blocks, joined, others) = launched
    assert (first, grid, second, blocks) == (
        "prepare_pairs", (plan.preparation.num_blocks,), plan.kernel, (plan.num_blocks,),
    )  # fmt: skip
    assert pointers == joined == [1, 2, 3, 400] + [0] * 12 + prepared and rest == others


@emulated
@pytest.mark.parametrize("tile", ["64x64p", "64x32p"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_results_are_those_of_tiles_that_prepare_themselves(tile: str, num_splits: int) -> None:
    """To the bit, for any strides and group of heads: pairs are pairs."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype("f") for shape in ((2, 4, 90, 40), (2, 2, 150, 40), (2, 150, 2, 40)))
    k[0, 0, 7], k[1, 1, 3, ::2], v[0, 9] = 0, 1e-30, 1e30
    arrays = q, k[:, :, ::-1], v.swapaxes(1, 2)[..., ::-1]
    found = [
        Emulator("precise_float32", name, num_splits=num_splits).attention(*arrays, causal=True, return_lse=True)
        for name in (tile.removesuffix("p").replace("64x32", "32x32"), tile)
    ]
    for ours, theirs in zip(*found, strict=True):
        assert num_splits > 1 or ours.tobytes() == theirs.tobytes()
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)  # splits end elsewhere in tiles of other heights


def _arrays(cupy: Any) -> list[Any]:
    rng = cupy.random.default_rng(0)
    return [rng.standard_normal((2, 16, 2048, 64), dtype="float32") for _ in range(3)]


def _close(out: Any, arrays: list[Any], **options: Any) -> None:
    exact, _ = reference.attention(*(x[0, :1].get() for x in arrays), **options)
    np.testing.assert_allclose(out[0, :1].get(), exact, atol=3e-6)


@pytest.mark.gpu
def test_given_and_allocated_workspaces(allocations: Any) -> None:
    import cupy

    arrays = _arrays(cupy)
    needed = cuflash.explain(cuflash.attention, *arrays).workspace
    assert needed == 2 * 2 * 16 * 2048 * (4 * 64 + 16)
    given = cupy.full(needed + 32, 0xFF, np.uint8)
    for _ in range(2):
        with allocations() as sizes:
            expected = cuflash.attention(*arrays)
        assert sorted(sizes) == sorted([expected.nbytes, needed])
        with allocations() as sizes:
            out = cuflash.attention(*arrays, workspace=given[16:-16])
        assert sizes == [out.nbytes] and bool((out == expected).all())
    assert bool((given[:16] == 0xFF).all()) and bool((given[-16:] == 0xFF).all())
    _close(out, arrays)
    with pytest.raises(ValueError, match=f"expected at least {needed}"):
        cuflash.attention(*arrays, workspace=given[:-64])


@pytest.mark.gpu
def test_captured_calls_need_no_workspace() -> None:
    """Where `out` is given, nothing could keep one alive: blocks then prepare for themselves."""
    import cupy

    arrays = _arrays(cupy)
    tokens = [x[0].swapaxes(0, 1) for x in arrays]
    boundaries = cupy.array([0, 300, 2048])
    outs = [cupy.empty_like(arrays[0]) for _ in range(2)]
    packed_out = cupy.empty((2048, 16, 64), np.float32)
    given = cupy.empty(cuflash.explain(cuflash.attention, *arrays).workspace, np.uint8)

    def calls() -> Any:
        cuflash.attention(*arrays, out=outs[0])
        cuflash.attention(*arrays, out=outs[1], workspace=given)
        cuflash.attention_varlen(*tokens, boundaries, out=packed_out)
        return cuflash.attention(*arrays, causal=True)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        calls()
        stream.begin_capture()
        allocated = calls()
        graph = stream.end_capture()
        for x in (*outs, packed_out):
            x.fill(np.nan)
        others = [cupy.full(given.size, 0xFF, np.uint8) for _ in range(4)]
        arrays[0] *= 0.5
        graph.launch()
    stream.synchronize()
    assert all(bool((x == 0xFF).all()) for x in others)
    for out in outs:
        _close(out, arrays)
    _close(allocated, arrays, causal=True)
    exact, _ = reference.attention_varlen(*(x.get() for x in tokens), boundaries.get(), boundaries.get())
    np.testing.assert_allclose(packed_out.get(), exact, atol=3e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256, 512])
def test_every_prepared_tile_on_the_gpu(head_dim: int, precision: str) -> None:
    """Against float64, twice, bitwise the same, and the same as without preparation where the tile is."""
    import cupy

    rng = cupy.random.default_rng(head_dim)
    q, k, v = (rng.standard_normal((2, heads, 700, head_dim), dtype="float32") for heads in (4, 2, 2))
    problem, _ = describe_attention(q, k, v, causal=True, precision=precision)
    exact, _ = reference.attention(q.get(), k.get(), v.get(), causal=True)
    for tile in SPEC.tiles(problem.traits, launch.device_info(0)):
        with cuflash.options(kernel=SPEC.name, tile=str(tile)):
            out = cuflash.attention(q, k, v, causal=True, precision=precision)
            again = cuflash.attention(q, k, v, causal=True, precision=precision)
        assert bool((out == again).all()), tile
        error = np.linalg.norm(out.get() - exact) / np.linalg.norm(exact)
        assert error < (1e-6 if precision == "ieee" else 1e-3), tile
