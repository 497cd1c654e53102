"""Measure what the cost model (cuflash/plan/cost.py) is to predict, fit its constants, say how good its choices are.

python benchmarks/fit_cost.py measure   on a GPU: every tile, with several numbers of splits, of all problems;
                                        with --kernel NAME those of one kernel, beside what is stored of others;
                                        with --new those of which nothing is stored yet
python benchmarks/fit_cost.py fit       constants for the `tiles_*.py`, fitted to what is stored, some minutes each;
                                        those that are 0 stay so. Compare calls that go another way now, in turn,
                                        on other lengths as well, before you take them
python benchmarks/fit_cost.py           how much longer the choices take than the best that was measured, by kernel and
                                        among kernels; a new tile, which was not, is as if it took for ever

What is stored lies in benchmarks/cost.json, or where `--file` says.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from cuflash.plan import (
    tiles_decode,
    tiles_float32,
    tiles_float64,
    tiles_mma,
    tiles_points,
    tiles_precise_decode,
    tiles_precise_wgmma,
    tiles_scalar,
    tiles_wgmma,
    tiles_wide,
    tiles_wmma,
)
from cuflash.plan.build import Build, find_builds
from cuflash.plan.cost import (
    SPLIT_CALL,
    Choice,
    Cost,
    Lengths,
    Pace,
    Walk,
    lengths_of,
    of_two_launches,
    pace_of,
    time_of,
    time_of_a_split,
    time_of_preparation,
    walk_of,
)
from cuflash.plan.partial import partial_traits
from cuflash.plan.plan import make_plan
from cuflash.plan.table import KERNELS, Device, Tile
from cuflash.problem.arrays import DTYPES, ITEMSIZE, ArrayInfo, contiguous_strides
from cuflash.problem.describe import describe_attention, describe_attention_lse
from cuflash.problem.problem import Problem
from cuflash.settings import AUTOMATIC, Settings

STORED = ROOT / "benchmarks" / "cost.json"
SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
REPEATS = 5
TRIALS = 12000
"""Changes of constants that are tried: a second has some 30 of them for 500 problems."""
OFF = 0.1
"""Share of errors of predicted times in what is to be least."""
SPECS = {spec.name: spec for spec in KERNELS}
FOR_FEW = "forward_decode", "precise_decode"
"""Kernels for few rows of a key head."""


class Case(NamedTuple):
    """A problem that is measured."""

    kernel: str
    dtype: str
    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    window: tuple[int, int] | None = None
    precision: str = "ieee"
    has_values: bool = True
    """Else the lse is all that is computed."""

    @property
    def flops(self) -> int:
        """Multiplications and additions, as if all keys were seen."""
        return (4 if self.has_values else 2) * self.batch * self.heads * self.seqlen_q * self.seqlen_k * self.head_dim

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of q, and of k and v."""
        return (
            (self.batch, self.heads, self.seqlen_q, self.head_dim),
            (self.batch, self.heads_kv, self.seqlen_k, self.head_dim),
        )

    @property
    def options(self) -> dict[str, Any]:
        """Those of the call."""
        return {"causal": self.causal, "window": self.window, "precision": self.precision}

    def describe(self) -> Problem:
        """Describe the problem, without arrays."""
        q, k = (
            ArrayInfo(None, shape, contiguous_strides(shape, ITEMSIZE[self.dtype]), self.dtype, 0, 0, True)
            for shape in self.shapes
        )
        if not self.has_values:
            return describe_attention_lse(q, k, **self.options)[0]
        return describe_attention(q, k, k, **self.options)[0]


