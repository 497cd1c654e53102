"""Kernels with one barrier, wait or bounds check taken out: the CPU harness must notice every one of them.

Barriers and waits are found by themselves. A bounds check has its line in `CHECKS`: the file, the text, what replaces
it, and who notices.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from cases import CASES_BY_NAME
from kernels.test_forward_mma import (
    alibi,
    alibi_scales,
    alibi_with_few_registers,
    bias_of_no_numbers,
    softcap,
    softcap_of_low_scores,
    steps_of_heads,
    turns,
)

from cuflash import attention, reference
from cuflash.gpu.compile import source_folder
from cuflash.plan.table import HELPERS, KERNELS
from cuflash.problem.problem import describe_attention
from cuflash.testing import check, describe, make_data, run
from emulator.emulator import EmulationError, Emulator, compiler, merge, shadow_sources
from emulator.test_kernels import MALFORMED, malformed

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")


class Mutant(NamedTuple):
    """One change to one source."""

    file: str
    text: str
    replacement: str
    noticed_by: str
    """A case of the matrix with its dtype and, if it takes a certain one, its tile, or a key of `SPECIAL`; one of
    several between semicolons."""
    occurrence: int = 0
    kernel: str = ""
    """Sources of the kernels that use it, if it is in a header that others include too."""

    def __str__(self) -> str:
        return f"{Path(self.file).stem}-{' '.join(self.text.split())}-{self.occurrence}"

    def apply(self) -> str:
        """Return the changed source; how its lines are broken does not matter."""
        source = (source_folder() / self.file).read_text()
        places = list(re.finditer(_pattern(self.text), source))
        assert len(places) > self.occurrence, f"{self.file} has no {self.text!r} number {self.occurrence}"
        place = places[self.occurrence]
        return source[: place.start()] + self.replacement + source[place.end() :]


def _pinned(emulator: Emulator, tile: str) -> Emulator:
    return Emulator(emulator.spec.name, tile, emulator.device, emulator.seed, emulator.sources)


def _no_lse(emulator: Emulator) -> None:
    x = np.ones((2, 70, 32), np.float16)
    assert (emulator.attention(x, x, x) == 1).all()
    assert (emulator.attention_varlen(x, x, x, np.array([0, 2])) == 1).all()


def _hidden_rows(emulator: Emulator) -> None:
    """Rows of k and v that no query of the last tile may see hold NaN."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in ((70, 32), (200, 32), (200, 32)))
    exact, _ = reference.attention(q, k, v, causal="top_left")
    k[70:], v[70:] = np.nan, np.nan
    out = emulator.attention(q, k, v, causal="top_left")
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=3e-3)


