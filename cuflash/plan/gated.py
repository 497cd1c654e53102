"""How a problem of the gated delta rule is computed on a device: kernel, tile, grid. Pure Python; needs no GPU.

A table of its own, beside that of attention: the first row that accepts the traits of a problem serves it, and the last
one of each operation takes everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from ..problem.arrays import FLOAT_NAMES, ITEMSIZE
from ..problem.gated import GatedProblem, GatedTraits
from ..settings import Settings
from .features import Macros
from .plan import Program
from .table import choose_row
from .tiles import Device, blocks_in_shared_memory, round_up

CHUNK_BYTES = 32
"""sizeof(Chunk) of gated/chunk.cuh."""
ROW_TILE = 16
"""Rows of a block of gated_output.cu."""
REGISTERS = 80
"""Of a thread of gated_output_mma.cu, roughly."""
MAX_HEADS = 4
"""Of v that a block of gated_output_mma.cu computes, and how many tokens' gates it holds for each thread."""
MIN_WAVES = 2
"""Of blocks that compute several heads: fewer would leave multiprocessors without work at the end."""
RECURRENT_THREADS = 256


class GatedTile(NamedTuple):
    """What a block computes."""

    tokens: int
    """Of a chunk, or 0 where blocks walk over tokens one by one."""
    width: int
    """Features of v."""
    num_threads: int
    stages: int = 1
    """How many chunks arrive while one is computed."""

    def __str__(self) -> str:
        return f"{self.tokens or 1}x{self.width}" + (f"x{self.stages}" if self.stages > 1 else "")


class GatedSpec(NamedTuple):
    """One row of the table: a CUDA source and what it serves."""

    name: str
    """Also the source `cuda_src/<name>.cu` and the entry point `cuflash_<name>`."""
    summary: str
    operations: tuple[str, ...]
    dtypes: tuple[str, ...]
    min_compute_capability: int
    tiles: Callable[[GatedTraits, Device], list[GatedTile]]
    """Tiles that fit, the best first."""
    macros: Callable[[GatedTraits, GatedTile, Device], Macros]
    """What it is compiled with beside dtype, threads and tile."""
    shared_memory: Callable[[GatedTraits, GatedTile], int]
    """Bytes per block."""
    vectors: bool
    """Whether it moves 16-byte vectors where arrays allow."""
    capabilities: tuple[int, ...] = ()
    """The only compute capabilities that it is for; (): all from the least one on."""
    limits: Callable[[GatedTraits, Device], str | None] = lambda traits, device: None
    """What else the kernel refuses, as a sentence."""
    preparing: str = ""
    """A source that computes what does not depend on the state, in a launch before it, with the same macros."""
    heads: Callable[[GatedProblem, GatedTile, int, Device], int] | None = None
    """How many heads of v a block computes where one each makes so many blocks; None: one."""

    def refusal(self, traits: GatedTraits, device: Device) -> str | None:
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
        limit = self.limits(traits, device)
        if limit is not None:
            return limit
        if not self.tiles(traits, device):
            head_dims = f"{traits.head_dim}/{traits.head_dim_v}"
            return f"no tile for head_dim {head_dims} fits {device.shared_memory_per_block} bytes of shared memory"
        return None


class GatedPreparation(NamedTuple):
    """A launch before the main one."""

    program: Program
    num_threads: int
    num_blocks: int


class GatedPlan(NamedTuple):
    """How a problem is computed on a device."""

    program: Program
    tile: GatedTile
    num_parts: int
    """Blocks that share heads of a sequence or chunk."""
    num_blocks: int
    preparation: GatedPreparation | None
    workspace: int
    """Bytes of scratch memory."""
    heads_per_block: int = 1
    """Heads of v that a block computes one after the other."""

    @property
    def kernel(self) -> str:
        """Name of its row."""
        return self.program.kernel

    def __str__(self) -> str:
        heads = f" of {self.heads_per_block} heads" if self.heads_per_block > 1 else ""
        workspace = f" ({self.workspace} bytes of workspace)" if self.workspace else ""
        return (
            f"{self.kernel} tile {self.tile}, {self.tile.num_threads} threads, {self.num_blocks} blocks"
            f"{heads}{workspace}, {self.program.shared_memory} bytes of shared memory"
        )