def cases() -> list[Case]:
    """Problems of usual shapes for forward_mma and forward_wgmma, and drawn ones for all kernels."""
    found = usual_shapes("forward_mma")
    rng = random.Random(5)
    widths = (32, 64, 80, 96, 128, 128, 160, 192, 256, 512)
    found += [draw(rng, "forward_mma", "float16", widths, 2e11) for _ in range(70)]
    found += [draw(rng, "forward_wmma", "float16", (64, 128, 256), 1e11) for _ in range(50)]
    found += [draw(rng, "forward_scalar", "float32", (64, 128, 256), 1.2e10) for _ in range(50)]
    found += [draw(rng, "forward_scalar", "float64", (64, 128), 6e9) for _ in range(25)]
    for kernel, dtype, most_flops in (("precise_float64", "float64", 4e10), ("precise_float32", "float32", 8e10)):
        first = len(found)
        found += [draw(rng, kernel, dtype, (32, 64, 128, 128, 256, 512), most_flops) for _ in range(60)]
        for head_dim, (batch, length), causal in product(
            (32, 64, 128, 256, 512), ((8, 1024), (2, 4096)), (False, True)
        ):
            heads = 1024 // head_dim
            found.append(Case(kernel, dtype, batch, heads, heads, length, length, head_dim, causal))
        for case in found[first::3]:
            found.append(case._replace(has_values=False))
    rng = random.Random(9)
    wide = [draw(rng, "precise_wide", "float64", (160, 192, 256, 320, 384, 512), 4e10) for _ in range(30)]
    found += [*wide, *(case._replace(has_values=False) for case in wide[::3])]
    found = [
        case._replace(kernel="precise_wide") if case.kernel == "precise_float64" and case.head_dim > 128 else case
        for case in found
    ]
    for case in [case for case in found if case.kernel == "precise_float32"]:
        found.append(case._replace(precision="tf32"))
        if case.head_dim <= 256:
            found += [case._replace(kernel="forward_wmma", precision="tf32"), case._replace(kernel="precise_wgmma")]
        if case.head_dim <= 128:
            found.append(case._replace(kernel="precise_wgmma", precision="tf32"))
    others = random.Random(13)
    some = [draw(others, "precise_float64", "float64", (32, 64, 96, 128), 2e9) for _ in range(150)]
    found += [case for case in some if case.seqlen_q > 16]
    few = [case for case in found if case.kernel in ("precise_float32", "precise_float64") and case.seqlen_q <= 64]
    few += [case for case in some if case.seqlen_q > 64]
    found += [case._replace(kernel="forward_scalar") for case in few if case.head_dim <= 256]
    found += [case._replace(kernel="precise_wide") for case in few if case.dtype == "float64"]
    narrow = [case for case in few if case.dtype == "float32" and case.head_dim <= 256 and case.has_values]
    found += [case._replace(kernel="precise_decode") for case in narrow]
    found += usual_shapes("forward_wgmma") + long_squares("forward_wgmma") + few_keys("forward_wgmma")
    found += [draw(rng, "forward_wgmma", "float16", (64, 80, 96, 128, 128, 192, 256), 1e12) for _ in range(60)]
    for kernel, heads_kv in (*product(("forward_decode", "forward_wgmma"), (8, 32)), ("forward_wgmma", 1)):
        found += few_queries(kernel, "float16", heads_kv)
    found += [*few_queries("precise_decode", "float32", 8), *few_queries("precise_decode", "float32", 32)]
    found += [case for case in usual_shapes("forward_decode") if case.seqlen_q > 1 and case.seqlen_k <= 300]
    found += windows("forward_wgmma", "float16", (64, 96, 128, 192, 256), 100)
    found += windows("forward_mma", "float16", (64, 96, 128, 192, 256), 30)
    for kernel in ("precise_wgmma", "precise_float32"):
        found += windows(kernel, "float32", (64, 128, 256), 20)
    return list(dict.fromkeys([*found, *point_clouds(), *of_any_size()]))


