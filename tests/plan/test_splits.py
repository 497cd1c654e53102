"""Keys split over blocks: how many splits, what each of them sees, and that their results join to the same answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import CASES_BY_NAME, DTYPES, serves
from emulator.emulator import Emulator, compiler
from emulator.test_kernels import assert_right, dtypes, rows

import cuflash
from cuflash import reference
from cuflash.gpu import execute, launch, workspace
from cuflash.gpu.compile import compile_offline
from cuflash.plan import build, plan
from cuflash.plan.partial import partial_of, partial_strides, partial_traits
from cuflash.plan.plan import make_plan, refusals
from cuflash.plan.table import KERNELS, KernelSpec, device_of
from cuflash.problem.arrays import DTYPES as DTYPES_BY_NAME
from cuflash.problem.describe import describe_attention_lse
from cuflash.problem.describe_cache import describe_kv_cache
from cuflash.problem.problem import Problem
from cuflash.settings import AUTOMATIC, Settings
from cuflash.testing import check, describe, make_data, run
from plan.test_plan import H200, dense, gpu, packed, square

emulated = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")


def decode(batch: int = 1, heads: int = 8, keys: int = 65536, **options: Any) -> Problem:
    return dense(gpu((batch, heads, 1, 128)), gpu((batch, heads, keys, 128)), **options)


def test_plans() -> None:
    assert make_plan(square("float16", 64), H200, AUTOMATIC).num_splits == 1
    few = make_plan(decode(), H200, AUTOMATIC)
    assert few.num_splits > 10 and few.num_blocks == 8 * few.num_splits > 100
    assert few.workspace == few.num_splits * 8 * (128 + 3) * 4
    assert str(few).endswith(
        f"{few.num_blocks} blocks ({few.num_splits} splits, {few.workspace} bytes of workspace), "
        f"{few.program.shared_memory} bytes of shared memory"
    )
    assert dict(few.program.macros)["OUT_DTYPE"] == "CUFLASH_FLOAT32"
    doubles = dense(gpu((1, 64), "float64"), gpu((9999, 64), "float64"), out_dtype="float16")
    assert dict(make_plan(doubles, H200, AUTOMATIC).program.macros)["OUT_DTYPE"] == "CUFLASH_FLOAT64"
    assert make_plan(packed(1, 8000, 8, 8, 64, "float16", window=(4000, 0)), H200, AUTOMATIC).num_splits == 1
    assert make_plan(packed(1, 1, 8, 8, 64, "float16")._replace(seqlen_k=99999), H200, AUTOMATIC).num_splits == 1


def test_rows_that_cannot_write_partial_results_do_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    row = KERNELS[-1]._replace(name="narrow", features=KERNELS[-1].features - {"out_dtype"})
    for module in (build, plan):
        monkeypatch.setattr(module, "KERNELS", (row,))
    monkeypatch.setattr(build, "_builds", {})
    assert refusals(decode().traits, H200) == [("narrow", None)]
    assert make_plan(decode(), H200, AUTOMATIC).num_splits == 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_no_split_is_left_without_a_tile(dtype: str) -> None:
    for keys in range(600, 4000, 59):
        found = make_plan(dense(gpu((4, 8, 1, 64), dtype), gpu((4, 8, keys, 64), dtype)), H200, AUTOMATIC)
        steps = -(-keys // found.tile.block_n)
        assert (found.num_splits - 1) * -(-steps // found.num_splits) < steps


def test_workspace_is_packed() -> None:
    problem = decode(batch=3)
    traits, partial = partial_traits(problem.traits), partial_of(problem, 5)
    strides = partial_strides(problem, partial)
    assert (traits.out_dtype, traits.lse_dtype) == ("float32", "float32")
    assert partial.strides == (3 * 8 * 128 * 4, 3 * 4)
    assert partial.sizes == (5 * 3 * 8 * 128 * 4, 5 * 3 * 8 * 3 * 4)
    assert strides.out == (8 * 512, 512, 512, 4) and strides.lse == (8 * 60, 60, 60, 4)


def test_without_values_only_sums_are_partial() -> None:
    problem, _ = describe_attention_lse(gpu((3, 8, 1, 128)), gpu((3, 8, 65536, 128)))
    partial = partial_of(problem, 7)
    assert partial.strides == (0, 3 * 4)
    strides, found = partial_strides(problem, partial), make_plan(problem, H200, AUTOMATIC)
    assert strides.v is None and strides.out is None and strides.lse == (8 * 84, 84, 84, 4)
    assert found.num_splits > 8 and found.workspace == found.num_splits * 3 * 8 * 3 * 4
    assert found.program == make_plan(problem, H200, AUTOMATIC, 1).program


SPLIT_CASES = [
    "lengths-17x200", "lengths-200x131", "lengths-5x0", "lengths-0x5", "causal-200x131", "causal-63x65",
    "top_left-200x70", "heads-8-1-3x70", "heads-6-2-100x90", "heads-6-3-1x200", "batch-broadcast-both", "batch-six",
    "two_dimensions-into", "window-5-7", "window-100-0", "window-causal-64", "offset--70", "offset--1000",
    "offset-array-int8", "scale-huge", "softcap", "softcap-small-float16",
    "bias-float32", "mask-batch", "bias-mask-odd", "alibi-float32",
    "sinks-float32", "sinks-no-keys", "layout-swapped", "layout-reversed-into", "layout-odd_bytes-into",
    "layout-gaps-into", "out_dtype-float16", "out_dtype-float64", "out_dtype-into", "packed-plain-True",
    "packed-tail-False", "packed-alibi-sinks", "packed-into", "everything", "everything-few_rows", "everything-strided",
    "lse-lengths-5x0", "lse-causal-200x131", "lse-heads-8-1-3x70", "lse-two_dimensions-into", "lse-batch-six",
    "lse-offset--1000", "lse-alibi-float32", "lse-sinks-float32", "lse-sinks-no-keys", "lse-layout-reversed-into",
    "lse-layout-odd_bytes-into", "lse-everything-few_rows", "lse-everything-strided",
]  # fmt: skip


@emulated
@rows
@pytest.mark.parametrize("name", SPLIT_CASES)
@pytest.mark.share(2 * len(KERNELS))
def test_cases(spec: KernelSpec, name: str) -> None:
    """Every number of splits from 2 to more than there are tiles, by case, and accumulators of both types in turn."""
    taken = [dtype for dtype in ("float16", "float64") if dtype in spec.dtypes] or spec.dtypes
    dtype = taken[SPLIT_CASES.index(name) % len(taken)]
    assert_right(CASES_BY_NAME[name], dtype, Emulator(spec.name, num_splits=2 + len(name) % 4))


@emulated
@rows
@pytest.mark.share(2 * len(KERNELS))
@pytest.mark.parametrize("num_splits", [2, 5, 128])
@pytest.mark.parametrize("name", ["keys-4090", "mean", "lengths-17x200", "lse-keys-9000"])
def test_numbers_of_splits(spec: KernelSpec, name: str, num_splits: int) -> None:
    assert_right(CASES_BY_NAME[name], spec.dtypes[0], Emulator(spec.name, num_splits=num_splits))


@emulated
@rows
@pytest.mark.share(4)
def test_as_many_as_the_plan_says(spec: KernelSpec) -> None:
    case = CASES_BY_NAME["keys-9000"]
    assert make_plan(describe(case, spec.dtypes[0]), H200, Settings(spec.name, "", False)).num_splits > 8
    assert_right(case, spec.dtypes[0], Emulator(spec.name, num_splits=None))


@emulated
@rows
@pytest.mark.share(4)
@pytest.mark.parametrize("name", ["causal-200x131", "batch-six"])
def test_grid_in_several_launches(spec: KernelSpec, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_GRID", 5)
    assert_right(CASES_BY_NAME[name], spec.dtypes[0], Emulator(spec.name, num_splits=3))


@emulated
@rows
def test_without_lse(spec: KernelSpec) -> None:
    x = (
        np.random.default_rng(0)
        .standard_normal((2, 200, min(32, spec.max_head_dim)))
        .astype(DTYPES_BY_NAME[spec.dtypes[0]])
    )
    emulator = Emulator(spec.name, num_splits=2)
    out, _ = emulator.attention(x, x, x, return_lse=True)
    assert emulator.attention(x, x, x).tobytes() == out.tobytes()


def _fake_cupy(*, capturing: bool) -> Any:
    class Array(np.ndarray):
        @property
        def data(self) -> Any:
            return SimpleNamespace(ptr=self.ctypes.data, memory=self)

    def new(shape: Any, dtype: Any, data: Any, strides: Any) -> Any:
        return np.ndarray(shape, dtype, data.memory, 0, strides).view(Array)

    stream = SimpleNamespace(is_capturing=lambda: capturing)
    return SimpleNamespace(
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
        ndarray=new,
        cuda=SimpleNamespace(get_current_stream=lambda: stream),
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_memory(swapped: bool) -> None:
    problem = dense(gpu((2, 3, 5, 16))) if not swapped else dense(gpu((2, 3, 5, 16), strides=(480, 32, 96, 2)))
    result = workspace.Result((2, 3, 5, 16), problem.traits.out_dtype, problem.strides.out)
    cupy = _fake_cupy(capturing=False)
    out, scratch, address = workspace.allocate_with_workspace(cupy, result, None, 100, None)
    assert not np.shares_memory(out, scratch) and address % 16 == 0 and scratch.size == 100
    given = cupy.empty(200, np.uint8)[3:]
    same, scratch, address = workspace.allocate_with_workspace(cupy, result, out, 100, given)
    assert same is out and scratch is given and address % 16 == 0 and 0 <= address - given.ctypes.data < 16
    cupy = _fake_cupy(capturing=True)
    out, scratch, address = workspace.allocate_with_workspace(cupy, result, None, 100, None)
    memory = out.base
    while memory.base is not None:
        memory = memory.base
    assert memory.nbytes == 2 * 3 * 5 * 16 * 2 + 100, "one allocation, which the result keeps"
    assert out.ctypes.data + 960 <= address and address + 100 <= memory.ctypes.data + memory.nbytes
    assert out.strides == problem.strides.out
    with pytest.raises(ValueError, match="workspace is None, expected a uint8 array of 100 bytes: out is given"):
        workspace.allocate_with_workspace(cupy, result, out, 100, None)


def test_explain_names_splits_and_workspace() -> None:
    x = np.empty((1, 8, 1, 128), np.float16)
    k = np.empty((1, 8, 65536, 128), np.float16)
    explanation = cuflash.explain(cuflash.attention, x, k, k, device=90)
    assert explanation.plan is not None and explanation.workspace == explanation.plan.workspace > 0
    text = str(explanation)
    assert f"{explanation.plan.num_splits} splits of the keys for each tile, merged by a second kernel" in text
    assert f"workspace      {explanation.workspace} bytes" in text


@pytest.mark.share(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_kernels_that_join_compile_without_spills(capability: int, dtype: str) -> None:
    pytest.importorskip("cupy", reason="needs CuPy with NVRTC")
    for width in (16, 64, 128, 512) if capability == 80 else (128,):
        problem = dense(gpu((2, 4, 1, 64), dtype), v=gpu((2, 4, 1, width), dtype))
        program = workspace.merge_of_splits(problem, 4).program
        for macros in (program.macros, (*program.macros[:-2], ("STACKED", 0), ("ALIGNMENT", 1))):
            resources = compile_offline(program._replace(macros=macros), device_of(capability).arch)
            assert resources.spill_bytes == 0 and resources.registers <= 240, (dtype, width, resources)
            assert resources.stack_bytes == 0 or dict(macros)["ALIGNMENT"] == 1


# What only a GPU can show.


def _draw(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    import cupy

    return cupy.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def _decode_arrays(dtype: Any = np.float32, keys: int = 5000) -> tuple[Any, Any, Any]:
    q, k, v = _draw(2, 8, 3, 64, dtype=dtype), *(_draw(2, 2, keys, 64, dtype=dtype, seed=i) for i in (1, 2))
    explanation = cuflash.explain(cuflash.attention, q, k, v)
    assert explanation.plan is not None and explanation.plan.num_splits > 1
    return q, k, v


def _close(out: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    expected, _ = reference.attention(q.get(), k.get(), v.get(), **options)
    np.testing.assert_allclose(out.get(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@rows
@dtypes
@pytest.mark.parametrize("name", SPLIT_CASES)
def test_cases_on_the_gpu(spec: KernelSpec, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    case = CASES_BY_NAME[name]
    if not serves(spec, describe(case, dtype), launch.device_info(0)):
        pytest.skip(f"{spec.name} refuses")
    monkeypatch.setattr(execute, "make_plan", lambda *arguments: make_plan(*arguments, 2 + len(name) % 4))
    monkeypatch.setattr(execute, "_launches", {})
    data = make_data(case, dtype)
    with cuflash.options(kernel=spec.name):
        first, second = run(case, data, cupy), run(case, data, cupy)
    check(case, data, first, rounds_weights=spec.rounds_weights)
    assert first.out.tobytes() == second.out.tobytes() and first.lse.tobytes() == second.lse.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 3])
def test_given_workspace(offset: int, allocations: Any) -> None:
    import cupy

    q, k, v = _decode_arrays()
    needed = cuflash.explain(cuflash.attention, q, k, v).workspace
    expected = cuflash.attention(q, k, v)
    memory = cupy.full(needed + 64, 0xFF, np.uint8)
    given = memory[16 + offset : 16 + needed + (16 if offset else 0)]
    for _ in range(3):  # the last ones by the cache
        given[...] = 0xFF
        with allocations() as sizes:
            out = cuflash.attention(q, k, v, workspace=given)
        np.testing.assert_array_equal(out.get(), expected.get())
        assert sizes == [out.nbytes]
    assert bool((memory[:16] == 0xFF).all()) and bool((memory[-32:] == 0xFF).all())
    with pytest.raises(
        ValueError, match=f"workspace has .* bytes from a 16-byte boundary on, expected at least {needed}"
    ):
        cuflash.attention(q, k, v, workspace=memory[16 : 16 + needed - 1])
    with pytest.raises(ValueError, match="workspace overlaps k"):
        cuflash.attention(q, k, v, workspace=k.view(np.uint8).ravel())


@pytest.mark.gpu
def test_allocates_results_and_workspace_only(allocations: Any) -> None:
    q, k, v = _decode_arrays()
    cuflash.attention(q, k, v, return_lse=True)
    with allocations() as sizes:
        out, lse = cuflash.attention(q, k, v, return_lse=True)
    workspace_size = cuflash.explain(cuflash.attention, q, k, v).workspace
    assert sorted(sizes) == sorted([out.nbytes, lse.nbytes, workspace_size])


@pytest.mark.gpu
def test_graphs_keep_their_workspace() -> None:
    import cupy

    q, k, v = _decode_arrays()
    out = cupy.empty(q.shape, np.float32)
    needed = cuflash.explain(cuflash.attention, q, k, v).workspace
    given = cupy.empty(needed, np.uint8)
    cuflash.attention(q, k, v, out=out, workspace=given)
    cuflash.attention(q, k, v, causal=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=f"workspace is None, expected a uint8 array of {needed} bytes"):
            cuflash.attention(q, k, v, out=out)
        cuflash.attention(q, k, v, out=out, workspace=given)
        allocated = cuflash.attention(q, k, v, causal=True)
        graph = stream.end_capture()
        others = [cupy.full(needed, 0xFF, np.uint8) for _ in range(20)]
        q *= 0.5
        graph.launch()
    stream.synchronize()
    assert all(bool((x == 0xFF).all()) for x in others)
    _close(out, q, k, v)
    _close(allocated, q, k, v, causal=True)


@pytest.mark.gpu
def test_graphs_keep_the_workspace_of_an_lse() -> None:
    import cupy

    q, k, _ = _decode_arrays()
    out = cupy.empty(q.shape[:-1], np.float32)
    needed = cuflash.explain(cuflash.attention_lse, q, k).workspace
    given = cupy.empty(needed, np.uint8)
    expected = reference.attention_lse(q.get(), k.get())
    for _ in range(2):
        assert cuflash.attention_lse(q, k, out=out, workspace=given) is out
        np.testing.assert_allclose(out.get(), expected, rtol=1e-5)
        np.testing.assert_array_equal(cuflash.attention_lse(q, k).get(), out.get())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=f"workspace is None, expected a uint8 array of {needed} bytes"):
            cuflash.attention_lse(q, k, out=out)
        cuflash.attention_lse(q, k, out=out, workspace=given)
        allocated = cuflash.attention_lse(q, k)
        graph = stream.end_capture()
        others = [cupy.full(needed, 0xFF, np.uint8) for _ in range(20)]
        q *= 0.5
        graph.launch()
    stream.synchronize()
    assert all(bool((x == 0xFF).all()) for x in others)
    for lse in (out, allocated):
        np.testing.assert_allclose(lse.get(), reference.attention_lse(q.get(), k.get()), rtol=1e-5)


@pytest.mark.gpu
def test_other_lengths_of_a_known_kind() -> None:
    for keys in (5000, 5001, 5300, 300, 70_000, 5000):
        q, k, v = _draw(2, 8, 3, 64), _draw(2, 2, keys, 64, seed=1), _draw(2, 2, keys, 64, seed=2)
        _close(cuflash.attention(q, k, v, causal=True), q, k, v, causal=True)


@pytest.mark.gpu
@dtypes
def test_many_splits_have_no_drift(dtype: str) -> None:
    import cupy

    element = DTYPES_BY_NAME[dtype]
    rng = cupy.random.default_rng(0)
    q = rng.standard_normal((4, 64), dtype=np.float32).astype(element)
    k = rng.standard_normal((1 << 18, 64), dtype=np.float32).astype(element)
    v = (1 + 0.1 * rng.standard_normal((1 << 18, 64), dtype=np.float32)).astype(element)
    assert cuflash.explain(cuflash.attention, q, k, v).plan.num_splits > 60
    scores = q.astype(np.float64) @ k.astype(np.float64).T * 64**-0.5
    weights = cupy.exp(scores - scores.max(-1, keepdims=True))
    exact = weights @ v.astype(np.float64) / weights.sum(-1, keepdims=True)
    error = float(cupy.linalg.norm(cuflash.attention(q, k, v).astype(np.float64) - exact) / cupy.linalg.norm(exact))
    rounding = float(cupy.linalg.norm(exact.astype(element).astype(np.float64) - exact) / cupy.linalg.norm(exact))
    assert error <= max(1.1 * rounding, 1e-15 if dtype == "float64" else 1.5e-6)


@pytest.mark.parametrize(("wanted", "found"), [(1, 1), (3, 3), (100, 100), (10**6, 128)])
def test_splits_of_a_cache_are_those_asked_for(wanted: int, found: int) -> None:
    """As far as there are tiles of keys: 8192 in 64s."""
    q, lengths = gpu((2, 8, 1, 64), "float16"), gpu((2,), "int32")
    k, v = (gpu((2, 1, 8192, 64), "float16") for _ in range(2))
    problem, _ = describe_kv_cache(q, k, v, seqlens_k=lengths, num_splits=wanted)
    plan = make_plan(problem, H200, Settings("forward_mma", "16x64x2", False))
    assert plan.num_splits == found and (found > 1) == (plan.workspace > 0)
    assert make_plan(problem._replace(seqlen_k=0), H200, AUTOMATIC).num_splits == 1


def test_caches_of_unknown_lengths_are_split_by_size() -> None:
    """One long sequence among short ones is not one block's alone, and short ones have few blocks with work."""
    caches = gpu((64, 8, 1, 64)), gpu((64, 8, 32768, 64)), gpu((64, 8, 32768, 64))
    known = make_plan(describe_kv_cache(*caches, seqlens_k=32768)[0], H200, AUTOMATIC)
    assert known.split_size == 0 and known.num_splits < 4
    unknown = make_plan(describe_kv_cache(*caches, seqlens_k=gpu((64,), "int32"))[0], H200, AUTOMATIC)
    assert (unknown.num_splits, unknown.split_size, unknown.largest_split) == (8, 0, 4096)
    assert unknown.even_splits == known.num_splits and "(8 splits of at most 4096 keys, " in str(unknown)
    prompts = gpu((2, 64, 4096, 64)), gpu((2, 8, 32768, 64)), gpu((2, 8, 32768, 64))
    many = make_plan(describe_kv_cache(*prompts, seqlens_k=gpu((2,), "int32"))[0], H200, AUTOMATIC)
    assert (many.num_splits, many.workspace) == (1, 0), "a sequence has tiles enough for all blocks"
    part = gpu((2, 8, 700, 64)), *prompts[1:]
    few = make_plan(describe_kv_cache(*part, seqlens_k=gpu((2,), "int32"))[0], H200, AUTOMATIC)
    assert 1 < few.num_splits < 32768 // 4096
    assert few.num_blocks // 2 * (few.num_splits + 1) > H200.num_multiprocessors * few.num_splits
    short = gpu((64, 8, 1, 64)), gpu((64, 8, 900, 64)), gpu((64, 8, 900, 64))
    assert make_plan(describe_kv_cache(*short, seqlens_k=gpu((64,), "int32"))[0], H200, AUTOMATIC).num_splits == 1


