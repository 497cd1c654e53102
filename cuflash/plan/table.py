"""The table of kernels: one `KernelSpec` row each, fastest first. A row's tiles lie in the `tiles_*.py` of its tier.

Plans, tests, import-time compilation and `python -m cuflash kernels` all iterate over `KERNELS`. The first row that
accepts a problem serves it. The last row takes everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..problem.arrays import FLOAT_NAMES
from ..problem.problem import Problem
from .splits import MIN_KEYS_PER_SPLIT
from .tiles import Device as Device
from .tiles import Tile as Tile
from .tiles import device_of as device_of
from .tiles_mma import mma_bucket, mma_min_blocks, mma_shared_memory, mma_tiles
from .tiles_scalar import scalar_bucket, scalar_min_blocks, scalar_shared_memory, scalar_tiles
from .tiles_wmma import wmma_bucket, wmma_limits, wmma_min_blocks, wmma_shared_memory, wmma_tiles

CPU_KERNEL = "cpu"
"""Name of the NumPy back end where a kernel's name is asked for."""


class KernelSpec(NamedTuple):
    """One row of the table: a CUDA source and what it serves."""

    name: str
    """Also the source `cuda_src/<name>.cu` and the entry point `cuflash_<name>`."""
    summary: str
    operations: tuple[str, ...]
    dtypes: tuple[str, ...]
    features: frozenset[str]
    """Names of the optional arguments that the kernel implements."""
    min_compute_capability: int
    max_head_dim: int
    head_dim_bucket: Callable[[int], int]
    """Head dimension of the compiled kernel that serves a given one."""
    tiles: Callable[[Problem, Device], list[Tile]]
    """Tiles that fit problem and device, preferred first; the plan takes the first that is not too tall for the rows.

    Like everything else here they may depend on anything in the problem but its lengths."""
    shared_memory: Callable[[Problem, Tile], int]
    """Bytes of shared memory per block."""
    min_blocks: Callable[[Problem, Tile, Device], int]
    """Blocks per multiprocessor for which the compiler keeps registers free."""
    limits: Callable[[Problem, Device], str | None] = lambda problem, device: None
    """What else the kernel refuses, as a sentence."""
    splits_from: int = 2 * MIN_KEYS_PER_SPLIT
    """Keys that a tile must see to be split."""
    latency_bound: bool = False
    """Whether a tile of 64 rows takes as long as a lower one: lower ones, spread over more blocks, gain nothing."""
    caps_by_polynomial: bool = False
    """Whether softcap is a polynomial of small scores, whose degree the kernel is compiled for."""
    rounds_weights: bool = False
    """Whether weights are rounded to the format of the operands, as tensor cores want them: part of the error rule."""

    def refusal(self, problem: Problem, device: Device) -> str | None:
        """Return None if the kernel serves the problem on the device, else the reason as a sentence."""
        if problem.op not in self.operations:
            return f"does not implement {problem.op}"
        if device.compute_capability < self.min_compute_capability:
            return f"needs sm_{self.min_compute_capability}, the device is {device.arch}"
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype} is not one of {', '.join(self.dtypes)}"
        if max(problem.head_dim, problem.head_dim_v) > self.max_head_dim:
            return f"head_dim {max(problem.head_dim, problem.head_dim_v)} is above {self.max_head_dim}"
        if self.features != FEATURES:
            missing = [name for name in used_features(problem) if name not in self.features]
            if missing:
                return f"does not implement {', '.join(missing)}"
        limit = self.limits(problem, device)
        if limit is not None:
            return limit
        if not self.tiles(problem, device):
            head_dims = f"{problem.head_dim}/{problem.head_dim_v}"
            return f"no tile for head_dim {head_dims} fits {device.shared_memory_per_block} bytes of shared memory"
        return None


FEATURES = frozenset({"window", "softcap", "bias", "mask", "alibi_slopes", "sinks", "query_offset", "out_dtype"})


def used_features(problem: Problem) -> list[str]:
    """Names of the features that a problem needs."""
    p = problem
    return [
        name
        for name, used in (
            ("window", p.window_left is not None or p.window_right is not None),
            ("softcap", p.softcap != 0),
            ("bias", p.bias is not None),
            ("mask", p.mask is not None),
            ("alibi_slopes", p.alibi_slopes is not None),
            ("sinks", p.sinks is not None),
            ("query_offset", p.query_offsets is not None),
            ("out_dtype", p.out_dtype != p.dtype),
        )
        if used
    ]


KERNELS = (
    KernelSpec(
        name="forward_mma",
        summary="tensor cores through mma.sync: float16 and bfloat16 from sm_80",
        operations=("attention", "attention_varlen"),
        dtypes=("float16", "bfloat16"),
        features=FEATURES,
        min_compute_capability=80,
        max_head_dim=512,
        head_dim_bucket=mma_bucket,
        tiles=mma_tiles,
        shared_memory=mma_shared_memory,
        min_blocks=mma_min_blocks,
        splits_from=3 * MIN_KEYS_PER_SPLIT,
        latency_bound=True,
        caps_by_polynomial=True,
        rounds_weights=True,
    ),
    KernelSpec(
        name="forward_wmma",
        summary="tensor cores through WMMA: float16 from sm_70, bfloat16 and tf32 from sm_80",
        operations=("attention", "attention_varlen"),
        dtypes=("float16", "bfloat16", "float32"),
        features=FEATURES,
        min_compute_capability=70,
        max_head_dim=256,
        head_dim_bucket=wmma_bucket,
        tiles=wmma_tiles,
        shared_memory=wmma_shared_memory,
        min_blocks=wmma_min_blocks,
        limits=wmma_limits,
        rounds_weights=True,
    ),
    KernelSpec(
        name="forward_scalar",
        summary="any GPU, dtype and head_dim, on the ordinary arithmetic units",
        operations=("attention", "attention_varlen"),
        dtypes=FLOAT_NAMES,
        features=FEATURES,
        min_compute_capability=50,
        max_head_dim=512,
        head_dim_bucket=scalar_bucket,
        tiles=scalar_tiles,
        shared_memory=scalar_shared_memory,
        min_blocks=scalar_min_blocks,
    ),
)


def softcap_degree(problem: Problem) -> int:
    """Degree of the polynomial that caps scores as long as they are small; 0 without softcap, 1 for unusual ones.

    Degree 3 is exact enough for scores up to 5 if softcap is 30, and degree 5 for more. Beside other features there is
    no polynomial, and one build serves every usual softcap.
    """
    if problem.softcap == 0:
        return 0
    if not 1e-15 <= problem.softcap <= 256:
        return 1
    alone = problem.bias is None and problem.mask is None and problem.alibi_slopes is None
    return 3 if alone and problem.softcap >= 30 else 5


HELPERS = ("combine",)
"""Sources beside the table: they finish calls of several kernels, and no problem is dispatched to them."""


def kernel_names() -> list[str]:
    """Names that `options(kernel=...)` takes."""
    return [spec.name for spec in KERNELS] + [CPU_KERNEL]
