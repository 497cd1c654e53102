"""The table of kernels: one `KernelSpec` row each, fastest first.

Dispatch, tests, import-time compilation and `python -m cuflash kernels` all iterate over `KERNELS`. The first row that
accepts a problem serves it. The last row takes everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .arrays import FLOAT_NAMES, ITEMSIZE
from .problem import Problem, common_alignment

CPU_KERNEL = "cpu"
"""Name of the NumPy back end where a kernel's name is asked for."""


class Device(NamedTuple):
    """What the choice of a kernel needs to know of a GPU."""

    compute_capability: int
    """10 x major + minor."""
    shared_memory_per_block: int
    """Bytes that one block may use (the opt-in maximum)."""
    num_multiprocessors: int

    @property
    def arch(self) -> str:
        """Name of the architecture as compilers spell it."""
        return f"sm_{self.compute_capability}"


_SHARED_MEMORY_KB = {
    70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 88: 99, 89: 99,
    90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99,
}  # fmt: skip


def device_of(compute_capability: int) -> Device:
    """Describe a GPU by its compute capability alone, for plans without one at hand."""
    kilobytes = _SHARED_MEMORY_KB.get(compute_capability, 48 if compute_capability < 70 else 99)
    return Device(compute_capability, kilobytes * 1024, 132 if compute_capability in (90, 100, 103) else 80)


class Tile(NamedTuple):
    """Rows and keys that a block works on at a time, and its threads."""

    block_m: int
    block_n: int
    num_threads: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}"


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


def _blocks_in_shared_memory(device: Device, size: int) -> int:
    """How many blocks of `size` bytes a multiprocessor holds; each takes 1 KiB for itself."""
    return (device.shared_memory_per_block + 1024) // (size + 1024)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def scalar_bucket(head_dim: int) -> int:
    """16, 32, 64, then multiples of 32 and, above 192, of 64."""
    if head_dim <= 64:
        return 16 if head_dim <= 16 else _round_up(head_dim, 32)
    return _round_up(head_dim, 32 if head_dim <= 192 else 64)


def _scalar_slice(bucket: int) -> int:
    return bucket if bucket <= 64 else 64 if bucket % 64 == 0 else 32


def _scalar_form(problem: Problem) -> tuple[int, int, int]:
    """Accumulator size and head dimensions, which decide what a tile takes."""
    itemsize = 8 if problem.dtype == "float64" else 4
    return itemsize, scalar_bucket(problem.head_dim), scalar_bucket(problem.head_dim_v)


def scalar_shared_memory(problem: Problem, tile: Tile) -> int:
    """Bytes of `SharedTiles` in forward_scalar.cu."""
    itemsize, bucket, bucket_v = _scalar_form(problem)
    pad = 16 // itemsize
    q = tile.block_m * (bucket + pad)
    slices = 2 * tile.block_n * (max(_scalar_slice(bucket), _scalar_slice(bucket_v)) + pad)
    weights = tile.block_m * (tile.block_n + pad)
    return _round_up((q + slices + weights) * itemsize + _TILE_MAP_BYTES, 16)


# Threads hold block_m * 16 / num_threads rows each: 8 rows give the best ratio of arithmetic to shared-memory loads,
# until the output (rows x head_dim_v / 16 accumulators) no longer fits the registers beside the operands. Measured on
# an H200, TFLOP/s: float32 64x64 with 128 threads 33 (head_dim 64, 128), with 256 threads 29 (256, 512); float64 128x64
# 15.5 (64), 64x64 15.4 (128).
_SCALAR_TILES = {
    4: (
        Tile(64, 64, 128), Tile(64, 64, 256), Tile(32, 64, 128), Tile(32, 32, 64), Tile(16, 64, 128), Tile(16, 32, 64),
        Tile(8, 32, 32), Tile(4, 16, 32),
    ),
    8: (
        Tile(128, 64, 256), Tile(64, 64, 256), Tile(32, 64, 256), Tile(32, 32, 256), Tile(32, 32, 128),
        Tile(16, 64, 128), Tile(16, 32, 128), Tile(8, 32, 32), Tile(4, 16, 32),
    ),
}  # fmt: skip
_TILE_MAP_BYTES = 16 * 8
"""sizeof(TileMap) of sequence.cuh."""


def scalar_tiles(problem: Problem, device: Device) -> list[Tile]:
    """Tiles whose output fits the registers and whose operands fit the device's shared memory, tallest first."""
    itemsize, _, bucket_v = _scalar_form(problem)
    fitting = []
    for tile in _SCALAR_TILES[itemsize]:
        rows = tile.block_m * 16 // tile.num_threads
        output_registers = rows * bucket_v // 16 * itemsize // 4
        limit = 64 if rows >= 8 else 128 if itemsize == 4 or (rows <= 2 and tile.block_n <= 32) else 112
        if output_registers <= limit and scalar_shared_memory(problem, tile) <= device.shared_memory_per_block:
            fitting.append(tile)
    return fitting


