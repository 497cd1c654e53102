"""Kernels compiled by g++ and run on the CPU: from a plan to the results, with every memory access checked.

The entry file is the one that goes to NVRTC, and so are the sources, except that `ptx/` is replaced by the definitions
in this folder. `builtins.h` stands in for what a CUDA compiler declares, `runtime.cpp` runs the grid, and
`tensor_cores.cpp` computes products of matrices.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from cases import serves

from cuflash.gpu.arguments import Packer, pack_pointers
from cuflash.gpu.compile import entry_text, source_digest, source_folder
from cuflash.gpu.launch import launch_parts
from cuflash.gpu.merge_parts import merge_steps, merge_workspace
from cuflash.gpu.workspace import merge_of_splits
from cuflash.plan.build import Program
from cuflash.plan.plan import Plan, make_plan
from cuflash.plan.table import KERNELS, Device, device_of
from cuflash.plan.tiles import APPENDING, PREPARING
from cuflash.problem.arrays import DTYPES, ArrayInfo, extent, inspect
from cuflash.problem.describe import describe_attention, describe_attention_lse, describe_varlen
from cuflash.problem.describe_cache import describe_kv_cache
from cuflash.problem.parts import Parts, describe_parts, result_operands
from cuflash.problem.problem import ARRAYS, Problem, result_rows
from cuflash.settings import Settings
from cuflash.testing import Case

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "cpu_cuda"
DEBUG = os.environ.get("CPU_CUDA_DEBUG") == "1"
"""Unoptimised kernels without checks of memory, for a debugger."""

_COMMON = ("-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-Wno-unknown-pragmas")
_CHECKED = ("-Og", "-g1", "-fsanitize=thread,alignment,bounds", "-nostdlib")
"""-nostdlib keeps g++'s own sanitizer libraries away; runtime.cpp is behind the checks. Most kernels run once or twice:
with -O1 it all takes an eighth longer."""


class EmulationError(AssertionError):
    """A kernel did what no GPU must see; the message says which thread, where, and what."""


class _Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_size_t),
        ("end", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_int),
    )


def compiler() -> str | None:
    """Path of g++, or None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


@lru_cache(maxsize=1)
def _processor_flags() -> tuple[str, ...]:
    # fma() is an instruction with them and a slow function without; nothing is reassociated either way.
    return ("-march=native",) if platform.machine() == "x86_64" else ()


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@lru_cache(maxsize=1)
def _harness_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.h"), *HERE.glob("ptx/*.cuh"), *HERE.glob("*.cpp")]):
        digest.update(path.read_bytes())
    version = subprocess.run([compiler() or "g++", "--version"], capture_output=True, check=True).stdout
    return _key(digest.hexdigest(), version.decode(), platform.node(), str(DEBUG))


def _build(target: Path, arguments: list[str]) -> None:
    """Compile into a file that appears whole or not at all: several processes may want it at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    command = [compiler() or "g++", *_COMMON, *arguments, "-o", str(partial)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"g++ refused a kernel:\n{' '.join(command)}\n{result.stderr}")
    partial.replace(target)


@lru_cache(maxsize=1)
def _runtime() -> ctypes.CDLL:
    target = BUILD / f"runtime-{_harness_digest()}.so"
    if not target.exists():
        # Some distributions' g++ checks that longjmp only goes up its own stack; fibers have many.
        sources = [str(HERE / name) for name in ("runtime.cpp", "tensor_cores.cpp")]
        _build(target, ["-O3", "-g1", "-U_FORTIFY_SOURCE", *_processor_flags(), f"-I{HERE}", *sources])
    return ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


def shadow_sources(folder: Path, changed: Mapping[str, str] | None = None, definitions: Path = HERE) -> Path:
    """Make a folder that looks like cuda_src, with another `ptx` (that of `definitions`), and some texts changed."""
    source = source_folder()
    paths = {path.relative_to(source): path for path in [*source.glob("*.cu"), *source.glob("*/*.cuh")]}
    paths |= {path.relative_to(definitions): path for path in definitions.glob("ptx/*.cuh")}
    for name, path in paths.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if changed and name.as_posix() in changed:
            _write(link, changed[name.as_posix()])
        elif not link.is_symlink():
            with suppress(FileExistsError):  # another process may be quicker
                link.symlink_to(path)
    return folder


