"""Partial results on a GPU, merged: so many at a time as one launch takes."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..plan.partial import partial_layout
from ..problem.parts import Parts, result_operands
from .compile import kernel_function
from .merge import MAX_PARTS, Merge, operands_of, plan_merge
from .workspace import Result, allocate_with_workspace, launch_merge


def merge_workspace(parts: Parts) -> int:
    """Bytes of scratch memory: partial results of each `MAX_PARTS` arrays, if there are more."""
    if parts.strides is not None or parts.num_parts <= MAX_PARTS:
        return 0
    first = parts.outs[0]
    num_groups = -(-parts.num_parts // MAX_PARTS)
    return sum(partial_layout(first.shape[:-1], first.shape[-1], parts.lses[0].dtype, num_groups).sizes)


class Step(NamedTuple):
    """One launch with its addresses."""

    merge: Merge
    outs: list[int]
    lses: list[int]
    out: int
    lse: int


def merge_steps(parts: Parts, out: int, lse: int, workspace: int) -> list[Step]:
    """Launches that merge parts, in their order, given the addresses of results and of scratch memory."""
    shape, dtype = parts.outs[0].shape, parts.lses[0].dtype
    rows, width = shape[:-1], shape[-1]
    out_result, lse_result = result_operands(parts)
    outs, lses = operands_of(parts.outs), operands_of(parts.lses)
    out_pointers, lse_pointers = ([info.pointer for info in infos] for infos in (parts.outs, parts.lses))
    if parts.strides is not None or parts.num_parts <= MAX_PARTS:
        whole = plan_merge(rows, width, outs, lses, out_result, lse_result, parts.num_parts, parts.strides)
        return [Step(whole, out_pointers, lse_pointers, out, lse)]
    num_groups = -(-parts.num_parts // MAX_PARTS)
    partial_out, partial_lse, (out_step, lse_step), (out_bytes, _) = partial_layout(rows, width, dtype, num_groups)
    partial_lses = workspace + out_bytes
    steps = []
    for group in range(num_groups):
        members = slice(group * MAX_PARTS, (group + 1) * MAX_PARTS)
        some = outs[members]
        merge = plan_merge(rows, width, some, lses[members], partial_out, partial_lse, len(some), None)
        to = workspace + group * out_step, partial_lses + group * lse_step
        steps.append(Step(merge, out_pointers[members], lse_pointers[members], *to))
    steps_apart = out_step, lse_step
    last = plan_merge(rows, width, [partial_out], [partial_lse], out_result, lse_result, num_groups, steps_apart)
    return [*steps, Step(last, [workspace], [partial_lses], out, lse)]


def merge_parts_on_gpu(parts: Parts) -> tuple[Any, Any]:
    """Compute `merge_attention_states` of checked GPU arrays."""
    import cupy

    device_id, rows = parts.outs[0].device, parts.lses[0].shape
    out_result, lse_result = result_operands(parts)
    with cupy.cuda.Device(device_id):
        result = Result(parts.outs[0].shape, out_result.dtype, out_result.strides)
        out, _workspace, address = allocate_with_workspace(cupy, result, None, merge_workspace(parts), None)
        lse = Result(rows, lse_result.dtype, lse_result.strides).allocate(cupy)
        steps = merge_steps(parts, out.data.ptr, lse.data.ptr, address)
        functions = [kernel_function(step.merge.program, device_id) for step in steps]
        for function, step in zip(functions, steps, strict=True):
            launch_merge(function, *step)
    return out, lse
