"""How a problem of the gated delta rule is computed on a device: kernel, tile, grid. Pure Python; needs no GPU.

A table of its own, beside that of attention: the first row that accepts the traits of a problem serves it, and the last
one of each operation takes everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from ..problem.arrays import FLOAT_NAMES, ITEMSIZE
from ..problem.describe_gated import MAX_GATED_HEAD_DIM
from ..problem.gated import GatedProblem, GatedTraits
from ..settings import Settings
from .build import Program
from .features import Macros
from .gated_tiles import (
    CHUNK_BYTES,
    MAX_HEADS,
    MIN_WAVES,
    ROW_TILE,
    GatedTile,
    decay_bytes,
    delta_macros,
    delta_shared_memory,
    delta_tiles,
    delta_wgmma_limits,
    delta_wgmma_macros,
    delta_wgmma_shared_memory,
    delta_wgmma_tiles,
    matrix_bytes,
    output_macros,
    output_mma_held,
    output_mma_macros,
    output_mma_shared_memory,
    output_mma_tiles,
    output_shared_memory,
    output_tiles,
    recurrent_macros,
    recurrent_shared_memory,
    recurrent_tiles,
)
from .table import choose_row
from .tiles import REGISTERS, Device, blocks_in_shared_memory, no_tile, round_up

CARRY, CHAIN, CUT = 0.84, 2.5, 12.0
"""In times of a chunk: one of which only what segments carry is wanted, a segment in the chain, and the launches of
both."""
CROWDED = 1.3
"""What a chunk takes where all multiprocessors compute one: memory is the limit then."""
MAX_SEGMENTS = 32
CHAIN_WIDTH = 8
"""Features of v of a block of gated_chain.cu."""


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
    max_head_dim: int = MAX_GATED_HEAD_DIM
    """Of q and k; v has up to `MAX_GATED_HEAD_DIM`."""
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
        if traits.head_dim > self.max_head_dim:
            return f"head_dim {traits.head_dim} is above {self.max_head_dim}"
        limit = self.limits(traits, device)
        if limit is not None:
            return limit
        if not self.tiles(traits, device):
            return no_tile(traits, device, partial(self.tiles, traits))
        return None


class ScratchStates(NamedTuple):
    """States in the workspace, transposed, of all heads of each sequence or segment."""

    name: str
    """Which array of the call they stand for."""
    begin: int
    num_columns: int
    """Of a state, which has all features of k."""


class GatedLaunch(NamedTuple):
    """One launch of a plan."""

    program: Program
    num_threads: int
    num_blocks: int
    num_parts: int = 1
    """Blocks that share heads of a sequence, segment or chunk."""
    heads_per_block: int = 1
    """Heads of v that a block computes one after the other."""
    num_segments: int = 1
    """Of a sequence, each of which has blocks of its own."""
    segment_tokens: int = 0
    """Of each segment but the last; 0: all."""
    identity_column: int = 0
    """Of what segments carry."""
    scratch: tuple[ScratchStates, ...] = ()


class GatedPlan(NamedTuple):
    """How a problem is computed on a device."""

    tile: GatedTile
    launches: tuple[GatedLaunch, ...]
    """In order; the last one writes the results."""
    workspace: int
    """Bytes of scratch memory."""

    @property
    def program(self) -> Program:
        """What the last launch runs."""
        return self.launches[-1].program

    @property
    def num_blocks(self) -> int:
        """Of the last launch."""
        return self.launches[-1].num_blocks

    @property
    def kernel(self) -> str:
        """Name of its row."""
        return self.program.kernel

    def __str__(self) -> str:
        last = self.launches[-1]
        heads = f" of {last.heads_per_block} heads" if last.heads_per_block > 1 else ""
        segments = f" ({last.num_segments} segments)" if last.num_segments > 1 else ""
        workspace = f" ({self.workspace} bytes of workspace)" if self.workspace else ""
        return (
            f"{self.kernel} tile {self.tile}, {self.tile.num_threads} threads, {self.num_blocks} blocks"
            f"{heads}{segments}{workspace}, {self.program.shared_memory} bytes of shared memory"
        )


def output_mma_heads(problem: GatedProblem, tile: GatedTile, num_blocks: int, device: Device) -> int:
    """Heads of v for which q, k and scores stay: the more, the less is loaded, the fewer blocks there are."""
    group = problem.num_heads_v // max(problem.num_heads, 1)
    enough = MIN_WAVES * device.num_multiprocessors * output_mma_held(problem.traits, tile, device)
    return next(n for n in (MAX_HEADS, 2, 1) if n == 1 or (group % n == 0 and num_blocks // n >= enough))


def _preparation(problem: GatedProblem, tile: GatedTile, program: Program, device: Device) -> GatedLaunch:
    tokens, bucket = tile.tokens, int(dict(program.macros)["HEAD_DIM"])
    square = max(ITEMSIZE[problem.traits.dtype] * tokens * (bucket + 8), 4 * tokens * (tokens + 4))
    shared_memory = 2 * square + 2 * 4 * tokens + CHUNK_BYTES
    held = min(blocks_in_shared_memory(device, shared_memory), REGISTERS // (128 * 2 * tokens))
    own = {"BLOCK_N": None, "STAGES": None, "THREADS": 2 * tokens}
    macros = ((name, own.get(name, value)) for name, value in program.macros)
    given = tuple((name, value) for name, value in macros if value is not None)
    return GatedLaunch(
        Program("gated_prepare", (*given, ("MIN_BLOCKS", max(1, held))), shared_memory),
        2 * tokens,
        _num_chunks(problem, tokens),
    )


def _prepared_bytes(problem: GatedProblem, tokens: int) -> int:
    """What gated_prepare.cu leaves: chunks of packed sequences are counted as if each began one more."""
    packed, num_sequences, seqlen = problem.traits.packed, problem.num_sequences, problem.seqlen
    chunks = seqlen // tokens + num_sequences if packed else -(-seqlen // tokens) * num_sequences
    return chunks * problem.num_heads_v * (matrix_bytes(tokens) + decay_bytes(tokens)) if seqlen else 0


GATED_KERNELS = (
    GatedSpec(
        name="gated_output_mma",
        summary="chunks of the gated delta rule on tensor cores: float16 and bfloat16 from sm_80",
        operations=("chunk_gated_output",),
        dtypes=("float16", "bfloat16"),
        min_compute_capability=80,
        tiles=output_mma_tiles,
        macros=output_mma_macros,
        shared_memory=output_mma_shared_memory,
        vectors=True,
        heads=output_mma_heads,
    ),
    GatedSpec(
        name="gated_output",
        summary="chunks of the gated delta rule on any GPU, any dtype",
        operations=("chunk_gated_output",),
        dtypes=FLOAT_NAMES,
        min_compute_capability=50,
        tiles=output_tiles,
        macros=output_macros,
        shared_memory=output_shared_memory,
        vectors=False,
    ),
    GatedSpec(
        name="gated_delta_wgmma",
        summary="the gated delta rule by chunks on Hopper's tensor cores: float16 and bfloat16",
        operations=("chunk_gated_delta_rule",),
        dtypes=("float16", "bfloat16"),
        min_compute_capability=90,
        tiles=delta_wgmma_tiles,
        macros=delta_wgmma_macros,
        shared_memory=delta_wgmma_shared_memory,
        vectors=True,
        max_head_dim=128,
        capabilities=(90,),
        limits=delta_wgmma_limits,
        preparing="gated_prepare",
    ),
    GatedSpec(
        name="gated_delta_mma",
        summary="the gated delta rule by chunks on tensor cores: float16 and bfloat16 from sm_80",
        operations=("chunk_gated_delta_rule",),
        dtypes=("float16", "bfloat16"),
        min_compute_capability=80,
        tiles=delta_tiles,
        macros=delta_macros,
        shared_memory=delta_shared_memory,
        vectors=True,
        preparing="gated_prepare",
    ),
    GatedSpec(
        name="gated_recurrent",
        summary="the gated delta rule token by token on any GPU, any dtype",
        operations=("chunk_gated_delta_rule", "recurrent_gated_delta_rule"),
        dtypes=FLOAT_NAMES,
        min_compute_capability=50,
        tiles=recurrent_tiles,
        macros=recurrent_macros,
        shared_memory=recurrent_shared_memory,
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
    if spec.preparing:
        preparation, workspace = _preparation(problem, tile, program, device), _prepared_bytes(problem, tile.tokens)
        walks, workspace = _walks(problem, tile, program, device, workspace)
        return GatedPlan(tile, (preparation, *walks), workspace)
    num_blocks = (_num_chunks(problem, tile.tokens) if tile.tokens else _num_walks(problem)) * num_parts
    heads = spec.heads(problem, tile, num_blocks, device) if spec.heads else 1
    return GatedPlan(tile, (GatedLaunch(program, tile.num_threads, num_blocks // heads, num_parts, heads),), 0)


def _time(problem: GatedProblem, tile: GatedTile, device: Device) -> float:
    """What a tile of gated_delta_mma.cu takes, relative to others."""
    return _walking_time(problem, tile, device)[0] * (1 + tile.width / 64) * (1 + tile.tokens / 64)


def _parts(traits: GatedTraits, tile: GatedTile) -> tuple[int, int]:
    """Blocks for the features of v of a state, and for an identity beside it."""
    return -(-traits.head_dim_v // tile.width), -(-traits.head_dim // tile.width)


def _walking_time(problem: GatedProblem, tile: GatedTile, device: Device) -> tuple[float, int]:
    """The least time from first chunks to last ones, in that of a chunk, and chunks of a segment with which it is so.

    A block has a multiprocessor for itself. Of a sequence that is cut, what segments carry to the next one is computed
    first, and chained.
    """
    chunks, walks = -(-problem.seqlen // tile.tokens), _num_walks(problem)
    parts, more_parts = _parts(problem.traits, tile)

    def time_of(number: int) -> tuple[float, int]:
        own, before, most = -(-chunks // number), number - 1, device.num_multiprocessors
        blocks, carrying = walks * number * parts, -(-walks * before * (parts + more_parts) // most)
        time = max(-(-blocks // most), CROWDED * blocks / most) + CARRY * carrying
        return own * time + (CUT + CHAIN * before if before else 0), own

    most_segments = 1 if problem.traits.packed else min(chunks, MAX_SEGMENTS)
    return min(map(time_of, range(1, most_segments + 1)), default=(0, 0))


def _walks(
    problem: GatedProblem, tile: GatedTile, program: Program, device: Device, workspace: int
) -> tuple[list[GatedLaunch], int]:
    """Launches behind the preparation, and bytes of scratch memory with what they need."""
    traits, walks, (parts, more_parts) = problem.traits, _num_walks(problem), _parts(problem.traits, tile)
    tokens = _walking_time(problem, tile, device)[1] * tile.tokens
    number = 1 if traits.packed or not tokens else -(-problem.seqlen // tokens)
    if number == 1:
        return [GatedLaunch(program, tile.num_threads, walks * parts, parts)], workspace
    before, identity = number - 1, parts * tile.width
    column = 4 * traits.head_dim * walks
    carried, states = workspace, workspace + before * column * (identity + traits.head_dim)
    bucket = round_up(traits.head_dim, 32)
    chain = Program("gated_chain", (("HEAD_DIM", bucket), ("THREADS", 2 * bucket)), 2 * 4 * bucket * CHAIN_WIDTH)
    chain_parts, carry_parts = -(-traits.head_dim_v // CHAIN_WIDTH), parts + more_parts
    carry = program._replace(macros=(*program.macros, ("CARRY", 1)))
    carries, starts = identity + traits.head_dim, traits.head_dim_v
    made = [
        GatedLaunch(
            carry, tile.num_threads, walks * before * carry_parts, carry_parts, 1, before, tokens, identity,
            (ScratchStates("final_state", carried, carries),),
        ),
        GatedLaunch(
            chain, 2 * bucket, walks * chain_parts, chain_parts, 1, 1, tokens, identity,
            (ScratchStates("states", carried, carries), ScratchStates("final_state", states, starts)),
        ),
        GatedLaunch(
            program, tile.num_threads, walks * number * parts, parts, 1, number, tokens, identity,
            (ScratchStates("initial_state", states, starts),),
        ),
    ]  # fmt: skip
    return made, states + number * column * starts


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