def scalar_min_blocks(problem: Problem, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    itemsize, _, bucket_v = _scalar_form(problem)
    output_registers = tile.block_m * bucket_v // tile.num_threads * itemsize // 4
    registers = 168 if output_registers <= 32 else 255
    by_memory = _blocks_in_shared_memory(device, scalar_shared_memory(problem, tile))
    return max(1, min(by_memory, 65536 // (tile.num_threads * registers)))


def wmma_bucket(head_dim: int) -> int:
    """Multiples of 16 up to 96, then of 32."""
    return _round_up(head_dim, 16 if head_dim <= 96 else 32)


def wmma_shared_memory(problem: Problem, tile: Tile) -> int:
    """Bytes of `SharedTiles` in forward_wmma.cu."""
    bucket, bucket_v = wmma_bucket(problem.head_dim), wmma_bucket(problem.head_dim_v)
    itemsize = ITEMSIZE[problem.dtype]
    q_and_k = (tile.block_m + tile.block_n) * (bucket * itemsize + 16)
    v = tile.block_n * (bucket_v + 8) * itemsize
    scores = tile.block_m * (tile.block_n + 8) * 4
    factors = tile.block_m * 4
    return _round_up(q_and_k + v + scores + factors + _TILE_MAP_BYTES + 4 * 8 + 24, 32)


def wmma_limits(problem: Problem, device: Device) -> str | None:
    """Refuse float32 that is to be float32, and formats that the device does not multiply."""
    if problem.dtype == "float32" and problem.precision != "tf32":
        return "multiplies float32 as tf32, and only under precision='tf32'"
    if problem.dtype != "float16" and device.compute_capability < 80:
        name = "tf32" if problem.dtype == "float32" else problem.dtype
        return f"multiplies {name} from sm_80 on, the device is {device.arch}"
    return None


# Wavefronts of shared memory are the limit (two thirds of their rate on an H200; the rest is latency, as there are but
# eight warps). Per 32 rows and 64 keys, in clocks of a multiprocessor: head_dim 64 multiplies for 192, reads K and V
# for 128 if a warp has 32 rows (256 with 16), passes scores and weights through for 192 and computes exp2 for 128;
# head_dim 128 multiplies for 384, reads for 320 and passes for 192. So warps have 32 rows where the output fits the
# registers, 16 elsewhere, and two blocks of four warps wait for less than one of eight. Measured, TFLOP/s: head_dim 64
# 128x64 210, 128x32 200, 64x64 190; head_dim 128 128x32 245, 64x64 197, 64x32 191; head_dim 256 64x32 219, 128x32 195.
_WMMA_TILES = (
    Tile(128, 64, 128), Tile(128, 32, 128), Tile(64, 64, 128), Tile(64, 32, 128), Tile(128, 64, 256),
    Tile(128, 32, 256), Tile(64, 16, 128), Tile(32, 64, 64), Tile(32, 32, 64), Tile(32, 16, 64), Tile(16, 64, 32),
    Tile(16, 32, 32), Tile(16, 16, 32),
)  # fmt: skip


def _wmma_registers(problem: Problem, tile: Tile) -> tuple[int, int]:
    """Registers per thread that hold the output and the scores of a tile."""
    fragments = tile.block_m * 2 // tile.num_threads
    return fragments * wmma_bucket(problem.head_dim_v) // 2, fragments * tile.block_n // 2


def wmma_tiles(problem: Problem, device: Device) -> list[Tile]:
    """Tiles that fit registers and shared memory, tall ones first, and of them those that occupy eight warps.

    What fits the registers beside the output was found by compiling; before sm_80 operands take more of them. Tiles of
    16 rows come last: one warp alone hides little.
    """
    newer = device.compute_capability >= 80
    aligned = common_alignment(problem) == 16
    arrays = problem.bias is not None or problem.mask is not None
    simple = problem.head_dim <= 128 and problem.dtype != "float32" and aligned
    simple &= device.compute_capability >= 90 or not arrays
    together = 96 if device.compute_capability < 75 else 160 if newer and simple else 128
    fitting = []
    for tile in _WMMA_TILES:
        output, scores = _wmma_registers(problem, tile)
        tall = tile.block_m == tile.num_threads
        widest = 64 if output <= (80 if newer else 64) else 32 if output <= 96 or (newer and aligned) else 16
        if problem.dtype == "float32":  # operands of twice the size
            widest = 64 if output <= 48 else 32 if output <= 80 else 16
        if (
            output <= 128
            and tile.block_n <= widest
            and not (tall and output + scores > together)
            and wmma_shared_memory(problem, tile) <= device.shared_memory_per_block
        ):
            fitting.append(tile)

    def order(tile: Tile) -> tuple[bool, bool]:
        blocks = _blocks_in_shared_memory(device, wmma_shared_memory(problem, tile))
        return tile.block_m == 16, tile.block_m > 16 and blocks * tile.num_threads < 256

    return sorted(fitting, key=order)


def wmma_min_blocks(problem: Problem, tile: Tile, device: Device) -> int:
    """Blocks that shared memory allows, as long as each thread keeps the registers it needs."""
    output, scores = _wmma_registers(problem, tile)
    need = output * 5 // 4 + scores + (8 if max(problem.head_dim, problem.head_dim_v) > 96 else 0)
    need += 48 if problem.dtype == "float32" else 0
    warps = 16 if need <= 76 else 12 if need <= 112 else 8
    by_memory = _blocks_in_shared_memory(device, wmma_shared_memory(problem, tile))
    return max(1, min(by_memory, warps * 32 // tile.num_threads))


KERNELS = (
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


HELPERS = ("combine",)
"""Sources beside the table: they finish calls of several kernels, and no problem is dispatched to them."""


def kernel_names() -> list[str]:
    """Names that `options(kernel=...)` takes."""
    return [spec.name for spec in KERNELS] + [CPU_KERNEL]
