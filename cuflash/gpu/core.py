"""The kernels that `import cuflash` compiles when there is a GPU."""

from __future__ import annotations

import warnings

from ..cupy_cache import import_cupy
from ..plan.plan import Program, make_plan
from ..plan.table import Device
from ..problem.arrays import DTYPES, FLOAT_NAMES, ArrayInfo, contiguous_strides
from ..problem.describe import describe_attention
from ..settings import AUTOMATIC
from .compile import compile_core

CORE_HEAD_DIMS = (64, 128)


def core_programs(device: Device) -> list[Program]:
    """Programs of the core rows: dense forward, every dtype, head_dim 64 and 128, contiguous arrays of a usual size.

    Also what makes keys and values ready for them.
    """
    programs = []
    for dtype in FLOAT_NAMES:
        for head_dim in CORE_HEAD_DIMS:
            shape = (4, 16, 1024, head_dim)
            x = ArrayInfo(None, shape, contiguous_strides(shape, DTYPES[dtype].itemsize), dtype, 0, 0, True)
            problem, _ = describe_attention(x, x, x)
            plan = make_plan(problem, device, AUTOMATIC)
            programs.append(plan.program)
            if plan.preparation is not None:
                programs.append(plan.preparation.program)
    return programs


def compile_core_kernels() -> None:
    """Compile the core rows for the current GPU; a failure is a warning, and the call that needs the kernel raises."""
    try:
        cupy = import_cupy()
        if not cupy.cuda.is_available():
            return
        from .launch import device_info

        device_id = cupy.cuda.runtime.getDevice()
        device = device_info(device_id)
        compile_core(core_programs(device), device_id, device.arch)
    except Exception as error:  # whatever is wrong with driver, CuPy or compiler: the program may not need them
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return
        warnings.warn(f"cuflash could not compile its kernels at import: {error}", RuntimeWarning, stacklevel=2)
