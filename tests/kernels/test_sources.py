"""Every row of the table compiles for every architecture, without a GPU: time, registers, spills, struct layout."""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from emulator.emulator import tile_map

from cuflash.gpu import arguments, merge
from cuflash.gpu.compile import (
    Resources,
    compile_offline,
    compiler_options,
    entry_text,
    parse_resources,
    source_digest,
    source_folder,
)
from cuflash.gpu.tensor_maps import MAP_BYTES
from cuflash.plan.build import Program
from cuflash.plan.gated import GATED_KERNELS, GatedPlan
from cuflash.plan.plan import Plan, make_plan
from cuflash.plan.table import HELPERS, KERNELS, KernelSpec, device_of
from cuflash.problem.arrays import DTYPES, FLOAT_NAMES, ArrayInfo, contiguous_strides
from cuflash.problem.describe import describe_attention, describe_attention_lse, describe_varlen
from cuflash.problem.describe_cache import describe_kv_cache
from cuflash.problem.problem import Operand, Problem
from cuflash.settings import Settings

pytest.importorskip("cupy", reason="the compile tests need CuPy with NVRTC")

AnyPlan = TypeVar("AnyPlan", Plan, GatedPlan)
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
FEWEST = "128", "everything"
"""Problems that will do for the oldest architecture, which another compiler is for."""
PARTS = 24
"""A run compiles one in so many, and the first problem of every row for every architecture."""
SECONDS_PER_KERNEL = 6.0
"""Limit of processor time; generous, as test machines have slow cores. The aim is 1.5 s on a fast one."""


def _info(shape: tuple[int, ...], dtype: str) -> ArrayInfo:
    return ArrayInfo(None, shape, contiguous_strides(shape, DTYPES[dtype].itemsize), dtype, 0, 0, True)


def _features_alone(dtype: str, head_dim: int, bias: ArrayInfo, mask: ArrayInfo) -> Iterator[tuple[str, Problem]]:
    """Each feature that takes registers."""
    features: dict[str, dict[str, Any]] = {
        "bias": {"bias": bias},
        "mask": {"mask": mask},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": _info((16,), "float32")},
    }
    x = _info((16, 16, 2048, head_dim), dtype)
    for name, options in features.items():
        yield f"{dtype}-{name}_{head_dim}", describe_attention(x, x, x, **options)[0]


def _tensor_core_problems(dtype: str, bias: ArrayInfo, mask: ArrayInfo) -> Iterator[tuple[str, Problem]]:
    """Head dimensions that differ, and each feature alone: registers are scarce where scores stay."""
    for head_dim, head_dim_v in ((64, 128), (256, 64), (320, 320)):
        x, v = (_info((16, 16, 2048, features), dtype) for features in (head_dim, head_dim_v))
        yield f"{dtype}-{head_dim}/{head_dim_v}", describe_attention(x, x, v, causal=True)[0]
    for head_dim in (64, 128, 256):
        yield from _features_alone(dtype, head_dim, bias, mask)
    few, many = _info((1, 8, 512, 128), dtype), _info((1, 8, 16384, 128), dtype)
    yield f"{dtype}-splits", describe_attention(few, many, many)[0]
    if dtype == "float16":
        x = _info((16, 16, 2048, 128), dtype)
        for name, softcap in (("small", 5.0), ("large", 500.0)):
            yield f"{dtype}-{name}_softcap", describe_attention(x, x, x, softcap=softcap)[0]


