"""The kernels that `import cuflash` compiles when there is a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from ..cupy_cache import import_cupy
from ..plan.build import Program
from ..plan.gated import GatedPlan, make_gated_plan
from ..plan.plan import Plan, make_plan
from ..plan.table import Device
from ..problem.arrays import FLOAT_NAMES, ITEMSIZE, ArrayInfo, contiguous_strides
from ..problem.describe import describe_attention
from ..problem.describe_gated import describe_chunk_gated_delta_rule, describe_recurrent_gated_delta_rule
from ..settings import AUTOMATIC
from .compile import compile_core
from .installed import why_driver_fails, why_no_cupy

CORE_HEAD_DIMS = (64, 128)
CORE_GATED_HEAD_DIM = 128


def core_programs(device: Device) -> list[Program]:
    """Programs of the core rows, and of what makes chunks, keys and values ready for them, each once.

    Of attention that is the dense forward, in every dtype, with head_dim 64 and 128; of the gated delta rule prompts
    and steps in 16 bits with head_dim 128. Arrays are contiguous and of a usual size.
    """
    programs = []
    for plan in _attention_plans(device):
        programs.append(plan.program)
        if plan.preparation is not None:
            programs.append(plan.preparation.program)
    programs += [launch.program for plan in _gated_plans(device) for launch in plan.launches]
    return list(dict.fromkeys(programs))


def _attention_plans(device: Device) -> Iterator[Plan]:
    for dtype in FLOAT_NAMES:
        for head_dim in CORE_HEAD_DIMS:
            x = _stand_in((8, 16, 1024, head_dim), dtype)
            problem, _ = describe_attention(x, x, x)
            yield make_plan(problem, device, AUTOMATIC)


def _gated_plans(device: Device) -> Iterator[GatedPlan]:
    head_dim = CORE_GATED_HEAD_DIM
    state = _stand_in((4, 16, head_dim, head_dim), "float32")
    for dtype in ("float16", "bfloat16"):
        tokens, token = (_stand_in((4, seqlen, 16, head_dim), dtype) for seqlen in (4096, 1))
        gates, gate = (_stand_in(x.shape[:-1], "float32") for x in (tokens, token))
        prompt, _ = describe_chunk_gated_delta_rule(tokens, tokens, tokens, gates, gates)
        step, _ = describe_recurrent_gated_delta_rule(token, token, token, gate, gate, state)
        yield make_gated_plan(prompt, device, AUTOMATIC)
        yield make_gated_plan(step, device, AUTOMATIC)


def _stand_in(shape: tuple[int, ...], dtype: str) -> ArrayInfo:
    return ArrayInfo(None, shape, contiguous_strides(shape, ITEMSIZE[dtype]), dtype, 0, 0, True)


def compile_core_kernels() -> None:
    """Compile the core rows for the current GPU; a failure is a warning, and the call that needs the kernel raises."""
    try:
        cupy = import_cupy()
    except Exception as error:  # of a CuPy that does not match the machine, of many kinds
        if not (isinstance(error, ModuleNotFoundError) and error.name == "cupy"):
            _warn(why_no_cupy(error))
        return
    try:
        if not cupy.cuda.is_available():
            failure = why_driver_fails(cupy)
            if failure:
                _warn(failure)
            return
        from .launch import device_info

        device_id = cupy.cuda.runtime.getDevice()
        device = device_info(device_id)
        compile_core(core_programs(device), device_id, device.arch)
    except Exception as error:  # whatever is wrong with driver or compiler: the program may not need them
        _warn(str(error))


def _warn(failure: str) -> None:
    warnings.warn(f"cuflash could not compile its kernels at import: {failure}", RuntimeWarning, stacklevel=3)
