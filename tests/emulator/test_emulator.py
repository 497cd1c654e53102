"""The CPU harness itself: what it must notice, and every instruction that it defines, one by one.

The instruction tests run the same sources on a GPU where there is one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cuflash.gpu.arguments import divisor
from cuflash.gpu.compile import compiler_options, source_digest, source_folder
from cuflash.problem.arrays import DTYPES
from emulator.emulator import EmulationError, Kernel, compile_text, compiler, shadow_sources

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")

_HEAD = """
struct Params {{ const {input}* in; const {input}* in_2; {output}* out; }};
extern "C" __global__ void test_kernel(const __grid_constant__ Params params) {{
    extern __shared__ __align__(1024) char shared_memory[];
    const unsigned int thread = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    auto* shared = reinterpret_cast<{input}*>(shared_memory);
    const auto* in = params.in;
    const auto* in_2 = params.in_2;
    auto* out = params.out;
    (void)thread, (void)warp, (void)lane, (void)shared, (void)in, (void)in_2, (void)out;
"""


def _source(body: str, include: str = "", types: tuple[str, str] = ("float", "float")) -> str:
    head = _HEAD.format(input=types[0], output=types[1])
    return f'#include "common/config.cuh"\n{include}\nusing namespace cuflash;\n{head}{body}\n}}\n'


def _compile(source: str, folder: Path) -> Kernel:
    return compile_text(source, "test_kernel", shadow_sources(folder / "src"))


def _emulate(
    kernel: Kernel, arrays: tuple[np.ndarray, ...], threads: int, shared: int, seed: int, blocks: int = 1
) -> None:
    params = np.array([x.ctypes.data for x in arrays], np.uint64).tobytes()
    names = ("in", "in_2", "out")
    ranges = [
        (x.ctypes.data, x.ctypes.data + x.nbytes, name, name == "out") for name, x in zip(names, arrays, strict=True)
    ]
    kernel.launch(blocks, threads, shared, params, ranges, seed)


UNORDERED = "no barrier between|nobody has written"
"""Which of them depends on who comes first."""

FINDINGS = {
    "read-write race of warps": ("shared[thread] = 1; __syncwarp(); out[thread] = shared[63 - thread];", UNORDERED),
    "read-write race of lanes": ("shared[thread] = 1; out[thread] = shared[thread ^ 1];", UNORDERED),
    "a shuffle is no barrier": (
        "shared[thread] = 1; __shfl_xor_sync(0xffffffffu, 1, 1); out[thread] = shared[thread ^ 1];", UNORDERED
    ),
    "write-read race": (
        "shared[thread] = 1; __syncthreads(); out[thread] = shared[thread ^ 32]; shared[thread] = 2;", UNORDERED,
    ),
    "write-read race with the first of several lanes": (
        "shared[thread] = 1; __syncthreads(); out[thread] = shared[warp]; if (thread == 31) shared[0] = 2;", UNORDERED,
    ),
    "write-write race": ("shared[thread / 2] = thread;", UNORDERED),
    "uninitialised": ("__syncthreads(); out[thread] = shared[thread];", "nobody has written"),
    "before the input": ("out[thread] = in[static_cast<int>(thread) - 1];", "byte -4 of in,"),
    "behind the input": ("out[thread] = in[thread + 1];", "byte 256 of in, which has 256"),
    "behind the output": ("out[thread + 1] = 0;", "byte 256 of out, which has 256"),
    "null": ("out[thread] = *static_cast<const float*>(nullptr);", "far from every array"),
    "writes to an input": ("const_cast<float*>(in)[thread] = 0;", "an input"),
    "behind shared memory": ("shared[thread + 1] = 0;", "shared byte 256 of 256"),
    "outside an array of shared memory": (
        "struct Tiles { float a[4]; float b[60]; }; auto& tiles = *reinterpret_cast<Tiles*>(shared_memory);"
        "if (thread == 0) tiles.a[lane + 4 + blockIdx.x] = 0;", "index 4 is outside",
    ),
    "unaligned": ("struct alignas(16) Four { float x[4]; };"
                  "if (thread == 0) out[0] = reinterpret_cast<const Four*>(in + 1)->x[0];", "boundary"),
    **{
        f"{size} bytes from behind the input": (f"memcpy(out, in + 65 - {size} / 4, {size});", "of in, which has 256")
        for size in (4, 12, 16, 24, 32, 48, 64)
    },
    **{
        f"{size} bytes that are nowhere": (f"memcpy(out, shared + warp * {size} / 4, {size});", "nobody has written")
        for size in (4, 12, 16, 24, 32)
    },
    "two writers": ("out[thread / 2] = 0;", "has written"),
    "two blocks write": ("out[thread] = 0;", "of block 0 has written"),
    "barrier for some": ("if (thread < 32) __syncthreads();", "have returned|wait for each other"),
    "barriers of two kinds": ("if (lane < 16) __syncthreads(); else __syncwarp();", "wait for each other"),
    "lanes apart": (
        "if (lane < 16) __syncwarp(); else __shfl_sync(0xffffffffu, 1, 0);", "while other lanes of its warp wait in"
    ),
    "copy not waited for": (
        "cp_async_16(shared + 4 * thread, in, true); __syncthreads(); out[thread] = shared[4 * thread];",
        "before the wait",
    ),
    "copy seen by others": (
        "if (thread < 16) cp_async_16(shared + 4 * thread, in, true); cp_async_wait(); out[thread] = shared[thread];",
        UNORDERED,
    ),
    "copy over what the thread has read": (
        "auto& mine = shared[4 * thread]; mine = 1; __syncthreads(); out[thread] = mine;"
        "cp_async_16(&mine, in, true); out[thread] += mine;", "before the wait",
    ),
    "copy never waited for": ("if (thread < 16) cp_async_16(shared + 4 * thread, in, true);", "not waited for"),
    "copy from outside": ("cp_async_16(shared + 4 * (thread % 16), in + 64, true);", "byte 256 of in"),
    "copy on no boundary": ("if (thread == 0) cp_async_16(shared + 1, in, true);", "boundary"),
    "newest group not waited for": (
        "if (thread < 16) cp_async_16(shared + 4 * thread, in, true); cp_async_commit(); cp_async_wait_group<1>();"
        "if (thread < 16) out[thread] = shared[4 * thread];", "before the wait",
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", FINDINGS)
def test_notices(name: str, seed: int, tmp_path: Path) -> None:
    body, message = FINDINGS[name]
    kernel = _compile(_source(body, '#include "ptx/cp_async.cuh"'), tmp_path)
    arrays = tuple(np.zeros(64, np.float32) for _ in range(3))
    with pytest.raises(EmulationError, match=message):
        _emulate(
            kernel, arrays, 64, 1024 if "copy" in name or "group" in name else 256, seed, 2 if "blocks" in name else 1
        )


_EXCHANGE = """
    if (warp < 2) {
        shared[thread] = in[thread];
        barrier_wait(1, 64);
        out[thread] = shared[63 - thread];
    }
"""
"""Warps 0 and 1 of four, each of which then reads what the other wrote."""
_COPY = """
    if (warp < 2) {
        if (thread < 16) cp_async_16(shared + 4 * thread, in + 4 * thread, true);
        cp_async_wait();
        barrier_wait(1, 64);
        out[thread] = shared[63 - thread];
    }
"""

BARRIER_FINDINGS = {
    "exchange without a barrier": (_EXCHANGE.replace("barrier_wait(1, 64);", ""), UNORDERED),
    "exchange over a barrier of one warp": (_EXCHANGE.replace("1, 64", "1 + warp, 32"), UNORDERED),
    "exchange over a barrier that comes too early": (
        _EXCHANGE.replace("barrier_wait(1, 64);", "").replace("shared[thread]", "barrier_wait(1, 64); shared[thread]"),
        UNORDERED,
    ),
    "a third warp reads": (_EXCHANGE + "if (warp == 2) out[thread] = shared[lane];", UNORDERED),
    "a third warp reads after a barrier with others": (
        _EXCHANGE + "if (warp > 1) { barrier_wait(2, 64); out[thread] = shared[lane]; }", UNORDERED
    ),
    "a third warp reads after a barrier with the second": (
        # Which knows what the first did before their barrier, and no more.
        _EXCHANGE + "if (warp == 0) shared[64 + lane] = 3;"
        "if (warp == 1 || warp == 2) barrier_wait(2, 64); if (warp == 2) out[thread] = shared[64 + lane];",
        UNORDERED,
    ),
    "a warp writes what a third has read": (
        "shared[thread] = 1; __syncthreads(); if (warp == 2) out[thread] = shared[lane];"
        "if (warp < 2) barrier_wait(1, 64); if (warp == 0) shared[lane] = 2;",
        UNORDERED,
    ),
    "a warp writes what one of its readers may still read": (
        "shared[thread] = 1; __syncthreads(); if (warp > 0) out[thread] = shared[lane];"
        "if (warp < 2) barrier_wait(1, 64); if (warp == 0) shared[lane] = 2;",
        UNORDERED,
    ),
    "a warp writes what it and another have read": (
        "shared[thread] = 1; __syncthreads(); if (warp < 2) out[thread] = shared[lane];"
        "if (warp == 1) { barrier_wait(1, 32); shared[lane] = 2; }",
        UNORDERED,
    ),
    "copy not waited for": (_COPY.replace("cp_async_wait();", ""), "before the wait"),
    "copy waited for after the barrier": (
        _COPY.replace("cp_async_wait();", "").replace("64);", "64); cp_async_wait();"), f"{UNORDERED}|before the wait"
    ),
    "copy seen by a third warp": (_COPY + "if (warp == 2) out[thread] = shared[lane];", f"{UNORDERED}|before the wait"),
    "two pairs in one barrier": ("barrier_wait(1, 64);", "which other warps have used, with no barrier between"),
    "a barrier taken over": (
        "if (warp < 2) barrier_wait(1, 64);"
        "if (warp == 2 || warp == 3) { barrier_wait(2, 64); barrier_any(1, 64, true); }",
        "which other warps have used, with no barrier between|while other warps wait in barrier_",
    ),
    "barrier 0": ("barrier_wait(0, 64);", "comes to barrier 0, but they are 1 to 15"),
    "barrier 16": ("barrier_any(16, 64, true);", "comes to barrier 16, but they are 1 to 15"),
    "no threads": ("barrier_wait(1, 0);", "barrier_wait 1 for 0 threads, which are no warps"),
    "half a warp": ("barrier_wait(1, 48);", "barrier_wait 1 for 48 threads, which are no warps"),
    "more threads than the block": ("barrier_any(2, 160, true);", "barrier_any 2 for 160 threads, .* a block of 128"),
    "other counts of warps": ("barrier_wait(1, thread < 64 ? 128 : 96);", "for (96 .* for 128|128 .* for 96)"),
    "other counts of lanes": ("barrier_wait(1, lane < 16 ? 128 : 96);", "barrier_wait 1 for 96 threads while others"),
    "with and without a vote": (
        "if (thread < 64) barrier_wait(1, 128); else barrier_any(1, 128, true);", "while other warps wait in barrier_"
    ),
    "lanes in other barriers": (
        "barrier_wait(lane < 16 ? 1 : 2, 64);", r"calls barrier_wait \d while other lanes of its warp wait in barrier_"
    ),
    "lanes apart": (
        "if (lane < 16) barrier_wait(1, 128); else __syncwarp();", "while other lanes of its warp wait in"
    ),
    "lanes that never come": (
        "if (lane < 16) barrier_wait(1, 128);",
        "from thread 0 in barrier_wait 1; from thread 16 in the end of the kernel; from thread 32 in barrier_wait 1",
    ),
    "two half warps are no warp": (
        "if (thread < 16 || (48 <= thread && thread < 64)) barrier_wait(1, 32);", "wait for each other for ever"
    ),
    "lanes in a barrier of the block": (
        "if (lane < 16) barrier_wait(1, 128); else __syncthreads();",
        "from thread 0 in barrier_wait 1; from thread 16 in __syncthreads",
    ),
    "warps that never come": (
        "if (thread < 64) barrier_any(3, 96, true);",
        "from thread 0 in barrier_any 3; from thread 32 in barrier_any 3; from thread 64 in the end of the kernel",
    ),
    "other orders": (
        "barrier_wait(thread < 64 ? 4 : 5, 128); barrier_wait(thread < 64 ? 5 : 4, 128);",
        "from thread 0 in barrier_wait 4; .* from thread 64 in barrier_wait 5",
    ),
    "two places": (
        "if (warp < 2) { barrier_wait(1, 128); out[thread] = 1; } else { out[thread] = 2; barrier_wait(1, 128); }",
        "calls barrier_wait 1 at another place than other threads of the block",
    ),
    "what follows an arrival": (
        "if (warp == 0) { barrier_arrive(1, 64); shared[lane] = 1; }"
        "if (warp == 1) { barrier_wait(1, 64); out[thread] = shared[lane]; }",
        UNORDERED,
    ),
    "a warp that arrives sees nothing": (
        "if (warp == 0) { barrier_arrive(1, 64); out[thread] = shared[lane]; }"
        "if (warp == 1) { shared[lane] = 1; barrier_wait(1, 64); }",
        UNORDERED,
    ),
    "arrives for the next turn before all have gone on": (
        "for (int turn = 0; turn < 2; ++turn) {"
        "    barrier_arrive(warp < 2 ? 1 : 2, 128);"
        "    barrier_wait(warp < 2 ? 2 : 1, 128);"
        "}",
        "with no barrier between|twice before others have come",
    ),
    "arrives twice": (
        "if (warp == 0) { barrier_arrive(1, 96); barrier_arrive(1, 96); } else if (warp == 1) barrier_wait(1, 96);",
        "with no barrier between|barrier_arrive 1 twice before others have come",
    ),
    "all arrive": ("barrier_arrive(1, 128);", "the last to come to barrier_arrive 1, where nobody waits"),
    "an arrival for a vote": (
        "if (warp < 2) barrier_arrive(1, 128); else barrier_any(1, 128, true);", "while other warps wait in barrier_"
    ),
    "two places of the block": (
        "if (warp < 2) { __syncthreads(); out[thread] = 1; } else { out[thread] = 2; __syncthreads(); }",
        "calls __syncthreads at another place than other threads of the block",
    ),
    "a barrier of the block instead": (
        "if (thread < 32) __syncthreads(); else barrier_wait(1, 128);",
        "from thread 0 in __syncthreads; from thread 32 in barrier_wait 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", BARRIER_FINDINGS)
def test_notices_at_named_barriers(name: str, seed: int, tmp_path: Path) -> None:
    body, message = BARRIER_FINDINGS[name]
    kernel = _compile(_source(body, '#include "ptx/barrier.cuh"\n#include "ptx/cp_async.cuh"'), tmp_path)
    arrays = tuple(np.zeros(128, np.float32) for _ in range(3))
    with pytest.raises(EmulationError, match=message):
        _emulate(kernel, arrays, 128, 512, seed)


def test_names_the_line(tmp_path: Path) -> None:
    kernel = _compile(_source("out[thread] = in[thread + 1];"), tmp_path)
    with pytest.raises(EmulationError, match=r"block 0, thread 63: .*\(\w+\.cpp:\d+\)"):
        _emulate(kernel, tuple(np.zeros(64, np.float32) for _ in range(3)), 64, 0, 0)


def test_goes_on_after_a_finding(tmp_path: Path) -> None:
    arrays = tuple(np.arange(64, dtype=np.float32) for _ in range(3))
    bad = _compile(_source("__syncthreads(); out[thread] = in[thread + 1];"), tmp_path)
    good = _compile(
        _source("shared[thread] = in[thread]; __syncthreads(); out[thread] = shared[63 - thread];"), tmp_path
    )
    for _ in range(2):
        with pytest.raises(EmulationError):
            _emulate(bad, arrays, 64, 256, 0)
        _emulate(good, arrays, 64, 256, 0)
        assert (arrays[2] == np.arange(64)[::-1]).all()


BACK_ENDS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def _run(
    back_end: str, body: str, arrays: tuple[np.ndarray, ...], tmp_path: Path, include: str, types: tuple[str, str],
    threads: int = 32, shared: int = 8192,
) -> np.ndarray:  # fmt: skip
    """Run one block on the CPU, in several orders of its lanes, or on a GPU; return the output."""
    headers = "\n".join(f'#include "ptx/{name}.cuh"' for name in include.split())
    source = _source(body, f'#include "common/divide.cuh"\n#include "common/numeric.cuh"\n{headers}', types)
    if back_end == "gpu":
        return _run_on_gpu(source, arrays, threads, shared, TARGETS.get(include, ()))
    _assemble(source, TARGETS.get(include, ("sm_80", "sm_90", "sm_120")))
    kernel = _compile(source, tmp_path)
    results = []
    for seed in (0, 1, 2):
        arrays[2].view(np.uint8)[...] = 0xFF
        _emulate(kernel, arrays, threads, shared, seed)
        results.append(arrays[2].copy())
    assert all(x.tobytes() == results[0].tobytes() for x in results), "depends on the order of the lanes"
    return results[0]


TARGETS = {"stmatrix": ("sm_90", "sm_120"), "wgmma": ("sm_90a",), "tensor_copy": ("sm_90",)}
"""Of instructions that older architectures have not, or this one alone."""


def _assemble(source: str, targets: tuple[str, ...]) -> None:
    """What runs here on the CPU also compiles for GPUs."""
    nvrtc = pytest.importorskip("cupy.cuda", reason="needs CuPy with NVRTC").nvrtc
    for arch in targets:
        program = nvrtc.createProgram(source, "instructions.cu", (), ())
        nvrtc.compileProgram(program, (*compiler_options(), "-ftz=true", f"-arch={arch}"))
        nvrtc.destroyProgram(program)


def _run_on_gpu(
    source: str, arrays: tuple[np.ndarray, ...], threads: int, shared: int, targets: tuple[str, ...]
) -> np.ndarray:
    import cupy
    from cupy.cuda.function import CPointer

    own = f"sm_{cupy.cuda.Device().compute_capability}"
    if targets and not any(target.startswith(own) for target in targets):
        pytest.skip(f"{own} has no such instructions")
    # CuPy's own -arch stands before it: from NVRTC 12.9 on the last one counts.
    options = (*compiler_options(), *(f"-arch={target}" for target in targets if target == f"{own}a"))
    module = cupy.RawModule(code=f"// {source_digest()}\n{source}", options=options, backend="nvrtc")
    on_gpu = [cupy.asarray(x.view(np.uint8)) for x in arrays]
    params = np.array([x.data.ptr for x in on_gpu], np.uint64)
    module.get_function("test_kernel").kernel((1,), (threads,), (CPointer(params.ctypes.data),), shared)
    return on_gpu[2].get().view(arrays[2].dtype)


backends = pytest.mark.parametrize("back_end", BACK_ENDS)


@backends
def test_shuffles_and_votes(back_end: str, tmp_path: Path) -> None:
    body = """
        const int mine = static_cast<int>(in[lane]);
        int* row = out + 8 * lane;
        row[0] = __shfl_sync(0xffffffffu, mine, 5);
        row[1] = __shfl_xor_sync(0xffffffffu, mine, 3);
        row[2] = __shfl_up_sync(0xffffffffu, mine, 4);
        row[3] = __shfl_down_sync(0xffffffffu, mine, 4);
        row[4] = static_cast<int>(__ballot_sync(0xffffffffu, mine % 3 == 0));
        row[5] = __any_sync(0xffffffffu, mine == 7);
        row[6] = __all_sync(0xffffffffu, mine >= 0);
        row[7] = __ffs(mine);
    """
    values = np.random.default_rng(0).permutation(32).astype(np.int32)
    arrays = values, values, np.empty(256, np.int32)
    out = _run(back_end, body, arrays, tmp_path, "convert", ("int", "int")).reshape(32, 8)
    lanes = np.arange(32)
    votes = np.uint32((values % 3 == 0) @ (1 << lanes)).astype(np.int32)
    ffs = np.array([0 if v == 0 else (int(v) & -int(v)).bit_length() for v in values])
    up, down = np.where(lanes < 4, lanes, lanes - 4), np.where(lanes > 27, lanes, lanes + 4)
    expected = [np.full(32, values[5]), values[lanes ^ 3], values[up], values[down], np.full(32, votes), 1, 1, ffs]
    for column, value in zip(out.T, expected, strict=True):
        assert (column == value).all()


@backends
def test_largest_of_a_warp(back_end: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((8, 32)).astype(np.float32) * np.float32([[1], [1e38], [1e-42], [1], [1], [1], [1], [0]])
    rows[3] -= 9
    rows[4], rows[4, 7] = -np.inf, -3e38
    rows[5], rows[5, 30] = -np.inf, -1e-45
    rows[6, 11] = np.inf
    body = "for (int row = 0; row < 8; ++row) out[32 * row + lane] = largest_of_warp(in[32 * row + lane]);"
    arrays = rows.ravel(), rows.ravel(), np.empty(256, np.float32)
    out = _run(back_end, body, arrays, tmp_path, "maximum", ("float", "float")).reshape(8, 32)
    assert (out == rows.max(axis=1, keepdims=True)).all()


def _divide(back_end: str, tmp_path: Path, numbers: np.ndarray, values: np.ndarray, result: str) -> np.ndarray:
    """What an expression in `number` and `by` gives for each of 4096 numbers and what divides it."""
    reciprocals = np.array([divisor(int(x))[1] for x in values], np.uint64).view(np.int64)
    body = f"""
        constexpr int kCount = 4096;
        for (int i = lane; i < kCount; i += 32) {{
            const long long number = in[i];
            const Divisor by = {{in[kCount + i], static_cast<unsigned long long>(in[2 * kCount + i])}};
            out[i] = {result};
        }}
    """
    given = np.concatenate([numbers, values, reciprocals])
    arrays = given, given, np.empty(numbers.size, np.int64)
    return _run(back_end, body, arrays, tmp_path, "convert", ("long long", "long long")).ravel()


@backends
def test_division(back_end: str, tmp_path: Path) -> None:
    """By reciprocals, of whatever is not negative."""
    rng = np.random.default_rng(0)
    edges = [1, 2, 3, 7, 641, 6700417, 2**16 - 1, 2**16 + 1, 2**30 + 1, 2**31 - 2, 2**31 - 1, 2**31, 2**32 + 3, 2**62]
    values = np.concatenate([edges, (2 ** rng.uniform(0, 62, 50)).astype(np.int64)])
    multiples = (2**63 - 1) // values * values
    anything = (2 ** rng.uniform(0, 63, (59, 64))).astype(np.int64)
    largest = np.full(64, 2**63 - 1)
    numbers = np.stack([multiples, multiples - 1, values, values - 1, largest, *anything]).ravel()
    values = np.tile(values, 64)
    assert (_divide(back_end, tmp_path, numbers, values, "divide(number, by)") == numbers // values).all()


@backends
@pytest.mark.parametrize("part", ["quotient", "rest"])
def test_division_of_an_index(back_end: str, part: str, tmp_path: Path) -> None:
    """Of 32 bits, by lengths of any size, with its rest."""
    rng, most = np.random.default_rng(0), 2**32 - 2
    edges = [1, 2, 3, 7, 641, 6700417, 2**16 - 1, 2**16 + 1, 2**31 - 1, 2**31, most, 2**32, 2**32 + 3, 2**62]
    values = np.concatenate([edges, (2 ** rng.uniform(0, 33, 50)).astype(np.int64)])
    multiples, anything = most // values * values, (2 ** rng.uniform(0, 32, (59, 64))).astype(np.int64)
    numbers = np.stack([multiples, multiples - 1, values, values - 1, np.full(64, most), *anything])
    numbers, values = np.clip(numbers, 0, most).ravel(), np.tile(values, 64)
    found = _divide(back_end, tmp_path, numbers, values, f"Divided(static_cast<unsigned int>(number), by).{part}")
    assert (found == (numbers // values if part == "quotient" else numbers % values)).all()


@backends
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversions(back_end: str, dtype: str, tmp_path: Path) -> None:
    """Every 16-bit value to float and back, and floats at, beside and between the rounding boundaries."""
    name = "half" if dtype == "float16" else "bfloat16"
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = every.view(DTYPES[dtype]).astype(np.float32)
    body = f"for (int i = thread; i < {every.size}; i += 32) out[i] = float_from_{name}_bits(in[i]);"
    out = _run(
        back_end,
        body,
        (every, every, np.empty(every.size, np.float32)),
        tmp_path,
        "convert",
        ("unsigned short", "float"),
    )
    assert (out.view(np.uint32) == wide.view(np.uint32))[~np.isnan(wide)].all() and np.isnan(out[np.isnan(wide)]).all()

    finite = wide[np.isfinite(wide)].astype(np.float64)
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    floats = np.concatenate(
        [wide, middle, np.nextafter(middle, np.float32(9e9)), np.nextafter(middle, np.float32(-9e9))]
    )
    floats = np.concatenate([floats, np.float32([65519.9, 65520, 65536, 3.4e38, 1e-45, 2**-25, 2**-24, 2**-26])])
    body = f"for (int i = thread; i < {floats.size}; i += 32) out[i] = {name}_bits_from_float(in[i]);"
    arrays = floats, floats, np.empty(floats.size, np.uint16)
    out = _run(back_end, body, arrays, tmp_path, "convert", ("float", "unsigned short"))
    # CuPy compiles with -ftz=true, which the conversions do not follow: subnormal floats are left out.
    normal = (np.abs(floats) >= 2.0**-126) | (floats == 0)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = floats.astype(DTYPES[dtype])
    same = (out == expected.view(np.uint16)) | (np.isnan(floats) & np.isnan(out.view(DTYPES[dtype]).astype(np.float32)))
    assert same[normal].all()


@backends
def test_arithmetic_of_subnormal_floats(back_end: str, tmp_path: Path) -> None:
    """As NumPy's, whose float32 has them, while CuPy compiles with -ftz=true."""
    a = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    a *= np.float32(2.0) ** np.random.default_rng(1).integers(-148, -100, a.size).astype(np.float32)
    b, c = np.roll(a, 1) * np.float32(2.0**110), np.roll(a, 2)
    results = {
        "multiply_subnormal(a, b)": a * b,
        "multiply_add_subnormal(a, b, c)": (a.astype(np.float64) * b + c).astype(np.float32),
        "divide_subnormal(a, 3)": a / np.float32(3),
        "narrow_subnormal(widen_subnormal(a) / 3)": (a.astype(np.float64) / 3).astype(np.float32),
    }
    body = f"""
        constexpr int kCount = {a.size};
        for (int i = thread; i < kCount; i += 32) {{
            const float a = in[i], b = in[kCount + i], c = in[2 * kCount + i];
            {" ".join(f"out[{i} * kCount + i] = {result};" for i, result in enumerate(results))}
        }}
    """
    given = np.concatenate([a, b, c])
    arrays = given, given, np.empty(4 * a.size, np.float32)
    out = _run(back_end, body, arrays, tmp_path, "subnormal", ("float", "float"))
    for found, expected in zip(out.reshape(4, -1), results.values(), strict=True):
        assert (found == expected).all() and (np.abs(found) < 2.0**-126).any()


@backends
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversions_of_pairs(back_end: str, dtype: str, tmp_path: Path) -> None:
    name = "half2" if dtype == "float16" else "bfloat162"
    floats = np.random.default_rng(0).standard_normal(2048).astype(np.float32) * np.float32(50)
    body = f"""
        for (int i = 2 * thread; i < {floats.size}; i += 64) {{
            const unsigned int bits = {name}_bits_from_floats(in[i], in[i + 1]);
            out[i] = bits & 0xffff, out[i + 1] = bits >> 16;
        }}
    """
    arrays = floats, floats, np.empty(floats.size, np.uint16)
    out = _run(back_end, body, arrays, tmp_path, "convert", ("float", "unsigned short"))
    assert (out == floats.astype(DTYPES[dtype]).view(np.uint16)).all()


@backends
def test_conversion_to_tf32(back_end: str, tmp_path: Path) -> None:
    floats = np.random.default_rng(0).standard_normal(2048).astype(np.float32)
    floats[:4] = np.array([0x3F801000, 0x3F800FFF, 0xBF801000, 0x3F803000], np.uint32).view(np.float32)
    body = f"for (int i = thread; i < {floats.size}; i += 32) out[i] = tf32_bits_from_float(in[i]) & 0xffffe000u;"
    arrays = floats, floats, np.empty(floats.size, np.uint32)
    out = _run(back_end, body, arrays, tmp_path, "convert", ("float", "unsigned int"))
    assert (out == (floats.view(np.uint32) + np.uint32(0x1000) & np.uint32(0xFFFFE000))).all()


@backends
def test_exp2(back_end: str, tmp_path: Path) -> None:
    floats = np.float32([-np.inf, -1e30, -127, -126, -30.5, -1e-6, 0, 0.5, 15, 127])
    floats = np.concatenate([floats, np.linspace(-126, 126, 1000, dtype=np.float32)])
    body = f"for (int i = thread; i < {floats.size}; i += 32) out[i] = exp2_approximate(in[i]);"
    out = _run(back_end, body, (floats, floats, np.empty_like(floats)), tmp_path, "exp2", ("float", "float"))
    assert (out[:3] == 0).all() and out[6] == 1
    np.testing.assert_allclose(out[3:], np.exp2(floats[3:].astype(np.float64)), rtol=2.0**-21)


@backends
def test_copies_arrive_at_their_waits(back_end: str, tmp_path: Path) -> None:
    body = """
        for (int group = 0; group < 3; ++group) {
            cp_async_16(shared + 128 * group + 4 * lane, in + 128 * group + 4 * lane, lane != 3);
            cp_async_commit();
        }
        cp_async_wait_group<2>();
        __syncwarp();
        for (int i = 0; i < 4; ++i) out[4 * lane + i] = shared[127 - 4 * lane - i];
        cp_async_wait_group<0>();
        __syncwarp();
        for (int i = 4; i < 12; ++i) out[32 * i + lane] = shared[32 * i + 31 - lane];
    """
    values = np.random.default_rng(0).standard_normal(384).astype(np.float32)
    out = _run(back_end, body, (values, values, np.empty(384, np.float32)), tmp_path, "cp_async", ("float", "float"))
    copied = values.reshape(3, 32, 4).copy()
    copied[:, 3] = 0
    rows = copied.reshape(12, 32)
    expected = np.concatenate([rows[:4].reshape(-1)[::-1], rows[4:, ::-1].reshape(-1)])
    assert (out == expected).all()


def _run_warps(back_end: str, body: str, values: np.ndarray, tmp_path: Path, include: str) -> np.ndarray:
    """Run four warps; the elements that they have not written stay zero."""
    body = f"out[thread] = 0; {body}"
    arrays = values, values, np.empty(128, np.float32)
    return _run(back_end, body, arrays, tmp_path, include, ("float", "float"), 128, 512)


@backends
def test_warps_exchange_over_a_barrier(back_end: str, tmp_path: Path) -> None:
    """Twice in two pairs, while the others are elsewhere; then over a barrier that other warps have used."""
    body = """
        const int pair = warp / 2;
        float sum = in[thread];
        for (int round = 0; round < 2; ++round) {
            shared[thread] = sum;
            barrier_wait(1 + pair, 64);
            sum += 10 * shared[thread ^ 63];
            barrier_wait(1 + pair, 64);
        }
        shared[thread] = sum;
        __syncthreads();
        shared[thread] = -sum;
        if (warp > 0) {
            barrier_wait(1, 96);
            sum = shared[32 + (thread + 32) % 96];
        }
        out[thread] = sum;
    """
    values = np.arange(128, dtype=np.float32)
    out = _run_warps(back_end, body, values, tmp_path, "barrier")
    for _ in range(2):
        values = values + 10 * values[np.arange(128) ^ 63]
    assert (out == np.concatenate([values[:32], -np.roll(values[32:], -64)])).all()


@backends
def test_order_passes_on_from_barrier_to_barrier(back_end: str, tmp_path: Path) -> None:
    """Warp 2 sees what warp 0 wrote, and writes where warps 0 and 1 have read, without having met warp 0."""
    body = """
        if (warp == 0) shared[lane] = in[lane];
        __syncwarp();
        if (warp == 0) out[thread] = shared[31 - lane];
        if (warp < 2) barrier_wait(1, 64);
        if (warp == 1) out[thread] = shared[lane ^ 1];
        if (warp == 1 || warp == 2) barrier_wait(2, 64);
        if (warp == 2) {
            out[thread] = shared[lane];
            __syncwarp();
            shared[31 - lane] = 2 * in[lane];
        }
        __syncthreads();
        if (warp == 3) out[thread] = shared[lane];
    """
    values = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    out = _run_warps(back_end, body, values, tmp_path, "barrier").reshape(4, 32)
    expected = values[::-1], values[np.arange(32) ^ 1], values, 2 * values[::-1]
    for row, value in zip(out, expected, strict=True):
        assert (row == value).all()


@backends
def test_arrivals_hand_over(back_end: str, tmp_path: Path) -> None:
    """Two warps write for two others, which double it, in turns; a warp waits for no other of its half."""
    body = """
        shared[thread] = 0;
        __syncthreads();
        for (int turn = 0; turn < 3; ++turn) {
            if (warp < 2) {
                shared[thread] += in[thread];
                barrier_arrive(13, 128);
                barrier_wait(14, 128);
                out[thread] = shared[thread ^ 32];
                barrier_arrive(13, 128);
                barrier_wait(14, 128);
            } else {
                barrier_wait(13, 128);
                shared[thread - 64] *= 2;
                barrier_arrive(14, 128);
                barrier_wait(13, 128);
                barrier_arrive(14, 128);
            }
        }
    """
    values = np.arange(128, dtype=np.float32)
    out = _run_warps(back_end, body, values, tmp_path, "barrier")
    assert (out[:64] == 14 * values[:64][np.arange(64) ^ 32]).all()


@backends
def test_copies_are_seen_after_a_barrier(back_end: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    out = _run_warps(back_end, _COPY, values, tmp_path, "barrier cp_async")
    assert (out[:64] == values[63::-1]).all() and not out[64:].any()


@backends
def test_barrier_any(back_end: str, tmp_path: Path) -> None:
    """One use of a barrier right after the other, in which three warps vote, and a warp that asks itself alone."""
    body = """
        for (int round = 0; round < 16; ++round) {
            const bool mine = in[round * 128 + thread] != 0;
            const bool any = thread < 96 ? barrier_any(1, 96, mine) : barrier_any(15, 32, mine);
            out[round * 128 + thread] = any;
        }
    """
    votes = np.zeros((16, 128), np.int32)
    rng = np.random.default_rng(0)
    for i, row in enumerate(votes):
        row[rng.integers(96)] = -2 * (i % 2)
        row[96 + rng.integers(32)] = i // 2 % 2
    out = _run(back_end, body, (votes, votes, np.empty_like(votes)), tmp_path, "barrier", ("int", "int"), 128)
    assert (out[:, :96] == votes[:, :96].any(1, keepdims=True)).all()
    assert (out[:, 96:] == votes[:, 96:].any(1, keepdims=True)).all()


@backends
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(back_end: str, transposed: bool, tmp_path: Path) -> None:
    body = f"""
        for (int i = lane; i < 256; i += 32) shared[i / 8 * 24 + i % 8] = in[i];  // rows 48 bytes apart
        __syncwarp();
        unsigned int matrices[4];
        ldmatrix_x4{"_transposed" if transposed else ""}(matrices, shared_address(shared + lane * 24));
        for (int i = 0; i < 4; ++i) {{
            out[i * 64 + lane * 2] = matrices[i] & 0xffff;
            out[i * 64 + lane * 2 + 1] = matrices[i] >> 16;
        }}
    """
    values = np.random.default_rng(0).permutation(256).astype(np.uint16)
    arrays = values, values, np.empty(256, np.uint16)
    out = _run(back_end, body, arrays, tmp_path, "ldmatrix", ("unsigned short", "unsigned short"))
    matrices = values.reshape(4, 8, 8)
    assert (out.reshape(4, 8, 8) == (matrices.swapaxes(1, 2) if transposed else matrices)).all()


def _assert_close(out: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    a, b, c = (x.astype(np.float64) for x in (a, b, c))
    size = np.abs(a) @ np.abs(b) + np.abs(c)
    assert (np.abs(out - (a @ b + c)) <= 2.0**-21 * size).all()  # tensor cores round toward zero, at every addition


@backends
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mma_m16n8k16(back_end: str, dtype: str, tmp_path: Path) -> None:
    body = f"""
        const int row = lane / 4, column = lane % 4 * 2;
        const auto pair = [](const unsigned short* x, int step) {{
            return static_cast<unsigned int>(x[0]) | static_cast<unsigned int>(x[step]) << 16;
        }};
        unsigned int a[4], b[2];
        for (int i = 0; i < 4; ++i) a[i] = pair(in + (row + i % 2 * 8) * 16 + column + i / 2 * 8, 1);
        for (int i = 0; i < 2; ++i) b[i] = pair(in_2 + (column + i * 8) * 8 + row, 8);
        float d[4];
        for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(lane * 4 + i);
        mma_m16n8k16<{"true" if dtype == "bfloat16" else "false"}>(d, a, b);
        for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 + column + i % 2] = d[i];
    """
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in ((16, 16), (16, 8)))
    lane, i = np.divmod(np.arange(128), 4)
    c = np.empty((16, 8))
    c[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2] = np.arange(128)
    arrays = a.view(np.uint16), b.view(np.uint16), np.empty((16, 8), np.float32)
    out = _run(back_end, body, arrays, tmp_path, "mma", ("unsigned short", "float"))
    _assert_close(out.reshape(16, 8), a, b, c)


@backends
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_wmma(back_end: str, dtype: str, transposed: bool, tmp_path: Path) -> None:
    """One product, from operands at an offset in padded rows; the rows of C times a column of factors."""
    kind = "float" if dtype == "float32" else "unsigned short"
    depth = 8 if dtype == "float32" else 16
    columns, b_rows = (depth, 16) if transposed else (16, depth)
    body = f"""
        using Tensor = Wmma<CUFLASH_{dtype.upper()}>;
        constexpr int kPitch = 24;
        static_assert(Tensor::kDepth == {depth}, "depth");
        auto* a_tile = shared;
        auto* b_tile = shared + 512;
        auto* c_tile = reinterpret_cast<float*>(shared_memory + 4096);
        auto* factors = c_tile + 512;
        for (int i = lane; i < 16 * {depth}; i += 32) a_tile[16 + i / {depth} * kPitch + i % {depth}] = in[i];
        for (int i = lane; i < {b_rows * columns}; i += 32) b_tile[i / {columns} * kPitch + i % {columns}] = in_2[i];
        if (lane < 16) factors[lane] = static_cast<float>(lane + 1);
        __syncwarp();
        Tensor::A a;
        Tensor::{"BTransposed" if transposed else "B"} b;
        WmmaC c = {{}}, factor;
        Tensor::load<16>(a, a_tile, kPitch);
        Tensor::load<0>(b, b_tile, kPitch);
        wmma_load_column(factor, factors);
        Tensor::multiply_add(c, a, b);
        wmma_fence();
        for (int i = 0; i < 8; ++i) c.x[i] *= factor.x[i];
        wmma_store<16>(c_tile, c, 20);
        __syncwarp();
        for (int i = lane; i < 256; i += 32) out[i] = c_tile[16 + i / 16 * 20 + i % 16];
    """
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in ((16, depth), (b_rows, columns)))
    if dtype == "float32":
        a, b = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b))
        arrays = a, b, np.empty((16, 16), np.float32)
    else:
        arrays = a.view(np.uint16), b.view(np.uint16), np.empty((16, 16), np.float32)
    out = _run(back_end, body, arrays, tmp_path, "wmma", (kind, "float"))
    _assert_close(out.reshape(16, 16) / np.arange(1, 17)[:, None], a, b.T if transposed else b, np.zeros((16, 16)))


def test_every_instruction_has_its_definition() -> None:
    """A kernel may only use what the harness knows."""
    here = Path(__file__).parent / "ptx"
    assert sorted(path.name for path in source_folder().glob("ptx/*.cuh")) == sorted(
        path.name for path in here.glob("*")
    )
