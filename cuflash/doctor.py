"""What this machine can do: `show_config`, and `python -m cuflash doctor`, which also tries it out."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import reference
from .cupy_cache import cache_folder, import_cupy, why_nothing_is_kept
from .dense import attention
from .gated import chunk_gated_delta_rule, recurrent_gated_delta_rule
from .gpu.compile import source_digest
from .gpu.installed import driver_installed, why_no_gpu, why_not_compiled, why_slower
from .kv_cache import attention_with_kv_cache
from .options import options
from .plan.gated import GATED_KERNELS
from .plan.table import KERNELS
from .problem.arrays import DTYPES, FLOAT_NAMES
from .settings import KNOBS, misspelt, num_threads, read, settings

LARGEST_ERROR = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "float64": 1e-14}
"""Of a healthy back end, relative, by dtype."""


class _Gpus(NamedTuple):
    """What there is of GPUs."""

    lines: list[str]
    """For the report."""
    names: dict[int, str]
    """Those that can be used, by device."""
    missing: str
    """Why none can, and what to do about it; empty if one can."""
    faults: list[str]
    """What is wrong though some can, and what to do about it."""


def show_config() -> None:
    """Print versions, devices, kernels, settings and the kernel cache; the first thing to attach to a bug report."""
    _show_config(_look_for_gpus())


def doctor() -> int:
    """Print the configuration, check small calls on each back end against float64, end with a verdict.

    Returns
    -------
    int
        Exit status: 0 if every back end that was found computes what it should, 1 if not. A machine without a GPU is
        no failure.
    """
    gpus = _look_for_gpus()
    _show_config(gpus)
    failed = []
    with options(kernel="", tile=""):
        for name, xp, device in _backends(gpus):
            with device:
                for (operation, call), dtype in product(_OPERATIONS.items(), FLOAT_NAMES):
                    finding = _check(call, xp, dtype)
                    print(f"check: {name} {operation} {dtype} {finding}")
                    if not finding.endswith("ok"):
                        failed.append(f"{name} {operation} {dtype}")
    print(f"verdict: {_verdict(gpus, failed)}")
    return 1 if failed else 0


def _backends(gpus: _Gpus) -> list[tuple[str, Any, AbstractContextManager[Any]]]:
    """Name, array module and device of whatever computes."""
    found: list[tuple[str, Any, AbstractContextManager[Any]]] = [("NumPy", np, nullcontext())]
    if gpus.names:
        import cupy

        for number in gpus.names:
            name = "GPU" if len(gpus.names) == 1 else f"GPU {number}"
            found.append((name, cupy, cupy.cuda.Device(number)))
    return found


def _attention(xp: Any, dtype: np.dtype) -> tuple[list[Any], np.ndarray]:
    """Results of a small call, and what they are in float64, one behind the other."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 77, 64)).astype(dtype) for _ in range(3))
    expected, _ = reference.attention(q, k, v, causal=True)
    return [attention(*(xp.asarray(x) for x in (q, k, v)), causal=True)], expected.ravel()


def _gated_delta_rule(xp: Any, dtype: np.dtype) -> tuple[list[Any], np.ndarray]:
    """The same: a prompt, one step behind it, and the states that this leaves."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 78, 2, 64))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    tokens = [x.astype(dtype) for x in (q, k, v)]
    tokens += [-rng.exponential(0.1, (1, 78, 2)), rng.uniform(0, 1, (1, 78, 2))]
    expected = reference.gated_delta_rule(*tokens)
    prompt, step = ([xp.asarray(x[:, some]) for x in tokens] for some in (slice(77), slice(77, 78)))
    out, state = chunk_gated_delta_rule(*prompt, output_final_state=True)
    last = recurrent_gated_delta_rule(*(*step, state))
    return [out, last, state], np.concatenate([x.ravel() for x in expected])


def _cached(xp: Any, dtype: np.dtype) -> tuple[list[Any], np.ndarray]:
    """The same: a prompt and one step behind it, from pages that both are appended to."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 77, 64)).astype(dtype) for _ in range(3))
    expected, _ = reference.attention(q, k, v, causal=True)
    caches = [xp.asarray(np.zeros((5, 2, 16, 64), dtype)) for _ in range(2)]
    table, outs = xp.asarray(np.array([[3, 1, 4, 0, 2]], np.int32)), []
    for begin, some in ((0, slice(76)), (76, slice(76, 77))):
        query, key, value = (xp.asarray(x[:, :, some].copy()) for x in (q, k, v))
        options = {"seqlens_k": begin, "k_new": key, "v_new": value, "page_table": table, "causal": True}
        outs.append(attention_with_kv_cache(query, *caches, **options))
    return outs, np.concatenate([expected[:, :, :76].ravel(), expected[:, :, 76:].ravel()])


