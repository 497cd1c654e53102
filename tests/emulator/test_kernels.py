"""Every row of the kernel table on the CPU: its own source, every memory access checked (see emulator.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import CASES, CASES_BY_NAME, DTYPES, TF32_CASES, fitting
from hypothesis import given, settings
from kernels.test_random import SETTINGS, Call, alike_calls, dense_calls, lse_calls, packed_calls
from kernels.test_random import assert_right_twice as assert_call_right_twice

from cuflash.gpu import launch
from cuflash.plan.table import KERNELS, KernelSpec, device_of
from cuflash.problem.arrays import DTYPES as DTYPES_BY_NAME
from cuflash.problem.describe import describe_attention, describe_varlen
from cuflash.problem.describe_cache import describe_kv_cache
from cuflash.testing import Case, check, describe, make_data, run
from emulator.emulator import Emulator, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")

rows = pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def assert_right(case: Case, dtype: str, emulator: Emulator, *, twice: bool = True) -> None:
    """Right and, run `twice`, bitwise the same whatever the order in which warps and lanes take turns."""
    case = fitting(case, emulator.spec)
    if emulator.refuses(describe(case, dtype)):
        pytest.skip(f"{emulator.settings.kernel} refuses")
    data = make_data(case, dtype)
    first = run(case, data, np, emulator.function(case))
    check(case, data, first, rounds_weights=emulator.spec.rounds_weights)
    if not twice:
        return
    emulator.seed = 1 + len(case.name)
    second = run(case, data, np, emulator.function(case))
    assert first.out.tobytes() == second.out.tobytes() and first.lse.tobytes() == second.lse.tobytes(), "not repeatable"


@rows
@pytest.mark.parametrize(("number", "case"), [pytest.param(i, case, id=case.name) for i, case in enumerate(CASES)])
@pytest.mark.share(len(KERNELS))
def test_cases(spec: KernelSpec, number: int, case: Case) -> None:
    """Each in one of the dtypes that the row takes, in turn, and twice in one of the rows.

    On a GPU tests/kernels/test_forward.py runs all combinations.
    """
    taken = _taken(spec, case)
    if not taken:
        pytest.skip(f"{spec.name} refuses")
    takers = [row for row in KERNELS if _taken(row, case)]
    twice = takers[number % len(takers)] == spec
    assert_right(case, taken[number % len(taken)], Emulator(spec.name), twice=twice)


def _taken(spec: KernelSpec, case: Case) -> list[str]:
    """Dtypes in which the row takes a case."""
    emulator = Emulator(spec.name)
    return [dtype for dtype in DTYPES if not emulator.refuses(describe(fitting(case, spec), dtype))]


@rows
@pytest.mark.share(4)
@pytest.mark.parametrize("case", TF32_CASES, ids=lambda case: case.name)
def test_tf32(spec: KernelSpec, case: Case) -> None:
    assert_right(case, "float32", Emulator(spec.name))


@rows
@dtypes
@pytest.mark.share(4)
@pytest.mark.parametrize("bias", [-1e30, float(np.finfo(np.float32).min), -(2.0**27), 2.0**26 + 8])
def test_huge_logits(spec: KernelSpec, dtype: str, bias: float) -> None:
    """They are not hidden, however low, and weights do not overflow, however coarse logits are."""
    rng = np.random.default_rng(0)
    shape = (70, min(32, spec.max_head_dim))
    q, k, v = (rng.standard_normal(shape).astype(DTYPES_BY_NAME[dtype]) for _ in range(3))
    options: dict[str, Any] = {"bias": np.full((70, 70), bias, np.float32), "return_lse": True, "scale": 1e-9}
    emulator = Emulator(spec.name)
    if emulator.refuses(describe_attention(q, k, v, **options)[0]):
        pytest.skip(f"{spec.name} refuses")
    out, lse = emulator.attention(q, k, v, **options)
    mean = np.broadcast_to(v.astype(np.float64).mean(0), out.shape)
    np.testing.assert_allclose(out.astype(np.float64), mean, atol=2e-3)
    np.testing.assert_allclose(lse, bias, rtol=1e-6)


@rows
@pytest.mark.parametrize(
    ("capability", "dtype"),  # each has tiles of its own
    [(75, "float16"), (80, "float16"), (86, "float16"), (80, "float32"), (80, "float64"), (86, "float64")],
)
@pytest.mark.parametrize("name", ["everything", "packed-plain-True", "causal-200x131", "lse-causal-200x131"])
@pytest.mark.share(len(KERNELS))
def test_tiles(spec: KernelSpec, name: str, capability: int, dtype: str) -> None:
    """The two tallest tiles and the lowest, of devices with less shared memory."""
    case, device = fitting(CASES_BY_NAME[name], spec), device_of(capability)
    problem = describe(case, dtype)
    if spec.refusal(problem.traits, device) is not None:
        pytest.skip(f"{spec.name} refuses")
    tiles = list(dict.fromkeys(map(str, spec.tiles(problem.traits, device))))
    for tile in dict.fromkeys((*tiles[:2], tiles[-1])):
        assert_right(case, dtype, Emulator(spec.name, tile, device))


@pytest.mark.share(10)
@pytest.mark.parametrize(
    "name",
    [
        "everything", "causal-200x131", "head_dim-80-160", "wide-causal", "wide-window", "wide-everything",
        "lse-everything", "paged-prompt", "paged-wide", "paged-gaps",
    ],
)  # fmt: skip
def test_every_tile_of_forward_mma(name: str) -> None:
    """One buffer for keys and two, all heights, rows that warps share, and blocks whose halves play ping-pong."""
    case, spec = CASES_BY_NAME[name], Emulator("forward_mma").spec
    for tile in dict.fromkeys(map(str, spec.tiles(describe(case, "float16").traits, device_of(90)))):
        assert_right(case, "float16", Emulator(spec.name, tile))


@pytest.mark.parametrize("name", ["paged-prompt", "paged-wide"])
def test_every_tile_of_forward_wgmma_reads_pages(name: str) -> None:
    """A warpgroup that loads for itself copies the values of one tile before it takes what it looked up of the next."""
    case, spec = CASES_BY_NAME[name], Emulator("forward_wgmma").spec
    for tile in dict.fromkeys(map(str, spec.tiles(describe(case, "float16").traits, device_of(90)))):
        assert_right(case, "float16", Emulator(spec.name, tile))


@pytest.mark.share(12)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize(
    "name", ["everything", "packed-plain-True", "head_dim-80-160", "wide-causal", "lse-everything"]
)
def test_every_tile_of_precise_float32(name: str, precision: str) -> None:
    """Those whose keys and values a launch prepares, and those that prepare them themselves."""
    spec = Emulator("precise_float32").spec
    case = CASES_BY_NAME[name]
    case = case._replace(options={**case.options, "precision": precision})
    for tile in spec.tiles(describe(case, "float32").traits, device_of(90)):
        assert_right(case, "float32", Emulator(spec.name, str(tile)))


@rows
@pytest.mark.share(2 * len(KERNELS))
def test_restarted_sums_of_the_tallest_tile(spec: KernelSpec) -> None:
    case = CASES_BY_NAME["wide-keys-4200"]
    dtype = "float16" if "float16" in spec.dtypes else spec.dtypes[0]
    tile = str(spec.tiles(describe(fitting(case, spec), dtype).traits, device_of(90))[0])
    assert_right(case, dtype, Emulator(spec.name, tile))


def test_forward_mma_has_a_tile_of_every_form() -> None:
    """So that the tests above meet them: one and two stages, rows that are shared, and 256 threads, in ping-pong."""
    spec = Emulator("forward_mma").spec
    forms = set()
    for name in ("causal-200x131", "wide-causal", "wide-window"):
        problem = describe(CASES_BY_NAME[name], "float16")
        for tile in spec.tiles(problem.traits, device_of(90)):
            forms.add((problem.traits.head_dim_v > 128, tile.stages, tile.num_threads == 256))
    assert {(False, 1, False), (False, 2, False), (True, 1, False), (True, 2, False), (True, 2, True)} <= forms


@pytest.mark.parametrize(
    ("calls", "max_examples"),
    [
        pytest.param(dense_calls(gpu=True), 15, id="dense"),
        pytest.param(lse_calls(gpu=True), 8, id="lse"),
        pytest.param(alike_calls(), 12, id="alike"),
        pytest.param(packed_calls(gpu=True), 12, id="packed"),
    ],
)
@rows
@pytest.mark.share(len(KERNELS))
def test_random_calls(spec: KernelSpec, calls: Any, max_examples: int) -> None:
    @settings(SETTINGS, max_examples=max_examples)
    @given(calls)
    def right(call: Call) -> None:
        emulator = Emulator(spec.name, seed=call.seed % 3)
        try:
            assert_call_right_twice(call, np, emulator.function(call.case), spec)
        except ValueError as error:
            if "cannot serve this call" not in str(error):
                raise

    right()


def malformed(emulator: Emulator, values: tuple[int, ...]) -> None:
    """Queries of all ones and values of all ones: whatever the boundaries, every output is 1, or 0 without keys."""
    x = np.ones((100, 4, min(32, emulator.spec.max_head_dim)), DTYPES_BY_NAME[emulator.spec.dtypes[0]])
    boundaries = np.zeros(len(values), np.int64)
    problem, infos = describe_varlen(x, x, x, boundaries, boundaries, return_lse=True)
    boundaries[:] = values  # past the checks, as on a GPU, where nobody looks at values before the kernel does
    out, lse = emulator.run(problem, infos)
    assert not np.isnan(lse).any()
    expected = np.where(np.isneginf(lse), 0.0, 1.0)[..., np.newaxis]
    assert (np.abs(out.astype(np.float64) - expected) < 1e-3).all()


def malformed_cache(emulator: Emulator, lengths: tuple[int, ...], pages: tuple[int, ...] | None) -> None:
    """Values of all ones and NaN in no row: whatever lengths and table hold, nothing outside of the cache is touched.

    Rows of the cache that something may be appended to hold ones, too.
    """
    head_dim = min(32, emulator.spec.max_head_dim)
    q = np.ones((len(lengths), 4, 2, head_dim), DTYPES_BY_NAME[emulator.spec.dtypes[0]])
    new = q[:, :2]
    cache = np.ones((3, 2, 40, head_dim) if pages is None else (3, 2, 16, head_dim), q.dtype)
    seqlens_k = np.zeros(len(lengths), np.int64)
    table = None if pages is None else np.zeros((len(lengths), 3), np.int64)
    problem, infos = describe_kv_cache(
        q, cache, cache.copy(), seqlens_k=seqlens_k, k_new=new, v_new=new, page_table=table, return_lse=True
    )
    if emulator.refuses(problem):
        return
    seqlens_k[:] = lengths  # past the checks
    if table is not None:
        table[:] = pages
    out, lse = emulator.run(problem, infos)
    assert not np.isnan(lse).any() and (np.abs(out.astype(np.float64) - 1) < 1e-3).all()
    capacity = 40 if pages is None else 48
    keys = np.minimum(np.clip(lengths, 0, capacity) + 2, capacity)
    np.testing.assert_allclose(lse[:, 0, 0], np.sqrt(head_dim) + np.log(keys), rtol=1e-3)
    assert (cache == 1).all()


@rows
@pytest.mark.share(3)
@pytest.mark.parametrize("pages", [None, (-1, 2**40, 7), (2, -(2**60), 1)], ids=["contiguous", "beyond", "before"])
def test_malformed_caches_stay_inside(spec: KernelSpec, pages: tuple[int, ...] | None) -> None:
    malformed_cache(Emulator(spec.name), (-5, 2**63 - 1, 39), pages)


MALFORMED = {
    "late_and_falling": (5, 3, 100, 20),
    "outside": (-7, 40, 30, 900),
    "far_outside": (0, 10**9, 10**9, 10**9),
    "all_empty": (100, 100, 100, 100),
    "huge": (0, 50, -(2**62), 80),
    "long_fall": (0, *(90 - i // 4 for i in range(300)), 95),
}


@rows
@pytest.mark.share(len(KERNELS))
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_cu_seqlens(spec: KernelSpec, name: str) -> None:
    malformed(Emulator(spec.name), MALFORMED[name])


@rows
@pytest.mark.share(4)
@pytest.mark.parametrize("name", ["causal-200x131", "batch-six", "packed-plain-True", "heads-6-2-100x90"])
def test_grid_in_several_launches(spec: KernelSpec, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_GRID", 5)
    assert_right(CASES_BY_NAME[name], spec.dtypes[0], Emulator(spec.name))


@rows
def test_without_lse(spec: KernelSpec) -> None:
    shape = (2, 70, min(32, spec.max_head_dim))
    x = np.random.default_rng(0).standard_normal(shape).astype(DTYPES_BY_NAME[spec.dtypes[0]])
    emulator = Emulator(spec.name)
    out, _ = emulator.attention(x, x, x, return_lse=True)
    assert emulator.attention(x, x, x).tobytes() == out.tobytes()


@pytest.mark.gpu
@rows
@dtypes
@pytest.mark.parametrize("name", ["lengths-63x65", "everything", "packed-plain-True", "head_dim-160-160"])
def test_agrees_with_the_gpu(spec: KernelSpec, name: str, dtype: str) -> None:
    """Within a few roundings: functions such as exp differ, and so do fused multiply-adds."""
    import cupy

    import cuflash

    case, emulator = fitting(CASES_BY_NAME[name], spec), Emulator(spec.name, device=launch.device_info(0))
    if emulator.refuses(describe(case, dtype)):
        pytest.skip(f"{spec.name} refuses")
    data = make_data(case, dtype)
    emulated = run(case, data, np, emulator.function(case))
    with cuflash.options(kernel=spec.name):
        real = run(case, data, cupy)
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-20, "float64": 2.0**-48}[dtype]
    for ours, theirs in zip(emulated[:2], real[:2], strict=True):
        np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=eps, atol=eps)