def _huge_offsets(emulator: Emulator) -> None:
    """Far beyond all keys, or in front of them, whatever the integer type."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((4, 1, 20, 16)).astype(np.float16) for _ in range(3))
    options: list[dict[str, Any]] = [{"causal": True}, {"window": (5, None)}, {"window": (None, 5)}]
    for dtype in (np.int64, np.uint64):
        limits = np.iinfo(dtype)
        offsets = np.array([limits.min, limits.max, limits.max // 2, 3], dtype)
        for option in options:
            out = emulator.attention(q, k, v, query_offset=offsets, **option)
            expected = attention(q, k, v, query_offset=offsets, **option)
            np.testing.assert_allclose(out.astype(np.float64), expected.astype(np.float64), atol=3e-3)


def _tail_with_sinks(emulator: Emulator) -> None:
    """Tokens behind the last sequence are 0, their lse is -inf and not the sink."""
    x = np.ones((100, 2, 16), np.float16)
    boundaries = np.array([0, 40, 70])
    out, lse = emulator.attention_varlen(x, x, x, boundaries, boundaries, sinks=np.ones(2, np.float32), return_lse=True)
    assert (out[70:] == 0).all() and np.isneginf(lse[70:]).all() and np.isfinite(lse[:70]).all()


def _no_visible_key(emulator: Emulator) -> None:
    """Nothing may be on its way at the end, not even to a tile whose Q would stay in shared memory."""
    x = np.ones((5, 256), np.float16)
    assert (emulator.attention(x, x, x, causal=True, query_offset=-1000) == 0).all()


def _tall_tiles(emulator: Emulator) -> None:
    """Packed sequences with several warps per block, however few rows there are."""
    case = CASES_BY_NAME["packed-plain-True"]
    problem = describe(case, "float16")
    tile = str(emulator.spec.tiles(problem, emulator.device)[0])
    run(case, make_data(case, "float16"), np, _pinned(emulator, tile).function(case))


def _splits(emulator: Emulator) -> None:
    """Windows that begin and end inside of key tiles, with sinks; splits of packed sequences too.

    The cases that most mutants fail come first.
    """
    emulator.num_splits = 3
    for name in ("lengths-17x200", "everything", "window-100-0", "sinks-float32", "packed-alibi-sinks"):
        case, data = CASES_BY_NAME[name], make_data(CASES_BY_NAME[name], "float16")
        outcome = run(case, data, np, emulator.function(case))
        check(case, data, outcome, rounds_weights=emulator.spec.rounds_weights)


def _split_window(emulator: Emulator) -> None:
    """A split that begins inside of a tile of keys and ends with keys that all rows see."""
    emulator.num_splits = 3
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((20, 32)).astype(np.float16), rng.standard_normal((1000, 32)).astype(np.float16)
    options: dict[str, Any] = {"window": (400, 0), "query_offset": 980}
    out, exact = emulator.attention(q, k, k, **options), reference.attention(q, k, k, **options)[0]
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=2e-3)


def _splits_without_lse(emulator: Emulator) -> None:
    emulator.num_splits = 2
    x = np.ones((2, 200, 32), np.float16)
    assert (emulator.attention(x, x, x) == 1).all()


def _merge(width: int, emulator: Emulator) -> None:
    """Three parts of ones or, where they have seen no key, of NaN; rows that fill no block."""
    outs, lses = np.ones((3, 5, width), np.float32), np.zeros((3, 5), np.float32)
    lses[0, 1:] = lses[:, 3] = -np.inf
    outs[np.isneginf(lses)] = np.nan
    for parts in ((outs, lses), (list(outs), list(lses))):
        out, lse = merge(*parts, emulator.sources)
        np.testing.assert_allclose(out, np.where(np.arange(5) == 3, 0, np.ones((width, 5))).T, rtol=1e-6)
        np.testing.assert_allclose(
            lse, np.log([3, 2, 2, 0, 2], where=[1, 1, 1, 0, 1], out=np.full(5, -np.inf)), rtol=1e-6
        )


def _many_threads(emulator: Emulator) -> None:
    """More threads than a tile of keys has pieces of 16 bytes, in one stage and in two."""
    x = np.ones((140, 16), np.float16)
    for tile in ("64x32", "128x32x2"):
        if tile in map(str, emulator.spec.tiles(describe_attention(x, x, x)[0], emulator.device)):
            assert (_pinned(emulator, tile).attention(x, x, x) == 1).all()


def _huge_logits(emulator: Emulator) -> None:
    """So large that the rounding of their products with log2(e) is beyond all exponents."""
    x = np.random.default_rng(0).standard_normal((70, 32)).astype(np.float16)
    out = emulator.attention(x, x, x, bias=np.full((70, 70), -1e30, np.float32), scale=1e-9)
    np.testing.assert_allclose(out.astype(np.float64), [x.astype(np.float64).mean(0)] * 70, atol=2e-3)


def _extreme_softcaps(emulator: Emulator) -> None:
    """So small that scores of 0 are what matters, and so large that it makes no difference."""
    x = np.random.default_rng(0).standard_normal((70, 32)).astype(np.float16)
    out = emulator.attention(np.zeros_like(x), x, x, softcap=1e-40, scale=100)
    np.testing.assert_allclose(out.astype(np.float64), [x.astype(np.float64).mean(0)] * 70, atol=2e-3)
    out, exact = emulator.attention(x, x, x, softcap=1e7), reference.attention(x, x, x)[0]
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=5e-3)
    for cap, scale in ((1e-6, 1e6), (300, 0.2)):
        q, options = np.zeros_like(x) if scale > 1 else x, {"softcap": cap, "scale": scale}
        out, exact = emulator.attention(q, x, x, **options), reference.attention(q, x, x, **options)[0]
        np.testing.assert_allclose(out.astype(np.float64), exact, atol=5e-3)


def _hidden_for_long(emulator: Emulator) -> None:
    """A row that sees none of more keys than one sum takes."""
    q, k = np.ones((2, 16), np.float16), np.ones((4200, 16), np.float16)
    out = emulator.attention(q, k, k, mask=np.array([[False], [True]]))
    assert (out[0] == 0).all() and (out[1] == 1).all()


def _packed_heads(emulator: Emulator) -> None:
    """Several tiles of rows, low ones and high ones, that stand for more heads than one, whole tiles of keys."""
    for seqlen_q in (6, 20):
        q, k = (np.random.default_rng(0).standard_normal(shape) for shape in ((8, seqlen_q, 16), (1, 128, 16)))
        q, k = q.astype(np.float16), k.astype(np.float16)
        out, exact = emulator.attention(q, k, k, causal=True), reference.attention(q, k, k, causal=True)[0]
        np.testing.assert_allclose(out.astype(np.float64), exact, atol=3e-3)


def _staggered_copies(emulator: Emulator) -> None:
    """Halves of a block that copy K and V: neither as wide nor as far from row to row."""
    for width, width_v in ((248, 256), (256, 248), (256, 256)):
        q, k, memory = np.ones((70, width), np.float16), np.ones((130, width), np.float16), np.full((130, 512), np.nan)
        memory[:, :width_v] = 1
        v = memory.astype(np.float16)[:, :width_v]
        if "128x64x2" in map(str, emulator.spec.tiles(describe_attention(q, k, v)[0], emulator.device)):
            assert (_pinned(emulator, "128x64x2").attention(q, k, v) == 1).all()


SPECIAL: dict[str, Callable[[Emulator], None]] = {
    "no_lse": _no_lse,
    "hidden_rows": _hidden_rows,
    "huge_offsets": _huge_offsets,
    "packed-tail-sinks": _tail_with_sinks,
    "no_visible_key": _no_visible_key,
    "tall_tiles": _tall_tiles,
    "many_threads": _many_threads,
    "huge_logits": _huge_logits,
    "extreme_softcaps": _extreme_softcaps,
    "hidden_for_long": _hidden_for_long,
    "packed_heads": _packed_heads,
    "staggered_copies": _staggered_copies,
    "turns": turns,
    "steps_of_heads": steps_of_heads,
    "alibi": alibi,
    "alibi_few": alibi_with_few_registers,
    "alibi_scales": alibi_scales,
    "bias_of_no_numbers": bias_of_no_numbers,
    "softcap": softcap,
    "softcap_of_low_scores": softcap_of_low_scores,
    "splits": _splits,
    "split_window": _split_window,
    "splits_without_lse": _splits_without_lse,
    "merge-odd": partial(_merge, 17),
    "merge-narrow": partial(_merge, 132),
    "merge-wide": partial(_merge, 600),
    **{f"malformed-{name}": lambda emulator, v=values: malformed(emulator, v) for name, values in MALFORMED.items()},
}

SCALAR, WMMA, MMA, COMBINE = "forward_scalar.cu", "forward_wmma.cu", "forward_mma.cu", "combine.cu"
MERGE, STORE = "common/merge.cuh", "common/store.cuh"
SEQUENCE, SEGMENT, TILE = (f"common/{name}.cuh" for name in ("sequence", "segment", "tile"))
MASK, SCORE, EPILOGUE, COLUMNS, DENSE = (
    f"common/{name}.cuh" for name in ("mask", "score", "epilogue", "columns", "dense")
)
FRAGMENTS = "wmma/fragments.cuh"
SCALAR_WMMA, WMMA_MMA = f"{SCALAR} {WMMA}", f"{WMMA} {MMA}"
LOADER, LOGIT_UNIT, MMA_SOFTMAX, MMA_PRODUCTS = (
    f"mma/{name}.cuh" for name in ("key_loader", "logit_unit", "softmax", "products")
)
MMA_WARP, MMA_ROWS, MMA_LOGITS, MMA_TOTAL, KEY_WALK = (
    f"mma/{name}.cuh" for name in ("warp", "rows", "logits", "total", "key_walk")
)
MMA_QUERIES, MMA_STORE, MMA_ALIBI, MMA_ARRAYS = (f"mma/{name}.cuh" for name in ("queries", "store", "alibi", "arrays"))
_OF_MMA = (
    LOADER, LOGIT_UNIT, MMA_SOFTMAX, MMA_PRODUCTS, MMA_WARP, MMA_ROWS, MMA_LOGITS, MMA_TOTAL, KEY_WALK, MMA_QUERIES,
    MMA_STORE, MMA_ALIBI, MMA_ARRAYS,
)  # fmt: skip
KERNEL_OF = {FRAGMENTS: WMMA, **dict.fromkeys(_OF_MMA, MMA)}
"""Headers of one kernel alone."""

CHECKS = [
    # The tile loader: rows and features that the arrays do not have.
    Mutant(TILE, "source != nullptr && ", "", "lengths-63x65 float16", 0, SCALAR_WMMA),
    Mutant(TILE, "source != nullptr && ", "", "head_dim-17-17 float16", 1, SCALAR_WMMA),
    Mutant(TILE, " && first_feature + column < num_features", "", "head_dim-40-40 float16", 0, SCALAR_WMMA),
    Mutant(TILE, " && first_feature + column < num_features", "", "head_dim-17-17 float16", 1, SCALAR_WMMA),
    Mutant(SCALAR, "row.valid ? tile.q", "true ? tile.q", "lengths-63x65 float16"),
    Mutant(SCALAR, "n_begin + key < keys.any.end ? tile.k", "true ? tile.k", "lengths-63x65 float16"),
    Mutant(SCALAR, "n_begin + key < keys.any.end ? tile.v", "true ? tile.v", "lengths-63x65 float16"),
    Mutant(SCALAR, "n_begin + key < keys.any.end ? tile.v", "n_begin + key < tile.seqlen_k ? tile.v", "hidden_rows"),
    # The walk over tiles and slices.
    Mutant(SCALAR, "if (tile.num_rows == 0) return;", "", "packed-plain-True float16"),
    Mutant(SCALAR, "if (keys.any.begin < keys.any.end) {", "{", "lengths-5x0 float32"),
    Mutant(SCALAR, "if (slice + 1 < kNumSlicesK)", "if (true)", "lengths-63x65 float16"),
    Mutant(SCALAR, "if (slice + 1 < kNumSlicesV)", "if (true)", "lengths-63x65 float16"),
    Mutant(SCALAR, "else if (n_begin + kBlockN < keys.any.end) load_k", "else load_k", "lengths-63x65 float32"),
    Mutant(SCALAR, "n_begin < keys.all.begin || ", "", "window-3-None float16"),
    Mutant(SCALAR, " || n_begin + kBlockN > keys.all.end", "", "lengths-63x65 float16"),
    Mutant(
        MASK, "max(position - params.window_left, tile.key_begin)",
        "position - params.window_left", "window-100-0 float16",
    ),
    Mutant(
        MASK, "min(position + params.window_right + 1, tile.key_end)",
        "position + params.window_right + 1", "lengths-63x65 float16",
    ),
    Mutant(MASK, "min(position + params.window_right + 1, tile.key_end)", "tile.key_end", "causal-63x65 float16"),
    Mutant(MASK, "min(first_query + kBlockM, tile.num_rows)", "first_query + kBlockM", "hidden_rows"),
    Mutant(MASK, "params.window_left >= kOpenWindow && ", "", "window-3-None float16"),
    Mutant(MASK, " && params.window_right >= kOpenWindow", "", "causal-63x65 float16"),
    Mutant(MASK, "if (params.packed_heads != 1)", "if (false)", "packed_heads"),
    Mutant(MASK, "begin <= column && ", "", "window-3-None float16"),
    Mutant(MASK, " && column < end", "", "causal-63x65 float16"),
    # The tensor-core kernel's own: its loader of rows, its walk, its two lanes per row.
    Mutant(WMMA, "row.valid ? tile.q", "true ? tile.q", "lengths-63x65 float16"),
    Mutant(WMMA, "min(keys.any.end - n_begin, kStride)", "kStride", "lengths-63x65 float16"),
    Mutant(WMMA, "min(keys.any.end - n_begin, kStride)", "min(tile.seqlen_k - n_begin, kStride)", "hidden_rows"),
    Mutant(WMMA, "if (tile.num_rows == 0) return;", "", "packed-plain-True float16"),
    Mutant(WMMA, "if (keys.any.begin < keys.any.end) {", "{", "no_visible_key"),
    Mutant(WMMA, "if (n_begin + kBlockN < keys.any.end) load_k", "load_k", "lengths-63x65 float16"),
    Mutant(WMMA, "n_begin < keys.all.begin || ", "", "window-3-None float16"),
    Mutant(WMMA, " || n_begin + kBlockN > keys.all.end", "", "lengths-63x65 float16"),
    Mutant(WMMA, "if (first_column == 0) factors", "factors", "lengths-63x65 float16"),
    Mutant(FRAGMENTS, "if (first_column == 0) factors", "factors", "keys-9000 float16", kernel=WMMA),
    Mutant(WMMA, "if (first != 0)", "", "keys-4090 float16"),
    Mutant(WMMA, "if (tile_begin(first + kTilesPerSum) < keys.any.end)", "", "keys-8192 float16"),
    Mutant(WMMA, "if (row.valid) {", "{", "lengths-63x65 float16"),
    Mutant(EPILOGUE, "if (!row.valid) continue;", "", "lengths-63x65 float16", kernel=WMMA),
    Mutant(TILE, "inside && row + pass < num_rows", "row + pass < num_rows", "head_dim-40-40 float16", kernel=WMMA),
    Mutant(TILE, "inside && row + pass < num_rows", "inside", "lengths-63x65 float16", kernel=WMMA),
    Mutant(TILE, "kElements; column < kWidth;", "kElements; column < kLanes * kElements;", "head_dim-40-40 float16",
           kernel=WMMA),
    Mutant(TILE, "if (kStep > kNumRows && row >= kNumRows) return;", "", "many_threads", kernel=WMMA),
    Mutant(TILE, "row < num_rows && column < num_features", "column < num_features", "head_dim-17-17 float16",
           kernel=WMMA),
    Mutant(TILE, "row < num_rows && column < num_features", "row < num_rows", "head_dim-17-17 float16", kernel=WMMA),
    Mutant(WMMA, "if (lane % kLanesPerRow == 0) store_lse", "store_lse", "lengths-63x65 float16"),
    Mutant(WMMA, "if (lane % kLanesPerRow == 0) factors", "factors", "lengths-63x65 float16"),
    Mutant(WMMA, "if (threadIdx.x < 32) {", "{", "tall_tiles"),
    # The kernel whose scores stay in registers: its rows, its walk, which tiles warps pass by, its two stages.
    Mutant(MMA_QUERIES, "return row.valid ? tile.q", "return true ? tile.q", "heads-8-1-3x70 float16", kernel=MMA),
    Mutant(MMA_QUERIES, "if (warp.lane >= OwnRows::kCount) return;", "", "causal-200x131 float16 64x64", kernel=MMA),
    Mutant(MMA_QUERIES, "kAtOnce > OwnRows::kCount && own_row >= OwnRows::kCount", "false",
           "head_dim-16-512 float16 16x32", kernel=MMA),
    Mutant(MMA_QUERIES, "if (own_column + column < kHeadDim)", "", "head_dim-40-40 float16", kernel=MMA),
    Mutant(MMA_QUERIES, "valid && own_column", "own_column", "lengths-63x65 float16", kernel=MMA),
    Mutant(MMA_QUERIES, "valid && own_column + column < params.head_dim", "valid", "head_dim-40-40 float16",
           kernel=MMA),
    Mutant(MMA_QUERIES, "if (params.packed_heads == 1)", "if (true)", "heads-8-1-3x70 float16", kernel=MMA),
    Mutant(MMA_QUERIES, "copy(pass, source, pass < num_rows)", "copy(pass, source, true)", "lengths-63x65 float16",
           kernel=MMA),
    Mutant(MMA_QUERIES, "copy(pass, source, source != nullptr)", "copy(pass, source, true)", "heads-8-1-3x70 float16",
           kernel=MMA),
    Mutant(MMA_QUERIES, "source != nullptr && column", "column", "layout-gaps float16", kernel=MMA),
    Mutant(MMA_QUERIES, " && column < params.head_dim;", ";", "head_dim-17-17 float16", kernel=MMA),
    Mutant(SEQUENCE, "min(tile.num_rows - row, static_cast<long long>(kBlockM))", "kBlockM", "lengths-63x65 float16",
           kernel=MMA),
    Mutant(MMA_STORE, "if (lane / 8 == r) row_max", "row_max", "lengths-63x65 float16", kernel=MMA),
    Mutant(MMA_STORE, "if (kLanes == kVectors || lane % kLanes < kVectors)", "", "head_dim-160-160 float16",
           kernel=MMA),
    Mutant(MMA_STORE, "lane < kRowsPerWarp && row.valid", "row.valid", "causal-200x131 float16 64x64", kernel=MMA),
    Mutant(MMA_STORE, "lane < kRowsPerWarp && row.valid", "lane < kRowsPerWarp", "lengths-63x65 float16", kernel=MMA),
    Mutant(MMA_STORE, "if (warp.share == 0) store_lse", "store_lse", "wide-causal float16", kernel=MMA),
    Mutant(MMA_STORE, "else if (row_address) store_output", "else store_output", "out_dtype-float32 float16",
           kernel=MMA),
    Mutant(MMA_STORE, "if (params.packed_heads == 1)", "if (true)", "heads-8-1-3x70 float16", kernel=MMA),
    Mutant(MMA_STORE, "pass < num_rows ? row_address : nullptr", "row_address", "lengths-63x65 float16", kernel=MMA),
    Mutant(MMA, "threadIdx.x < 32 && map_block", "map_block", "tall_tiles"),
    Mutant(MMA, "if (threadIdx.x == kThreads - 32) shared.unit", "shared.unit", "lengths-63x65 float16"),
    Mutant(MMA, "if (tile.num_rows == 0) return;", "", "packed-plain-True float16"),
    Mutant(MMA, "if (i > kTilesPerSum) add_total", "if (false) add_total", "keys-9000 float16"),
    Mutant(MMA, "if (i < walk.num_tiles) restart", "restart", "keys-8192 float16"),
    Mutant(MMA, "i + 1 < walk.num_tiles ? kBlockN : 0", "kBlockN", "lengths-63x65 float16"),
    Mutant(MMA, "i == 0 ? 0 : kBlockN", "kBlockN", "causal-200x131 float16 64x64"),
    Mutant(MMA, "kStages == 1 && i == 0", "kStages == 1", "causal-200x131 float16 64x64"),
    Mutant(MMA, "kStages > 1 ? i + 1 : i", "i + 1", "causal-200x131 float16 64x64"),
    Mutant(MMA, "kStages > 1 ? i + 1 : i", "i", "head_dim-128-128 float16 128x64x2"),
    Mutant(MMA, "if constexpr (kStages == 1)", "if constexpr (false)", "causal-200x131 float16 64x64", 0),
    Mutant(MMA, "if constexpr (kStages == 1)", "if constexpr (false)", "causal-200x131 float16 64x64", 1),
    Mutant(MMA, "if constexpr (kStages == 1)", "if constexpr (false)", "causal-200x131 float16 64x64", 2),
    Mutant(MMA, "if constexpr (kStages == 1)", "if constexpr (false)", "causal-200x131 float16 64x64", 3),
    Mutant(MMA, "if constexpr (kStages == 1)", "if constexpr (true)", "causal-200x131 float16 128x64x2", 3),
    Mutant(MMA, "if constexpr (kStages > 1 && !kStaggered)", "if constexpr (kStages > 1)",
           "wide-causal float16 128x64x2"),
    Mutant(MMA, "if constexpr (!kStaggered) next_v", "next_v", "wide-causal float16 128x64x2"),
    Mutant(MMA, "lags ? params.head_dim_v : params.head_dim", "params.head_dim", "staggered_copies"),
    Mutant(MMA, "lags ? params.head_dim_v : params.head_dim", "params.head_dim_v", "staggered_copies"),
    Mutant(MMA, "lags ? params.v_strides : params.k_strides", "params.k_strides", "staggered_copies"),
    Mutant(MMA, "i < walk.inner_begin || ", "", "lengths-63x65 float16"),
    Mutant(MMA, " || i >= walk.inner_end", "", "window-3-None float16"),
    Mutant(MMA, "if (pending)", "if (true)", "wide-causal float16 128x64x2", 0),
    Mutant(MMA, "if (pending)", "if (false)", "wide-causal float16 128x64x2", 0),
    Mutant(MMA, "lags && !is_over", "lags", "wide-causal float16 128x64x2"),
    Mutant(MMA, "if (is_over) break;", "", "wide-causal float16 128x64x2"),
    Mutant(MMA, "(kStaggered && i == walk.num_tiles)", "false", "wide-causal float16 128x64x2"),
    Mutant(MMA, "if (i == 0)", "if (false)", "wide-causal float16 128x64x2"),
    Mutant(MMA, "if (!kStaggered || i != 0) return;", "return;", "wide-causal float16 128x64x2"),
    Mutant(MMA, "pending = false; continue;", "continue;", "wide-window-160 float16 128x64x2"),
    Mutant(MMA, "++part) copy_part(part);", "++part) {}", "window-5-7 float16 128x64x2"),
    Mutant(MMA, "pending = true;", "pending = false;", "wide-causal float16 128x64x2"),
    Mutant(MMA, "if constexpr (!kStaggered) multiply_pv", "multiply_pv", "wide-causal float16 128x64x2"),
    Mutant(LOADER, "row < kBlockN && column + first_column < kWidth", "column + first_column < kWidth", "many_threads",
           kernel=MMA),
    Mutant(LOADER, "row < kBlockN && column + first_column < kWidth", "row < kBlockN", "head_dim-40-40 float16",
           kernel=MMA),
    Mutant(LOADER, "column + first_column < num_features && valid", "valid", "head_dim-40-40 float16", kernel=MMA),
    Mutant(LOADER, "column + first_column < num_features && valid", "column + first_column < num_features",
           "lengths-63x65 float16", kernel=MMA),
    Mutant(LOADER, "key_of(row) + shift < num_keys", "shift < num_keys", "lengths-63x65 float16", kernel=MMA),
    Mutant(LOADER, "key_of(row) + shift < num_keys", "key_of(row) < num_keys", "lengths-63x65 float16", kernel=MMA),
    Mutant(LOADER, "kWhole ? kSkips || num_keys > 0", "kWhole ? true", "lengths-63x65 float16", kernel=MMA),
    Mutant(LOADER, "!kWhole || !kSkips || num_keys > 0", "true", "wide-causal float16 128x64x2", kernel=MMA),
    Mutant(LOADER, "shift < num_keys && ", "", "head_dim-17-17 float16", kernel=MMA),
    Mutant(LOADER, " && feature < num_features", "", "head_dim-17-17 float16", kernel=MMA),
    # Its tiles of keys, none of which there may be.
    Mutant(KEY_WALK, "max(keys.any.end - walk.begin, 0LL)", "keys.any.end - walk.begin",
           "no_visible_key; huge_offsets", kernel=MMA),
    Mutant(KEY_WALK, "max(walk.num_tiles - 1, 0)", "(walk.num_tiles - 1)", "no_visible_key", kernel=MMA),
    # Its logits: what products are added to, and the polynomial of small scores.
    Mutant(MMA_ARRAYS, "__all_sync(0xffffffffu, has_vectors<kRun>(params, row))", "true", "bias-mask-odd float16",
           kernel=MMA),
    Mutant(MMA_SOFTMAX, "largest_scores<kBiasDtype != 0>", "largest_scores<false>", "bias_of_no_numbers", kernel=MMA),
    Mutant(MMA_SOFTMAX, "hide_nan();", "", "bias_of_no_numbers", kernel=MMA),
    Mutant(MMA_SOFTMAX, "largest = largest_scores<false>(scores);", "", "bias_of_no_numbers", kernel=MMA),
    Mutant(MMA_LOGITS, "kOnlyAlibi && !unit.scaled", "kOnlyAlibi", "alibi_scales", 0, kernel=MMA),
    Mutant(MMA_LOGITS, "kOnlyAlibi && !unit.scaled", "kOnlyAlibi", "alibi_scales", 1, kernel=MMA),
    Mutant(MMA_LOGITS, "kOnlyAlibi && !unit.scaled", "false", "alibi", 1, kernel=MMA),
    Mutant(MMA_LOGITS, "beside &= ", "beside = ", "alibi", kernel=MMA),
    Mutant(MMA_ALIBI, "distance >= kWarpKeys - 1 || ", "distance >= kWarpKeys / 2 || ", "alibi", kernel=MMA),
    Mutant(MMA_ALIBI, "|| distance <= 0", "|| distance <= 1", "alibi", kernel=MMA),
    Mutant(MMA_LOGITS, "__all_sync(0xffffffffu, beside)", "true", "alibi", kernel=MMA),
    Mutant(MMA_ALIBI, "distance > 0 ? slope : -slope", "slope", "alibi", kernel=MMA),
    Mutant(MMA_LOGITS, "if constexpr (kFewRegisters) find_shifts", "if constexpr (false) find_shifts", "alibi_few",
           kernel=MMA),
    Mutant(MMA_ALIBI, "beside &= ", "beside = ", "alibi_few", kernel=MMA),
    Mutant(MMA_ALIBI, "if (!__all_sync(0xffffffffu, beside)) return;", "", "alibi_few", kernel=MMA),
    Mutant(MMA_LOGITS, "small &= ", "small = ", "softcap", kernel=MMA),
    Mutant(MMA_LOGITS, "logits.is_polynomial = __all_sync(0xffffffffu, small)", "logits.is_polynomial = true",
           "softcap", kernel=MMA),
    Mutant(MMA_LOGITS, "else if (unit.scaled)", "else if (false)", "scale-negative float16", kernel=MMA),
    Mutant(MMA_LOGITS, "if constexpr (!kOnlySoftcap) return -infinity();", "return -infinity();",
           "softcap_of_low_scores", kernel=MMA),
    Mutant(MMA_LOGITS, "kSoftcapDegree == 3 && logits.is_polynomial ? -kLowestScore : kLowestScore", "kLowestScore",
           "softcap_of_low_scores", kernel=MMA),
    Mutant(MMA_SOFTMAX, "score == kLowestScore ? -infinity() : ", "", "softcap_of_low_scores", kernel=MMA),
    Mutant(MMA_SOFTMAX, "if (!kOnlySoftcap || !logits.is_polynomial)", "if (!kOnlySoftcap)", "softcap", kernel=MMA),
    Mutant(MMA_TOTAL, "finite_maximum(maxima.of[r])", "maxima.of[r]", "hidden_for_long", kernel=MMA),
    Mutant(MMA_SOFTMAX, "if (warp.lane % 4 == 0) shared[", "shared[", "wide-causal float16 64x64", kernel=MMA),
    Mutant(MMA_SOFTMAX, "if (warp.lane % 4 == 0) shared_maxima", "shared_maxima", "wide-causal float16", kernel=MMA),
    Mutant(MMA_SOFTMAX, "if (warp.any(outgrown))", "if (outgrown)", "wide-causal float16", kernel=MMA),
    Mutant(MMA_SOFTMAX, "finite_maximum(largest.of[r])", "largest.of[r]", "causal-200x131 float16", kernel=MMA),
    Mutant(MMA_SOFTMAX, "finite_maximum(maxima.of[r])", "maxima.of[r]", "causal-200x131 float16", kernel=MMA),
    Mutant(MMA_SOFTMAX, "largest_reference > kLargeReference)", "false)",
           "huge_logits", kernel=MMA),
    Mutant(LOGIT_UNIT, "kUsualSoftcap = kSoftcapDegree > 1", "kUsualSoftcap = kHasSoftcap", "extreme_softcaps",
           kernel=MMA),
    Mutant(LOGIT_UNIT, " && ratio <= 1e6", "", "extreme_softcaps", kernel=MMA),
    Mutant(LOGIT_UNIT, "minimum(widest, 8.6f / softcap)", "widest", "softcap_of_low_scores", kernel=MMA),
    Mutant(LOGIT_UNIT, "multiplier >= kLeast && ", "", "scale-negative float16", kernel=MMA),
    Mutant(EPILOGUE, "row && column < params.head_dim_v", "column < params.head_dim_v", "lengths-63x65 float16",
           kernel=MMA),
    Mutant(EPILOGUE, "row && column < params.head_dim_v", "row", "head_dim-40-40 float16", kernel=MMA),
    Mutant(EPILOGUE, "row && column + e < params.head_dim_v", "column + e < params.head_dim_v",
           "head_dim-17-17 float16", kernel=MMA),
    Mutant(EPILOGUE, "row && column + e < params.head_dim_v", "row", "head_dim-17-17 float16", kernel=MMA),
    # One row: what of it is read, and written.
    Mutant(SEQUENCE, "row < tile.num_rows}", "true}", "lengths-63x65 float16", 0),
    Mutant(SEQUENCE, "row < tile.num_rows}", "true}", "heads-8-1-3x70 float16", 1),
    Mutant(SCORE, "min(tile_row, last_row)", "tile_row", "bias-float32 float16"),
    Mutant(
        SCORE, "min(tile.num_rows - tile.row_begin, static_cast<long long>(kBlockM))", "kBlockM", "bias-float32 float16"
    ),
    Mutant(COLUMNS, "min(column, last_column) *", "column *", "bias-mask-odd float16"),
    Mutant(COLUMNS, "if (column + e < last_column)", "", "bias-mask-odd float16", kernel=WMMA_MMA),
    Mutant(COLUMNS, "min(column, last_column + 1 - kCount)", "column", "bias-float16 float16", kernel=WMMA_MMA),
    Mutant(SCORE, "min(tile.seqlen_k - n_begin, static_cast<long long>(kBlockN))", "kBlockN", "mask-keys float16"),
    Mutant(SCORE, " && (row.last_column + 1) % kCount == 0", "", "bias-mask-odd float16", kernel=WMMA),
    Mutant(COLUMNS, "column_stride == sizeof(Value) && ", "", "mask-scalar float16", kernel=WMMA_MMA),
    Mutant(COLUMNS, " && reinterpret_cast<unsigned long long>(row) % (kCount * sizeof(Value)) == 0", "",
           "bias-mask-odd float16", kernel=WMMA_MMA),
    Mutant(SCALAR, "if (!row.valid) continue;", "", "lengths-63x65 float16"),
    Mutant(SCALAR, "if (lane == 0) store_lse", "store_lse", "lengths-63x65 float16"),
    Mutant(EPILOGUE, "if (!tile.lse) return;", "", "no_lse"),
    Mutant(STORE, "if (column_stride == 0)", "if (true)", "splits"),
    Mutant(EPILOGUE, "if (tile.sinks)", "if (true)", "lengths-63x65 float16"),
    Mutant(STORE, "if (column + (kWhole ? 0 : kCount - 1) < num_features)", "if (true)",
           "head_dim-40-40 float16; out_dtype-into float16"),
    Mutant(STORE, "if (column + e < num_features)", "if (true)", "head_dim-17-17 float16; out_dtype-odd float16"),
    # Splits of the keys: each in its range, and only the first with the sink.
    Mutant(MASK, "min(position + params.window_right + 1, tile.key_end)",
           "min(position + params.window_right + 1, tile.seqlen_k)", "splits"),
    Mutant(MASK, "min(tile.key_end, tile.key_begin + num_keys)", "tile.key_begin + num_keys", "splits"),
    Mutant(MASK, "if (split != 0) tile.sinks = nullptr;", "", "splits"),
    Mutant(MASK, "keys.any = {max(keys.any.begin, tile.key_begin), min(keys.any.end, tile.key_end)}; "
           "keys.all = {max(keys.all.begin, tile.key_begin), min(keys.all.end, tile.key_end)};", "", "splits"),
    Mutant(MASK, "min(keys.all.end, tile.key_end)", "keys.all.end", "split_window", kernel=MMA),
    Mutant(MASK, "tile.out += split * params.out_split_stride;", "", "splits"),
    Mutant(MASK, "tile.lse += split * params.lse_split_stride;", "", "splits"),
    # The kernel that joins them: rows, parts and features that are not there, parts that have seen no key.
    Mutant(COMBINE, "if (row < params.num_rows) {", "{", "merge-odd"),
    Mutant(COMBINE, "if (row < params.num_rows && lane == 0", "if (lane == 0", "merge-odd"),
    Mutant(COMBINE, "&& lane == 0 && params.lse)", "&& params.lse)", "merge-odd"),
    Mutant(COMBINE, "lane == 0 && params.lse)", "lane == 0)", "splits_without_lse"),
    Mutant(COMBINE, "if (first + i < params.num_parts) {", "{", "merge-odd"),
    Mutant(COMBINE, "if (part >= params.num_parts) return -1;", "", "merge-odd"),
    Mutant(COMBINE, "sum.largest == -infinity() ? -1 : ", "", "merge-odd"),
    Mutant(COMBINE, "counts ? joined : values[v][e]", "joined", "merge-odd"),
    Mutant(COMBINE, "if (column < params.head_dim_v)", "", "merge-narrow"),
    Mutant(COMBINE, "if (column + e < params.head_dim_v)", "", "merge-odd"),
    Mutant(COMBINE, "while (column < params.head_dim_v)", "while (false)", "merge-wide"),
    Mutant(MERGE, "exponent == largest ? Accumulator(0) : exponent - largest", "exponent - largest", "merge-odd",
           kernel=COMBINE),
    # Which sequence and which batch: boundaries may hold anything.
    Mutant(SCALAR, "if (threadIdx.x < 32) map_block", "map_block", "packed-plain-True float16"),
    Mutant(MASK, "if (threadIdx.x != 0) return false;", "", "lengths-63x65 float16"),
    Mutant(MASK, "if (threadIdx.x == 0) tile.num_rows = 0;", "tile.num_rows = 0;", "packed-plain-True float16"),
    Mutant(MASK, "if (!map_packed_tile(params, tile_idx, mapped)) return false;",
           "map_packed_tile(params, tile_idx, mapped);", "packed-plain-True float16"),
    Mutant(SEQUENCE, "segment.index >= 0 && ", "", "malformed-late_and_falling"),
    Mutant(SEQUENCE, " && segment.index < params.num_sequences", "", "packed-tail-True float16"),
    Mutant(
        SEQUENCE, "max(load_integer(boundaries, params.cu_seqlens_k_size), 0LL)",
        "load_integer(boundaries, params.cu_seqlens_k_size)", "malformed-outside",
    ),
    Mutant(SEQUENCE, "min(max(end_k, begin_k), params.seqlen_k)", "max(end_k, begin_k)", "malformed-outside"),
    Mutant(
        SEQUENCE, "is_sequence ? params.sinks", "true ? params.sinks", "packed-tail-sinks",
    ),
    # Which batch and head of a dense call.
    Mutant(DENSE, "planes >= params.planes_at_once", "true", "turns", kernel=MMA),
    Mutant(DENSE, "planes >= params.planes_at_once", "false", "turns", kernel=MMA),
    Mutant(DENSE, "tile_idx < params.tiles_at_once ? 0", "true ? 0", "turns", kernel=MMA),
    Mutant(DENSE, "params.num_batches == 1 || params.heads_continue", "true", "steps_of_heads"),
    Mutant(DENSE, "params.num_batches == 1 || params.heads_continue", "true", "layout-swapped float16"),
    Mutant(DENSE, "-(1LL << 60)), 1LL << 60)", "-(1LL << 60)), 0x7fffffffffffffffLL)", "huge_offsets"),
    Mutant(DENSE, "-(1LL << 60))", "-0x7fffffffffffffffLL - 1)", "huge_offsets"),
    Mutant(SEGMENT, "value >> 63 ? 0x7fffffffffffffffLL : ", "", "huge_offsets"),
    Mutant(SEGMENT, "if (i > params.num_sequences) return params.seqlen_q;", "", "packed-plain-True float16"),
    Mutant(SEGMENT, "min(value, params.seqlen_q)", "value", "malformed-outside"),
    Mutant(SEGMENT, "max(ends[i], ends[i - 1])", "ends[i]", "malformed-late_and_falling"),
    Mutant(SEGMENT, "max(ends[i], segment_begin)", "ends[i]", "malformed-long_fall"),
    Mutant(SEGMENT, "max(begin, chunk_begin)", "begin", "malformed-long_fall"),
    Mutant(SEGMENT, "max(chunk_begin, __shfl_sync", "(__shfl_sync", "malformed-long_fall"),
    Mutant(SEGMENT, "if (lane >= distance) running", "running", "packed-many-True float16"),
]  # fmt: skip

_BARRIER = re.compile(r"(?:__sync\w+\(\)|\b\w+\.wait\(\)|\b\w+_wait\w*\((?:[^()]|\([^()]*\))*\));")

FENCES = (
    (MMA_LOGITS, "__syncwarp();  // one row after the other"),
    (MMA_LOGITS, "__syncwarp(); float largest = kLowestScore"),
    (MMA_ARRAYS, "__syncwarp(); const RowContext row = row_context"),
    (MMA_ARRAYS, "if (!kVectors) __syncwarp();"),
    (MMA_LOGITS, "__syncwarp();  // few at a time"),
    (MMA_LOGITS, "if constexpr (!kUsualSoftcap) __syncwarp();"),
    (MMA_PRODUCTS, "__syncwarp();  // the compiler fetches no further ahead"),
    (MMA_PRODUCTS, "__syncwarp(); if (group + 1"),
)
"""Barriers that only keep the compiler from moving instructions: no thread waits for what another one does."""
REDUNDANT = (
    (MMA_STORE, "warp.wait();  // for the rows of Q as well"),
    (MMA_STORE, "__syncwarp(); const int first_column"),
    (MMA_SOFTMAX, "= values; __syncwarp();"),
)
"""Barriers that order once more what is ordered already: by the last exchange of weights, by shuffles, and for the
maxima of rows by what comes before they are read, the product by V and the barriers of the next tile."""

_EVERYWHERE = (
    "head_dim-160-160 float16; head_dim-160-160 float32; packed-many-True float16; keys-9000 float16; "
    "wide-window-160 float16 64x32x2; causal-200x131 float16 64x64; wide-causal float16 64x64; "
    "wide-causal float16 128x64x2"
)
"""One of them misses a barrier of a kernel: they copy asynchronously, many slices, search for a sequence, restart;
warps share rows, with one stage and with two, and the halves of a block are staggered."""


def _pattern(text: str) -> str:
    return r"\s+".join(map(re.escape, re.split(r"\s+", text)))


def _barriers() -> list[Mutant]:
    """Every statement that is a barrier or a wait, by what it looks like."""
    found = []
    folder = source_folder()
    for path in sorted([*folder.glob("*.cu"), *(x for x in folder.glob("*/*.cuh") if x.parent.name != "ptx")]):
        name, source = path.relative_to(folder).as_posix(), path.read_text()
        fences = [
            place.span()
            for file, text in FENCES + REDUNDANT
            if file == name
            for place in re.finditer(_pattern(text), source)
        ]
        for match in _BARRIER.finditer(source):
            if not any(begin <= match.start() < end for begin, end in fences):
                occurrence = len(re.findall(_pattern(match[0]), source[: match.start()]))
                found.append(Mutant(name, match[0], ";", _EVERYWHERE, occurrence, KERNEL_OF.get(name, "")))
    return found


def _notice(noticed_by: str, emulator: Emulator) -> None:
    """Raise AssertionError if the kernel does what it must not."""
    if "; " in noticed_by:
        for one in noticed_by.split("; "):
            _notice(one, emulator)
        return
    if noticed_by in SPECIAL:
        SPECIAL[noticed_by](emulator)
        return
    name, dtype, *tiles = noticed_by.split()
    case, data = CASES_BY_NAME[name], make_data(CASES_BY_NAME[name], dtype)
    if emulator.refuses(describe(case, dtype)):
        return
    if tiles:
        if tiles[0] not in map(str, emulator.spec.tiles(describe(case, dtype), emulator.device)):
            return
        emulator = _pinned(emulator, tiles[0])
    check(case, data, run(case, data, np, emulator.function(case)), rounds_weights=emulator.spec.rounds_weights)


def test_barriers_are_found() -> None:
    for file, text in FENCES + REDUNDANT:
        assert re.search(_pattern(text), (source_folder() / file).read_text()), f"{file} has no {text!r}"
    texts = [(mutant.file, mutant.text) for mutant in _barriers()]
    assert {(MMA, "first_warp.wait();"), (MMA_STORE, "warp.wait();"), (MMA, "same.wait();")} <= set(texts)
    assert (MMA_SOFTMAX, "warp.wait();") in texts and (MMA, "barrier_wait(15, kThreads / 2);") in texts
    assert texts.count(("forward_scalar.cu", "__syncthreads();")) == 2
    assert ("forward_scalar.cu", "cp_async_wait();") in texts
    for spec in KERNELS:
        assert any(mutant.file == f"{spec.name}.cu" for mutant in _barriers()), f"{spec.name} has no barrier?"


@pytest.mark.share(8)
@pytest.mark.parametrize("noticed_by", sorted({mutant.noticed_by for mutant in CHECKS}))
def test_unchanged_sources_pass(noticed_by: str) -> None:
    for spec in KERNELS:
        _notice(noticed_by, Emulator(spec.name))


@pytest.mark.share(8)
@pytest.mark.parametrize("mutant", [*_barriers(), *CHECKS], ids=str)
def test_mutant_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    """By each kernel that the change is named for; one in a header of all kernels by one of them, in turn."""
    sources = shadow_sources(tmp_path / "src", {mutant.file: mutant.apply()})
    helpers = {f"{name}.cu" for name in HELPERS}
    only = set((mutant.kernel or (mutant.file if mutant.file.endswith(".cu") else "")).split())
    specs = [spec for spec in KERNELS if f"{spec.name}.cu" in only]
    if not specs:
        specs = [KERNELS[0 if helpers & only else len(str(mutant)) % len(KERNELS)]]
    for spec in specs:
        with pytest.raises((EmulationError, AssertionError)):
            _notice(mutant.noticed_by, Emulator(spec.name, sources=sources))