def of_any_size() -> Iterator[Case]:
    """The same problems for each kernel that may serve them, with as few or as many batches as there can be.

    So short ones come in many waves of blocks, too.
    """
    rng = random.Random(17)
    narrow = "forward_wgmma", "forward_mma", "forward_decode"
    single = "precise_wgmma", "precise_float32", "precise_decode", "forward_scalar"
    double = "precise_float64", "precise_wide", "forward_scalar"
    for dtype, count, most, kernels in (
        ("float16", 300, 4e11, narrow),
        ("float32", 110, 4e10, single),
        ("float64", 50, 1e10, double),
    ):
        for _ in range(count):
            head_dim = rng.choice((16, 32, 40, 64, 64, 72, 80, 96, 128, 128, 160, 192, 256))
            heads = rng.choice((1, 2, 4, 8, 12, 16, 24, 32, 40, 64))
            heads_kv = heads // rng.choice((1, 1, 1, 2, 4)) if heads % 4 == 0 else heads
            seqlen_q = seqlen_k = round(2 ** rng.uniform(3, 14 if dtype == "float16" else 12))
            if rng.random() < 0.4:
                seqlen_q = seqlen_k = max(64, seqlen_q // 64 * 64)
            causal, kind = rng.random() < 0.5, rng.random()
            if kind < 0.15:
                seqlen_q, seqlen_k, causal = rng.choice((1, 1, 2, 4, 8, 16)), round(2 ** rng.uniform(7, 16)), False
            elif kind < 0.3:
                seqlen_k, causal = round(2 ** rng.uniform(4, 11)), False
            one = Case("", dtype, 1, heads, heads_kv, seqlen_q, seqlen_k, head_dim, causal)
            elements = (heads * seqlen_q + heads_kv * seqlen_k) * head_dim
            batch = int(2 ** rng.uniform(0, max(0.0, math.log2(min(most / one.flops, 5e8 / elements, 512)))))
            for kernel in kernels:
                spec, rows = SPECS[kernel], seqlen_q * heads // heads_kv
                if head_dim <= spec.max_head_dim and (kernel not in FOR_FEW or rows <= 64):
                    yield one._replace(kernel=kernel, batch=batch)


def few_queries(kernel: str, dtype: str, heads_kv: int) -> Iterator[Case]:
    """One query, or some, of caches of many sizes."""
    lengths = (
        (1, 1, 8192), (1, 1, 65536), (1, 1, 1000), (1, 3, 4096), (4, 1, 2048), (16, 1, 8192), (16, 4, 500),
        (64, 1, 1000), (64, 1, 4096), (8, 1, 32768), (200, 1, 300), (33, 1, 3000), (1, 1, 2048), (2, 1, 16384),
        (1, 1, 131072), (64, 1, 8192), (8, 1, 65536),
    )  # fmt: skip
    heads = 64 if heads_kv == 1 else 32
    for head_dim, (batch, seqlen_q, seqlen_k) in product((64, 128, 192, 256), lengths):
        if batch * heads_kv * seqlen_k * head_dim * ITEMSIZE[dtype] < 2e9:
            yield Case(kernel, dtype, batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim)


def usual_shapes(kernel: str) -> list[Case]:
    """Thin problems, and squares with few and with many heads."""
    found = []
    for head_dim in (64, 128, 256):
        for batch, heads, heads_kv, seqlen_q, seqlen_k in (
            (1, 8, 8, 1, 8192), (1, 8, 8, 1, 65536), (8, 32, 8, 1, 4096), (1, 32, 8, 1, 1000), (64, 32, 8, 1, 2048),
            (1, 16, 16, 77, 77), (1, 8, 8, 77, 1000), (1, 8, 8, 16, 4096), (4, 16, 16, 256, 77),
            (8, 12, 12, 77, 77), (1, 12, 12, 50, 50), (16, 8, 8, 20, 20), (2, 16, 16, 128, 300),
        ):  # fmt: skip
            found.append(Case(kernel, "float16", batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim))
        squares = (
            (1, 8, 128), (1, 8, 256), (1, 8, 512), (1, 4, 1024), (1, 8, 1024), (1, 16, 2048), (4, 16, 512),
            (32, 12, 197), (1, 16, 4096),
        )  # fmt: skip
        for (batch, heads, length), causal in product(squares, (False, True)):
            found.append(Case(kernel, "float16", batch, heads, heads, length, length, head_dim, causal))
        found.append(Case(kernel, "float16", 1, 8, 8, 4096, 4096, head_dim, False, (512, 0)))
        found.append(Case(kernel, "float16", 1, 8, 8, 300, 5000, head_dim, True))
    many = ((32, 8, 512), (16, 8, 1024), (64, 4, 256), (8, 8, 512), (4, 8, 1024), (8, 8, 2048))
    for head_dim, (batch, heads, length), causal in product((64, 128, 192, 256), many, (False, True)):
        found.append(Case(kernel, "float16", batch, heads, heads, length, length, head_dim, causal))
    return found


def long_squares(kernel: str) -> list[Case]:
    """Some 16384 tokens of 2048 features, of which longer sequences than elsewhere are made, too."""
    return [
        Case(kernel, "float16", 16384 // length, 2048 // head_dim, 2048 // head_dim, length, length, head_dim, causal)
        for head_dim in (32, 48, 64, 80, 96, 128, 256)
        for length in (256, 512, 1024, 1500, 2048, 3000, 4096, 8192, 16384)
        for causal in (False, True)
    ]


def few_keys(kernel: str) -> list[Case]:
    """Many queries of few keys, as of prompts and of conditions."""
    return [
        Case(kernel, "float16", batch, heads, heads, seqlen_q, seqlen_k, head_dim)
        for head_dim in (32, 48, 64, 80, 96, 128, 192, 256)
        for batch, heads, seqlen_q in ((1, 64, 8192), (4, 20, 1500))
        for seqlen_k in (16, 40, 64, 77, 100, 128, 160, 200, 256, 320, 384, 450)
    ]


def windows(kernel: str, dtype: str, head_dims: tuple[int, ...], count: int) -> list[Case]:
    """Squares whose queries see some keys in front of them and, of some, as many behind: the same for each kernel."""
    rng, found = random.Random(11), []
    most, elements = (1e11, 2**24) if dtype == "float16" else (1e10, 2**22)
    while len(found) < count:
        head_dim, is_causal = rng.choice(head_dims), rng.random() < 0.8
        length, left = (round(2 ** rng.uniform(*powers)) for powers in ((9, 15), (5, 13)))
        heads = rng.choice((8, 16, 32))
        batch = max(1, elements // (heads * length * head_dim))
        window = left, 0 if is_causal else left
        if left < length and batch * heads * length * sum(window) * head_dim < most:
            heads_kv = heads // rng.choice((1, 1, 4))
            found.append(Case(kernel, dtype, batch, heads, heads_kv, length, length, head_dim, False, window))
    return found


def point_clouds() -> list[Case]:
    """One head with as many points as there are, few queries of many keys, and drawn ones."""
    found, rng = [], random.Random(7)
    for dtype, most_flops in (("float32", 4e10), ("float64", 1e10)):
        for head_dim, seqlen_q in product((1, 3, 16), (1, 30, 1000, 20_000)):
            found.append(Case("forward_points", dtype, 1, 1, 1, seqlen_q, 20_000, head_dim))
        found.append(Case("forward_points", dtype, 1, 1, 1, 100_000, 100_000, 3))
        found.append(Case("forward_points", dtype, 1, 1, 1, 10, 1_000_000, 3))
        found += [draw(rng, "forward_points", dtype, (1, 2, 3, 4, 8, 16), most_flops) for _ in range(30)]
    return found


def draw(rng: random.Random, kernel: str, dtype: str, head_dims: tuple[int, ...], most_flops: float) -> Case:
    """Draw a problem; lengths are as likely between 100 and 200 as between 1000 and 2000."""

    def length(low: int, high: int) -> int:
        return round(2 ** rng.uniform(math.log2(low), math.log2(high)))

    while True:
        head_dim = rng.choice(head_dims)
        heads_kv, group_size = rng.choice((1, 2, 4, 8, 12, 16, 32)), rng.choice((1, 1, 1, 4, 8))
        batch = rng.choice((1, 1, 1, 2, 4, 8, 16, 64))
        seqlen_q = 1 if rng.random() < 0.25 else length(2, 4096)
        seqlen_k = length(64, 65536) if seqlen_q < 64 or rng.random() < 0.3 else seqlen_q
        causal = seqlen_q > 1 and rng.random() < 0.45
        case = Case(kernel, dtype, batch, heads_kv * group_size, heads_kv, seqlen_q, seqlen_k, head_dim, causal)
        fits = 8 * batch * heads_kv * seqlen_k * head_dim < 4e9
        if 1e6 < case.flops < most_flops and fits and (not causal or seqlen_k >= seqlen_q):
            return case


def candidates(case: Case, device: Device) -> Iterator[tuple[Tile, int]]:
    """Tiles and splits worth measuring: not too many of them, and the number that the model would choose for a tile."""
    problem, spec = case.describe(), SPECS[case.kernel]
    rows = case.seqlen_q * case.heads // case.heads_kv
    tiles = spec.tiles(problem.traits, device)
    lowest = min(tile.block_m for tile in tiles)
    every = find_builds(problem.traits, device, Settings(spec.name, "", False))[0].predict(lengths_of(problem), True)
    expected = {prediction.tile: prediction.time for prediction in every}
    for tile in tiles:
        num_blocks = make_plan(problem, device, Settings(spec.name, str(tile), False), 1).num_blocks
        if tile.block_m > max(4 * rows, 128, lowest) or expected[str(tile)] > 3 * min(expected.values()):
            continue
        resident = spec.min_blocks(problem.traits, tile, device) * device.num_multiprocessors
        chosen = find_builds(problem.traits, device, Settings(spec.name, str(tile), False))[0].choose(
            lengths_of(problem)
        )
        most = -(-case.seqlen_k // tile.block_n) if num_blocks < resident else 1
        for splits in sorted({*SPLITS, chosen.num_splits}):
            if splits == 1 or (not tile.walks_on and splits <= most and num_blocks * splits <= 3 * resident):
                yield tile, splits


def measure(file: Path, kernel: str, only_new: bool) -> None:
    """Time every candidate of every problem, or of those of one kernel or not stored yet, on the current GPU."""
    from concurrent.futures import ThreadPoolExecutor
    from os import cpu_count

    import cupy

    from cuflash.bench.device import GpuBackend
    from cuflash.gpu.compile import kernel_function
    from cuflash.gpu.launch import Launch, device_info
    from cuflash.problem.problem import ARRAYS

    def run_plan(problem: Problem, pointers: list[int], out: Any, lse: Any, plan: Any) -> Callable[[], Any]:
        launch, workspace = Launch(problem, plan, 0), cupy.empty(plan.workspace + 16, "uint8")
        return lambda: launch.run(list(pointers), out, lse, workspace)

    device = device_info(0)
    earlier: dict[str, Any] = json.loads(file.read_text()) if kernel or only_new else {"device": "", "problems": []}
    kept = [old for old in earlier["problems"] if only_new or old["kernel"] != kernel]
    known = {case_of(old) for old in kept}
    wanted = [case for case in cases() if kernel in ("", case.kernel) and case not in known]
    found = [(case, list(candidates(case, device))) for case in wanted]

    def plan_of(case: Case, tile: Tile, splits: int) -> Any:
        return make_plan(case.describe(), device, Settings(case.kernel, str(tile), False), splits)

    plans = [plan_of(case, *candidate) for case, chosen in found for candidate in chosen]
    programs = {plan.program for plan in plans}
    programs |= {plan.preparation.program for plan in plans if plan.preparation is not None}
    with ThreadPoolExecutor(cpu_count()) as pool:
        list(pool.map(lambda program: kernel_function(program, 0), programs))
    backend, stored = GpuBackend(), kept
    rng = cupy.random.default_rng(0)
    for case, chosen in found:
        cupy.get_default_memory_pool().free_all_blocks()
        q, k, v = (
            rng.standard_normal(shape, dtype="float32").astype(DTYPES[case.dtype])
            for shape in (case.shapes[0], case.shapes[1], case.shapes[1])
        )
        arrays = {"q": q, "k": k}
        if case.has_values:
            arrays |= {"v": v, "out": cupy.empty_like(q)}
            problem, _ = describe_attention(**arrays, **case.options)
        else:
            lse = cupy.empty(q.shape[:-1], "float64" if case.dtype == "float64" else "float32")
            problem, _ = describe_attention_lse(**arrays, out=lse, **case.options)
            arrays["lse"] = lse
        pointers = [arrays[name].data.ptr if name in arrays else 0 for name in ARRAYS]
        run = partial(run_plan, problem, pointers, arrays.get("out"), arrays.get("lse"))

        calls = {(str(tile), splits): run(plan_of(case, tile, splits)) for tile, splits in chosen}
        times = backend.time_candidates(calls, REPEATS)
        stored.append(case._asdict() | {"times": [[*key, round(median, 2)] for key, (_, median) in times.items()]})
    names = [name for name in earlier["device"].split("; ") if only_new or not name.startswith(f"{kernel}:")]
    names = names if kept else []
    if backend.device_name() not in names:
        names.append(f"{kernel or 'new'}: {backend.device_name()}" if kept else backend.device_name())
    file.write_text(dumps({"device": "; ".join(names), "problems": stored}))


def dumps(stored: dict[str, Any]) -> str:
    """JSON with a line for each problem."""
    lines = ",\n".join(json.dumps(problem, separators=(",", ":")) for problem in stored["problems"])
    return f'{{"device": {json.dumps(stored["device"])}, "problems": [\n{lines}\n]}}\n'


FAMILIES = {
    "forward_wgmma": tiles_wgmma.COST,
    "forward_decode": tiles_decode.COST,
    "forward_mma": tiles_mma.COST,
    "forward_mma, two warps to a row": tiles_mma.COST_OF_SHARED_ROWS,
    "forward_wmma": tiles_wmma.COST,
    "forward_wmma, tf32": tiles_wmma.COST_OF_TF32,
    "forward_points": tiles_points.COST,
    "forward_points, float64": tiles_points.COST_OF_DOUBLES,
    "precise_float32": tiles_float32.COST,
    "precise_float32, tf32": tiles_float32.COST_OF_TF32,
    "precise_wgmma": tiles_precise_wgmma.COST,
    "precise_wgmma, tf32": tiles_precise_wgmma.COST_OF_TF32,
    "precise_float64": tiles_float64.COST,
    "precise_float64, without values": tiles_float64.COST_WITHOUT_VALUES,
    "precise_wide": tiles_wide.COST,
    "precise_wide, without values": tiles_wide.COST_WITHOUT_VALUES,
    "precise_decode": tiles_precise_decode.COST,
    "forward_scalar": tiles_scalar.COST,
    "forward_scalar, float64": tiles_scalar.COST_OF_DOUBLES,
}
"""Constants by name, in the order of the table; a kernel that is not there has one family, of its own name."""


class Measured(NamedTuple):
    """A case with what its candidates took."""

    case: Case
    problem: Problem
    lengths: Lengths
    times: list[tuple[Tile, int, float]]

    @property
    def fastest(self) -> tuple[Tile, int, float]:
        """The candidate that takes the GPU the least time."""
        return min(self.times, key=lambda candidate: candidate[2])

    def loss(self, tile: Tile, splits: int, time: float) -> float:
        """How much longer a candidate takes than the best one.

        That is of calls, and of the GPU's time among all that keep the host busy as long.
        """
        best = min(_called(*candidate) for candidate in self.times)
        if not _has_two_launches(tile, splits):
            return time / best - 1
        fastest = min(other for *candidate, other in self.times if _has_two_launches(*candidate))
        return max(_called(tile, splits, time) / best, time / fastest) - 1


def _has_two_launches(tile: Tile, splits: int) -> bool:
    return splits > 1 or tile.prepared


def _called(tile: Tile, splits: int, time: float) -> float:
    """What a call takes: the host is busy for some time with two launches."""
    return max(time, SPLIT_CALL) if _has_two_launches(tile, splits) else time


def case_of(stored: dict[str, Any]) -> Case:
    """Return the case that was measured."""
    case = Case(**{name: value for name, value in stored.items() if name != "times"})
    return case if case.window is None else case._replace(window=tuple(case.window))


def read(file: Path, device: Device) -> list[Measured]:
    """Read what was measured of tiles that are still in use."""
    found = []
    for stored in json.loads(file.read_text())["problems"]:
        times, case = stored["times"], case_of(stored)
        problem = case.describe()
        tiles = {str(tile): tile for tile in SPECS[case.kernel].tiles(problem.traits, device)}
        known = [(tiles[name], splits, time) for name, splits, time in times if name in tiles]
        if known:  # else of none that is: one query of (8, 32, 8, 4096, 64), measured again with times that jump
            found.append(Measured(case, problem, lengths_of(problem), known))
    return found


def family(case: Case) -> str:
    """Name of the constants that a case belongs to."""
    cost = SPECS[case.kernel].cost(case.describe().traits)
    return next((name for name, known in FAMILIES.items() if known is cost), case.kernel)


def losses(found: list[Measured], device: Device) -> dict[str, list[tuple[float, Measured, str]]]:
    """How much longer each choice takes than the best candidate, by family and among kernels, the worst first.

    Of splits that were not measured the next smaller number counts; tiles that were not count as infinite.
    """
    by_family: dict[str, list[tuple[float, Measured, str]]] = {}
    for one in found:
        build = find_builds(one.problem.traits, device, Settings(one.case.kernel, "", False))[0]
        by_family.setdefault(family(one.case), []).append(_loss_of(one, one.times, build, build.choose(one.lengths)))
    for those in _by_problem(found).values():
        every = those[0]._replace(times=[candidate for one in those for candidate in one.times])
        build, choice = find_builds(every.problem.traits, device, AUTOMATIC).choose(every.lengths)
        for one in those:
            if len(those) > 1 and one.case.kernel == build.spec.name:
                by_family.setdefault("among kernels", []).append(_loss_of(every, one.times, build, choice))
    return {name: sorted(those, key=lambda loss: -loss[0]) for name, those in by_family.items()}


def _by_problem(found: list[Measured]) -> dict[Case, list[Measured]]:
    problems: dict[Case, list[Measured]] = {}
    for one in found:
        problems.setdefault(one.case._replace(kernel=""), []).append(one)
    return problems


def _loss_of(
    one: Measured, times: list[tuple[Tile, int, float]], build: Build, choice: Choice
) -> tuple[float, Measured, str]:
    """Compare a choice with all candidates; `times` are those of its kernel."""
    tile = build.tiles[choice.tile_idx]
    fewer = [(splits, time) for other, splits, time in times if other == tile and splits <= choice.num_splits]
    loss = one.loss(tile, *max(fewer)) if fewer else math.inf
    return loss, one, f"{build.spec.name} {tile}, {choice.num_splits} splits"


def report(found: list[Measured], device: Device) -> None:
    """Print mean and worst loss of each family, and of the choice among kernels that were measured for a problem."""
    everything = []
    for name, those in losses(found, device).items():
        values = [loss for loss, *_ in those]
        everything += values
        print(f"{name}: {len(values)} problems, mean loss {sum(values) / len(values):.2%}, worst {values[0]:.1%}")
        for loss, one, choice in those[:3]:
            tile, splits, time = one.fastest
            print(f"    {loss:.1%} {tuple(one.case)[2:]}: {choice}; fastest {tile}, {splits} splits, {time} us")
    print(f"all: {len(everything)} problems, mean {sum(everything) / len(everything):.2%}, worst {max(everything):.1%}")


def fit(found: list[Measured], device: Device, start: Cost) -> Cost:
    """Try constants near those that there are, and keep what chooses better.

    What counts is how much longer than the best candidate the choices take: more of longer calls, by the logarithm of
    their time, and of large losses; and, less, how far off the predicted times of the fastest ones are, with splits and
    without, as they are compared with each other and with other kernels'.
    """
    problems = [(one, list(_candidates_of(one, device)), _fastest_of(one)) for one in found]
    weights = [math.log1p(one.fastest[2] / 10) for one in found]
    of_all = math.fsum(weights)

    def score(cost: Cost) -> float:
        paces: dict[Any, Pace] = {}
        lost, off = [], 0.0
        for (one, known, fastest), weight in zip(problems, weights, strict=True):
            times = []
            for kind, walk, splits, loss in known:
                pace = paces.get(kind)
                if pace is None:
                    pace = paces[kind] = pace_of(cost, *kind)
                time = time_of_preparation(pace, one.lengths) + time_of(pace, walk, device.num_multiprocessors, splits)
                if splits > 1:
                    time += cost.merge + splits * time_of_a_split(cost, one.lengths, one.problem.traits.head_dim_v)
                called = of_two_launches(time) if _has_two_launches(pace.tile, splits) else time
                times.append((called, loss, time))
            lost.append(min(times)[1])
            off += weight * fmean(abs(math.log(times[idx][2] / measured)) for idx, measured in fastest)
        mean, off = math.fsum(map(operator.mul, weights, lost)) / of_all, off / of_all
        return mean + 0.15 * math.sqrt(fmean(loss**2 for loss in lost)) + OFF * off

    rng = random.Random(0)
    # `stream` is what caches of some GB get, larger than those here; no tile was measured both by tiles and by pairs.
    fixed = "stream", "by_tiles", "by_pairs"
    names = [name for name, constant in start._asdict().items() if constant > 0 and name not in fixed]
    best, least = start, score(start)
    for _ in range(TRIALS):
        step = rng.choice((0.02, 0.06, 0.2))
        changed = rng.sample(names, rng.randint(1, 3))
        tried = best._replace(**{name: getattr(best, name) * math.exp(rng.gauss(0, step)) for name in changed})
        of_tried = score(tried)
        if of_tried < least:
            best, least = tried, of_tried
    return Cost(*(float(f"{value:.3g}") for value in best))


def _fastest_of(one: Measured) -> list[tuple[int, float]]:
    """Places and times of the candidates that take the GPU the least time, without splits and with them."""
    kinds: dict[bool, tuple[int, float]] = {}
    for idx, (_, splits, time) in enumerate(one.times):
        if time < kinds.get(splits > 1, (0, math.inf))[1]:
            kinds[splits > 1] = idx, time
    return list(kinds.values())


def _candidates_of(one: Measured, device: Device) -> Iterator[tuple[Any, Walk, int, float]]:
    """What the pace of each candidate depends on, its walk and splits, and what is lost with it."""
    spec, traits = SPECS[one.case.kernel], one.problem.traits
    features = spec.head_dim_bucket(traits.head_dim) + spec.head_dim_bucket(traits.head_dim_v)
    for tile, splits, time in one.times:
        blocks, split_blocks = (spec.min_blocks(some, tile, device) for some in (traits, partial_traits(traits)))
        kind = tile, features, blocks, 1, split_blocks, spec.prepared_row(traits)
        yield kind, walk_of(one.lengths, tile), splits, one.loss(tile, splits, time)


def main() -> int:
    """Measure, fit or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", choices=("measure", "fit", "report"), default="report")
    parser.add_argument("--file", type=Path, default=STORED)
    parser.add_argument("--family", default="", help="part of the name of the constants to fit")
    parser.add_argument("--kernel", default="", choices=["", *SPECS], metavar="NAME", help="the only one to measure")
    parser.add_argument("--new", action="store_true", help="measure only what is not stored yet")
    arguments = parser.parse_args()
    if not arguments.file.exists() and (arguments.kernel or arguments.new or arguments.step != "measure"):
        parser.error(f"there is no {arguments.file}")
    if arguments.step == "measure":
        from cuflash.gpu.installed import why_no_gpu

        if missing := why_no_gpu():
            parser.error(missing)
        measure(arguments.file, arguments.kernel, arguments.new)
        return 0
    from cuflash.plan.table import device_of

    device = device_of(90)
    found = read(arguments.file, device)
    if arguments.step == "report":
        report(found, device)
        return 0
    families = list(dict.fromkeys(family(one.case) for one in found))
    if not any(arguments.family in name for name in families):
        parser.error(f"no family with {arguments.family!r} has problems in {arguments.file}: {', '.join(families)}")
    for name in families:
        if arguments.family in name:
            those = [one for one in found if family(one.case) == name]
            cost = fit(those, device, SPECS[those[0].case.kernel].cost(those[0].problem.traits))
            print(f"{name}: {cost}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
