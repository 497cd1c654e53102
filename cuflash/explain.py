"""What a call would do, without doing it: `explain`, `warmup`."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Callable
from functools import lru_cache
from typing import Any, SupportsIndex

import numpy as np

from .cache import KVCache
from .cpu.execute import check_settings
from .dense import attention, attention_lse
from .explanation import Explanation
from .gated import chunk_gated_delta_rule, chunk_gated_output, recurrent_gated_delta_rule
from .gpu.compile import compile_offline, kernel_function
from .gpu.installed import compiles_for, gpu_available
from .gpu.workspace import merge_of_splits
from .kv_cache import attention_with_kv_cache
from .plan.build import Program
from .plan.gated import GatedPlan, gated_refusals, make_gated_plan
from .plan.plan import Plan, make_plan, predict, refusals
from .plan.table import CPU_KERNEL, Device, device_of
from .problem import arrays
from .problem.checks import parse_integer
from .problem.describe import describe_attention, describe_attention_lse, describe_varlen
from .problem.describe_cache import describe_kv_cache
from .problem.describe_gated import (
    describe_chunk_gated_delta_rule,
    describe_chunk_gated_output,
    describe_recurrent_gated_delta_rule,
)
from .problem.gated import GatedProblem
from .problem.hints import check_options, positional
from .problem.problem import ARRAYS, Problem
from .settings import Settings, num_threads, settings
from .varlen import attention_varlen

_DESCRIBE: dict[Callable[..., Any], Callable[..., Any]] = {
    attention: describe_attention,
    attention_lse: describe_attention_lse,
    attention_varlen: describe_varlen,
    attention_with_kv_cache: describe_kv_cache,
    chunk_gated_delta_rule: describe_chunk_gated_delta_rule,
    chunk_gated_output: describe_chunk_gated_output,
    recurrent_gated_delta_rule: describe_recurrent_gated_delta_rule,
}
FUNCTIONS = {function.__name__: function for function in _DESCRIBE}
"""What can be explained, by its name."""
_LISTED = " or ".join(", ".join(FUNCTIONS).rsplit(", ", 1))
_GATED_ARRAYS = ("v_new", "h", "log_g_cumsum", "cu_seqlens", "log_g", "beta", "initial_state", "state")
_ARRAYS = (*ARRAYS, "k_cache", "v_cache", "workspace", *_GATED_ARRAYS)


def explain(
    function: Callable[..., Any], *args: Any, device: SupportsIndex | str | None = None, **options: Any
) -> Explanation:
    """Say which kernel would serve a call, and why, without running it.

    Parameters
    ----------
    function : callable
        `attention`, `attention_lse`, `attention_varlen`, `attention_with_kv_cache`, `chunk_gated_delta_rule`,
        `chunk_gated_output` or `recurrent_gated_delta_rule`.
    *args, **options
        The call's arguments. Arrays may be stand-ins: any objects with ``shape`` and ``dtype``, and ``strides`` (bytes)
        where they are not C-contiguous.
    device : int or str of digits, optional
        Compute capability (90 for 9.0, "90" as CuPy's devices have it) of a GPU to plan for; no GPU is needed then.
        Default: where the arrays are, and for stand-ins the current GPU or, without one, the CPU.

    Returns
    -------
    Explanation
        Frozen; prints as a short report.

    Raises
    ------
    TypeError, ValueError
        Whatever the call itself would raise.
    RuntimeError
        The kernel does not compile; the message holds the compiler's log.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.empty((1, 16, 4096, 64), np.float16)
    >>> cuflash.explain(cuflash.attention, x, x, x, causal=True, device=90).kernel
    'forward_wgmma'
    """
    capability = None if device is None else _compute_capability(device)
    problem, gpu, _ = _describe("explain", function, args, options, capability)
    chosen = settings()
    if gpu is None:
        check_settings(chosen)
        return Explanation(problem, CPU_KERNEL, "", None, None, 0, num_threads(), 0, 0, None, None, ())
    plan = _plan(problem, gpu, chosen)
    registers, spills = _resources(plan, gpu)
    ahead = []
    for name, reason in _refusals(problem, gpu):
        if name == plan.kernel:
            break
        ahead.append((name, reason or _why_not(problem, chosen)))
    return Explanation(
        problem, plan.kernel, str(plan.tile), gpu, plan, plan.num_blocks, plan.tile.num_threads,
        plan.program.shared_memory, plan.workspace, registers, spills, tuple(ahead),
        tuple(predict(problem, gpu, chosen)) if isinstance(problem, Problem) and plan.num_blocks else (),
    )  # fmt: skip


def _why_not(problem: Problem | GatedProblem, chosen: Settings) -> str:
    """Why a kernel that serves a call, and comes first in the table, is not chosen."""
    if chosen.kernel:
        return "options(kernel=...) chose another"
    cache = None if isinstance(problem, GatedProblem) else problem.cache
    if cache is not None and cache.split_size is not None:
        return "its bits of a row depend on other rows, and split_size is given"
    return "expected to take longer at these lengths"


def warmup(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Compile what a call needs, without running it.

    Parameters
    ----------
    function : callable
        `attention`, `attention_lse`, `attention_varlen`, `attention_with_kv_cache`, `chunk_gated_delta_rule`,
        `chunk_gated_output` or `recurrent_gated_delta_rule`.
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
        plan = _plan(problem, gpu, settings())
        ahead = plan.launches[:-1] if isinstance(plan, GatedPlan) else filter(None, [plan.preparation])
        for program in (*(launch.program for launch in ahead), plan.program):
            kernel_function(program, device_id)
        if isinstance(problem, Problem) and isinstance(plan, Plan) and plan.num_splits > 1:
            kernel_function(merge_of_splits(problem, plan.num_splits).program, device_id)
        if isinstance(plan, Plan) and plan.append is not None:
            kernel_function(plan.append.program, device_id)


def _plan(problem: Problem | GatedProblem, device: Device, chosen: Settings) -> Plan | GatedPlan:
    if isinstance(problem, GatedProblem):
        return make_gated_plan(problem, device, chosen)
    return make_plan(problem, device, chosen)


def _refusals(problem: Problem | GatedProblem, device: Device) -> list[tuple[str, str | None]]:
    """Rows of the problem's table with the reason why each does not serve it, None where it does."""
    if isinstance(problem, GatedProblem):
        return gated_refusals(problem.traits, device)
    return refusals(problem.traits, device)


def _describe(
    caller: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], capability: int | None
) -> tuple[Problem | GatedProblem, Device | None, int]:
    """Return the problem, the GPU (None: the CPU) and its number of a call with real arrays or stand-ins."""
    describe = next((describe for known, describe in _DESCRIBE.items() if known is function), None)
    if describe is None:
        got = f"a {type(function).__name__} of shape {function.shape}" if hasattr(function, "shape") else repr(function)
        if isinstance(getattr(function, "__self__", None), KVCache):
            got = (
                "a method of KVCache, which calls attention_with_kv_cache with keys[layer], values[layer], lengths and "
                "page_table"
            )
        raise TypeError(
            f"function is {got}, expected cuflash.{_LISTED}, before the arguments of the call: "
            f"{caller}(cuflash.attention, q, k, v, ...)"
        )
    check_options(function.__name__, options, args[len(positional[function.__name__]) :])
    try:
        bound = signatures.signature(function).bind(*args, **options).arguments
    except TypeError as error:
        raise TypeError(f"{function.__name__}(): {error}") from None
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


def _compute_capability(device: Any) -> int:
    """Read it as CuPy spells it, too."""
    expected = "a compute capability: an int such as 90 for 9.0, at least 50"
    if isinstance(device, str) and device.isdecimal() and len(device) < 9:
        device = int(device)
    capability = parse_integer("device", device, expected)
    if not 50 <= capability < 1000:
        raise ValueError(f"device is {capability}, expected {expected}")
    return capability


def _array_types() -> tuple[type, ...]:
    gpu_type = arrays.cupy_ndarray()
    return (np.ndarray,) if gpu_type is None else (np.ndarray, gpu_type)


def _device_number(x: Any) -> int:
    return arrays.inspect("q", x).device


def _resources(plan: Plan | GatedPlan, device: Device) -> tuple[int | None, int | None]:
    """Registers and spilled bytes; None where the call launches nothing, or where no compiler knows the device."""
    if plan.num_blocks == 0 or not compiles_for(device.arch):
        return None, None
    return _compiled_resources(plan.program, device.arch)


@lru_cache(maxsize=256)
def _compiled_resources(program: Program, arch: str) -> tuple[int, int]:
    resources = compile_offline(program, arch)
    return resources.registers, resources.spill_bytes
