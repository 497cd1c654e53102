"""From a plan to a compiled kernel: entry text, CuPy's RawModule, and compilation without a GPU.

The entry file of a kernel is a few #define lines and one #include. CuPy caches compiled modules on disk by that text,
which holds a digest of all of cuda_src because the cache does not see included files.
"""

from __future__ import annotations

import hashlib
import re
import time
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

from ..cupy_cache import compile_in_memory
from ..log import INFO, logger
from ..plan.build import Program
from ..settings import read
from .installed import why_no_nvrtc, why_not_compiled
from .progress import show_progress, tell_if_slow


class KernelCompileError(RuntimeError):
    """A kernel did not compile; the message says what to do about it, or holds the compiler's log."""


def nvrtc_version() -> tuple[int, int]:
    """Version of the compiler; a KernelCompileError says what to do where there is none."""
    missing = why_no_nvrtc()
    if missing:
        raise KernelCompileError(missing)
    from cupy.cuda import nvrtc

    version: tuple[int, int] = nvrtc.getVersion()
    return version


@lru_cache(maxsize=1)
def source_folder() -> Path:
    """Folder of the CUDA sources: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if (folder / "common" / "config.cuh").is_file():
            return folder
    raise FileNotFoundError(f"the CUDA sources of cuflash are missing: no cuda_src in or beside {package}")


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Twelve hexadecimal digits over the names and contents of all CUDA sources."""
    digest = hashlib.sha256()
    folder = source_folder()
    for path in sorted([*folder.rglob("*.cu"), *folder.rglob("*.cuh")]):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def entry_text(program: Program) -> str:
    """Source of one specialised kernel; goes unchanged to NVRTC, nvcc, ncu or compute-sanitizer."""
    values = [(name, str(value)) for name, value in program.macros]
    choices = " ".join(f"{name.lower()}={value.removeprefix('CUFLASH_').lower()}" for name, value in values)
    lines = [f"// cuflash {program.kernel} | {choices} | sources {source_digest()}"]
    lines += [f"#define CUFLASH_{name} {value}" for name, value in values]
    lines.append(f'#include "{program.kernel}.cu"')
    return "\n".join(lines) + "\n"


def compiler_options() -> tuple[str, ...]:
    """One tuple for all kernels: every distinct one costs CuPy a preprocessor run per process."""
    return ("--std=c++17", f"-I{source_folder()}")


_functions: dict[tuple[Program, int], Any] = {}
_locks: dict[tuple[Program, int], Any] = {}
"""Reentrant: a signal handler may need the kernel that it keeps from being compiled."""


def kernel_function(program: Program, device_id: int) -> Any:
    """Return the compiled kernel as CuPy's Function on that device, from memory, CuPy's disk cache or the compiler."""
    key = (program, device_id)
    function = _functions.get(key)
    if function is None:
        with tell_if_slow(program.kernel):
            function = _compiled(program, device_id)
    return function


def _compiled(program: Program, device_id: int) -> Any:
    key = (program, device_id)
    function = _functions.get(key)
    if function is None:
        with _locks.setdefault(key, RLock()):
            function = _functions.get(key)
            if function is None:
                function = _functions[key] = _build(program, device_id)
    return function


def _build(program: Program, device_id: int) -> Any:
    import cupy

    text = entry_text(program)
    dump(program.kernel, text)
    begin = time.perf_counter()
    with cupy.cuda.Device(device_id) as device:
        try:
            try:
                kernel = _load(program.kernel, text)
            except OSError as error:
                compile_in_memory(error)
                kernel = _load(program.kernel, text)
            if program.shared_memory > 48 * 1024:
                kernel.max_dynamic_shared_size_bytes = program.shared_memory
            function = kernel.kernel
        except Exception as error:
            first_line = text.partition("\n")[0]
            reason = _known_reason(device) or error
            raise KernelCompileError(f"could not compile or load {first_line}: {reason}") from error
    if logger.isEnabledFor(INFO):
        seconds = time.perf_counter() - begin
        logger.info("%s is compiled or loaded, %.1f s", text.partition("\n")[0].removeprefix("// cuflash "), seconds)
    return function


