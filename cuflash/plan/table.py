"""The table of kernels: one `KernelSpec` row each, fastest first. A row's tiles lie in the `tiles_*.py` of its tier.

Plans, tests, import-time compilation and `python -m cuflash kernels` all iterate over `KERNELS`. The first row that
accepts the traits of a problem serves it, unless it yields to a later one. The last row takes everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from ..problem.arrays import FLOAT_NAMES
from ..problem.problem import Traits
from ..settings import Settings
from . import (
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
from .cost import Cost
from .features import FEATURES, Macros, used_features
from .tiles import Device as Device
from .tiles import Tile as Tile
from .tiles import device_of as device_of
from .tiles import needs_vectors, no_tile

CPU_KERNEL = "cpu"
"""Name of the NumPy back end where a kernel's name is asked for."""


class Preparing(NamedTuple):
    """A CUDA source that makes keys and values ready for another. Its blocks are as `PREPARING` of tiles.py."""

    name: str
    """Also the source `cuda_src/<name>.cu` and the entry point `cuflash_<name>`."""
    row: Callable[[Traits], tuple[int, int]]
    """Bytes that it makes of a row of k and of v."""
    shared_memory: Callable[[Traits], int]
    """Bytes per block."""
    macros: Callable[[Traits], Macros]
    """What it is compiled with beside dtype, features and alignment."""


def preparing_pairs(bucket: Callable[[int], int]) -> Preparing:
    """What makes pairs of float16 ready for a kernel that rounds head dimensions up by `bucket`."""
    row, memory = partial(tiles_float32.prepared_row, bucket), partial(tiles_float32.preparing_memory, bucket)
    return Preparing("prepare_pairs", row, memory, tiles_float32.preparing_macros)


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
    tiles: Callable[[Traits, Device], list[Tile]]
    """Tiles that fit the device; the plan takes the one that costs the least."""
    shared_memory: Callable[[Traits, Tile], int]
    """Bytes of shared memory per block."""
    min_blocks: Callable[[Traits, Tile, Device], int]
    """Blocks per multiprocessor (occupancy) for which the compiler keeps registers free."""
    cost: Callable[[Traits], Cost]
    """What its tiles take, as `benchmarks/fit_cost.py` finds."""
    capabilities: tuple[int, ...] = ()
    """The only compute capabilities that it is for; (): all from the least one on."""
    limits: Callable[[Traits, Device], str | None] = lambda traits, device: None
    """What else the kernel refuses, as a sentence."""
    starved_rows: int = 0
    """Rows up to which a tile multiplies keys faster than memory gives them."""
    macros: Callable[[Traits], Macros] = lambda traits: ()
    """What else the kernel is compiled with."""
    caps_by_polynomial: bool = False
    """Whether small scores are capped by a polynomial, whose degree the kernel is compiled for."""
    preparing: Preparing | None = None
    """What makes keys and values ready for tiles that want that."""
    yields_to: tuple[str, ...] = ()
    """Later rows that serve the call where the cost model expects less time of them: few queries, for one."""
    row_by_row: bool = False
    """Whether the bits of a row depend on no other row, and its first tile has splits: for `split_size`."""
    takes_maps: bool = False
    """Whether it has maps of tiles of keys and values behind its struct of arguments."""
    rounds_weights: bool = False
    """Whether weights are rounded to the format of the operands, as tensor cores want them: part of the error rule."""

    def prepared_row(self, traits: Traits) -> tuple[int, int]:
        """Bytes that are made ready of a row of k and of v, for tiles that want that."""
        return self.preparing.row(traits) if self.preparing else (0, 0)

    def refusal(self, traits: Traits, device: Device) -> str | None:
        """Return None if the kernel serves such problems on the device, else the reason as a sentence."""
        if traits.op not in self.operations:
            return f"does not implement {traits.op}"
        if device.compute_capability < self.min_compute_capability:
            return f"needs sm_{self.min_compute_capability}, the device is {device.arch}"
        if self.capabilities and device.compute_capability not in self.capabilities:
            known = ", ".join(f"sm_{capability}" for capability in self.capabilities)
            return f"is for {known}, the device is {device.arch}"
        if traits.dtype not in self.dtypes:
            return f"dtype {traits.dtype} is not one of {', '.join(self.dtypes)}"
        if max(traits.head_dim, traits.head_dim_v) > self.max_head_dim:
            return f"head_dim {max(traits.head_dim, traits.head_dim_v)} is above {self.max_head_dim}"
        if self.features != FEATURES:
            missing = [name for name in used_features(traits) if name not in self.features]
            if missing:
                return f"does not implement {', '.join(missing)}"
        limit = self.limits(traits, device)
        if limit is not None:
            return limit
        if not self.tiles(traits, device):
            return no_tile(traits, device, partial(self.tiles, traits))
        return None


