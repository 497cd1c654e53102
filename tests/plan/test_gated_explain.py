"""`explain` and `warmup` of the gated delta rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import explain, options, warmup
from cuflash.gpu.compile import compile_offline
from cuflash.plan.gated import make_gated_plan
from cuflash.plan.table import device_of
from cuflash.problem.gated import GatedProblem
from cuflash.settings import AUTOMATIC
from plan.test_explain import StandIn

FUNCTIONS = {
    "chunk_gated_output": cuflash.chunk_gated_output,
    "chunk_gated_delta_rule": cuflash.chunk_gated_delta_rule,
    "recurrent_gated_delta_rule": cuflash.recurrent_gated_delta_rule,
}
operations = pytest.mark.parametrize("op", FUNCTIONS)


def arguments_of(op: str, dtype: Any = np.float16, make: Callable[..., Any] = np.zeros) -> dict[str, Any]:
    """A call: two sequences of 100 tokens, 2 heads and 4 of values, 64 features."""
    q, v, gates = make((2, 100, 2, 64), dtype), make((2, 100, 4, 64), dtype), make((2, 100, 4), np.float32)
    state = make((2, 4, 64, 64), np.float32)
    if op == "recurrent_gated_delta_rule":
        return {"q": q, "k": q, "v": v, "log_g": gates, "beta": gates, "state": state}
    if op == "chunk_gated_delta_rule":
        return {"q": q, "k": q, "v": v, "log_g": gates, "beta": gates, "initial_state": state}
    tokens, values, boundaries = make((200, 2, 64), dtype), make((200, 4, 64), dtype), make((3,), np.int32)
    h, gates = make((4, 4, 64, 64), dtype), make((200, 4), np.float32)
    return {"q": tokens, "k": tokens, "v_new": values, "h": h, "log_g_cumsum": gates, "cu_seqlens": boundaries}


@operations
@pytest.mark.parametrize("make", [np.zeros, StandIn], ids=["NumPy", "stand-ins"])
@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu(op: str, make: Callable[..., Any]) -> None:
    found = explain(FUNCTIONS[op], **arguments_of(op, make=make))
    assert found.kernel == "cpu" and found.device is None and found.plan is None
    assert (found.tile, found.source, found.workspace, found.refusals) == ("", "", 0, ())
    first, second = str(found).splitlines()
    assert first == str(found.problem) and first.startswith(f"{op} float16, ")
    assert re.fullmatch(r"  kernel +cpu: NumPy arrays are computed on the CPU, \d+ threads", second)
    warmup(FUNCTIONS[op], **arguments_of(op, make=make))


@operations
@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("capability", [61, 75, 90, 120])
@pytest.mark.parametrize("make", [np.zeros, StandIn], ids=["NumPy", "stand-ins"])
def test_a_device_that_is_not_here(op: str, make: Callable[..., Any], capability: int) -> None:
    found = explain(FUNCTIONS[op], **arguments_of(op, make=make), device=capability)
    device = device_of(capability)
    assert isinstance(found.problem, GatedProblem)
    plan = make_gated_plan(found.problem, device, AUTOMATIC)
    assert (found.device, found.plan) == (device, plan)
    assert (found.kernel, found.tile) == (plan.kernel, str(plan.tile))
    assert (found.num_blocks, found.num_threads) == (plan.num_blocks, plan.tile.num_threads)
    assert (found.shared_memory, found.workspace) == (plan.program.shared_memory, plan.workspace)
    assert (found.registers, found.spill_bytes) == (None, None)
    text = str(found)
    for part in (
        f"kernel         {plan.kernel} for sm_{capability}",
        f"{plan.tile} (tokens x features of v), {plan.tile.num_threads} threads",
        f"{plan.num_blocks} blocks",
        f"{plan.program.shared_memory} of {device.shared_memory_per_block} bytes",
        f"workspace      {plan.workspace} bytes",
    ):
        assert part in text
    assert ("chunks are made ready by gated_prepare, once" in text) == plan.kernel.startswith("gated_delta_")
    assert f'#include "{plan.kernel}.cu"' in found.source


@pytest.mark.usefixtures("no_compiler")
def test_stand_ins_have_strides() -> None:
    given = arguments_of("chunk_gated_output", make=StandIn)
    swapped = np.zeros((4, 4, 64, 64), np.float16).swapaxes(-1, -2)
    given["h"] = StandIn(swapped.shape, "float16", swapped.strides)
    found = explain(cuflash.chunk_gated_output, **given, device=90)
    real = arguments_of("chunk_gated_output") | {"h": swapped}
    assert found.problem == explain(cuflash.chunk_gated_output, **real, device=90).problem
    assert found.problem.traits.swapped_states  # type: ignore[union-attr]
    assert found.plan is not None and dict(found.plan.program.macros)["SWAPPED_STATES"] == 1


@pytest.mark.usefixtures("no_compiler")
def test_rows_ahead_say_why_not() -> None:
    given = arguments_of("chunk_gated_delta_rule", np.float32)
    found = explain(cuflash.chunk_gated_delta_rule, **given, device=90)
    reason = "dtype float32 is not one of float16, bfloat16"
    tensor_cores = ("gated_delta_wgmma", reason), ("gated_delta_mma", reason)
    assert (found.kernel, found.refusals) == ("gated_recurrent", tensor_cores)
    assert f"  not gated_delta_mma: {reason}" in str(found).splitlines()
    given = arguments_of("chunk_gated_output")
    with options(kernel="gated_output"):
        found = explain(cuflash.chunk_gated_output, **given, device=90)
    assert found.refusals == (("gated_output_mma", "options(kernel=...) chose another"),)
    assert (
        explain(cuflash.recurrent_gated_delta_rule, **arguments_of("recurrent_gated_delta_rule"), device=90).refusals
        == ()
    )


@operations
@pytest.mark.usefixtures("no_compiler")
def test_options_choose(op: str) -> None:
    given = arguments_of(op)
    with options(tile="63x64"), pytest.raises(ValueError, match="tile '63x64' cannot serve this call"):
        explain(FUNCTIONS[op], **given, device=90)
    with options(kernel="forward_mma"), pytest.raises(ValueError, match=f"'forward_mma' .* does not implement {op}"):
        explain(FUNCTIONS[op], **given, device=90)
    with options(kernel="gated_recurrent"), pytest.raises(ValueError, match="it needs GPU arrays, these are NumPy's"):
        explain(FUNCTIONS[op], **given)


@operations
def test_registers_are_those_of_the_main_kernel(op: str) -> None:
    pytest.importorskip("cupy")
    found = explain(FUNCTIONS[op], **arguments_of(op), device=90)
    assert found.plan is not None
    resources = compile_offline(found.plan.program, "sm_90")
    assert (found.registers, found.spill_bytes) == (resources.registers, resources.spill_bytes)
    assert f"{resources.registers} per thread, {resources.spill_bytes} bytes spilled" in str(found)


@operations
@pytest.mark.parametrize("capability", [None, 90])
@pytest.mark.parametrize(
    "changes",
    [
        {"q": None},
        {"k": np.zeros((2, 100, 2, 65), np.float16)},
        {"q": np.zeros((2, 100, 2, 64), np.float32)},
        {"scale": np.nan},
        {"out": np.zeros((2, 100, 4, 63), np.float16)},
        {"bogus": 1},
    ],
    ids=str,
)
def test_errors_are_those_of_the_call(op: str, changes: dict[str, Any], capability: int | None) -> None:
    given = arguments_of(op) | changes
    with pytest.raises((TypeError, ValueError)) as expected:
        FUNCTIONS[op](**given)
    with pytest.raises(expected.type) as found:
        explain(FUNCTIONS[op], device=capability, **given)
    assert str(expected.value).endswith(str(found.value))


@pytest.mark.usefixtures("no_compiler")
def test_heads_that_kernels_cannot_count() -> None:
    x, gates, state = (
        StandIn((1, 1, 2**31, 1)),
        StandIn((1, 1, 2**31), np.float32),
        StandIn((1, 2**31, 1, 1), "float32"),
    )
    with pytest.raises(ValueError, match=r"^v has 2147483648 heads, expected at most 2147483647 on a GPU$"):
        explain(cuflash.recurrent_gated_delta_rule, x, x, x, gates, gates, state, device=90)


def test_explain_writes_nothing() -> None:
    given = arguments_of("recurrent_gated_delta_rule") | {"state": np.full((2, 4, 64, 64), 7, np.float32)}
    given["out"] = np.full((2, 100, 4, 64), 7, np.float16)
    explain(cuflash.recurrent_gated_delta_rule, **given)
    assert (given["state"] == 7).all() and (given["out"] == 7).all()


@pytest.mark.gpu
@operations
def test_warmup_compiles_all_that_a_call_needs(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from cuflash.gpu import compile as compile_module

    built = []
    build = compile_module._build
    monkeypatch.setattr(compile_module, "_functions", {})
    monkeypatch.setattr(compile_module, "_build", lambda plan, device: built.append(plan) or build(plan, device))
    given = {name: cupy.asarray(x) for name, x in arguments_of(op).items()}
    warmup(FUNCTIONS[op], **given)
    warmup(FUNCTIONS[op], **arguments_of(op, make=StandIn))
    plan = explain(FUNCTIONS[op], **given).plan
    assert plan is not None and built == [launch.program for launch in plan.launches]
