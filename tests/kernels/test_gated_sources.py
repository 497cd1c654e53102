"""Every row of the gated delta rule compiles for every architecture, without a GPU: spills, struct layout, memory."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from plan.test_gated_plan import delta_problem, output_problem

from cuflash.gpu.compile import Resources, compile_offline
from cuflash.gpu.gated import FIELDS, STRIDED, gated_parts, gated_pointers
from cuflash.plan.build import Program
from cuflash.plan.gated import GATED_KERNELS, GatedPlan, GatedSpec, make_gated_plan
from cuflash.plan.table import device_of
from cuflash.problem.gated import GatedProblem
from cuflash.settings import AUTOMATIC, Settings
from kernels.test_sources import (
    ARCHITECTURES,
    check_resources,
    compile_with,
    layout_checks,
    nvrtc_12,
    plans_of_this_run,
)

pytest.importorskip("cupy", reason="the compile tests need CuPy with NVRTC")

rows = pytest.mark.parametrize("spec", GATED_KERNELS, ids=lambda spec: spec.name)
PLAIN = "128/128"


def _outputs(dtype: str) -> Iterator[tuple[str, GatedProblem]]:
    """Calls of `chunk_gated_output`: heads of all sizes, chunks of all sizes, states of other types and orders."""
    yield PLAIN, output_problem(dtype)
    yield "16/16", output_problem(dtype, (16, 16), chunk_size=16)
    yield "64/128", output_problem(dtype, (64, 128), chunk_size=128)
    yield "256/256", output_problem(dtype, (256, 256))
    yield "small_chunks", output_problem(dtype, (256, 64), chunk_size=32)
    yield "swapped", output_problem(dtype, swapped=True)
    yield "wide_swapped", output_problem(dtype, (256, 256), swapped=True)
    yield "other_states", output_problem(dtype, state_dtype="float32" if dtype == "float16" else "float16")
    yield "gaps", output_problem(dtype, (100, 200), at=8)
    yield "odd_bytes", output_problem(dtype, (100, 200), at=1)


def _delta_rules(dtype: str, *, recurrent: bool) -> Iterator[tuple[str, GatedProblem]]:
    """Calls of the delta rule: heads of all sizes, packed sequences, states in another order."""
    yield PLAIN, delta_problem(dtype, recurrent=recurrent)
    yield "16/16", delta_problem(dtype, (16, 16), recurrent=recurrent)
    yield "64/256", delta_problem(dtype, (64, 256), recurrent=recurrent)
    yield "192/64", delta_problem(dtype, (192, 64), recurrent=recurrent, swapped=True)
    yield "256/256", delta_problem(dtype, (256, 256), recurrent=recurrent)
    yield "swapped", delta_problem(dtype, recurrent=recurrent, swapped=True)
    yield "gaps", delta_problem(dtype, (100, 200), recurrent=recurrent, at=8)
    yield "odd_bytes", delta_problem(dtype, (100, 200), recurrent=recurrent, at=1)
    if not recurrent:
        yield "packed", delta_problem(dtype, packed=True)


def representative_plans(spec: GatedSpec, capability: int) -> dict[str, GatedPlan]:
    """Plans of representative problems that a row takes on a device, with each of its tiles, by name."""
    device, plans = device_of(capability), {}
    recurrent = "chunk_gated_delta_rule" not in spec.operations or not spec.preparing
    for dtype in spec.dtypes:
        made = _outputs(dtype) if "chunk_gated_output" in spec.operations else _delta_rules(dtype, recurrent=recurrent)
        for name, problem in made:
            if spec.refusal(problem.traits, device) is not None:
                continue
            for tile in dict.fromkeys(map(str, spec.tiles(problem.traits, device))):
                plans[f"{dtype}-{name} {tile}"] = make_gated_plan(problem, device, Settings(spec.name, tile, False))
    return plans


def programs_of(spec: GatedSpec, plans: dict[str, GatedPlan]) -> dict[str, Program]:
    """What is compiled for plans, by name, once each."""
    programs: dict[str, Program] = {}
    for name, plan in plans.items():
        for program in (launch.program for launch in plan.launches):
            if program not in programs.values():
                programs[f"{program.kernel} {name}"] = program
    return programs


@rows
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_compiles_without_spills_and_as_laid_out(
    spec: GatedSpec, capability: int, share: Callable[[str, int], bool]
) -> None:
    if capability < spec.min_compute_capability or capability not in (spec.capabilities or [capability]):
        pytest.skip(f"{spec.name} is for {spec.capabilities or f'sm_{spec.min_compute_capability} and newer'}")
    programs = programs_of(spec, plans_of_this_run(representative_plans(spec, capability), capability, share))

    def compiled(program: Program) -> Resources:
        return compile_offline(program, f"sm_{capability}", layout_checks(program, "GatedParams", FIELDS))

    with ThreadPoolExecutor(2) as pool:
        for name, resources in zip(programs, pool.map(compiled, programs.values()), strict=True):
            check_resources(f"{name} sm_{capability}", resources)


@pytest.mark.parametrize(
    "spec", [spec for spec in GATED_KERNELS if spec.min_compute_capability <= 70], ids=lambda spec: spec.name
)
def test_compiles_for_sm_70(spec: GatedSpec) -> None:
    nvrtc = nvrtc_12()
    if nvrtc is None:
        pytest.skip("NVRTC 12 is not installed (nvidia-cuda-nvrtc-cu12)")
    for name, plan in representative_plans(spec, 70).items():
        if f"-{PLAIN} " in name:
            check_resources(f"{spec.name} {name} sm_70", compile_with(nvrtc, plan.program, "sm_70"))


@rows
def test_representatives_have_every_form(spec: GatedSpec) -> None:
    plans = representative_plans(spec, 90)
    assert {plan.kernel for plan in plans.values()} == {spec.name}
    macros = [dict(plan.program.macros) for plan in plans.values()]
    alignments = {found["ALIGNMENT"] for found in macros}
    assert (1 in alignments or spec.name.endswith("_wgmma")) and (16 in alignments or not spec.vectors)
    assert {found["DTYPE"] for found in macros} == {f"CUFLASH_{dtype.upper()}" for dtype in spec.dtypes}
    if "SWAPPED_STATES" in macros[0]:
        assert {found["SWAPPED_STATES"] for found in macros} == {0, 1}
    if spec.preparing:
        assert {found["VARLEN"] for found in macros} == {0, 1}
        assert {plan.launches[0].program.kernel for plan in plans.values()} == {spec.preparing}


def test_struct_is_packed_in_order() -> None:
    problem = delta_problem(packed=True, tokens=100)
    launch = make_gated_plan(problem, device_of(90), AUTOMATIC).launches[-1]
    ((num_blocks, values),) = gated_parts(problem, launch._replace(num_blocks=24, num_parts=2))
    addresses = {name: 1 + place for place, (name, _) in enumerate(FIELDS[:11])}
    packed = gated_pointers(addresses) + values
    assert num_blocks == 24 and len(packed) == struct.calcsize("=" + "".join(code for _, code in FIELDS))
    fields, offset = {}, 0
    for name, code in FIELDS:
        fields[name] = list(struct.unpack_from("=" + code, packed, offset))
        offset += struct.calcsize("=" + code)
    assert [fields[name] for name in addresses] == [[1 + place] for place in range(11)]
    assert fields["scale"] == [128**-0.5] and fields["head_dim"] == fields["head_dim_v"] == [128]
    assert fields["seqlen"] == [100] and fields["num_sequences"] == [2] and fields["num_parts"][0] == 2
    assert fields["num_heads_v"] == [8, (1 << 61) - 1] and fields["group_size"] == [2, (1 << 63) - 1]
    assert fields["cu_seqlens_stride"] == [4] and fields["cu_seqlens_size"] == [-4]
    for name in STRIDED:
        given = getattr(problem.strides, name) or ()
        assert fields[f"{name}_strides"] == [*given, *(0,) * (4 - len(given))]


def test_the_largest_grids_are_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuflash.gpu.gated.MAX_GRID", 10)
    launch = make_gated_plan(delta_problem(), device_of(90), AUTOMATIC).launches[0]
    parts = gated_parts(delta_problem(), launch._replace(num_blocks=25))
    place = struct.calcsize(
        "=" + "".join(code for name, code in FIELDS[11 : [n for n, _ in FIELDS].index("first_block")])
    )
    assert [blocks for blocks, _ in parts] == [10, 10, 5]
    assert [struct.unpack_from("=q", values, place)[0] for _, values in parts] == [0, 10, 20]