# cuda_src/gated_output_mma.cu


def _mma_bucket(head_dim: int) -> int:
    return round_up(head_dim, 32 if head_dim <= 128 else 64)


def _mma_tiles(traits: GatedTraits, device: Device) -> list[GatedTile]:
    num_parts = 1 if traits.head_dim_v <= 128 else 2
    widths = (round_up(-(-traits.head_dim_v // num_parts), 32), 64, 32)
    tiles = [GatedTile(traits.chunk_size, width, 4 * traits.chunk_size) for width in widths]
    return [tile for tile in tiles if _mma_shared_memory(traits, tile) <= device.shared_memory_per_block]


def _mma_macros(traits: GatedTraits, tile: GatedTile, device: Device) -> Macros:
    return (
        ("HEAD_DIM", _mma_bucket(traits.head_dim)),
        ("STATE_DTYPE", f"CUFLASH_{traits.state_dtype.upper()}"),
        ("VARLEN", 1),
        ("SWAPPED_STATES", int(traits.swapped_states)),
        ("MIN_BLOCKS", _mma_held(traits, tile, device)),
    )


def _mma_held(traits: GatedTraits, tile: GatedTile, device: Device) -> int:
    """Blocks of a multiprocessor."""
    held = blocks_in_shared_memory(device, _mma_shared_memory(traits, tile))
    return max(1, min(held, 65536 // (REGISTERS * tile.num_threads)))


def _mma_shared_memory(traits: GatedTraits, tile: GatedTile) -> int:
    bucket, size = _mma_bucket(traits.head_dim), ITEMSIZE[traits.dtype]
    rows, columns = (tile.width, bucket) if traits.swapped_states else (bucket, tile.width)
    elements = tile.tokens * (bucket + 8 + max(bucket, tile.width) + 8) + rows * (columns + 8)
    steps = tile.tokens // 16
    weights, decays = steps * (steps + 1) // 2 * 512, MAX_HEADS * 4 * tile.tokens
    return round_up(size * elements + weights + decays + CHUNK_BYTES + 8, 16)


def _mma_heads(problem: GatedProblem, tile: GatedTile, num_blocks: int, device: Device) -> int:
    """Heads of v for which q, k and scores stay: the more, the less is loaded, the fewer blocks there are."""
    group = problem.num_heads_v // max(problem.num_heads, 1)
    enough = MIN_WAVES * device.num_multiprocessors * _mma_held(problem.traits, tile, device)
    return next(n for n in (MAX_HEADS, 2, 1) if n == 1 or (group % n == 0 and num_blocks // n >= enough))


# cuda_src/gated_output.cu


def _output_tiles(traits: GatedTraits, device: Device) -> list[GatedTile]:
    return [GatedTile(traits.chunk_size, traits.head_dim_v, 128)]


def _output_macros(traits: GatedTraits, tile: GatedTile, device: Device) -> Macros:
    return ("STATE_DTYPE", f"CUFLASH_{traits.state_dtype.upper()}"), ("VARLEN", 1)


def _output_shared_memory(traits: GatedTraits, tile: GatedTile) -> int:
    tokens, size = tile.tokens, ITEMSIZE[traits.computed]
    elements = tokens + ROW_TILE * (tokens + 1) + (ROW_TILE + tokens) * 17 + 16 * 64
    return round_up(CHUNK_BYTES + size * elements, 8)


# cuda_src/gated_prepare.cu and cuda_src/gated_delta_mma.cu


def _delta_bucket(head_dim: int) -> int:
    return round_up(head_dim, 32 if head_dim <= 128 else 64)


def _delta_tiles(traits: GatedTraits, device: Device) -> list[GatedTile]:
    """Return tiles that fit, each with as many chunks under way as do."""
    tiles = []
    for tokens in (64, 32):
        for width in (16, 32, 64):
            made = [GatedTile(tokens, width, 2 * (width + tokens) + 64, stages) for stages in (2, 1)]
            fits = [tile for tile in made if _delta_shared_memory(traits, tile) <= device.shared_memory_per_block]
            tiles += fits[:1] if width == 16 or width // 2 < traits.head_dim_v else []
    return tiles


def _delta_macros(traits: GatedTraits, tile: GatedTile, device: Device) -> Macros:
    return ("HEAD_DIM", _delta_bucket(traits.head_dim)), ("VARLEN", int(traits.packed)), ("STAGES", tile.stages)


def _matrix_bytes(tokens: int) -> int:
    """Three times sizeof(Triangle) of gated/prepared.cuh."""
    steps = tokens // 16
    return 3 * steps * (steps + 1) // 2 * 512


def _decay_bytes(tokens: int) -> int:
    """sizeof(TokenDecays) of gated/prepared.cuh."""
    return 12 * tokens


def _delta_shared_memory(traits: GatedTraits, tile: GatedTile) -> int:
    bucket, size = _delta_bucket(traits.head_dim), ITEMSIZE[traits.dtype]
    keys, values = size * tile.tokens * (bucket + 8), size * tile.tokens * (tile.width + 8)
    arriving = 2 * keys + values + _matrix_bytes(tile.tokens) + _decay_bytes(tile.tokens)
    handed_over = 2 * tile.width // 16 * (bucket + tile.tokens) // 16 * 512
    return (tile.stages + 1) * arriving + keys + _decay_bytes(tile.tokens) + handed_over


def _wgmma_limits(traits: GatedTraits, device: Device) -> str | None:
    if not device.has_own_instructions:
        return "the compiler at hand has not its instructions: NVRTC 12.9 and newer have"
    if traits.head_dim > 128:
        return f"head_dim {traits.head_dim} is above 128"
    if min(traits.input_alignment, traits.result_alignment) < 16:
        return "q, k, v or out have rows that begin on no 16-byte boundary"
    return None


def _wgmma_tiles(traits: GatedTraits, device: Device) -> list[GatedTile]:
    return [GatedTile(64, 64, 256, 2)]


def _wgmma_macros(traits: GatedTraits, tile: GatedTile, device: Device) -> Macros:
    return ("HEAD_DIM", round_up(traits.head_dim, 64)), ("VARLEN", int(traits.packed)), ("STAGES", tile.stages)


def _wgmma_shared_memory(traits: GatedTraits, tile: GatedTile) -> int:
    panels, matrices = 2 * 64 * round_up(traits.head_dim, 64), _matrix_bytes(64)
    arriving = 2 * panels + 2 * 64 * (64 + 8) + matrices + _decay_bytes(64)
    return round_up((tile.stages + 1) * arriving + matrices // 3 + 2 * 2 * 64 * (64 + 8), 1024)


def _preparation(problem: GatedProblem, tile: GatedTile, program: Program, device: Device) -> GatedPreparation:
    tokens, bucket = tile.tokens, int(dict(program.macros)["HEAD_DIM"])
    square = max(ITEMSIZE[problem.traits.dtype] * tokens * (bucket + 8), 4 * tokens * (tokens + 4))
    shared_memory = 2 * square + 2 * 4 * tokens + CHUNK_BYTES
    held = min(blocks_in_shared_memory(device, shared_memory), 65536 // (128 * 2 * tokens))
    own = {"BLOCK_N": None, "STAGES": None, "THREADS": 2 * tokens}
    macros = ((name, own.get(name, value)) for name, value in program.macros)
    given = tuple((name, value) for name, value in macros if value is not None)
    return GatedPreparation(
        Program("gated_prepare", (*given, ("MIN_BLOCKS", max(1, held))), shared_memory),
        2 * tokens,
        _num_chunks(problem, tokens),
    )


def _prepared_bytes(problem: GatedProblem, tokens: int) -> int:
    """What gated_prepare.cu leaves: no two chunks of sequences begin in the same 64 tokens of the same sequence."""
    packed, num_sequences, seqlen = problem.traits.packed, problem.num_sequences, problem.seqlen
    chunks = seqlen // tokens + num_sequences if packed else -(-seqlen // tokens) * num_sequences
    return chunks * problem.num_heads_v * (_matrix_bytes(tokens) + _decay_bytes(tokens)) if seqlen else 0


# cuda_src/gated_recurrent.cu


def _recurrent_bucket(head_dim: int) -> int:
    return round_up(head_dim, 32)


def _recurrent_tiles(traits: GatedTraits, device: Device) -> list[GatedTile]:
    bucket, size = _recurrent_bucket(traits.head_dim), ITEMSIZE[traits.computed]
    # A thread holds 256 bytes of the state, and neighbouring features in a vector of 16.
    columns = min(256 * RECURRENT_THREADS // 32 // (bucket * size), 16 // size)
    while columns > 1 and 16 * columns >= traits.head_dim_v:
        columns //= 2
    return [GatedTile(0, 32 * columns, RECURRENT_THREADS)]


def _recurrent_macros(traits: GatedTraits, tile: GatedTile, device: Device) -> Macros:
    return (
        ("HEAD_DIM", _recurrent_bucket(traits.head_dim)),
        ("VARLEN", int(traits.packed)),
        ("SWAPPED_STATES", int(traits.swapped_states)),
        ("MIN_BLOCKS", 2 if device.compute_capability > 70 else 1),  # compilers for that one spill
    )


def _recurrent_shared_memory(traits: GatedTraits, tile: GatedTile) -> int:
    sums = tile.num_threads // 32 * (2 * tile.width + 1)
    return ITEMSIZE[traits.computed] * (4 * _recurrent_bucket(traits.head_dim) + sums)


GATED_KERNELS = (
    GatedSpec(
        name="gated_output_mma",
        summary="chunks of the gated delta rule on tensor cores: float16 and bfloat16 from sm_80",
        operations=("chunk_gated_output",),
        dtypes=("float16", "bfloat16"),
        min_compute_capability=80,
        tiles=_mma_tiles,
        macros=_mma_macros,
        shared_memory=_mma_shared_memory,
        vectors=True,
        heads=_mma_heads,
    ),
    GatedSpec(
        name="gated_output",
        summary="chunks of the gated delta rule on any GPU, any dtype",
        operations=("chunk_gated_output",),
        dtypes=FLOAT_NAMES,
        min_compute_capability=50,
        tiles=_output_tiles,
        macros=_output_macros,
        shared_memory=_output_shared_memory,
        vectors=False,
    ),
    GatedSpec(
        name="gated_delta_wgmma",
        summary="the gated delta rule by chunks on Hopper's tensor cores: float16 and bfloat16",
        operations=("chunk_gated_delta_rule",),
        dtypes=("float16", "bfloat16"),
        min_compute_capability=90,
        tiles=_wgmma_tiles,
        macros=_wgmma_macros,
        shared_memory=_wgmma_shared_memory,
        vectors=True,
        capabilities=(90,),
        limits=_wgmma_limits,
        preparing="gated_prepare",
    ),
    GatedSpec(
        name="gated_delta_mma",
        summary="the gated delta rule by chunks on tensor cores: float16 and bfloat16 from sm_80",
        operations=("chunk_gated_delta_rule",),
        dtypes=("float16", "bfloat16"),
        min_compute_capability=80,
        tiles=_delta_tiles,
        macros=_delta_macros,
        shared_memory=_delta_shared_memory,
        vectors=True,
        preparing="gated_prepare",
    ),
    GatedSpec(
        name="gated_recurrent",
        summary="the gated delta rule token by token on any GPU, any dtype",
        operations=("chunk_gated_delta_rule", "recurrent_gated_delta_rule"),
        dtypes=FLOAT_NAMES,
        min_compute_capability=50,
        tiles=_recurrent_tiles,
        macros=_recurrent_macros,
        shared_memory=_recurrent_shared_memory,
        vectors=True,
    ),
)
"""The table: one row for each kernel, fastest first."""


@lru_cache(maxsize=1024)
def make_gated_plan(problem: GatedProblem, device: Device, settings: Settings) -> GatedPlan:
    """Choose a kernel and a tile for a problem.

    Raises
    ------
    ValueError
        `options(kernel=..., tile=...)` asks for what cannot serve the problem.
    """
    traits = problem.traits
    spec = choose_row(GATED_KERNELS, traits, device, settings)
    tiles = spec.tiles(traits, device)
    if settings.tile:
        named = [tile for tile in tiles if str(tile) == settings.tile]
        if not named:
            names = ", ".join(dict.fromkeys(map(str, tiles)))
            raise ValueError(f"tile {settings.tile!r} cannot serve this call: kernel {spec.name!r} has {names} for it")
        tiles = named
    tile = min(tiles, key=lambda tile: _time(problem, tile, device)) if spec.preparing else tiles[0]
    num_parts = -(-traits.head_dim_v // tile.width) if spec.vectors else tile.tokens // ROW_TILE
    program = _program(spec, traits, tile, device)
    num_blocks = (
        _num_chunks(problem, tile.tokens) if tile.tokens and not spec.preparing else _num_walks(problem)
    ) * num_parts
    if not spec.preparing:
        heads = spec.heads(problem, tile, num_blocks, device) if spec.heads else 1
        return GatedPlan(program, tile, num_parts, num_blocks // heads, None, 0, heads)
    preparation = _preparation(problem, tile, program, device)
    return GatedPlan(program, tile, num_parts, num_blocks, preparation, _prepared_bytes(problem, tile.tokens))


def _time(problem: GatedProblem, tile: GatedTile, device: Device) -> float:
    """What a tile of gated_delta_mma.cu takes, relative to others: a block has a multiprocessor for itself."""
    blocks = _num_walks(problem) * -(-problem.traits.head_dim_v // tile.width)
    chunks = -(-problem.seqlen // tile.tokens)
    return -(-blocks // device.num_multiprocessors) * chunks * (1 + tile.width / 64) * (1 + tile.tokens / 64)


def gated_refusals(traits: GatedTraits, device: Device) -> list[tuple[str, str | None]]:
    """Every row for the operation with the reason why it does not serve such problems, None where it does."""
    return [(spec.name, spec.refusal(traits, device)) for spec in GATED_KERNELS if traits.op in spec.operations]


def _num_chunks(problem: GatedProblem, tokens: int) -> int:
    """Chunks of all heads, at least as many as there are: lengths of packed sequences are unknown."""
    num_sequences, seqlen = problem.num_sequences, problem.seqlen
    if not problem.traits.packed:
        return -(-seqlen // tokens) * num_sequences * problem.num_heads_v
    # Every sequence, and the tokens before and behind them all, may end in a partial chunk.
    return (seqlen // tokens + min(num_sequences + 2, seqlen)) * problem.num_heads_v


def _num_walks(problem: GatedProblem) -> int:
    """Heads of sequences; the tokens behind packed sequences are one more."""
    return (problem.num_sequences + problem.traits.packed) * problem.num_heads_v


def _program(spec: GatedSpec, traits: GatedTraits, tile: GatedTile, device: Device) -> Program:
    alignment = min(traits.input_alignment, traits.result_alignment)
    macros: Macros = (
        ("DTYPE", f"CUFLASH_{traits.dtype.upper()}"),
        ("BLOCK_M", tile.tokens or 64),
        ("BLOCK_N", tile.width),
        ("THREADS", tile.num_threads),
        ("ALIGNMENT", alignment if spec.vectors or alignment < 16 else ITEMSIZE[traits.dtype]),
        *spec.macros(traits, tile, device),
    )
    return Program(spec.name, macros, spec.shared_memory(traits, tile))