KERNELS = (
    KernelSpec(
        name="forward_wgmma",
        summary="tensor cores of Hopper through wgmma: float16 and bfloat16 on sm_90",
        operations=("attention", "attention_varlen", "attention_with_kv_cache"),
        dtypes=("float16", "bfloat16"),
        features=FEATURES,
        min_compute_capability=90,
        max_head_dim=256,
        head_dim_bucket=tiles_wgmma.head_dim_bucket,
        tiles=tiles_wgmma.tiles,
        shared_memory=tiles_wgmma.shared_memory,
        min_blocks=tiles_wgmma.min_blocks,
        cost=tiles_wgmma.cost,
        capabilities=(90,),
        limits=tiles_wgmma.limits,
        starved_rows=192,
        macros=tiles_wgmma.macros,
        takes_maps=True,
        caps_by_polynomial=True,
        yields_to=("forward_mma", "forward_decode"),
        rounds_weights=True,
    ),
    KernelSpec(
        name="forward_mma",
        summary="tensor cores through mma.sync: float16 and bfloat16 from sm_80",
        operations=("attention", "attention_varlen", "attention_lse", "attention_with_kv_cache"),
        dtypes=("float16", "bfloat16"),
        features=FEATURES,
        min_compute_capability=80,
        max_head_dim=512,
        head_dim_bucket=tiles_mma.head_dim_bucket,
        tiles=tiles_mma.tiles,
        shared_memory=tiles_mma.shared_memory,
        min_blocks=tiles_mma.min_blocks,
        cost=tiles_mma.cost,
        starved_rows=64,
        macros=tiles_mma.macros,
        caps_by_polynomial=True,
        yields_to=("forward_decode",),
        rounds_weights=True,
    ),
    KernelSpec(
        name="forward_decode",
        summary="few queries of many keys, through mma.sync: float16 and bfloat16 from sm_80",
        operations=("attention", "attention_varlen", "attention_with_kv_cache"),
        dtypes=("float16", "bfloat16"),
        features=FEATURES,
        min_compute_capability=80,
        max_head_dim=256,
        head_dim_bucket=tiles_decode.head_dim_bucket,
        tiles=tiles_decode.tiles,
        shared_memory=tiles_decode.shared_memory,
        min_blocks=tiles_decode.min_blocks,
        cost=tiles_decode.cost,
        limits=needs_vectors,
        starved_rows=64,
        row_by_row=True,
        rounds_weights=True,
    ),
    KernelSpec(
        name="precise_wgmma",
        summary="tensor cores of Hopper through wgmma, by pairs of float16: float32 and tf32 on sm_90",
        operations=("attention", "attention_varlen", "attention_lse"),
        dtypes=("float32",),
        features=FEATURES - {"page_table", "seqlens_k"},
        min_compute_capability=90,
        max_head_dim=256,
        head_dim_bucket=tiles_precise_wgmma.head_dim_bucket,
        tiles=tiles_precise_wgmma.tiles,
        shared_memory=tiles_precise_wgmma.shared_memory,
        min_blocks=tiles_precise_wgmma.min_blocks,
        cost=tiles_precise_wgmma.cost,
        capabilities=(90,),
        limits=tiles_precise_wgmma.limits,
        macros=tiles_precise_wgmma.macros,
        preparing=preparing_pairs(tiles_precise_wgmma.head_dim_bucket),
        yields_to=("precise_float32", "forward_wmma", "forward_points", "precise_decode", "forward_scalar"),
        rounds_weights=True,
    ),
    KernelSpec(
        name="precise_float32",
        summary="tensor cores by pairs of float16: float32 and tf32 from sm_80",
        operations=("attention", "attention_varlen", "attention_lse", "attention_with_kv_cache"),
        dtypes=("float32",),
        features=FEATURES - {"page_table"},
        min_compute_capability=80,
        max_head_dim=512,
        head_dim_bucket=tiles_float32.head_dim_bucket,
        tiles=tiles_float32.tiles,
        shared_memory=tiles_float32.shared_memory,
        min_blocks=tiles_float32.min_blocks,
        cost=tiles_float32.cost,
        macros=tiles_float32.macros,
        preparing=preparing_pairs(tiles_float32.head_dim_bucket),
        yields_to=("forward_wmma", "forward_points", "precise_decode", "forward_scalar"),
        rounds_weights=True,
    ),
    KernelSpec(
        name="forward_wmma",
        summary="tensor cores through WMMA: float16 from sm_70, bfloat16 and tf32 from sm_80",
        operations=("attention", "attention_varlen", "attention_lse", "attention_with_kv_cache"),
        dtypes=("float16", "bfloat16", "float32"),
        features=FEATURES - {"page_table"},
        min_compute_capability=70,
        max_head_dim=256,
        head_dim_bucket=tiles_wmma.head_dim_bucket,
        tiles=tiles_wmma.tiles,
        shared_memory=tiles_wmma.shared_memory,
        min_blocks=tiles_wmma.min_blocks,
        cost=tiles_wmma.cost,
        limits=tiles_wmma.limits,
        rounds_weights=True,
    ),
    KernelSpec(
        name="forward_points",
        summary="point clouds: float32 and float64 of up to 16 features",
        operations=("attention", "attention_varlen", "attention_with_kv_cache"),
        dtypes=("float32", "float64"),
        features=FEATURES - {"page_table"},
        min_compute_capability=50,
        max_head_dim=16,
        head_dim_bucket=tiles_points.head_dim_bucket,
        tiles=tiles_points.tiles,
        shared_memory=tiles_points.shared_memory,
        min_blocks=tiles_points.min_blocks,
        cost=tiles_points.cost,
    ),
    KernelSpec(
        name="precise_float64",
        summary="tensor cores in double precision: float64 on sm_80, sm_90 and sm_100",
        operations=("attention", "attention_varlen", "attention_lse", "attention_with_kv_cache"),
        dtypes=("float64",),
        features=FEATURES - {"page_table"},
        min_compute_capability=80,
        max_head_dim=128,
        head_dim_bucket=tiles_float64.head_dim_bucket,
        tiles=tiles_float64.tiles,
        shared_memory=tiles_float64.shared_memory,
        min_blocks=tiles_float64.min_blocks,
        cost=tiles_float64.cost,
        capabilities=tiles_float64.FAST_FLOAT64,
        yields_to=("precise_wide", "forward_scalar"),
    ),
    KernelSpec(
        name="precise_wide",
        summary="tensor cores in double precision, for wide heads and few queries: float64 on sm_80, sm_90 and sm_100",
        operations=("attention", "attention_varlen", "attention_lse", "attention_with_kv_cache"),
        dtypes=("float64",),
        features=FEATURES - {"page_table"},
        min_compute_capability=80,
        max_head_dim=512,
        head_dim_bucket=tiles_wide.head_dim_bucket,
        tiles=tiles_wide.tiles,
        shared_memory=tiles_wide.shared_memory,
        min_blocks=tiles_wide.min_blocks,
        cost=tiles_wide.cost,
        capabilities=tiles_float64.FAST_FLOAT64,
        macros=tiles_wide.macros,
    ),
    KernelSpec(
        name="precise_decode",
        summary="few queries of many keys, on the ordinary arithmetic units: float32",
        operations=("attention", "attention_varlen", "attention_with_kv_cache"),
        dtypes=("float32",),
        features=FEATURES - {"page_table"},
        min_compute_capability=80,
        max_head_dim=256,
        head_dim_bucket=tiles_precise_decode.head_dim_bucket,
        tiles=tiles_precise_decode.tiles,
        shared_memory=tiles_precise_decode.shared_memory,
        min_blocks=tiles_precise_decode.min_blocks,
        cost=tiles_precise_decode.cost,
        limits=needs_vectors,
        yields_to=("forward_scalar",),
    ),
    KernelSpec(
        name="forward_scalar",
        summary="any GPU, dtype and head_dim, on the ordinary arithmetic units",
        operations=("attention", "attention_varlen", "attention_lse", "attention_with_kv_cache"),
        dtypes=FLOAT_NAMES,
        features=FEATURES,
        min_compute_capability=50,
        max_head_dim=512,
        head_dim_bucket=tiles_scalar.head_dim_bucket,
        tiles=tiles_scalar.tiles,
        shared_memory=tiles_scalar.shared_memory,
        min_blocks=tiles_scalar.min_blocks,
        cost=tiles_scalar.cost,
        row_by_row=True,
    ),
)


HELPERS = ("merge", "append_keys")
"""Sources beside the table, that rows share: one merges split keys, one appends to caches. No problem goes to them."""


class _Row(Protocol):
    @property
    def name(self) -> str: ...
    def refusal(self, traits: Any, device: Device) -> str | None: ...


Row = TypeVar("Row", bound=_Row)


def choose_row(rows: Sequence[Row], traits: Any, device: Device, settings: Settings) -> Row:
    """First row of a table that accepts, or the one that the settings name; a ValueError says why that can't serve."""
    if not settings.kernel:
        return next(spec for spec in rows if spec.refusal(traits, device) is None)
    reason: str | None = f"does not implement {traits.op}"
    if settings.kernel == CPU_KERNEL:
        reason = "it computes NumPy arrays, these are on a GPU"
    for spec in rows:
        if spec.name == settings.kernel:
            reason = spec.refusal(traits, device)
            if reason is None:
                return spec
    raise ValueError(f"kernel {settings.kernel!r} cannot serve this call: {reason}")
