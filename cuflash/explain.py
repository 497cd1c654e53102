"""What a call would do, without doing it: `explain`, `warmup`."""

from __future__ import annotations

import inspect as signatures
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .cpu.execute import check_settings
from .cupy_cache import import_cupy
from .dense import attention
from .gpu.compile import KernelCompileError, compile_offline, entry_text, kernel_function
from .gpu.workspace import combination_of
from .plan.plan import Macros, Plan, make_plan, refusals
from .plan.table import CPU_KERNEL, Device, device_of
from .problem import arrays
from .problem.names import check_options
from .problem.problem import Problem, describe_attention, describe_varlen
from .settings import num_threads, settings
from .varlen import attention_varlen

_DESCRIBE: dict[Callable[..., Any], Callable[..., Any]] = {
    attention: describe_attention,
    attention_varlen: describe_varlen,
}
_ARRAYS = (
    "q", "k", "v", "bias", "mask", "alibi_slopes", "sinks", "query_offset", "cu_seqlens_q", "cu_seqlens_k",
    "out", "lse", "workspace",
)  # fmt: skip


@dataclass(frozen=True)
class Explanation:
    """Which kernel serves a call, and why; `print` it."""

    problem: Problem
    """The call, without its data."""
    kernel: str
    """Name of the kernel; `"cpu"` for the NumPy back end."""
    tile: str
    """Rows x keys of a tile; empty for the NumPy back end."""
    device: Device | None
    """The GPU; None for the NumPy back end."""
    plan: Plan | None
    """Everything that the launch needs; None for the NumPy back end."""
    num_blocks: int
    num_threads: int
    """Threads of a block, or of the NumPy back end."""
    shared_memory: int
    """Bytes per block."""
    workspace: int
    """Bytes of scratch memory; what the `workspace` argument must hold at least."""
    registers: int | None
    """Per thread; None where there is no compiler to ask."""
    spill_bytes: int | None
    """Register bytes per thread that did not fit; None where there is no compiler to ask."""
    refusals: tuple[tuple[str, str], ...]
    """Kernels ahead of this one in the table and why each refused."""

    @property
    def source(self) -> str:
        """The generated source of the kernel; empty for the NumPy back end."""
        return entry_text(self.plan.kernel, self.plan.macros) if self.plan else ""

    def __str__(self) -> str:
        lines = [str(self.problem)]
        if self.device is None:
            lines.append(
                f"  kernel         {self.kernel}: NumPy arrays are computed on the CPU, {self.num_threads} threads"
            )
        else:
            splits = ""
            if self.plan and self.plan.num_splits > 1:
                splits = f": {self.plan.num_splits} splits of the keys for each tile, joined by a second kernel"
            registers = f"unknown (no NVRTC here that compiles for {self.device.arch})"
            if self.registers is not None:
                registers = f"{self.registers} per thread, {self.spill_bytes} bytes spilled"
            lines += [
                f"  kernel         {self.kernel} for {self.device.arch}",
                f"  tile           {self.tile} (rows x keys), {self.num_threads} threads",
                f"  grid           {self.num_blocks} blocks{splits}",
                f"  shared memory  {self.shared_memory} of {self.device.shared_memory_per_block} bytes per block",
                f"  registers      {registers}",
                f"  workspace      {self.workspace} bytes",
            ]
        lines += [f"  not {name}: {reason}" for name, reason in self.refusals]
        return "\n".join(lines)


def explain(function: Callable[..., Any], *args: Any, device: int | None = None, **options: Any) -> Explanation:
    """Say which kernel would serve a call, and why, without running it.

    Parameters
    ----------
    function : callable
        `attention` or `attention_varlen`.
    *args, **options
        The call's arguments. Arrays may be stand-ins: any objects with ``shape`` and ``dtype``, and ``strides`` (bytes)
        where they are not C-contiguous.
    device : int, optional
        Compute capability (90 for 9.0) of a GPU to plan for; no GPU is needed then. Default: where the arrays are, and
        for stand-ins the current GPU or, without one, the CPU.

    Returns
    -------
    Explanation
        Frozen; prints as a short report.

    Raises
    ------
    TypeError, ValueError
        Whatever the call itself would raise.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.empty((1, 16, 4096, 64), np.float16)
    >>> cuflash.explain(cuflash.attention, x, x, x, causal=True, device=90).kernel
    'forward_mma'
    """
    problem, gpu, _ = _describe("explain", function, args, options, device)
    chosen = settings()
    if gpu is None:
        check_settings(chosen)
        return Explanation(problem, CPU_KERNEL, "", None, None, 0, num_threads(), 0, 0, None, None, ())
    plan = make_plan(problem, gpu, chosen)
    registers, spills = _resources(plan, gpu)
    ahead = []
    for name, reason in refusals(problem, gpu):
        if name == plan.kernel:
            break
        ahead.append((name, reason or "options(kernel=...) chose another"))
    return Explanation(
        problem, plan.kernel, str(plan.tile), gpu, plan, plan.num_blocks, plan.tile.num_threads, plan.shared_memory,
        plan.workspace, registers, spills, tuple(ahead),
    )  # fmt: skip


