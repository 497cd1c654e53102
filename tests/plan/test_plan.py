"""The choice of kernel, tile and grid, without a GPU.

`python tests/plan/test_plan.py` prints the golden table anew, for when a plan is changed on purpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.plan.build
import cuflash.plan.plan
from cuflash.plan.axes import BATCH_AXES
from cuflash.plan.features import FEATURES, used_features
from cuflash.plan.plan import Plan, make_plan, refusals
from cuflash.plan.table import KERNELS, Device, KernelSpec, device_of
from cuflash.plan.tiles import SHARED_MEMORY_KB
from cuflash.problem.arrays import DTYPES, FLOAT_NAMES, ITEMSIZE, ArrayInfo, contiguous_strides
from cuflash.problem.describe import describe_attention, describe_varlen
from cuflash.problem.problem import Problem, Traits
from cuflash.settings import AUTOMATIC, Settings

DEVICES = [device_of(capability) for capability in (50, 61, *SHARED_MEMORY_KB)]
H200 = device_of(90)


def gpu(
    shape: tuple[int, ...], dtype: str = "float16", strides: tuple[int, ...] | None = None, at: int = 0
) -> ArrayInfo:
    """An array on a GPU that is nowhere; strides in bytes."""
    strides = contiguous_strides(shape, ITEMSIZE[dtype]) if strides is None else strides
    return ArrayInfo(None, shape, strides, dtype, at, 0, True)


def swapped(shape: tuple[int, ...], dtype: str = "float16") -> ArrayInfo:
    """(..., heads, sequence, feature) that lies in memory as (..., sequence, heads, feature)."""
    *batch, heads, length, features = shape
    *outer, row, head, column = contiguous_strides((*batch, length, heads, features), ITEMSIZE[dtype])
    return gpu(shape, dtype, (*outer, head, row, column))


def dense(q: Any, k: Any = None, v: Any = None, **options: Any) -> Problem:
    k = q if k is None else k
    return describe_attention(q, k, k if v is None else v, **options)[0]


def square(dtype: str, head_dim: int, length: int = 4096, heads: int = 16, batch: int = 4, **options: Any) -> Problem:
    return dense(gpu((batch, heads, length, head_dim), dtype), **options)


def packed(lengths: int, total: int, heads: int, heads_kv: int, head_dim: int, dtype: str, **options: Any) -> Problem:
    q, k = gpu((total, heads, head_dim), dtype), gpu((total, heads_kv, head_dim), dtype)
    return describe_varlen(q, k, k, gpu((lengths + 1,), "int32"), **options)[0]


def six_axes(dtype: str = "float32") -> Problem:
    """Leading axes of which no two can be walked as one: every second index of each."""
    shape = (2, 3, 2, 3, 2, 3, 1, 8, 64)
    memory = contiguous_strides(tuple(2 * length for length in shape), ITEMSIZE[dtype])
    return dense(gpu(shape, dtype, tuple(2 * step for step in memory[:-1]) + memory[-1:]))


CASES: list[tuple[str, Problem, int]] = [
    *((f"{dtype} D=64", square(dtype, 64), 90) for dtype in FLOAT_NAMES),
    *((f"{dtype} D=128 causal", square(dtype, 128, causal=True), 90) for dtype in FLOAT_NAMES),
    *((f"{dtype} D=256", square(dtype, 256), 90) for dtype in FLOAT_NAMES),
    *((f"{dtype} D=512", square(dtype, 512), 90) for dtype in FLOAT_NAMES),
    *((f"float32 D={head_dim}", square("float32", head_dim), 90) for head_dim in (1, 16, 17, 33, 65, 80, 96, 192, 257)),
    *(
        (f"float32 D=128 on {capability}", square("float32", 128), capability)
        for capability in (61, 70, 75, 80, 86, 120)
    ),
    *((f"float64 D=512 on {capability}", square("float64", 512), capability) for capability in (61, 75, 86)),
    *((f"float16 D={head_dim}", square("float16", head_dim), 90) for head_dim in (1, 16, 32, 80, 96, 112, 160, 192)),
    *(
        (f"float16 D={head_dim} on {capability}", square("float16", head_dim), capability)
        for head_dim in (64, 128, 256)
        for capability in (70, 75, 80, 86, 120)
    ),
    *((f"tf32 D={head_dim}", square("float32", head_dim, precision="tf32"), 90) for head_dim in (64, 128, 256)),
    *((f"float16 D=512 on {capability}", square("float16", 512), capability) for capability in (75, 80, 86)),
    ("tf32 D=128 on 75", square("float32", 128, precision="tf32"), 75),
    ("bfloat16 D=64 on 75", square("bfloat16", 64), 75),
    ("float16 D=64 on 61", square("float16", 64), 61),
    ("D=192 Dv=128", dense(gpu((4, 16, 999, 192)), v=gpu((4, 16, 999, 128))), 90),
    ("D=64 Dv=128", dense(gpu((4, 16, 999, 64)), v=gpu((4, 16, 999, 128))), 90),
    ("D=256 Dv=64", dense(gpu((4, 16, 999, 256)), v=gpu((4, 16, 999, 64))), 90),
    ("GQA, 1 query", dense(gpu((8, 32, 1, 128)), gpu((8, 8, 4096, 128))), 90),
    ("GQA, many", dense(gpu((8, 32, 4096, 128)), gpu((8, 8, 4096, 128))), 90),
    ("MQA, 7", dense(gpu((8, 32, 7, 128)), gpu((8, 1, 4096, 128))), 90),
    ("MHA, one query", dense(gpu((8, 32, 1, 128)), gpu((8, 32, 4096, 128))), 90),
    ("digits", dense(gpu((597, 64), "float32"), gpu((1200, 64), "float32"), gpu((1200, 10), "float32")), 90),
    *(
        (f"points {dtype} D={head_dim}", dense(gpu((100_000, head_dim), dtype), v=gpu((100_000, 1), dtype)), 90)
        for dtype in ("float32", "float64")
        for head_dim in (3, 16)
    ),
    ("points, few queries", dense(gpu((5, 3), "float32"), gpu((100_000, 3), "float32")), 90),
    ("no queries", dense(gpu((2, 4, 0, 64)), gpu((2, 4, 7, 64))), 90),
    ("no keys", dense(gpu((2, 4, 7, 64)), gpu((2, 4, 0, 64))), 90),
    ("no batch", dense(gpu((0, 4, 7, 64))), 90),
    ("no heads", dense(gpu((2, 0, 7, 64))), 90),
    ("(B, N, H, D) swapped", dense(swapped((4, 16, 1000, 64))), 90),
    ("three batch axes", dense(gpu((2, 3, 5, 4, 100, 64))), 90),
    ("batch of q broadcast", dense(gpu((1, 4, 100, 64)), gpu((9, 4, 100, 64))), 90),
    ("six batch axes", six_axes(), 90),
    ("unaligned rows", dense(gpu((2, 4, 100, 64), strides=(51600, 12900, 129, 2))), 90),
    ("unaligned address", dense(gpu((2, 4, 100, 64), at=2)), 90),
    ("D=68 of float16", dense(gpu((2, 4, 100, 68))), 90),
    ("every second feature", dense(gpu((2, 4, 100, 64), strides=(102400, 25600, 256, 4))), 90),
    ("softcap window", square("float16", 64, softcap=30, window=(128, 0)), 90),
    (
        "bias mask",
        square("bfloat16", 64, 100, bias=gpu((4, 1, 100, 100), "float32"), mask=gpu((100, 100), "bool")),
        90,
    ),
    ("bias D=256", square("float16", 256, bias=gpu((4096, 4096), "float16")), 90),
    ("mask on 120", square("float16", 128, mask=gpu((4096, 4096), "bool")), 120),
    ("sinks alibi_slopes", square("float16", 64, sinks=gpu((16,), "float32"), alibi_slopes=gpu((16,), "float32")), 90),
    ("out_dtype", square("float16", 64, out_dtype="float32"), 90),
    ("varlen", packed(8, 8192, 16, 16, 64, "float16", causal=True), 90),
    ("varlen, GQA, short", packed(100, 800, 32, 8, 64, "float16"), 90),
    ("varlen, no tokens", packed(3, 0, 4, 4, 64, "float32"), 90),
    ("varlen, no sequences", packed(0, 10, 4, 4, 64, "float32"), 90),
]

GOLDEN = """\
float16 D=64, forward_wgmma, 192x128x2/512, grid 1408, 105472 B, batch 0:4, D 64/64, align 16, x1
bfloat16 D=64, forward_wgmma, 192x128x2/512, grid 1408, 105472 B, batch 0:4, D 64/64, align 16, x1
float32 D=64, precise_wgmma, 128x64x2p/384, grid 2048, 111616 B, batch 0:4, D 64/64, align 16, x1
float64 D=64, precise_float64, 128x64/256, grid 2048, 133280 B, batch 0:4, D 64/64, align 16, x1
float16 D=128 causal, forward_wgmma, 128x128x2w/384, grid 132, 209920 B, batch 0:4, D 128/128, align 16, x1
bfloat16 D=128 causal, forward_wgmma, 128x128x2w/384, grid 132, 209920 B, batch 0:4, D 128/128, align 16, x1
float32 D=128 causal, precise_wgmma, 128x64x2p/384, grid 2048, 209920 B, batch 0:4, D 128/128, align 16, x1, 64 at once
float64 D=128 causal, precise_float64, 128x32/256, grid 2048, 197792 B, batch 0:4, D 128/128, align 16, x1, 64 at once
float16 D=256, forward_wgmma, 128x64x2w/384, grid 132, 215040 B, batch 0:4, D 256/256, align 16, x1
bfloat16 D=256, forward_wgmma, 128x64x2w/384, grid 132, 215040 B, batch 0:4, D 256/256, align 16, x1
float32 D=256, precise_wgmma, 128x32p/384, grid 2048, 207872 B, batch 0:4, D 256/256, align 16, x1
float64 D=256, precise_wide, 32x128/256, grid 8192, 166144 B, batch 0:4, D 256/256, align 16, x1
float16 D=512, forward_mma, 64x32x2/256, grid 4096, 209616 B, batch 0:4, D 512/512, align 16, x1
bfloat16 D=512, forward_mma, 64x32x2/256, grid 4096, 209616 B, batch 0:4, D 512/512, align 16, x1
float32 D=512, precise_float32, 64x16p/256, grid 4096, 210864 B, batch 0:4, D 512/512, align 16, x1
float64 D=512, precise_wide, 32x128/256, grid 8192, 231680 B, batch 0:4, D 512/512, align 16, x1
float32 D=1, forward_points, 512x256/128, grid 512, 2240 B, batch 0:4, D 1/1, align 4, x4
float32 D=16, forward_points, 512x256/128, grid 512, 33440 B, batch 0:4, D 16/16, align 16, x2
float32 D=17, precise_float32, 64x64p/128, grid 4096, 33840 B, batch 0:4, D 32/32, align 4, x3
float32 D=33, precise_wgmma, 128x64x2p/384, grid 2048, 111616 B, batch 0:4, D 64/64, align 4, x1
float32 D=65, precise_wgmma, 128x64x2p/384, grid 2048, 209920 B, batch 0:4, D 128/128, align 4, x1
float32 D=80, precise_wgmma, 128x64x2p/384, grid 2048, 209920 B, batch 0:4, D 128/128, align 16, x1
float32 D=96, precise_wgmma, 128x64x2p/384, grid 2048, 209920 B, batch 0:4, D 128/128, align 16, x1
float32 D=192, precise_wgmma, 128x32p/384, grid 2048, 207872 B, batch 0:4, D 256/256, align 16, x1
float32 D=257, precise_float32, 64x16p/256, grid 4096, 161712 B, batch 0:4, D 384/384, align 4, x1
float32 D=128 on 61, forward_scalar, 32x32/64, grid 8192, 39072 B, batch 0:4, D 128/128, align 16, x1
float32 D=128 on 70, forward_scalar, 64x64/128, grid 4096, 86176 B, batch 0:4, D 128/128, align 16, x1
float32 D=128 on 75, forward_scalar, 32x64/128, grid 8192, 60576 B, batch 0:4, D 128/128, align 16, x1
float32 D=128 on 80, precise_float32, 64x32p/128, grid 4096, 72752 B, batch 0:4, D 128/128, align 16, x2
float32 D=128 on 86, precise_float32, 64x64/128, grid 4096, 71968 B, batch 0:4, D 128/128, align 16, x1
float32 D=128 on 120, precise_float32, 64x64/128, grid 4096, 71968 B, batch 0:4, D 128/128, align 16, x1
float64 D=512 on 61, forward_scalar, 4x16/32, grid 65536, 34080 B, batch 0:4, D 512/512, align 16, x1
float64 D=512 on 75, forward_scalar, 4x16/32, grid 65536, 34080 B, batch 0:4, D 512/512, align 16, x1
float64 D=512 on 86, forward_scalar, 4x16/32, grid 65536, 34080 B, batch 0:4, D 512/512, align 16, x2
float16 D=1, forward_mma, 128x64x2/128, grid 2048, 25568 B, batch 0:4, D 16/16, align 2, x3
float16 D=16, forward_mma, 128x64x2/128, grid 2048, 25568 B, batch 0:4, D 16/16, align 16, x3
float16 D=32, forward_wgmma, 192x128x2/512, grid 1408, 105472 B, batch 0:4, D 32/32, align 16, x1
float16 D=80, forward_wgmma, 192x112x2/512, grid 1408, 179200 B, batch 0:4, D 80/80, align 16, x1
float16 D=96, forward_wgmma, 192x112x2/512, grid 1408, 179200 B, batch 0:4, D 96/96, align 16, x1
float16 D=112, forward_wgmma, 128x128x2w/384, grid 132, 209920 B, batch 0:4, D 128/128, align 16, x1
float16 D=160, forward_wgmma, 128x96x2w/384, grid 132, 215040 B, batch 0:4, D 192/192, align 16, x1
float16 D=192, forward_wgmma, 128x96x2w/384, grid 132, 215040 B, batch 0:4, D 192/192, align 16, x1
float16 D=64 on 70, forward_wmma, 128x64/256, grid 2048, 74432 B, batch 0:4, D 64/64, align 16, x1
float16 D=64 on 75, forward_wmma, 128x32/256, grid 2048, 48832 B, batch 0:4, D 64/64, align 16, x1
float16 D=64 on 80, forward_mma, 128x64x2/128, grid 2048, 62432 B, batch 0:4, D 64/64, align 16, x2
float16 D=64 on 86, forward_mma, 128x32x2/128, grid 2048, 43936 B, batch 0:4, D 64/64, align 16, x2
float16 D=64 on 120, forward_mma, 128x32x2/128, grid 2048, 43936 B, batch 0:4, D 64/64, align 16, x2
float16 D=128 on 70, forward_wmma, 128x32/256, grid 2048, 73408 B, batch 0:4, D 128/128, align 16, x1
float16 D=128 on 75, forward_wmma, 64x32/128, grid 4096, 45504 B, batch 0:4, D 128/128, align 16, x1
float16 D=128 on 80, forward_mma, 128x32x2/128, grid 2048, 76704 B, batch 0:4, D 128/128, align 16, x2
float16 D=128 on 86, forward_mma, 128x32x2/256, grid 2048, 76704 B, batch 0:4, D 128/128, align 16, x1
float16 D=128 on 120, forward_mma, 128x32x2/256, grid 2048, 76704 B, batch 0:4, D 128/128, align 16, x1
float16 D=256 on 70, forward_wmma, 64x16/128, grid 4096, 57280 B, batch 0:4, D 256/256, align 16, x1
float16 D=256 on 75, forward_wmma, 64x16/128, grid 4096, 57280 B, batch 0:4, D 256/256, align 16, x1
float16 D=256 on 80, forward_mma, 128x32x2/256, grid 2048, 153808 B, batch 0:4, D 256/256, align 16, x1
float16 D=256 on 86, forward_mma, 64x32/128, grid 4096, 77008 B, batch 0:4, D 256/256, align 16, x1
float16 D=256 on 120, forward_mma, 64x32/128, grid 4096, 77008 B, batch 0:4, D 256/256, align 16, x1
tf32 D=64, precise_wgmma, 128x64x2p/384, grid 2048, 78848 B, batch 0:4, D 64/64, align 16, x1
tf32 D=128, precise_wgmma, 128x64x2p/384, grid 2048, 144384 B, batch 0:4, D 128/128, align 16, x1
tf32 D=256, precise_float32, 128x32p/256, grid 2048, 175920 B, batch 0:4, D 256/256, align 16, x1
float16 D=512 on 75, forward_scalar, 16x32/64, grid 16384, 52896 B, batch 0:4, D 512/512, align 16, x1
float16 D=512 on 80, forward_mma, 16x32/64, grid 16384, 85840 B, batch 0:4, D 512/512, align 16, x1
float16 D=512 on 86, forward_mma, 16x32/64, grid 16384, 85840 B, batch 0:4, D 512/512, align 16, x1
tf32 D=128 on 75, forward_scalar, 32x64/128, grid 8192, 60576 B, batch 0:4, D 128/128, align 16, x1
bfloat16 D=64 on 75, forward_scalar, 32x32/64, grid 8192, 30880 B, batch 0:4, D 64/64, align 16, x2
float16 D=64 on 61, forward_scalar, 32x32/64, grid 8192, 30880 B, batch 0:4, D 64/64, align 16, x1
D=192 Dv=128, forward_wgmma, 128x128x2w/384, grid 132, 231424 B, batch 0:4, D 192/128, align 16, x1
D=64 Dv=128, forward_wgmma, 128x128x2w/384, grid 132, 177152 B, batch 0:4, D 64/128, align 16, x1
D=256 Dv=64, forward_wgmma, 128x112x2w/384, grid 132, 227328 B, batch 0:4, D 256/64, align 16, x1
GQA, 1 query, forward_wgmma, 64x64x2/128, grid 256, splits 4, 88064 B, heads 4 of 4, batch 0:8, D 128/128, align 16, x2
GQA, many, forward_wgmma, 192x80x2/512, grid 5632, 146432 B, heads 1 of 4, batch 0:8, D 128/128, align 16, x1
MQA, 7, forward_wgmma, 128x128x2/384, grid 128, splits 8, 174080 B, heads 32 of 32, batch 0:8, D 128/128, align 16, x1
MHA, one query, forward_decode, 16x32/128, grid 256, 44448 B, batch 0:8, D 128/128, align 16, x2
digits, forward_scalar, 32x64/128, grid 361, splits 19, 52384 B, D 64/16, align 4, x3
points float32 D=3, forward_points, 512x256/128, grid 392, splits 2, 4320 B, D 3/1, align 4, x4
points float32 D=16, forward_points, 512x256/128, grid 392, splits 2, 17840 B, D 16/1, align 4, x2
points float64 D=3, forward_points, 256x128/128, grid 391, 4320 B, D 3/1, align 8, x3
points float64 D=16, forward_points, 256x128/128, grid 782, splits 2, 17840 B, D 16/1, align 8, x2
points, few queries, forward_points, 8x512/128, grid 98, splits 98, 12544 B, D 3/3, align 4, x6
no queries, forward_wgmma, 64x64x2/128, grid 0, 47104 B, batch 0:2, D 64/64, align 16, x4
no keys, forward_wgmma, 64x64x2/128, grid 8, 47104 B, batch 0:2, D 64/64, align 16, x4
no batch, forward_wgmma, 64x64x2/128, grid 0, 47104 B, batch 0:0, D 64/64, align 16, x4
no heads, forward_wgmma, 64x64x2/128, grid 0, 47104 B, batch 0:2, D 64/64, align 16, x4
(B, N, H, D) swapped, forward_wgmma, 64x64x2/128, grid 1024, 47104 B, batch 0:4, D 64/64, align 16, x4
three batch axes, forward_wgmma, 64x128x2/256, grid 240, 79872 B, batch 0:2 1:3 2:5, D 64/64, align 16, x2
batch of q broadcast, forward_wgmma, 64x128x2/256, grid 72, 79872 B, batch 0:9, D 64/64, align 16, x2
six batch axes, precise_decode, 8x16/128, grid 36, 13216 B, batch 2:2 3:3 4:2 5:3, outer 0:2 1:3, D 64/64, align 16, x3
unaligned rows, forward_mma, 32x64x2/64, grid 32, 43616 B, batch 0:2, D 64/64, align 1, x5
unaligned address, forward_mma, 32x64x2/64, grid 32, 43616 B, batch 0:2, D 64/64, align 2, x5
D=68 of float16, forward_mma, 32x64x2/64, grid 32, 52832 B, batch 0:2, D 80/80, align 2, x4
every second feature, forward_mma, 32x64x2/64, grid 32, 43616 B, batch 0:2, D 64/64, align 2, x5
softcap window, forward_wgmma, 64x64x2/128, grid 4096, 47104 B, batch 0:4, D 64/64, align 16, x4, 16 at once, softcap
bias mask, forward_mma, 64x64x2/128, grid 128, 49888 B, batch 0:4, D 64/64, align 16, x3, mask bias=float32
bias D=256, forward_wgmma, 128x64x2/384, grid 2048, 206848 B, batch 0:4, D 256/256, align 16, x1, bias=float16
mask on 120, forward_mma, 128x32x2/256, grid 2048, 76704 B, batch 0:4, D 128/128, align 16, x1, mask
sinks alibi_slopes, forward_wgmma, 64x64x2/128, grid 4096, 47104 B, batch 0:4, D 64/64, align 16, x4
out_dtype, forward_wgmma, 192x128x2/512, grid 1408, 105472 B, batch 0:4, D 64/64, align 16, x1, out=float32
varlen, forward_wgmma, 64x64x2/128, grid 2208, 47104 B, D 64/64, align 16, x4, 16 at once, varlen
varlen, GQA, short, forward_mma, 16x16/32, grid 2416, 8128 B, heads 4 of 4, D 64/64, align 16, x16, 8 at once, varlen
varlen, no tokens, forward_scalar, 4x16/32, grid 0, 10272 B, D 64/64, align 16, x12, 4 at once, varlen
varlen, no sequences, precise_decode, 2x16/128, grid 28, 3456 B, D 64/64, align 16, x4, 4 at once, varlen
"""


def axes(pairs: tuple[tuple[int, int], ...]) -> str:
    return " ".join(f"{axis}:{length}" for axis, length in pairs)


def row(name: str, problem: Problem, capability: int) -> str:
    plan = make_plan(problem, device_of(capability), AUTOMATIC)
    macros = dict(plan.program.macros)
    chosen = [name.lower() for name in ("MASK", "SOFTCAP", "VARLEN") if macros[name]]
    if macros["BIAS_DTYPE"]:
        chosen.append(f"bias={macros['BIAS_DTYPE']}")
    if macros["OUT_DTYPE"] != macros["DTYPE"] and plan.num_splits == 1:
        chosen.append(f"out={macros['OUT_DTYPE']}")
    cells = (
        name,
        plan.kernel,
        f"{plan.tile}/{plan.tile.num_threads}",
        f"grid {plan.num_blocks}",
        f"splits {plan.num_splits}" if plan.num_splits > 1 else "",
        f"{plan.program.shared_memory} B",
        f"heads {plan.packed_heads} of {plan.group_size}" if plan.group_size > 1 else "",
        f"batch {axes(plan.batch_axes)}" if plan.batch_axes else "",
        f"outer {axes(plan.outer_axes)}" if plan.outer_axes else "",
        f"D {macros['HEAD_DIM']}/{macros['HEAD_DIM_V']}",
        f"align {macros['ALIGNMENT']}",
        f"x{macros['MIN_BLOCKS']}",
        f"{plan.planes_at_once} at once" if plan.planes_at_once > 1 else "",
        " ".join(chosen).replace("CUFLASH_", "").lower(),
    )
    return ", ".join(cell for cell in cells if cell)


def table() -> str:
    """The plan of every case."""
    return "".join(f"{row(*case)}\n" for case in CASES)


def test_golden_table() -> None:
    assert table().splitlines() == GOLDEN.splitlines()


def traits_of_every_width() -> Iterator[Traits]:
    for dtype in FLOAT_NAMES:
        like = square(dtype, 64).traits
        for head_dim in range(1, 513):
            yield like._replace(head_dim=head_dim, head_dim_v=head_dim)
        ends = [head_dim for head_dim in range(1, 513) if bucket(head_dim) != bucket(head_dim + 1)]
        for head_dim, head_dim_v in itertools.product(ends, ends):
            yield like._replace(head_dim=head_dim, head_dim_v=head_dim_v)


def bucket(head_dim: int) -> int:
    return KERNELS[-1].head_dim_bucket(head_dim)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_every_width_has_a_tile_that_fits(device: Device) -> None:
    spec = KERNELS[-1]
    for traits in traits_of_every_width():
        tiles = spec.tiles(traits, device)
        assert tiles, f"{traits} on {device.arch}"
        for tile in tiles:
            assert spec.shared_memory(traits, tile) <= device.shared_memory_per_block, f"{traits} {tile} {device.arch}"
            assert tile.num_threads % 32 == 0 and spec.min_blocks(traits, tile, device) >= 1


@pytest.mark.parametrize("head_dim", [1, 512])
def test_buckets_hold_their_head_dims(head_dim: int) -> None:
    buckets = [bucket(length) for length in range(1, 513)]
    assert buckets == sorted(buckets)
    assert all(length <= size <= 512 for length, size in enumerate(buckets, 1))
    assert bucket(head_dim) in (16, 512)


def test_the_last_row_takes_everything() -> None:
    last = KERNELS[-1]
    assert last.features == FEATURES and last.dtypes == FLOAT_NAMES
    for device in DEVICES:
        for name, problem, _ in CASES:
            assert last.refusal(problem.traits, device) is None, f"{name} on {device.arch}"


def offsets(problem: Problem, walked: tuple[tuple[int, int], ...]) -> list[tuple[int, ...]]:
    """Where every operand stands for every index of some leading axes."""
    strides = [steps for steps in problem.strides if steps is not None]
    return sorted(
        tuple(sum(i * steps[axis] for i, (axis, _) in zip(index, walked, strict=True)) for steps in strides)
        for index in itertools.product(*(range(length) for _, length in walked))
    )


def check_axes(problem: Problem, plan: Plan) -> None:
    """The kernel must visit exactly the leading indices of the problem, however the axes are merged."""
    assert len(plan.batch_axes) <= BATCH_AXES
    assert offsets(problem, (*plan.outer_axes, *plan.batch_axes)) == offsets(problem, tuple(enumerate(problem.batch)))


@st.composite
def batches(draw: st.DrawFn) -> Problem:
    """Problems whose arrays lie in memory in any order of axes, with axes left out, repeated, cut and reversed."""
    lengths = draw(st.lists(st.integers(1, 3), max_size=7))

    def array(within: list[int], tail: tuple[int, ...]) -> ArrayInfo:
        shape = (*(length if draw(st.booleans()) else 1 for length in within), *tail)
        order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else range(len(shape))
        spare = draw(st.sampled_from([0, 0, 0, 1]))
        strides = [0] * len(shape)
        for axis, step in zip(order, contiguous_strides(tuple(shape[axis] + spare for axis in order), 4), strict=True):
            strides[axis] = step * draw(st.sampled_from([1, 1, 1, -1]))
        return gpu(shape, "float32", tuple(strides))

    q, k = array(lengths, (4, 2, 8)), array(lengths, (4, 3, 8))
    batch = [max(pair) for pair in zip(q.shape[:-3], k.shape[:-3], strict=True)]
    return dense(q, k, bias=array(batch, (1, 2, 3)) if draw(st.booleans()) else None)


@settings(max_examples=300, deadline=None)
@given(batches())
def test_merged_axes_visit_every_index_once(problem: Problem) -> None:
    check_axes(problem, make_plan(problem, H200, AUTOMATIC))


@pytest.mark.parametrize(
    ("problem", "outer", "batch"),
    [
        (dense(gpu((5, 64))), (), ()),
        (dense(gpu((3, 4, 5, 64))), (), ((0, 3),)),
        (dense(gpu((2, 1, 5, 4, 100, 64))), (), ((0, 2), (1, 1), (2, 5))),
        (dense(gpu((2, 0, 4, 5, 64))), (), ((0, 2), (1, 0))),
        (dense(gpu((2, 3, 1, 2, 5, 4, 10, 64))), (), ((4, 60),)),
        (dense(gpu((1, 1, 1, 1, 1, 4, 10, 64))), (), ()),
        (dense(swapped((2, 3, 1, 2, 5, 4, 10, 64))), (), ((4, 60),)),
        (dense(gpu((2, 1, 1, 1, 3, 4, 5, 64)), gpu((1, 1, 1, 1, 3, 4, 5, 64))), (), ((0, 2), (4, 3))),
        (dense(gpu((2, 1, 1, 2, 3, 4, 5, 64)), bias=gpu((3, 1, 5, 5), "float32")), (), ((3, 4), (4, 3))),
        (six_axes(), ((0, 2), (1, 3)), ((2, 2), (3, 3), (4, 2), (5, 3))),
    ],
)
def test_axes_merge_where_strides_allow(problem: Problem, outer: Any, batch: Any) -> None:
    plan = make_plan(problem, H200, AUTOMATIC)
    assert (plan.outer_axes, plan.batch_axes) == (outer, batch)
    check_axes(problem, plan)


def alignment(problem: Problem) -> Any:
    return dict(make_plan(problem, H200, AUTOMATIC).program.macros)["ALIGNMENT"]


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_alignment(dtype: str) -> None:
    itemsize = ITEMSIZE[dtype]
    shape, steps = (2, 4, 10, 64), contiguous_strides((2, 4, 10, 64), itemsize)
    plain = gpu(shape, dtype)
    assert alignment(dense(plain)) == 16
    assert alignment(dense(plain, plain._replace(pointer=16))) == 16
    assert alignment(dense(plain, plain._replace(pointer=itemsize))) == itemsize
    assert alignment(dense(plain, v=plain._replace(pointer=itemsize // 2))) == 1
    assert alignment(dense(gpu(shape, dtype, (*steps[:-1], 2 * itemsize)))) == itemsize
    assert alignment(dense(gpu(shape, dtype, (*steps[:-1], -itemsize)))) == itemsize
    assert alignment(dense(gpu(shape, dtype, (*steps[:2], -steps[2], itemsize)))) == 16
    assert alignment(dense(gpu(shape, dtype, (*steps[:2], 0, itemsize)))) == 16
    assert alignment(dense(gpu(shape, dtype, (*steps[:2], steps[2] + itemsize, itemsize)))) == itemsize
    assert alignment(dense(gpu(shape, dtype, (*steps[:2], steps[2] + 1, itemsize)))) == 1
    assert alignment(dense(gpu(shape, dtype, (*steps[:-1], itemsize + 1)))) == 1
    assert alignment(dense(gpu((2, 4, 10, 61), dtype))) == itemsize
    assert alignment(dense(plain, v=gpu((2, 4, 10, 61), dtype))) == itemsize


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_alignment_of_results(dtype: str) -> None:
    itemsize = ITEMSIZE[dtype]
    x = gpu((2, 4, 10, 64), dtype)
    assert alignment(dense(x, out=gpu(x.shape, dtype))) == 16
    assert alignment(dense(x, out=gpu(x.shape, dtype, at=itemsize))) == itemsize
    assert alignment(dense(x, out=gpu(x.shape, dtype, at=1))) == 1
    transposed = gpu(x.shape, dtype, (2560 * itemsize, 640 * itemsize, itemsize, 10 * itemsize))
    assert alignment(dense(x, out=transposed)) == itemsize
    assert alignment(dense(transposed, x)) == itemsize


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [("bias", (10, 10), "float32"), ("sinks", (4,), "float64"), ("lse", (2, 4, 10), "float32")]
    + [("query_offset", (2,), "int32"), ("alibi_slopes", (2, 4), "float16")],
)
def test_options_of_elements_that_lie_anywhere(name: str, shape: tuple[int, ...], dtype: str) -> None:
    x = gpu((2, 4, 10, 64))
    assert alignment(dense(x, **{name: gpu(shape, dtype)})) == 16
    assert alignment(dense(x, **{name: gpu(shape, dtype, at=1)})) == 1
    strides = tuple(4 * step + 1 for step in contiguous_strides(shape, ITEMSIZE[dtype]))
    assert alignment(dense(x, **{name: gpu(shape, dtype, strides)})) == 1


def test_build_key_holds_no_lengths() -> None:
    """What is compiled depends on none of lengths, strides and scale, except by tile and whether keys are split."""
    plans = [
        make_plan(problem, H200, AUTOMATIC)
        for length, heads, batch in itertools.product((1, 70, 1000, 1001, 4096, 99991), (1, 7, 16), (1, 3, 64))
        for problem in (
            square("float16", 64, length, heads, batch),
            square("float16", 64, length, heads, batch, scale=0.3, causal=True, window=(5, 7)),
            square("float16", 64, length, heads, batch, sinks=gpu((heads,), "float64"), return_lse=True),
            dense(swapped((batch, heads, length, 64)), query_offset=length),
        )
    ]
    kinds = {(plan.kernel, plan.tile, plan.num_splits > 1) for plan in plans}
    assert len({(plan.kernel, plan.program.macros) for plan in plans}) == len(kinds)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"mask": gpu((4096, 4096), "bool")},
        {"bias": gpu((4096, 4096), "float16")},
        {"bias": gpu((4096, 4096), "float32")},
        {"out_dtype": "float32"},
    ],
    ids=lambda options: "-".join(f"{name}-{getattr(x, 'dtype', x)}" for name, x in options.items()),
)
def test_build_key_holds_what_changes_the_code(options: dict[str, Any]) -> None:
    plain = make_plan(square("float16", 64), H200, AUTOMATIC).program.macros
    assert make_plan(square("float16", 64, **options), H200, AUTOMATIC).program.macros != plain


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_every_tile_and_kernel_can_be_chosen(spec: KernelSpec) -> None:
    name = spec.name
    head_dim = min(64, spec.max_head_dim)
    squares = (square(dtype, head_dim) for dtype in ("float32", "float16", "float64"))
    problem = next(p for p in squares if spec.refusal(p.traits, H200) is None)
    tiles = spec.tiles(problem.traits, H200)
    for tile in dict.fromkeys(map(str, tiles)):
        plan = make_plan(problem, H200, Settings(name, tile, False))
        assert (plan.kernel, str(plan.tile)) == (name, tile)
        assert plan.num_m_blocks == -(-4096 // plan.tile.block_m)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings("cpu", "", False), "kernel 'cpu' cannot serve this call: it computes NumPy arrays"),
        (Settings("forward", "", False), "kernel 'forward' cannot serve this call: does not implement attention"),
        (Settings("", "63x64", False), "tile '63x64' cannot serve this call: kernel 'precise_wgmma' has 128x64x2p;"),
        (Settings("", "big", False), "tile 'big' cannot serve this call: .* kernel 'precise_float32' has 64x64, "),
    ],
)
def test_settings_that_are_refused(settings: Settings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_plan(square("float32", 64), H200, settings)


def test_tile_that_does_not_fit_is_refused() -> None:
    wide, small = square("float64", 512), device_of(61)
    too_large = str(KERNELS[-1].tiles(square("float64", 16).traits, H200)[0])
    assert too_large not in map(str, KERNELS[-1].tiles(wide.traits, small))
    with pytest.raises(ValueError, match=f"tile '{too_large}' cannot serve this call"):
        make_plan(wide, small, Settings("", too_large, False))


NEEDED = {1: 2**20, 2: 2**40}
"""Bytes of shared memory that tiles of a row take, by head_dim_v: more than there are, and more than there could be."""
narrow = KERNELS[-1]._replace(
    name="narrow",
    operations=("attention",),
    dtypes=("float16", "bfloat16"),
    features=frozenset({"window"}),
    min_compute_capability=80,
    max_head_dim=128,
    tiles=lambda traits, device: (
        KERNELS[-1].tiles(traits, device) if device.shared_memory_per_block >= NEEDED.get(traits.head_dim_v, 0) else []
    ),
)


@pytest.mark.parametrize(
    ("make", "capability", "words"),
    [
        (lambda: square("float16", 64, causal=True), 80, None),
        (lambda: packed(2, 99, 4, 4, 64, "float16"), 90, "does not implement attention_varlen"),
        (lambda: square("float16", 64), 75, "needs sm_80, the device is sm_75"),
        (lambda: square("float32", 64), 90, "dtype float32 is not one of float16, bfloat16"),
        (lambda: square("float16", 136), 90, "head_dim 136 is above 128"),
        (lambda: dense(gpu((1, 5, 64)), v=gpu((1, 5, 160))), 90, "head_dim 160 is above 128"),
        (lambda: square("float16", 64, softcap=3), 90, "does not implement softcap"),
        (
            lambda: square("float16", 64, 8, bias=gpu((8, 8)), sinks=gpu(()), out_dtype="float32"),
            90,
            "does not implement bias, sinks, out_dtype",
        ),
        (lambda: dense(gpu((1, 5, 64)), v=gpu((1, 5, 1))), 90, "no tile for head_dim 64/1 fits 232448 bytes of shared"),
        (lambda: dense(gpu((1, 5, 64)), v=gpu((1, 5, 2))), 90, "no tile for head_dim 64/2 fits the registers of a"),
    ],
)
def test_rows_refuse_with_a_sentence(
    make: Callable[[], Problem], capability: int, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cuflash.plan.build, cuflash.plan.plan):
        monkeypatch.setattr(module, "KERNELS", (narrow, KERNELS[-1]))
    monkeypatch.setattr(cuflash.plan.build, "_builds", {})
    problem, device = make(), device_of(capability)
    (name, reason), *others = refusals(problem.traits, device)
    assert name == "narrow" and all(other is None for _, other in others)
    if words is None:
        assert reason is None and make_plan(problem, device, AUTOMATIC).kernel == "narrow"
        return
    assert reason is not None and reason.startswith(words)
    assert make_plan(problem, device, AUTOMATIC).kernel == KERNELS[-1].name
    with pytest.raises(ValueError, match=f"kernel 'narrow' cannot serve this call: {words}"):
        make_plan(problem, device, Settings("narrow", "", False))


def test_what_the_tiles_of_wide_heads_lack() -> None:
    """float32 by pairs of float16: registers on newer GPUs, or shared memory."""
    for head_dim, device, words in (
        (256, device_of(100), "the registers of a thread on sm_100"),
        (512, device_of(86)._replace(shared_memory_per_block=49152), "49152 bytes of shared memory"),
    ):
        with pytest.raises(ValueError, match=f"no tile for head_dim {head_dim}/{head_dim} fits {words}$"):
            make_plan(square("float32", head_dim), device, Settings("precise_float32", "", False))


(wmma,) = (spec for spec in KERNELS if spec.name == "forward_wmma")


@pytest.mark.parametrize(
    ("problem", "capability", "words"),
    [
        (square("float16", 64), 70, None),
        (square("float16", 64), 61, "needs sm_70, the device is sm_61"),
        (square("bfloat16", 64), 80, None),
        (square("bfloat16", 64), 75, "multiplies bfloat16 from sm_80 on, the device is sm_75"),
        (square("float32", 64, precision="tf32"), 80, None),
        (square("float32", 64, precision="tf32"), 75, "multiplies tf32 from sm_80 on, the device is sm_75"),
        (square("float32", 64), 90, "multiplies float32 as tf32, and only under precision='tf32'"),
        (square("float64", 64), 90, "dtype float64 is not one of "),
        (square("float16", 264), 90, "head_dim 264 is above 256"),
    ],
)
def test_wmma_refuses_with_a_sentence(problem: Problem, capability: int, words: str | None) -> None:
    reason = wmma.refusal(problem.traits, device_of(capability))
    assert reason is None if words is None else reason is not None and reason.startswith(words)


@pytest.mark.parametrize("capability", [capability for capability in SHARED_MEMORY_KB if capability >= 70])
def test_wmma_has_tiles_for_every_width(capability: int) -> None:
    device = device_of(capability)
    for like in (square("float16", 64).traits, square("float32", 64, precision="tf32").traits):
        if wmma.refusal(like, device) is not None:
            continue
        for head_dim, head_dim_v in itertools.product((1, 16, 17, 64, 80, 96, 97, 128, 160, 192, 224, 256), repeat=2):
            traits = like._replace(head_dim=head_dim, head_dim_v=head_dim_v)
            tiles = wmma.tiles(traits, device)
            wanted = 2 if like.dtype == "float32" else 3  # 99 KB hold no third for wide float32
            assert len({str(tile) for tile in tiles}) >= wanted, f"{traits} on {device.arch}"
            assert tiles[-1].block_m == 16 or any(tile.block_m == 16 for tile in tiles)
            for tile in tiles:
                assert wmma.shared_memory(traits, tile) <= device.shared_memory_per_block
                assert 1 <= wmma.min_blocks(traits, tile, device) <= 16


def test_features_are_named_as_the_arguments_are() -> None:
    x = gpu((2, 4, 10, 64))
    options = {
        "window": (3, None),
        "softcap": 3.0,
        "bias": gpu((10, 10), "float32"),
        "mask": gpu((10, 10), "bool"),
        "alibi_slopes": gpu((4,), "float32"),
        "sinks": gpu((4,), "float32"),
        "query_offset": gpu((2,), "int32"),
        "out_dtype": "float32",
    }
    assert {*options, "seqlens_k", "page_table"} == FEATURES
    assert used_features(dense(x).traits) == []
    assert used_features(dense(x, **options).traits) == list(options)
    for name, option in options.items():
        assert used_features(dense(x, **{name: option}).traits) == [name]
    assert used_features(dense(x, causal=True).traits) == ["window"]


def test_devices_by_number() -> None:
    assert Device(90, 227 * 1024, 132) == H200 and H200.arch == "sm_90"
    assert device_of(61).shared_memory_per_block == 48 * 1024
    assert device_of(999).shared_memory_per_block == 99 * 1024
    assert all(48 * 1024 <= device.shared_memory_per_block <= 227 * 1024 for device in DEVICES)


def test_blocks_are_counted_by_32_bits() -> None:
    kv, settings = gpu((2**20, 64, 1, 64)), Settings("forward_mma", "64x64x2", False)
    assert make_plan(dense(gpu((2**20, 64, 2**11, 64)), kv), H200, settings).num_blocks == 2**31
    with pytest.raises(ValueError, match=r"^q has \d+ tiles of \d+ rows, times 1 splits: expected at most 4294967295 "):
        make_plan(dense(gpu((2**20, 64, 2**13, 64)), kv), H200, settings)


def test_planes_at_once_stay_in_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, settings = square("float16", 64, 1024, 16, 2, causal=True), Settings("forward_mma", "64x64x2", False)
    assert make_plan(problem, H200, settings).planes_at_once == 32, "16 heads of two batches: all of them"
    monkeypatch.setattr(cuflash.plan.plan, "CACHED_BYTES", 31 * 1024 * 128 * 2)
    assert make_plan(problem, H200, settings).planes_at_once == 16, "turns are nearly equal"
    monkeypatch.setattr(cuflash.plan.plan, "CACHED_BYTES", 3 * 1024 * 128 * 2)
    assert make_plan(problem, H200, settings).planes_at_once == 3
    assert make_plan(problem, H200, settings._replace(tile="128x64x2")).planes_at_once == 32
    groups = dense(gpu((2, 16, 1024, 64)), gpu((2, 4, 1024, 64)), causal=True)
    assert make_plan(groups, H200, settings).planes_at_once == 12, "heads of a group read the same keys"
    monkeypatch.setattr(cuflash.plan.plan, "CACHED_BYTES", 1)
    assert make_plan(problem, H200, settings).planes_at_once == 1


def test_longest_tiles_first_where_lengths_differ() -> None:
    assert make_plan(square("float16", 64, causal=True), H200, AUTOMATIC).planes_at_once > 1
    assert make_plan(square("float16", 64), H200, AUTOMATIC).planes_at_once == 1


@pytest.mark.parametrize("group", [2, 3, 8, 64])
def test_heads_of_a_group_share_a_tile_when_queries_are_few(group: int) -> None:
    kv = gpu((2, 2, 500, 64))
    few = make_plan(dense(gpu((2, 2 * group, 3, 64)), kv), H200, AUTOMATIC)
    assert few.packed_heads == few.group_size == group
    assert few.num_blocks == 2 * 2 * -(-3 * group // few.tile.block_m) * few.num_splits
    many = make_plan(dense(gpu((2, 2 * group, 5000, 64)), kv), H200, Settings("", "64x64x2", False))
    assert (many.packed_heads, many.group_size) == (1, group)
    assert many.num_blocks == 2 * 2 * group * -(-5000 // many.tile.block_m) * many.num_splits


def test_plan_is_plain_data_and_prints_as_one_line() -> None:
    plan = make_plan(square("float64", 64), H200, AUTOMATIC)
    assert hash(plan) == hash(make_plan(square("float64", 64), H200, AUTOMATIC))
    tile = plan.tile
    assert str(plan) == (
        f"{plan.kernel} tile {tile.block_m}x{tile.block_n}, {tile.num_threads} threads, "
        f"{plan.num_blocks} blocks, {plan.program.shared_memory} bytes of shared memory"
    )


def test_stand_ins_of_numpy_dtypes_agree() -> None:
    """The tables of types that plans are made of name the same types as the arrays do."""
    sizes = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    assert sizes == ITEMSIZE


@pytest.mark.parametrize("capability", [86, 90])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 512])
def test_a_name_is_that_of_one_tile(head_dim: int, capability: int) -> None:
    names = [str(tile) for tile in KERNELS[0].tiles(square("float16", head_dim).traits, device_of(capability))]
    assert len(names) == len(set(names))


def test_the_tile_of_a_name_is_the_first_in_their_order() -> None:
    """Where one block has a multiprocessor for itself, the one with eight warps."""
    assert make_plan(square("float16", 128), device_of(86), AUTOMATIC).tile.num_threads == 256


def test_degree_of_softcap_is_of_the_build() -> None:
    """Where there is a polynomial: other kernels and other features need no second build."""

    def degrees(kernel: str, **options: Any) -> list[Any]:
        problems = (square("float16", 64, softcap=softcap, **options) for softcap in (None, 5, 30, 256.5, 1e-21))
        return [dict(make_plan(x, H200, Settings(kernel, "", False)).program.macros)["SOFTCAP"] for x in problems]

    assert degrees("forward_mma") == [0, 5, 3, 1, 1]
    assert degrees("forward_mma", mask=gpu((4096,), "bool")) == [0, 5, 5, 1, 1]
    assert degrees("forward_wmma") == degrees("forward_scalar") == [0, 1, 1, 1, 1]


if __name__ == "__main__":
    print(table(), end="")