def modified_sources(texts: Mapping[str, str]) -> Path:
    """The folder with these texts in place of sources, in which their kernels stay until they change."""
    return shadow_sources(BUILD / f"{source_digest()}-{_key(*texts.values())}-{_harness_digest()}" / "src", texts)


def _write(path: Path, text: str) -> None:
    """Write a file that appears whole: several processes may want it at once."""
    if not path.exists():
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)


def choose_mutant(number: int | None, max_steps: int = 2**64 - 1) -> int:
    """Run kernels with one of the mutants that are compiled into them; return the steps since the last choice."""
    choose = _runtime().runtime_choose
    choose.argtypes, choose.restype = [ctypes.c_int, ctypes.c_uint64], ctypes.c_uint64
    return int(choose(-1 if number is None else number, max_steps))


def reached_mutants() -> dict[int, bool]:
    """Mutants that kernels have come by since the last choice, and whether they would have differed there."""
    array = ctypes.c_ubyte * ctypes.c_int.in_dll(_runtime(), "runtime_max_mutants").value
    return {
        number: bool(found & 2) for number, found in enumerate(array.in_dll(_runtime(), "runtime_reached")) if found
    }


class Kernel:
    """A compiled kernel."""

    def __init__(self, library: Path) -> None:
        self._library = library
        loaded = ctypes.CDLL(str(library))
        self._entry, self._flushes = loaded.cpu_cuda_entry, ctypes.c_bool.in_dll(loaded, "cpu_cuda_flushes")

    def launch(
        self,
        num_blocks: int,
        num_threads: int,
        shared_memory: int,
        params: bytes,
        ranges: list[tuple[int, int, str, bool]],
        seed: int = 0,
    ) -> None:
        """Run a grid; EmulationError if a thread does what it must not.

        Parameters
        ----------
        params
            The argument struct, and the maps behind it if the kernel takes them.
        ranges
            Begin, end, name and whether it may be written, of every array.
        seed
            Order in which warps and lanes take turns; 0 is the natural one.
        """
        runtime = _runtime()
        text, place = ctypes.create_string_buffer(2048), ctypes.c_size_t()
        array = (_Range * len(ranges))(*((begin, end, name.encode(), w) for begin, end, name, w in ranges))
        status = runtime.runtime_launch(
            self._entry, params, num_blocks, num_threads, ctypes.c_size_t(shared_memory), array, len(ranges),
            ctypes.c_uint64(seed), self._flushes, text, ctypes.c_size_t(len(text)), ctypes.byref(place),
        )  # fmt: skip
        if status != 0:
            raise EmulationError(f"{text.value.decode()}{self._where(place.value)}")

    def _where(self, place: int) -> str:
        """Source line of a program counter inside the kernel."""
        base = ctypes.cast(self._entry, ctypes.c_void_p).value
        if not place or base is None or shutil.which("addr2line") is None:
            return ""
        symbols = subprocess.run(["nm", str(self._library)], capture_output=True, text=True, check=False).stdout
        entry = next((int(line.split()[0], 16) for line in symbols.splitlines() if line.endswith(" cpu_cuda_entry")), 0)
        offset = hex(place - base + entry - 1)
        command = ["addr2line", "-i", "-e", str(self._library), offset]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        places = [f"{Path(line.split(' ')[0]).name}" for line in lines if line and not line.startswith("?")]
        return f" ({', called from '.join(places)})" if places else ""