def warmup(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Compile what a call needs, without running it.

    Parameters
    ----------
    function : callable
        `attention` or `attention_varlen`.
    *args, **options
        The call's arguments; arrays may be stand-ins as in `explain`, and are then taken to be on the current GPU.
        Calls on NumPy arrays need no compilation.

    Raises
    ------
    TypeError, ValueError
        Whatever the call itself would raise.
    RuntimeError
        The kernel does not compile; the message holds the compiler's log.
    """
    problem, gpu, device_id = _describe("warmup", function, args, options, None)
    if gpu is not None:
        plan = make_plan(problem, gpu, settings())
        kernel_function(plan, device_id)
        if plan.num_splits > 1:
            kernel_function(combination_of(problem, plan.num_splits).build, device_id)


def gpu_available() -> bool:
    """Whether CuPy is installed and finds a usable GPU. Imports CuPy only where a CUDA driver is installed."""
    if not driver_installed():
        return False
    try:
        return bool(import_cupy().cuda.is_available())
    except Exception:  # a broken CuPy or driver raises many kinds; for us they all mean "no GPU"
        return False


def driver_installed() -> bool:
    """Whether the CUDA driver's library can be loaded. Does not initialise it."""
    import ctypes

    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _describe(
    caller: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], capability: int | None
) -> tuple[Problem, Device | None, int]:
    """Return the problem, the GPU (None: the CPU) and its number of a call with real arrays or stand-ins."""
    describe = _DESCRIBE.get(function) if callable(function) else None
    if describe is None:
        got = f"a {type(function).__name__} of shape {function.shape}" if hasattr(function, "shape") else repr(function)
        raise TypeError(
            f"function is {got}, expected cuflash.attention or cuflash.attention_varlen, before the arguments of the "
            f"call: {caller}(cuflash.attention, q, k, v, ...)"
        )
    if capability is not None and (
        not isinstance(capability, int) or isinstance(capability, bool) or not 50 <= capability < 1000
    ):
        raise ValueError(f"device is {capability!r}, expected a compute capability such as 90 for 9.0")
    check_options(function.__name__, options)
    bound = signatures.signature(function).bind(*args, **options).arguments
    real = [bound[name] for name in _ARRAYS if isinstance(bound.get(name), _array_types())]
    on_gpu = capability is not None or (not real and gpu_available())
    for name in _ARRAYS:
        x = bound.get(name)
        if x is None or not hasattr(x, "dtype") or isinstance(x, np.generic):
            continue
        if capability is not None:
            bound[name] = arrays.stand_in(name, x, 0)
        elif not isinstance(x, _array_types()) and not hasattr(x, "__cuda_array_interface__"):
            bound[name] = arrays.stand_in(name, x, _device_number(real[0]) if real else 0 if on_gpu else arrays.HOST)
    problem, infos = describe(**bound)
    device_id = infos["q"].device
    if capability is not None:
        return problem, device_of(capability), 0
    if device_id == arrays.HOST:
        return problem, None, 0
    from .gpu.launch import device_info

    return problem, device_info(device_id), device_id


def _array_types() -> tuple[type, ...]:
    gpu_type = arrays.cupy_ndarray()
    return (np.ndarray,) if gpu_type is None else (np.ndarray, gpu_type)


def _device_number(x: Any) -> int:
    return arrays.inspect("q", x).device


def _resources(plan: Plan, device: Device) -> tuple[int | None, int | None]:
    """Registers and spilled bytes; None where the call launches nothing, or where no compiler knows the device."""
    if plan.num_blocks == 0:
        return None, None
    try:
        return _compiled_resources(plan.kernel, plan.macros, device.arch)
    except (ImportError, KernelCompileError):
        return None, None


@lru_cache(maxsize=256)
def _compiled_resources(kernel: str, macros: Macros, arch: str) -> tuple[int, int]:
    resources = compile_offline(kernel, macros, arch)
    return resources.registers, resources.spill_bytes