def representative_problems(*, tensor_cores: bool) -> dict[str, Problem]:
    """Representative problems: every dtype at several head dimensions, and every compile-time feature.

    Kernels without tensor cores compile the same for tf32 as for float32, and features take few of their registers.
    """
    problems = {}
    for dtype in FLOAT_NAMES:
        for head_dim in (16, 64, 128, 192, 256, 512):
            x = _info((16, 16, 2048, head_dim), dtype)
            problems[f"{dtype}-{head_dim}"] = describe_attention(x, x, x, causal=True)[0]
        x = _info((16, 16, 2048, 80), dtype)
        bias, mask = _info((2048, 2048), "float32"), _info((2048, 2048), "bool")
        options: dict[str, Any] = {"bias": bias, "mask": mask, "softcap": 2.0, "out_dtype": "float64"}
        problems[f"{dtype}-everything"] = describe_attention(x, x, x, **options)[0]
        without_values = {name: option for name, option in options.items() if name != "out_dtype"}
        problems[f"{dtype}-lse_everything"] = describe_attention_lse(x, x, **without_values)[0]
        for head_dim in (64, 128, 256):
            q = _info((16, 16, 2048, head_dim), dtype)
            problems[f"{dtype}-lse_{head_dim}"] = describe_attention_lse(q, q, causal=True)[0]
        if (tensor_cores and dtype in ("float16", "bfloat16")) or dtype == "float64":
            problems |= _tensor_core_problems(dtype, bias, mask)
        elif dtype == "float16":  # at the limit of registers with which three blocks share a multiprocessor
            problems |= _features_alone(dtype, 64, bias, mask)
        tokens, boundaries = _info((4096, 4, 96), dtype), _info((5,), "int32")
        problems[f"{dtype}-varlen"] = describe_varlen(tokens, tokens, tokens, boundaries, causal=True)[0]
        odd = x._replace(pointer=1)
        problems[f"{dtype}-odd_bytes"] = describe_attention(odd, odd, odd)[0]
        if tensor_cores and dtype == "float32":
            for head_dim in (64, 128, 256):
                x = _info((16, 16, 2048, head_dim), dtype)
                problems[f"tf32-{head_dim}"] = describe_attention(x, x, x, causal=True, precision="tf32")[0]
            x = _info((16, 16, 2048, 80), dtype)
            problems["tf32-everything"] = describe_attention(x, x, x, precision="tf32", **options)[0]
        problems |= dict(_cache_problems(dtype))
        few, many = _info((16, 16, 2, 64), dtype), _info((16, 16, 1024, 64), dtype)
        problems[f"{dtype}-few_rows"] = describe_attention(few, many, many)[0]
    return problems


def _cache_problems(dtype: str) -> Iterator[tuple[str, Problem]]:
    """Caches with lengths, with pages, and with pages and all else."""
    lengths, table = _info((16,), "int32"), _info((16, 128), "int32")
    for head_dim in (64, 128, 256):
        q, new = _info((16, 16, 512, head_dim), dtype), _info((16, 4, 512, head_dim), dtype)
        k, v = (_info((16, 4, 8192, head_dim), dtype)._replace(pointer=at << 40) for at in (1, 2))
        pages = [x._replace(shape=(2048, 4, 64, head_dim), strides=new.strides) for x in (k, v)]
        options: dict[str, Any] = {"seqlens_k": lengths, "k_new": new, "v_new": new, "causal": True}
        yield f"{dtype}-cache_{head_dim}", describe_kv_cache(q, k, v, **options)[0]
        yield f"{dtype}-paged_{head_dim}", describe_kv_cache(q, *pages, page_table=table, **options)[0]
    bias, mask = _info((512, 8192), "float32"), _info((512, 8192), "bool")
    options |= {"bias": bias, "mask": mask, "softcap": 2.0, "alibi_slopes": _info((16,), "float32")}
    yield f"{dtype}-paged_everything", describe_kv_cache(q, *pages, page_table=table, **options)[0]
    one = q._replace(shape=(16, 16, 1, 256))
    yield f"{dtype}-paged_few_rows", describe_kv_cache(one, *pages, seqlens_k=lengths, page_table=table)[0]