@emulated
@pytest.mark.parametrize("window", [None, (200, None)])
@pytest.mark.parametrize(
    ("kernel", "tile", "any_even"),
    [
        ("forward_decode", "", False),
        ("forward_mma", "16x64x2", True),
        ("forward_wgmma", "64x64x2", False),
        ("forward_scalar", "", True),
    ],
)
def test_keys_of_unknown_lengths_are_shared_out(
    kernel: str, tile: str, any_even: bool, window: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By so many splits that equal sequences would have, or more where these would be too long."""
    monkeypatch.setattr(cuflash.plan.plan, "KEYS_OF_A_SPLIT", 128)
    lengths = np.array([700, 130, 1, 0], np.int32)
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((4, 2, n, 64)).astype(np.float16) for n in (2, 700, 700))
    k[1, :, 130:] = v[1, :, 130:] = np.nan
    options = {"seqlens_k": lengths, "causal": True, "window": window, "return_lse": True}
    emulator = Emulator(kernel, tile, num_splits=None)
    plan = make_plan(describe_kv_cache(q, k, v, **options)[0], emulator.device, emulator.settings)
    assert plan.num_splits >= 6 and plan.largest_split == 128
    assert window or (plan.even_splits > 1) == any_even
    out, lse = emulator.attention_with_kv_cache(q, k, v, **options)
    exact, exact_lse = cuflash.attention_with_kv_cache(*(x.astype(np.float64) for x in (q, k, v)), **options)
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=2e-3, rtol=2e-3)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("queries", "dtype", "kernel"),
    [(1, "bfloat16", "forward_decode"), (999, "float16", "forward_decode"), (1, "float32", "forward_scalar")],
)
def test_a_split_size_names_kernel_and_tile(queries: int, dtype: str, kernel: str) -> None:
    arrays = gpu((2, 8, queries, 64), dtype), gpu((2, 2, 5000, 64), dtype), gpu((2, 2, 5000, 64), dtype)
    found = make_plan(describe_kv_cache(*arrays, seqlens_k=5000, split_size=1024)[0], H200, AUTOMATIC)
    assert (found.kernel, found.num_splits, found.split_size) == (kernel, 5, 1024)
    assert found.tile == make_plan(describe_kv_cache(*arrays, seqlens_k=10, split_size=64)[0], H200, AUTOMATIC).tile


def assert_rows_alike(attend: Any, xp: Any, dtype: Any, capacity: int, split_size: int, **options: Any) -> None:
    """With a split size each row has the same bits alone, in a batch, behind a part of the prompt, and with pages."""
    rng = np.random.default_rng(3)
    lengths = np.asarray([capacity - 50, capacity // 3, capacity], np.int32)
    num_queries, page_size = 5, 8

    def draw(*shape: int) -> Any:
        return xp.asarray(rng.standard_normal(shape, np.float32).astype(dtype))

    q, k, v = draw(3, 4, num_queries, 64), draw(3, 2, capacity, 64), draw(3, 2, capacity, 64)
    options |= {"causal": True, "split_size": split_size}
    together = attend(q, k, v, seqlens_k=xp.asarray(lengths), **options)
    order = rng.permutation(3 * capacity // page_size)
    pages = [xp.empty((order.size, 2, page_size, 64), dtype) for _ in range(2)]
    for x, cache in zip(pages, (k, v), strict=True):
        x[order] = cache.reshape(3, 2, -1, page_size, 64).swapaxes(1, 2).reshape(-1, 2, page_size, 64)
    table = xp.asarray(order.reshape(3, -1).astype(np.int32))
    paged = attend(q, *pages, seqlens_k=xp.asarray(lengths), page_table=table, **options)
    assert bool((paged == together).all())
    for batch, length in enumerate(lengths.tolist()):
        for i in range(num_queries):
            seen = length - num_queries + 1 + i
            room = slice(None, min(seen + 7 * i, capacity))
            alone = attend(
                q[batch : batch + 1, :, i : i + 1], k[batch : batch + 1, :, room], v[batch : batch + 1, :, room],
                seqlens_k=seen, **options,
            )  # fmt: skip
            assert bool((alone[0, :, 0] == together[batch, :, i]).all()), (batch, i)


@emulated
@pytest.mark.parametrize("options", [{}, {"window": (90, None)}], ids=["causal", "window"])
def test_rows_of_equal_splits_are_alike(options: dict[str, Any]) -> None:
    assert_rows_alike(Emulator("forward_decode").attention_with_kv_cache, np, np.float16, 200, 64, **options)


@emulated
def test_rows_of_equal_splits_are_alike_in_float32() -> None:
    assert_rows_alike(Emulator("forward_scalar").attention_with_kv_cache, np, np.float32, 200, 64)
