"""Kernel, tile and grid of calls of the gated delta rule, what `options()` may choose, and what is printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.plan.gated import GATED_KERNELS, GatedPlan, GatedSpec, gated_refusals, make_gated_plan
from cuflash.plan.names import kernel_names
from cuflash.plan.table import CPU_KERNEL, KERNELS, device_of
from cuflash.problem.arrays import DTYPES, FLOAT_NAMES, ITEMSIZE, ArrayInfo, contiguous_strides
from cuflash.problem.describe_gated import (
    MAX_GATED_HEAD_DIM,
    describe_chunk_gated_delta_rule,
    describe_chunk_gated_output,
    describe_recurrent_gated_delta_rule,
)
from cuflash.problem.gated import GatedProblem
from cuflash.settings import Settings

H200 = device_of(90)
rows = pytest.mark.parametrize("spec", GATED_KERNELS, ids=lambda spec: spec.name)


def gpu(shape: tuple[int, ...], dtype: str, *, swapped: bool = False, at: int = 0) -> ArrayInfo:
    """An array on a GPU that is nowhere; swapped: the last axis is not the one of neighbours in memory."""
    size = ITEMSIZE[dtype]
    strides = contiguous_strides(shape, size)
    if swapped:
        strides = (*strides[:-2], size, shape[-2] * size)
    return ArrayInfo(None, shape, strides, dtype, at, 0, True)


def output_problem(
    dtype: str = "float16",
    head_dims: tuple[int, int] = (128, 128),
    *,
    tokens: int = 4096,
    chunk_size: int = 64,
    state_dtype: str = "",
    swapped: bool = False,
    at: int = 0,
) -> GatedProblem:
    """A call of `chunk_gated_output`: two sequences, 4 heads and 8 of values."""
    head_dim, head_dim_v = head_dims
    q, v = gpu((tokens, 4, head_dim), dtype, at=at), gpu((tokens, 8, head_dim_v), dtype)
    h = gpu((-(-tokens // chunk_size) + 1, 8, head_dim, head_dim_v), state_dtype or dtype, swapped=swapped)
    gates, boundaries = gpu((tokens, 8), "float32"), gpu((3,), "int32")
    return describe_chunk_gated_output(q, q, v, h, gates, boundaries, chunk_size=chunk_size)[0]


def delta_problem(
    dtype: str = "float16",
    head_dims: tuple[int, int] = (128, 128),
    *,
    batch: int = 2,
    tokens: int = 4096,
    packed: bool = False,
    recurrent: bool = False,
    swapped: bool = False,
    at: int = 0,
) -> GatedProblem:
    """A call of either form of the delta rule: 4 heads and 8 of values, states in and out."""
    head_dim, head_dim_v = head_dims
    batch = 1 if packed else batch
    q, v = gpu((batch, tokens, 4, head_dim), dtype, at=at), gpu((batch, tokens, 8, head_dim_v), dtype)
    gates = gpu((batch, tokens, 8), "float32")
    computed = "float64" if dtype == "float64" else "float32"
    state = gpu((2 if packed else batch, 8, head_dim, head_dim_v), computed, swapped=swapped)
    if recurrent:
        return describe_recurrent_gated_delta_rule(q, q, v, gates, gates, state)[0]
    options: dict[str, Any] = {"initial_state": state, "output_final_state": True}
    if packed:
        options["cu_seqlens"] = gpu((3,), "int32")
    return describe_chunk_gated_delta_rule(q, q, v, gates, gates, **options)[0]


MAKE: dict[str, Callable[..., GatedProblem]] = {
    "chunk_gated_output": output_problem,
    "chunk_gated_delta_rule": delta_problem,
    "recurrent_gated_delta_rule": lambda *given, **options: delta_problem(*given, **options, recurrent=True),
}
operations = pytest.mark.parametrize("op", MAKE)


def plan(problem: GatedProblem, capability: int = 90, kernel: str = "", tile: str = "") -> GatedPlan:
    """Plan without a GPU."""
    return make_gated_plan(problem, device_of(capability), Settings(kernel, tile, False))


@operations
@pytest.mark.parametrize("dtype", FLOAT_NAMES)
@pytest.mark.parametrize("capability", [50, 75, 80, 90, 120])
def test_the_first_row_that_accepts_serves(op: str, dtype: str, capability: int) -> None:
    problem = MAKE[op](dtype)
    found = gated_refusals(problem.traits, device_of(capability))
    assert [name for name, _ in found] == [spec.name for spec in GATED_KERNELS if op in spec.operations]
    assert plan(problem, capability).kernel == next(name for name, reason in found if reason is None)


@operations
@pytest.mark.parametrize("head_dims", [(1, 1), (128, 128), (256, 256), (256, 1), (1, 256)])
def test_the_last_row_of_an_operation_takes_everything(op: str, head_dims: tuple[int, int]) -> None:
    for capability in (50, 75, 86, 100):
        for dtype in FLOAT_NAMES:
            problem = MAKE[op](dtype, head_dims, at=1)
            assert gated_refusals(problem.traits, device_of(capability))[-1][1] is None


@pytest.mark.parametrize(
    ("make", "capability", "words"),
    [
        (lambda: output_problem("float32"), 90, "dtype float32 is not one of float16, bfloat16"),
        (lambda: output_problem(), 75, "needs sm_80, the device is sm_75"),
        (lambda: delta_problem(recurrent=True), 90, "does not implement recurrent_gated_delta_rule"),
        (
            lambda: output_problem(head_dims=(256, 256), chunk_size=128),
            86,
            "no tile for head_dim 256/256 fits 101376 bytes of shared memory",
        ),
    ],
)
def test_rows_refuse_with_a_sentence(make: Callable[[], GatedProblem], capability: int, words: str) -> None:
    problem = make()
    assert GATED_KERNELS[0].refusal(problem.traits, device_of(capability)) == words
    with pytest.raises(ValueError, match=f"^kernel 'gated_output_mma' cannot serve this call: {re.escape(words)}$"):
        plan(problem, capability, "gated_output_mma")


@rows
def test_rows_serve_the_head_dims_that_they_name(spec: GatedSpec) -> None:
    capability, most = spec.capabilities[0] if spec.capabilities else 90, spec.max_head_dim
    for head_dim in (most, most + 1)[: 2 if most < MAX_GATED_HEAD_DIM else 1]:
        problem = MAKE[spec.operations[0]](spec.dtypes[0], (head_dim, MAX_GATED_HEAD_DIM))
        words = f"head_dim {head_dim} is above {most}" if head_dim > most else None
        assert spec.refusal(problem.traits, device_of(capability)) == words


@operations
def test_kernels_of_other_operations_refuse(op: str) -> None:
    for name in kernel_names():
        if any(spec.name == name and op in spec.operations for spec in GATED_KERNELS):
            continue
        words = "it computes NumPy arrays, these are on a GPU" if name == "cpu" else f"does not implement {op}"
        with pytest.raises(ValueError, match=f"^kernel '{name}' cannot serve this call: {words}$"):
            plan(MAKE[op](), kernel=name)


def test_names_of_all_operations() -> None:
    assert kernel_names() == [*(spec.name for spec in KERNELS), *(spec.name for spec in GATED_KERNELS), CPU_KERNEL]
    assert len(set(kernel_names())) == len(kernel_names())


def some_problems(spec: GatedSpec) -> list[GatedProblem]:
    """Problems that a row takes."""
    made = [
        MAKE[op](dtype, head_dims, swapped=swapped)
        for op in spec.operations
        for dtype in spec.dtypes
        for head_dims in ((16, 16), (64, 128), (100, 200), (256, 256))
        for swapped in (False, True)
    ]
    return [problem for problem in made if spec.refusal(problem.traits, H200) is None]


@rows
def test_every_tile_can_be_chosen(spec: GatedSpec) -> None:
    problems = some_problems(spec)
    assert problems
    for problem in problems:
        for tile in dict.fromkeys(map(str, spec.tiles(problem.traits, H200))):
            with cuflash.options(kernel=spec.name, tile=tile):
                found = plan(problem, kernel=spec.name, tile=tile)
            assert (found.kernel, str(found.tile)) == (spec.name, tile)
            assert found.program.shared_memory <= H200.shared_memory_per_block
        with pytest.raises(ValueError, match=f"tile '3x3' cannot serve this call: kernel '{spec.name}' has "):
            plan(problem, kernel=spec.name, tile="3x3")


def test_programs_do_not_depend_on_lengths() -> None:
    for make in MAKE.values():
        programs = {plan(make(tokens=tokens)).program for tokens in (4096, 4097, 8000)}
        assert len(programs) == 1


def test_grid_covers_packed_sequences_of_unknown_lengths() -> None:
    """Each of them, and the tokens before and behind them all, may end in a partial chunk."""
    found = plan(output_problem(tokens=1000))
    assert found.num_blocks == (1000 // 64 + 4) * 8 * found.launches[-1].num_parts
    walking = plan(delta_problem(packed=True))
    assert walking.num_blocks == 3 * 8 * walking.launches[-1].num_parts
    assert plan(delta_problem(batch=5)).num_blocks % (5 * 8) == 0
    for make in MAKE.values():
        assert plan(make(tokens=0)).workspace == 0


@pytest.mark.parametrize("packed", [False, True])
def test_chunks_are_prepared_in_a_workspace(packed: bool) -> None:
    found = plan(delta_problem(packed=packed, tokens=1000))
    preparation = found.launches[0]
    assert preparation.program.kernel == "gated_prepare"
    assert preparation.num_blocks == (1000 // 64 + 4 if packed else 2 * 16) * 8
    chunks = 1000 // 64 + 2 if packed else 2 * 16
    assert found.workspace == chunks * 8 * (3 * 10 * 512 + 3 * 4 * 64)
    assert f"{found.workspace} bytes of workspace" in str(found)
    assert len(plan(delta_problem("float32")).launches) == 1


def test_sequences_of_few_heads_are_cut() -> None:
    """Into segments of whole chunks; not where blocks are many, chunks few, or lengths unknown."""

    def made(num_heads: int, tokens: int = 8192, packed: bool = False) -> GatedPlan:
        problem = delta_problem("bfloat16", batch=1, tokens=tokens, packed=packed)
        return plan(problem._replace(num_heads=num_heads, num_heads_v=num_heads))

    few = made(8)
    assert [launch.program.kernel for launch in few.launches] == [
        "gated_prepare", "gated_delta_wgmma", "gated_chain", "gated_delta_wgmma",
    ]  # fmt: skip
    _, carry, chain, walk = few.launches
    assert walk.segment_tokens == carry.segment_tokens == chain.segment_tokens
    assert walk.segment_tokens % 64 == 0 and -(-8192 // walk.segment_tokens) == walk.num_segments > 2
    assert carry.num_segments == walk.num_segments - 1 and chain.num_segments == 1
    assert (carry.num_blocks, walk.num_blocks) == (8 * 4 * carry.num_segments, 8 * 2 * walk.num_segments)
    assert few.workspace > made(8, packed=True).workspace and f"({walk.num_segments} segments)" in str(few)
    for whole in (made(32), made(8, 512), made(8, packed=True)):
        assert len(whole.launches) == 2 and "segments" not in str(whole)


def test_plans_print_as_one_line() -> None:
    assert re.fullmatch(
        r"gated_output_mma tile 64x128, 256 threads, \d+ blocks, \d+ bytes of shared memory",
        str(plan(output_problem())),
    )


def test_problems_print_in_words() -> None:
    assert str(output_problem("bfloat16", (128, 64), state_dtype="float32")) == (
        "chunk_gated_output bfloat16, packed sequences 2, heads 4/8, tokens 4096, head_dim 128/64, chunks of 64, "
        "states float32"
    )
    assert str(delta_problem(packed=True)) == (
        "chunk_gated_delta_rule float16, packed sequences 2, heads 4/8, tokens 4096, head_dim 128, chunks of 64, "
        "initial_state, final_state"
    )
    assert str(delta_problem("float32", recurrent=True, tokens=1, batch=7)) == (
        "recurrent_gated_delta_rule float32, batch 7, heads 4/8, tokens 1, head_dim 128"
    )


# Calls of NumPy arrays


def numpy_calls() -> dict[str, Callable[[], Any]]:
    """A call of each function; states are zeros, and shared."""
    x, gates, state = np.ones((1, 5, 2, 8), np.float32), np.zeros((1, 5, 2)), np.zeros((1, 2, 8, 8), np.float32)
    return {
        "chunk_gated_output": lambda: cuflash.chunk_gated_output(x[0], x[0], x[0], state, gates[0], np.array([0, 5])),
        "chunk_gated_delta_rule": lambda: cuflash.chunk_gated_delta_rule(x, x, x, gates, gates),
        "recurrent_gated_delta_rule": lambda: cuflash.recurrent_gated_delta_rule(x, x, x, gates, gates, state),
    }


@operations
def test_log_is_one_line_per_call(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = numpy_calls()[op]
    call()
    with cuflash.options(log=True):
        call()
        call()
    first, second = capsys.readouterr().err.splitlines()
    assert first == second and re.fullmatch(rf"cuflash: {op} float32, .*, heads 2/2, tokens 5, .* -> cpu", first)


@operations
def test_numpy_arrays_refuse_what_is_for_a_gpu(op: str) -> None:
    call = numpy_calls()[op]
    for name in ("gated_recurrent", "forward_mma"):
        words = f"kernel '{name}' cannot serve this call: it needs GPU arrays, these are NumPy's"
        with cuflash.options(kernel=name), pytest.raises(ValueError, match=words):
            call()
    words = "tile '1x32' cannot serve this call: the NumPy back end has no choice of tile"
    with cuflash.options(tile="1x32"), pytest.raises(ValueError, match=words):
        call()
    with cuflash.options(kernel="cpu"):
        call()


def test_what_is_refused_changes_no_state() -> None:
    x, gates, state = np.ones((1, 5, 2, 8), np.float32), np.zeros((1, 5, 2)), np.full((1, 2, 8, 8), 7, np.float32)
    with cuflash.options(kernel="gated_recurrent"), pytest.raises(ValueError, match="cannot serve this call"):
        cuflash.recurrent_gated_delta_rule(x, x, x, gates, gates, state)
    assert (state == 7).all()


@pytest.mark.gpu
@operations
def test_log_names_kernel_and_tile(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    import cupy

    x, gates = cupy.ones((1, 5, 2, 8), DTYPES["float16"]), cupy.zeros((1, 5, 2), np.float32)
    state, boundaries = cupy.zeros((1, 2, 8, 8), np.float32), cupy.asarray([0, 5])
    with cuflash.options(log=True):
        if op == "chunk_gated_output":
            cuflash.chunk_gated_output(x[0], x[0], x[0], state, gates[0], boundaries)
        elif op == "chunk_gated_delta_rule":
            cuflash.chunk_gated_delta_rule(x, x, x, gates, gates)
        else:
            cuflash.recurrent_gated_delta_rule(x, x, x, gates, gates, state)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"cuflash: {op} float16, .* -> gated_\w+ tile \d+x\d+(x2)?, .*", line)