_TRAMPOLINE = """
template <typename Params>
__attribute__((no_sanitize("thread"))) static void cpu_cuda_call(void (*kernel)(Params), const void* params) {{
    kernel(*static_cast<const Params*>(params));
}}
template <typename Params, typename Maps>
__attribute__((no_sanitize("thread"))) static void cpu_cuda_call(void (*kernel)(Params, Maps), const void* params) {{
    const auto* const first = static_cast<const Params*>(params);
    const auto* const bytes = reinterpret_cast<const char*>(first + 1);  // on no boundary of theirs
    Maps maps;
    for (unsigned int i = 0; i < sizeof(maps); ++i) reinterpret_cast<char*>(&maps)[i] = bytes[i];
    kernel(*first, maps);
}}
extern "C" void cpu_cuda_entry(const void* params) {{ cpu_cuda_call({entry}, params); }}
extern "C" const bool cpu_cuda_flushes =
#if defined(CUFLASH_DTYPE) && CUFLASH_DTYPE != CUFLASH_FLOAT64
    true;
#else
    false;
#endif
"""
_kernels: dict[str, Kernel] = {}


def compile_text(text: str, entry: str, sources: Path) -> Kernel:
    """Compile a CUDA source whose kernel is called `entry` and takes one struct, with includes from `sources`."""
    key = _key(text, entry, str(sources), _TRAMPOLINE, *_CHECKED, _harness_digest())
    if key not in _kernels:
        _runtime()
        library = sources.parent / f"{key}.so"
        if not library.exists():
            source = sources.parent / f"{key}.cpp"
            source.write_text(text + _TRAMPOLINE.format(entry=entry))
            options = ("-O0", "-g", "-DCPU_CUDA_DEBUG") if DEBUG else _CHECKED
            _build(
                library,
                [*options, *_processor_flags(), f"-I{sources}", "-include", str(HERE / "builtins.h"), str(source)],
            )
        _kernels[key] = Kernel(library)
    return _kernels[key]


def compile_kernel(program: Program, sources: Path | None = None) -> Kernel:
    """Compile the entry file of a program, unchanged; `sources` is a folder made by `shadow_sources`."""
    if sources is None:
        sources = shadow_sources(BUILD / f"{source_digest()}-{_harness_digest()}" / "src")
    return compile_text(entry_text(program), f"cuflash_{program.kernel}", sources)


