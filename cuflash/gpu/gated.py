"""The gated delta rule on a GPU: the argument struct `GatedParams` of cuda_src/gated/params.cuh, and the launch."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

from ..log import DEBUG, is_enabled, log_call, log_plan
from ..plan.gated import GatedLaunch, GatedPlan, make_gated_plan
from ..plan.plan import MAX_GRID
from ..problem.arrays import ITEMSIZE, ArrayInfo, shapes_given
from ..problem.gated import GATED_ARRAYS, GatedProblem
from ..settings import settings
from .arguments import DIVISOR, FLOAT_CODES, Fields, divisor, packer, start
from .compile import kernel_function
from .launch import device_info
from .workspace import Result, allocate_with_workspace

POINTERS: Fields = tuple((name, "Q") for name in (*GATED_ARRAYS, "prepared"))
STRIDED = GATED_ARRAYS[:-1]
VALUES: Fields = (
    *((f"{name}_strides", "4q") for name in STRIDED),
    ("cu_seqlens_stride", "q"),
    ("cu_seqlens_size", "q"),
    ("seqlen", "q"),
    ("num_sequences", "q"),
    ("num_chunks", "q"),
    ("first_block", "q"),
    ("heads_per_block", "q"),
    ("num_heads_v", DIVISOR),
    ("group_size", DIVISOR),
    ("num_parts", DIVISOR),
    ("num_segments", DIVISOR),
    ("segment_tokens", "q"),
    ("identity_column", "q"),
    ("scale", "d"),
    ("head_dim", "i"),
    ("head_dim_v", "i"),
    ("gate_dtype", "i"),
    ("beta_dtype", "i"),
)
"""What stands behind the addresses."""
FIELDS: Fields = (*POINTERS, *VALUES)
"""Every field; tests have the compiler confirm names and offsets."""

_pack_pointers = struct.Struct("=" + "".join(code for _, code in POINTERS)).pack
_pack_values = packer(VALUES)


Part = tuple[int, bytes]
"""Blocks of a launch, and the struct behind the addresses."""


def gated_parts(problem: GatedProblem, launch: GatedLaunch) -> list[Part]:
    """What a kernel is launched with: once, but for the largest grids."""
    return [
        (min(MAX_GRID, launch.num_blocks - first_block), _values(problem, launch, first_block))
        for first_block in range(0, launch.num_blocks, MAX_GRID)
    ]


def _values(problem: GatedProblem, launch: GatedLaunch, first_block: int) -> bytes:
    traits = problem.traits
    strides = {name: _four(getattr(problem.strides, name)) for name in STRIDED}
    for states in launch.scratch:  # of float32, features of k are neighbours
        column = 4 * traits.head_dim
        state = column * states.num_columns
        strides[states.name] = problem.num_heads_v * state, state, 4, column
    size = ITEMSIZE[problem.cu_seqlens_dtype] if problem.cu_seqlens_dtype else 0
    return _pack_values(
        **{f"{name}_strides": four for name, four in strides.items()},
        cu_seqlens_stride=problem.strides.cu_seqlens[0] if problem.strides.cu_seqlens else 0,
        cu_seqlens_size=size if problem.cu_seqlens_dtype.startswith("u") else -size,
        seqlen=problem.seqlen,
        num_sequences=problem.num_sequences,
        num_chunks=problem.num_chunks,
        first_block=first_block,
        heads_per_block=launch.heads_per_block,
        num_heads_v=divisor(problem.num_heads_v),
        group_size=divisor(problem.num_heads_v // max(problem.num_heads, 1)),
        num_parts=divisor(launch.num_parts),
        num_segments=divisor(launch.num_segments),
        segment_tokens=launch.segment_tokens or problem.seqlen,
        scale=problem.scale,
        head_dim=traits.head_dim,
        head_dim_v=traits.head_dim_v,
        identity_column=launch.identity_column,
        gate_dtype=FLOAT_CODES[traits.gate_dtype],
        beta_dtype=FLOAT_CODES.get(traits.beta_dtype, 0),
    )


def addresses_of(launch: GatedLaunch, addresses: dict[str, int], workspace: int) -> dict[str, int]:
    """Addresses of a call's arrays for one of its launches."""
    return {**addresses, "prepared": workspace, **{x.name: workspace + x.begin for x in launch.scratch}}


def _four(strides: tuple[int, ...] | None) -> tuple[int, ...]:
    """Strides of an array, 0 for axes that it lacks."""
    given = strides or ()
    return *given, *(0,) * (4 - len(given))


def gated_pointers(addresses: dict[str, int]) -> bytes:
    """Pack addresses, given by name; others are null."""
    return _pack_pointers(*(addresses.get(name, 0) for name, _ in POINTERS))


Step = tuple[GatedLaunch, Any, list[Part]]
"""A launch, its compiled kernel, and what that is launched with."""


@lru_cache(maxsize=1024)
def _steps(problem: GatedProblem, plan: GatedPlan, device_id: int) -> list[Step]:
    log_plan(problem, plan)
    return [
        (launch, kernel_function(launch.program, device_id), gated_parts(problem, launch))
        for launch in plan.launches
        if launch.num_blocks
    ]


def execute_gated_on_gpu(problem: GatedProblem, infos: dict[str, ArrayInfo], out: Any, final: bool) -> Any:
    """Compute a checked problem of GPU arrays.

    Parameters
    ----------
    out
        The caller's own array, or None.
    final
        Whether the final state is a result, too.

    Returns
    -------
    out or (out, final_state)
    """
    import cupy

    device_id, strides, traits = infos["q"].device, problem.strides, problem.traits
    plan = make_gated_plan(problem, device_info(device_id), settings())
    if settings().log or is_enabled(DEBUG):
        log_call(problem, plan, shapes_given(infos))
    addresses = {name: info.pointer for name, info in infos.items()}
    final_state = None
    with cupy.cuda.Device(device_id):
        batch = () if traits.op == "chunk_gated_output" else (infos["q"].shape[0],)
        shape = (*batch, problem.seqlen, problem.num_heads_v, traits.head_dim_v)
        result = Result(shape, traits.dtype, strides.out)
        out, _memory, workspace = allocate_with_workspace(cupy, result, out, plan.workspace, None)
        addresses.setdefault("out", out.data.ptr)
        if final:
            assert strides.final_state is not None, "it is wanted"
            shape = (problem.num_sequences, problem.num_heads_v, traits.head_dim, traits.head_dim_v)
            final_state = Result(shape, traits.state_dtype, strides.final_state).allocate(cupy)
            addresses["final_state"] = final_state.data.ptr
        for launch, function, parts in _steps(problem, plan, device_id):
            pointers = gated_pointers(addresses_of(launch, addresses, workspace))
            num_threads, shared_memory = (launch.num_threads,), launch.program.shared_memory
            for num_blocks, values in parts:
                start(function, (num_blocks,), num_threads, shared_memory, pointers + values)
    return (out, final_state) if final else out