def point_problems() -> dict[str, Problem]:
    """Few features: how many, each feature of a call that takes registers, and calls that take other tiles."""
    problems = {}
    for dtype in ("float32", "float64"):
        bias, mask = _info((2048, 2048), "float32"), _info((2048, 2048), "bool")
        for head_dim, head_dim_v in ((1, 1), (3, 1), (3, 3), (3, 16), (8, 8), (16, 1), (16, 16)):
            x, v = (_info((1, 100_000, features), dtype) for features in (head_dim, head_dim_v))
            problems[f"{dtype}-{head_dim}/{head_dim_v}"] = describe_attention(x, x, v)[0]
        for head_dim in (3, 16):
            x = _info((16, 16, 2048, head_dim), dtype)
            options: dict[str, Any] = {"bias": bias, "mask": mask, "softcap": 2.0, "out_dtype": "float64"}
            problems[f"{dtype}-everything_{head_dim}"] = describe_attention(x, x, x, **options)[0]
            problems |= _features_alone(dtype, head_dim, bias, mask)
            odd = x._replace(pointer=1)
            problems[f"{dtype}-odd_bytes_{head_dim}"] = describe_attention(odd, odd, odd)[0]
            few = _info((16, 16, 2, head_dim), dtype)
            problems[f"{dtype}-few_rows_{head_dim}"] = describe_attention(few, x, x)[0]
        tokens, boundaries = _info((4096, 4, 12), dtype), _info((5,), "int32")
        problems[f"{dtype}-varlen"] = describe_varlen(tokens, tokens, tokens, boundaries, causal=True)[0]
    return problems


def representative_plans(spec: KernelSpec, capability: int) -> dict[str, Plan]:
    """Plans of the representative problems that a row takes on a device, by name."""
    device = device_of(capability)
    few_features = spec.max_head_dim <= 16
    problems = point_problems() if few_features else representative_problems(tensor_cores=spec.rounds_weights)
    return {
        name: make_plan(problem, device, Settings(spec.name, "", False))
        for name, problem in problems.items()
        if spec.refusal(problem.traits, device) is None
    }


LOCAL_BYTES = {
    "forward_mma": 4 * (128 + 4), "forward_wmma": 4 * (128 + 2), "forward_wgmma": 4 * (128 + 2),
    "precise_float64": 8 * (66 + 2), "precise_wide": 8 * (4 * 17 + 4 + 16),
    "precise_wgmma": 4 * (130 + 2 + 24) + 16, "precise_float32": 4 * (130 + 2 + 24) + 16,
    "forward_points": 2 * 4 * 4 * (17 + 1),
}  # fmt: skip
"""Memory of a thread that a kernel keeps on purpose: sums of earlier keys, that rest there for many more keys."""


def check_resources(name: str, resources: Resources) -> None:
    """No spills, little local memory, and compiled soon enough."""
    assert resources.spill_bytes == 0, f"{name} spills {resources.spill_bytes} bytes ({resources.registers} registers)"
    if "odd_bytes" not in name:
        allowed = LOCAL_BYTES.get(name.split()[0], 0)
        assert resources.stack_bytes <= allowed, f"{name} uses {resources.stack_bytes} bytes of local memory"
    assert not resources.serializes, f"{name} has products of warpgroups wait for one another"
    assert resources.seconds < SECONDS_PER_KERNEL, f"{name} took {resources.seconds:.1f} s to compile"


def layout_checks(
    program: Program, params: str = "AttentionParams", fields: arguments.Fields = arguments.FIELDS
) -> str:
    """For the compiler to confirm: the offset of each field that is packed, and the size that the table plans with."""
    offset, checks = 0, []
    for name, code in fields:
        checks.append(f'static_assert(__builtin_offsetof(cuflash::{params}, {name}) == {offset}, "{name}");')
        offset += struct.calcsize("=" + code)
    checks.append(f'static_assert(sizeof(cuflash::{params}) == {offset}, "size");')
    if program.takes_maps:
        checks.append(f'static_assert(sizeof(cuflash::KeyMaps) == 2 * {MAP_BYTES}, "maps");')
    if program.shared_memory:
        checks.append(f'static_assert(sizeof(cuflash::SharedTiles) == {program.shared_memory}, "shared memory");')
    return "\n".join([*checks, ""])


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_compiles_without_spills_and_as_laid_out(
    spec: KernelSpec, capability: int, share: Callable[[str, int], bool]
) -> None:
    if capability < spec.min_compute_capability:
        pytest.skip(f"{spec.name} is for sm_{spec.min_compute_capability} and newer")
    plans = representative_plans(spec, capability)
    if not plans:
        pytest.skip(f"{spec.name} has no problem to serve on sm_{capability}")
    plans = plans_of_this_run(plans, capability, share)
    programs = {f"{spec.name} {name}": plan.program for name, plan in plans.items()}
    for name, plan in plans.items():
        preparation = plan.preparation
        if preparation is not None and preparation.program not in programs.values():
            programs[f"{preparation.program.kernel} {name}"] = preparation.program
        if plan.append is not None:
            programs[f"{plan.append.program.kernel} {name}"] = plan.append.program

    def compiled(program: Program) -> Resources:
        return compile_offline(program, f"sm_{capability}", layout_checks(program))

    with ThreadPoolExecutor(2) as pool:
        for name, resources in zip(programs, pool.map(compiled, programs.values()), strict=True):
            check_resources(f"{name} sm_{capability}", resources)