class Emulator:
    """Calls of the functions of attention with NumPy arrays, computed by a CUDA kernel on the CPU."""

    def __init__(
        self,
        kernel: str,
        tile: str = "",
        device: Device | None = None,
        seed: int = 0,
        sources: Path | None = None,
        num_splits: int | None = 1,
    ) -> None:
        self.settings = Settings(kernel, tile, False)
        self.spec = next(spec for spec in KERNELS if spec.name == kernel)
        self.device = device_of(90) if device is None else device
        self.seed = seed
        self.sources = sources
        self.num_splits = num_splits
        self.poison = 0xFF
        """Each byte of a workspace before the call."""

    def function(self, case: Case) -> Any:
        """Return the stand-in for `case.function`."""
        found: Any = getattr(self, case.function.__name__)
        return found

    def attention(self, *arrays: Any, **options: Any) -> Any:
        """Compute `cuflash.attention(...)`."""
        return self.run(*describe_attention(*arrays, **options), options.get("out"), options.get("lse"))

    def attention_varlen(self, *arrays: Any, **options: Any) -> Any:
        """Compute `cuflash.attention_varlen(...)`."""
        return self.run(*describe_varlen(*arrays, **options), options.get("out"), options.get("lse"))

    def attention_lse(self, *arrays: Any, out: Any = None, **options: Any) -> Any:
        """Compute `cuflash.attention_lse(...)`."""
        return self.run(*describe_attention_lse(*arrays, out=out, **options), None, out)

    def attention_with_kv_cache(self, *arrays: Any, **options: Any) -> Any:
        """Compute `cuflash.attention_with_kv_cache(...)`."""
        return self.run(*describe_kv_cache(*arrays, **options), options.get("out"), options.get("lse"))

    def refuses(self, problem: Problem) -> bool:
        """Whether the kernel does not serve the problem."""
        return not serves(self.spec, problem, self.device)

    def run(self, problem: Problem, infos: dict[str, ArrayInfo], out: Any = None, lse: Any = None) -> Any:
        """Compute a checked problem; `out` and `lse` are the caller's own arrays, if given."""
        chosen = problem.cache is not None and (problem.cache.num_splits or problem.cache.split_size)
        plan = make_plan(problem, self.device, self.settings, None if chosen else self.num_splits)
        rows = result_rows(problem)
        sums = rows if lse is None else lse.shape  # of a state its rows have columns
        spans = {name: span(info) for name, info in infos.items()}
        traits, strides = problem.traits, problem.strides
        if strides.out is not None:
            out, spans["out"] = new_result((*rows, traits.head_dim_v), traits.out_dtype, strides.out, out)
        if strides.lse is not None:
            lse, spans["lse"] = new_result(sums, traits.lse_dtype, strides.lse, lse)
        pointers = [spans[name][0] if name in spans else 0 for name in ARRAYS]
        if plan.append is not None:
            self._append(problem, plan, pointers, spans)
        ranges = [(begin, end, name, name in ("out", "lse")) for name, (_, begin, end) in spans.items() if begin < end]
        # A poisoned workspace of exactly the plan's size.
        memory = np.full(plan.workspace + 16, self.poison, np.uint8)
        workspace = memory.ctypes.data + -memory.ctypes.data % 16
        prepared: tuple[int, ...] = (0, 0)
        if plan.preparation is not None and plan.num_blocks:
            prepared = workspace + plan.preparation.offset_k, workspace + plan.preparation.offset_v
            made = [(*prepared, "prepared k"), (prepared[1], workspace + plan.workspace, "prepared v")]
            made = [found for found in made if found[0] < found[1]]
            kernel = compile_kernel(plan.preparation.program, self.sources)
            _, packed, _ = launch_parts(problem, plan, _packer(problem, plan))[0]
            kernel.launch(
                plan.preparation.num_blocks,
                PREPARING.num_threads,
                plan.preparation.program.shared_memory,
                pack_pointers(*pointers, *prepared) + packed,
                [*(found for found in ranges if not found[3]), *((*found, True) for found in made)],
                self.seed,
            )
            ranges += [(*found, False) for found in made]
        if plan.num_splits > 1:
            return self._run_split(problem, plan, pointers, prepared, workspace, ranges, out, lse)
        self._launch(problem, plan, [*pointers, *prepared], ranges)
        return out if lse is None else lse if out is None else (out, lse)

    def _append(
        self, problem: Problem, plan: Plan, pointers: list[int], spans: dict[str, tuple[int, int, int]]
    ) -> None:
        """Append keys and values to a cache, which nothing else may write."""
        assert plan.append is not None, "else there is nothing to append"
        there = [(begin, end, name, name in ("k", "v")) for name, (_, begin, end) in spans.items() if begin < end]
        kernel = compile_kernel(plan.append.program, self.sources)
        arguments = pack_pointers(*pointers, 0, 0) + _packer(problem, plan)(problem, plan)
        kernel.launch(plan.append.num_blocks, APPENDING.num_threads, 0, arguments, there, self.seed)

    def _launch(self, problem: Problem, plan: Plan, pointers: list[int], ranges: list[Any]) -> None:
        if plan.num_blocks:
            kernel = compile_kernel(plan.program, self.sources)
            for grid, packed, offsets in launch_parts(problem, plan, _packer(problem, plan)):
                steps = (0,) * len(pointers) if offsets is None else (*offsets, 0, 0)
                at = [p + step if p else 0 for p, step in zip(pointers, steps, strict=True)]
                arguments = pack_pointers(*at) + packed
                kernel.launch(grid[0], plan.tile.num_threads, plan.program.shared_memory, arguments, ranges, self.seed)

    def _run_split(
        self,
        problem: Problem,
        plan: Plan,
        pointers: list[int],
        prepared: tuple[int, ...],
        begin: int,
        ranges: list[Any],
        out: Any,
        lse: Any,
    ) -> Any:
        """Write partial results where a workspace begins, then merge them."""
        assert plan.partial is not None, "else it has one split"
        of_out, of_lse = plan.partial.sizes
        between, end = begin + of_out, begin + of_out + of_lse
        inputs = [found for found in ranges if not found[3]]
        halves = [(begin, between, "partial out"), (between, end, "partial lse")][begin == between :]
        at = [*pointers[:3], begin, between, *pointers[5:], *prepared]
        self._launch(problem, plan, at, [*inputs, *((*half, True) for half in halves)])
        merge = merge_of_splits(problem, plan.num_splits)
        kernel = compile_kernel(merge.program, self.sources)
        results = [found for found in ranges if found[3]] + [(*half, False) for half in halves]
        for packed in merge.arguments([begin], [between], *pointers[3:5]):
            kernel.launch(merge.num_blocks, merge.num_threads, merge.program.shared_memory, packed, results, self.seed)
        return out if lse is None else lse if out is None else (out, lse)