_OPERATIONS = {"attention": _attention, "KV cache": _cached, "gated delta rule": _gated_delta_rule}
"""What is tried out."""


def _check(call: Callable[[Any, np.dtype], tuple[list[Any], np.ndarray]], xp: Any, dtype: str) -> str:
    try:
        results, expected = call(xp, DTYPES[dtype])
        on_host = [x if xp is np else x.get() for x in results]
        out = np.concatenate([x.astype(np.float64).ravel() for x in on_host])
    except Exception as error:  # the report must name every failure, whatever it is
        return f"FAILED: {error}"
    error_norm = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
    return f"relative error {error_norm:.1e} {'ok' if error_norm < LARGEST_ERROR[dtype] else 'WRONG'}"


def _verdict(gpus: _Gpus, failed: list[str]) -> str:
    if failed:
        num_checks = len(_OPERATIONS) * len(FLOAT_NAMES) * (1 + len(gpus.names))
        return f"not ready, {len(failed)} of {num_checks} checks failed ({', '.join(failed)}); report all of the above"
    if gpus.names:
        verdict = f"ready, on {' and '.join(gpus.names.values())}, and for NumPy arrays on the CPU"
    else:
        verdict = f"ready for NumPy arrays only: {gpus.missing}"
    verdict += "".join(f"; but {fault}" for fault in gpus.faults)
    chosen = settings()
    for variable, value in (("CUFLASH_KERNEL", chosen.kernel), ("CUFLASH_TILE", chosen.tile)):
        if value:
            verdict += f"; but {variable}={value} is set, and calls that it cannot serve raise"
    return verdict + "".join(f"; but {line}" for line in misspelt())


def _show_config(gpus: _Gpus) -> None:
    from . import __version__

    # Not platform.platform(), which starts a program.
    machine = platform.system(), platform.release(), platform.machine(), *platform.libc_ver()
    system = "-".join(filter(None, machine))
    print(f"cuflash {__version__}, sources {source_digest()}, Python {platform.python_version()} on {system}")
    print(f"numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}, CPU back end with {num_threads()} threads")
    for line in gpus.lines:
        print(line)
    print("kernels:")
    for spec in (*KERNELS, *GATED_KERNELS):
        print(f"  {spec.name}: {spec.summary}")
    print("settings:")
    for knob in KNOBS:
        print(f"  {f'{knob.variable}={read(knob.variable)}':<24}  {knob.meaning}")
    for line in misspelt():
        print(f"  {line}")


def _look_for_gpus() -> _Gpus:
    missing = why_no_gpu()
    cupy, lines = _look_for_cupy()
    if missing:
        return _Gpus([*lines, missing], {}, missing, [])
    names, unusable, faults = {}, [], []
    for number in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(number)
        name = f"GPU {number} ({properties['name'].decode()})"
        capability = 10 * properties["major"] + properties["minor"]
        lines.append(
            f"GPU {number}: {properties['name'].decode()}, "
            f"compute capability {properties['major']}.{properties['minor']}, "
            f"{properties['multiProcessorCount']} multiprocessors, {properties['totalGlobalMem'] >> 30} GiB"
        )
        fault = why_not_compiled(capability)
        if fault:
            unusable.append(f"{name} cannot be used: {fault}")
        else:
            names[number] = name
            slower = why_slower(capability)
            faults += [f"{name} could be faster: {slower}"] if slower else []
    if not names:
        return _Gpus([*lines, *unusable], {}, "; ".join(unusable), [])
    nothing_kept = why_nothing_is_kept()
    faults += [*unusable, nothing_kept] if nothing_kept else unusable
    return _Gpus([*lines, *faults], names, "", faults)


def _look_for_cupy() -> tuple[Any, list[str]]:
    """CuPy, if it can be imported, and a line on it."""
    if not driver_installed():
        return None, []
    try:
        cupy = import_cupy()
    except Exception:  # the reason is found once more, as a sentence
        return None, []
    try:
        compiler = f"NVRTC {'.'.join(map(str, cupy.cuda.nvrtc.getVersion()))}"
    except Exception:  # whatever the search for its library raises
        compiler = "no NVRTC"
    return cupy, [f"cupy {cupy.__version__}, {compiler}, kernel cache {cache_folder()}"]