def plans_of_this_run(
    plans: dict[str, AnyPlan], capability: int, share: Callable[[str, int], bool]
) -> dict[str, AnyPlan]:
    """Leave the first of them, and one in `PARTS` of the others; what is there in float16 and bfloat16 in one of these.

    They compile much alike: of neighbouring architectures one has in float16 what the other one has in bfloat16.
    """
    left_out, turn = set(), ARCHITECTURES.index(capability)
    for name in plans:
        dtype, _, problem = name.partition("-")
        if dtype == "float16" and f"bfloat16-{problem}" in plans:
            left_out.add(f"{('bfloat16', 'float16')[(len(left_out) + turn) % 2]}-{problem}")
    plans = {name: plan for name, plan in plans.items() if name not in left_out}
    first = next(iter(plans))
    return {
        name: plan
        for name, plan in plans.items()
        if name == first or share(f"{plan.kernel} {name} {capability}", PARTS)
    }


def nvrtc_12() -> ctypes.CDLL | None:
    """NVRTC 12 from its wheel, beside the newer one that CuPy uses: the last that knows sm_70."""
    from cupy.cuda import nvrtc

    nvrtc.getVersion()  # loads CuPy's own, which would otherwise be this one from now on
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        for library in sorted(Path(folder).glob("cuda_nvrtc/lib/libnvrtc.so.12*")):
            return ctypes.CDLL(str(library))
    return None


@pytest.mark.parametrize(
    "spec", [spec for spec in KERNELS if spec.min_compute_capability <= 70], ids=lambda spec: spec.name
)
def test_compiles_for_sm_70(spec: KernelSpec) -> None:
    nvrtc = nvrtc_12()
    if nvrtc is None:
        pytest.skip("NVRTC 12 is not installed (nvidia-cuda-nvrtc-cu12)")
    for name, plan in representative_plans(spec, 70).items():
        if name.split("-")[1] in FEWEST:
            check_resources(f"{spec.name} {name} sm_70", compile_with(nvrtc, plan.program, "sm_70"))


def test_warpgroups_spill_nothing_with_an_older_compiler(share: Callable[[str, int], bool]) -> None:
    """NVRTC 12.9 and 13.0 keep fewer values in registers than later ones: with each tile of forward_wgmma."""
    nvrtc = nvrtc_12()
    if nvrtc is None:
        pytest.skip("NVRTC 12 is not installed beside CuPy's (nvidia-cuda-nvrtc-cu12)")
    spec, device = next(spec for spec in KERNELS if spec.name == "forward_wgmma"), device_of(90)
    for name, problem in representative_problems(tensor_cores=True).items():
        tiles = spec.tiles(problem.traits, device) if spec.refusal(problem.traits, device) is None else []
        for tile in tiles:
            if share(f"{name} {tile} older", PARTS):
                plan = make_plan(problem, device, Settings(spec.name, str(tile), False))
                spills = compile_with(nvrtc, plan.program, "sm_90a").spill_bytes
                allowed = 24 if name.endswith("-64/128") and str(tile) == "192x80x2w" else 0
                assert spills <= allowed, f"{name} {tile} spills {spills} bytes"