def _known_reason(device: Any) -> str:
    """What keeps this compiler from serving the device, whatever it says itself; "" if nothing is known."""
    try:
        return why_not_compiled(int(device.compute_capability))
    except Exception:  # of a device that fails: what it said first tells more
        return ""


def own_target(kernel: str) -> str:
    """Return the target that a source with instructions of one architecture alone is compiled for, else ""."""
    return "sm_90a" if kernel.endswith("_wgmma") else ""


def _load(kernel: str, text: str) -> Any:
    import cupy

    target = own_target(kernel)
    # CuPy's own -arch stands before it: from NVRTC 12.9 on the last one counts.
    options = (*compiler_options(), f"-arch={target}") if target else compiler_options()
    return cupy.RawModule(code=text, options=options, backend="nvrtc").get_function(f"cuflash_{kernel}")


def dump(kernel: str, text: str) -> None:
    """Write an entry file into the folder CUFLASH_DUMP, if it is set."""
    folder = read("CUFLASH_DUMP")
    if folder:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{kernel}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.cu").write_text(text)


class Resources(NamedTuple):
    """What the assembler reports of a kernel."""

    registers: int
    """Per thread."""
    spill_bytes: int
    """Per thread, stores and loads."""
    stack_bytes: int
    seconds: float
    """Processor time that compiling took: unlike time on the clock, the same on a busy machine."""
    serializes: bool
    """Whether the assembler has products of warpgroups wait for one another (its notes C7508 to C7515)."""


def compile_offline(program: Program, arch: str, extra_source: str = "") -> Resources:
    """Compile for an architecture such as `"sm_80"` with NVRTC alone: neither a GPU nor a driver is needed."""
    from cupy.cuda import nvrtc

    text = entry_text(program) + extra_source
    version = nvrtc_version()
    handle = nvrtc.createProgram(text, f"{program.kernel}_entry.cu", (), ())
    begin = time.thread_time()
    try:
        options = [
            *compiler_options(),
            "-ftz=true",
            f"-arch={own_target(program.kernel) or arch}",
            "--ptxas-options=-v",
        ]
        if version >= (12, 9):
            options.append("--no-cache")  # what NVRTC takes from its cache comes without the assembler's report
        nvrtc.compileProgram(handle, tuple(options))
        log = nvrtc.getProgramLog(handle)
    except nvrtc.NVRTCError as error:
        raise KernelCompileError(f"{text.partition(chr(10))[0]}: {error}\n{nvrtc.getProgramLog(handle)}") from error
    finally:
        nvrtc.destroyProgram(handle)
    return parse_resources(log, time.thread_time() - begin)


def parse_resources(log: str, seconds: float) -> Resources:
    """Read the assembler's report (`--ptxas-options=-v`)."""
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise KernelCompileError(f"the compiler's log names no registers:\n{log}")
    spills = sum(int(number) for number in re.findall(r"(\d+) bytes spill", log))
    stack = re.search(r"(\d+) bytes stack frame", log)
    serializes = re.search(r"\bC75(0[89]|1[0-5])\b", log) is not None
    return Resources(int(registers[1]), spills, int(stack[1]) if stack else 0, seconds, serializes)


def compile_core(programs: list[Program], device_id: int, arch: str) -> None:
    """Compile several kernels in threads; says so on stderr, once, when they do not come from the disk cache."""
    import os
    from concurrent.futures import ThreadPoolExecutor, wait

    with ThreadPoolExecutor(min(len(programs), os.cpu_count() or 1), "cuflash-compile") as pool:
        # The first has a moment for itself: what CuPy finds out about the options, once per process, is most of a warm
        # start, and threads that begin together would all do it.
        jobs = [pool.submit(_compiled, program, device_id) for program in programs[:1]]
        wait(jobs, timeout=0.15)
        jobs += [pool.submit(_compiled, program, device_id) for program in programs[1:]]
        show_progress(jobs, arch)
    for job in jobs:
        job.result()