def _packer(problem: Problem, plan: Plan) -> Packer:
    return Packer(problem, plan, tile_map)


def tile_map(row_stride: int, head_dim: int, num_rows: int) -> bytes:
    """`TensorMap` of ptx/tensor_copy.cuh here."""
    return struct.pack("=16Q", row_stride, head_dim, num_rows, *(0,) * 13)


def span(info: ArrayInfo) -> tuple[int, int, int]:
    """Address of an array's first element, and of its first and behind its last byte."""
    return info.pointer, *extent(info.pointer, info.shape, info.strides, DTYPES[info.dtype].itemsize)


def new_result(
    shape: tuple[int, ...], name: str, strides: tuple[int, ...], given: Any
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return the array of a type for a result, NaN where it is not the caller's own, and its `span`."""
    dtype = DTYPES[name]
    strides = strides[len(strides) - len(shape) :]
    if given is None:
        size = max(1, int(np.prod(shape)))
        memory = np.full(size * dtype.itemsize + 16, 0xFF, np.uint8)
        skip = -memory.ctypes.data % 16  # as device memory begins on such a boundary
        given = np.ndarray(shape, dtype, memory, skip, strides)
    pointer = given.ctypes.data
    return given, (pointer, *extent(pointer, shape, given.strides, dtype.itemsize))


def merge(outs: Any, lses: Any, sources: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Compute `cuflash.merge_attention_states(...)` of NumPy arrays."""
    parts = describe_parts(outs, lses)
    if not isinstance(outs, (list, tuple)) and not isinstance(lses, (list, tuple)):  # stacked, as on a GPU
        parts = Parts(parts.outs[:1], parts.lses[:1], parts.num_parts, (outs.strides[0], lses.strides[0]))
    spans = {f"{name}[{i}]": span(info) for name in ("outs", "lses") for i, info in enumerate(getattr(parts, name))}
    if parts.strides is not None:
        spans = {name: span(inspect(name, x)) for name, x in (("outs", outs), ("lses", lses))}
    out_result, lse_result = result_operands(parts)
    out, out_span = new_result(parts.outs[0].shape, out_result.dtype, out_result.strides, None)
    lse, lse_span = new_result(parts.lses[0].shape, lse_result.dtype, lse_result.strides, None)
    size = merge_workspace(parts)
    scratch = np.full(size + 16, 0xFF, np.uint8)
    at = scratch.ctypes.data + -scratch.ctypes.data % 16
    ranges = [(begin, end, name, False) for name, (_, begin, end) in spans.items() if begin < end]
    ranges += [(begin, end, name, True) for name, (_, begin, end) in (("out", out_span), ("lse", lse_span))]
    for step in merge_steps(parts, out.ctypes.data, lse.ctypes.data, at):
        merge = step.merge
        kernel = compile_kernel(merge.program, sources)
        for packed in merge.arguments(*step[1:]):
            usable = [*ranges, (at, at + size, "scratch memory", True)] if size else ranges
            usable = [r for r in usable if r[0] < r[1]]
            kernel.launch(merge.num_blocks, merge.num_threads, merge.program.shared_memory, packed, usable)
    return out, lse