def compile_with(nvrtc: ctypes.CDLL, program: Program, arch: str) -> Resources:
    """Compile for an architecture."""
    handle = ctypes.c_void_p()
    text = entry_text(program).encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(handle), text, b"entry.cu", 0, None, None) == 0
    options = [option.encode() for option in (*compiler_options(), "-ftz=true", f"-arch={arch}", "--ptxas-options=-v")]
    status = nvrtc.nvrtcCompileProgram(handle, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(handle, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(handle, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(handle))
    assert status == 0, log.value.decode()
    return parse_resources(log.value.decode(), 0.0)


@pytest.mark.parametrize("stacked", [True, False])
def test_struct_layout_of_merge(stacked: bool) -> None:
    offset, checks = 0, []
    for name, code in merge.fields(stacked):
        checks.append(f'static_assert(__builtin_offsetof(cuflash::MergeParams, {name}) == {offset}, "{name}");')
        offset += struct.calcsize("=" + code)
    checks.append(f'static_assert(sizeof(cuflash::MergeParams) == {offset}, "size");')
    assert offset <= 4096, "more than every driver takes"
    for macro, value in (("kMaxParts", 1 if stacked else merge.MAX_PARTS), ("kThreads", merge.MAX_THREADS)):
        checks.append(f'static_assert(cuflash::{macro} == {value}, "{macro}");')
    rows = Operand("float32", (0, 4), 4), Operand("float32", (0,), 4)
    program = merge.plan_merge((3,), 128, [rows[0]], [rows[1]], *rows, 2, (4, 4) if stacked else None).program
    checks.append(f"static_assert(sizeof(cuflash::TeamValues) == {program.shared_memory});")
    compile_offline(program, "sm_90", "\n".join([*checks, ""]))


def test_struct_is_packed_in_order() -> None:
    x = _info((2, 4, 100, 64), "float16")
    problem, _ = describe_attention(x, x, x, scale=0.25, window=(5, None))
    plan = make_plan(problem, device_of(90), Settings("", "", False))
    packed = arguments.pack_pointers(*range(1, len(arguments.POINTERS) + 1)) + arguments.Packer(
        problem, plan, tile_map
    )(problem, plan)
    assert struct.calcsize("=" + "".join(code for _, code in arguments.FIELDS)) == arguments.ARGUMENT_BYTES
    maps = packed[arguments.ARGUMENT_BYTES :]
    assert plan.program.takes_maps and len(maps) == 2 * MAP_BYTES
    assert struct.unpack_from("=3Q", maps) == struct.unpack_from("=3Q", maps, MAP_BYTES) == (128, 64, plan.tile.block_n)
    fields, offset = {}, 0
    for name, code in arguments.FIELDS:
        fields[name] = list(struct.unpack_from("=" + code, packed, offset))
        offset += struct.calcsize("=" + code)
    assert (
        fields["scale"] == [0.25] and fields["window_left"] == [5] and fields["window_right"] == [arguments.OPEN_WINDOW]
    )
    assert fields["num_splits"] == [1, (1 << 64) - 1]
    assert fields["out_split_stride"] == fields["lse_split_stride"] == [0]
    assert fields["seqlen_q"] == [100] and fields["head_tiles"] == [4, (1 << 62) - 1] and fields["head_dim"] == [64]
    assert fields["batch_shape"] == [2, (1 << 63) - 1] and fields["outer_shape"] == [1, (1 << 64) - 1] * 3


def test_entry_text_is_self_contained_and_named() -> None:
    x = _info((2, 4, 100, 64), "float16")
    plan = make_plan(describe_attention(x, x, x)[0], device_of(90), Settings("", "", False))
    text = entry_text(plan.program)
    assert text.startswith(f"// cuflash {plan.kernel} | dtype=float16") and source_digest() in text
    assert "#define CUFLASH_HEAD_DIM 64\n" in text and text.endswith(f'#include "{plan.kernel}.cu"\n')


@pytest.mark.parametrize("source", sorted(path.name for path in source_folder().glob("*.cu")))
def test_each_source_compiles_with_its_defaults(source: str) -> None:
    compile_offline(Program(source.removesuffix(".cu"), (), 0), "sm_80")


def test_every_source_belongs_to_a_row() -> None:
    names = {spec.name for spec in (*KERNELS, *GATED_KERNELS)}
    names |= {spec.preparing.name for spec in KERNELS if spec.preparing}
    names |= {name for spec in GATED_KERNELS if spec.preparing for name in (spec.preparing, "gated_chain")}
    assert {path.stem for path in source_folder().glob("*.cu")} == names | set(HELPERS)
