"""Blocks of warpgroups that go from tile to tile, run on the CPU, and on a GPU that has fewer of them than tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator.emulator import Emulator, compiler

import cuflash
from cuflash import reference
from cuflash.gpu.launch import device_info
from cuflash.plan.plan import make_plan
from cuflash.plan.table import KERNELS, device_of
from cuflash.problem.arrays import ArrayInfo, extent
from cuflash.problem.describe import describe_attention, describe_varlen
from cuflash.problem.describe_cache import describe_kv_cache
from cuflash.settings import Settings
from cuflash.testing import Case, check, describe, make_data, run
from kernels.test_forward_mma import assert_right, draw

KERNEL, TILE = "forward_wgmma", "128x128x2w"

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "odd heads, odd tiles": ((5, 290, 64), (5, 290, 64), {"causal": True}),
    "even heads, groups": ((2, 4, 200, 40), (2, 2, 170, 40), {"causal": True}),
    "groups in one tile": ((16, 4, 40, 16), (16, 1, 260, 16), {}),
    "window": ((8, 260, 128), (8, 400, 128), {"window": (70, 3), "query_offset": 100}),
    "rows that see nothing": ((7, 300, 24), (7, 150, 24), {"causal": True, "query_offset": -140}),
    "parts of a tile": ((7, 300, 72), (7, 150, 72), {"causal": True, "query_offset": -240}),
    "other layout": ((8, 140, 96), (8, 140, 96), {"softcap": 30.0, "sinks": np.arange(8, dtype=np.float32)}),
    "wide": ((6, 190, 200), (6, 190, 200), {"causal": True}),
    "wide keys": ((7, 150, 136), (7, 110, 136), {"causal": True, "query_offset": -140}),
    "wide values": ((16, 4, 40, 72), (16, 1, 100, 72), {}),
}
TILES = {
    **dict.fromkeys(("window", "parts of a tile"), "192x80x2w"),
    "other layout": "192x64x3w",
    **dict.fromkeys(("wide", "wide keys", "wide values"), "128x64x2w"),
}
"""Of three warpgroups, and of one buffer for queries, where features are many. The others take `TILE`."""
PAIRS = "odd heads, odd tiles", "even heads, groups", "window", "rows that see nothing", "wide"
"""Where blocks go from pair to pair of tiles, as these differ in their keys."""
PACKED = (32, TILE), (72, "192x80x2w")
"""The same for packed sequences on the CPU: one tile whose warpgroups see all of its keys, one in which they do not."""
VALUES = {"wide keys": 72, "wide values": 136}
"""Features of values, where these have others than keys."""


def walks(emulator: Emulator) -> None:
    """By kernels whose blocks do that, on a device of three multiprocessors."""
    if emulator.spec.name != KERNEL:
        return
    x = draw(3, 140, 16)
    assert_right(Emulator(KERNEL, TILE, emulator.device, emulator.seed, emulator.sources), x, x, x)  # one tile to each
    device = emulator.device._replace(num_multiprocessors=3)
    for name in SHAPES:
        _walk(Emulator(KERNEL, TILES.get(name, TILE), device, emulator.seed, emulator.sources), name)
    for head_dim, tile in PACKED:
        _walk_packed(Emulator(KERNEL, tile, device, emulator.seed, emulator.sources), head_dim)
    _walk_pages(Emulator(KERNEL, TILE, device, emulator.seed, emulator.sources))


def _walk(emulator: Emulator, name: str) -> None:
    shape_q, shape_k, options = SHAPES[name]
    *rows, features = shape_k
    q, k, v = draw(*shape_q), draw(*shape_k, seed=1), draw(*rows, VALUES.get(name, features), seed=2)
    plan = make_plan(describe_attention(q, k, v, **options)[0], emulator.device, emulator.settings)
    assert plan.num_blocks == emulator.device.num_multiprocessors < plan.num_stops
    assert plan.in_pairs == (name in PAIRS)
    assert_right(emulator, q, k, v, **options)


def _walk_packed(emulator: Emulator, head_dim: int) -> None:
    """Sequences of several tiles, one, and none, and tokens behind them; by tiles, and by pairs of tiles."""
    for causal, lengths in ((False, (300, 0, 50, 129, 5)), (True, (300, 250))):
        boundaries = np.cumsum([0, *lengths])
        q, k, v = (draw(boundaries[-1] + 16, 3, head_dim, seed=seed) for seed in range(3))
        call = q, k, v, boundaries, boundaries
        problem = describe_varlen(*call, causal=causal)[0]
        plan = make_plan(problem, emulator.device, emulator.settings)
        assert plan.num_blocks == emulator.device.num_multiprocessors < plan.num_stops
        assert plan.in_pairs == causal
        out, lse = emulator.attention_varlen(*call, causal=causal, return_lse=True)
        exact, exact_lse = reference.attention_varlen(*call, causal=causal)
        np.testing.assert_allclose(out.astype(np.float64), exact, atol=2e-3)
        np.testing.assert_allclose(lse, exact_lse, atol=1e-4)


def _walk_pages(emulator: Emulator) -> None:
    """Caches in pages, of which some have no keys."""
    rng, lengths = np.random.default_rng(0), np.array([150, 0, 290, 0, 16], np.int32)
    q, pages = draw(5, 1, 140, 32), draw(30, 1, 16, 32, seed=1)
    table = rng.integers(0, 30, (5, 20)).astype(np.int32)
    options: dict[str, Any] = {"page_table": table, "seqlens_k": lengths}
    problem, infos = describe_kv_cache(q, pages, pages.copy(), num_splits=1, **options)
    plan = make_plan(problem, emulator.device, emulator.settings, 1)
    assert plan.num_blocks == emulator.device.num_multiprocessors < plan.num_stops
    exact, _ = reference.attention_with_kv_cache(q, pages, pages, **options)
    np.testing.assert_allclose(emulator.run(problem, infos).astype(np.float64), exact, atol=4e-3)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
def test_blocks_walk_on_through_caches_without_keys() -> None:
    emulator = Emulator(KERNEL, TILE)
    emulator.device = emulator.device._replace(num_multiprocessors=3)
    _walk_pages(emulator)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
@pytest.mark.share(3)
@pytest.mark.parametrize(("head_dim", "tile"), [*PACKED, (136, "128x64x2w")])
def test_blocks_walk_on_through_packed_sequences(head_dim: int, tile: str) -> None:
    emulator = Emulator(KERNEL, tile)
    emulator.device = emulator.device._replace(num_multiprocessors=3)
    _walk_packed(emulator, head_dim)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
@pytest.mark.share(3)
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_walk_on(name: str) -> None:
    emulator = Emulator(KERNEL, TILES.get(name, TILE))
    emulator.device = emulator.device._replace(num_multiprocessors=3)
    _walk(emulator, name)


def _layouts() -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Queries of 5 heads, and 150 keys and values of 72 features, by how their rows lie."""
    x, padded, packed = (draw(*shape, seed=4) for shape in ((5, 150, 72), (5, 150, 80), (150, 3, 5, 72)))
    return {
        "padded rows": (x, padded[..., :72], padded[..., 8:]),
        "one row for all": (x, x, np.broadcast_to(x[:, :1], x.shape)),
        "rows that overlap": (x, np.lib.stride_tricks.as_strided(padded, x.shape, (150 * 160, 16, 2)), x),
        "heads behind rows": tuple(packed.transpose(1, 2, 0, 3)),
        "heads backwards": (x, x[::-1], x[::-1]),
    }


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
@pytest.mark.parametrize("name", _layouts())
def test_tiles_of_rows_that_ascend(name: str) -> None:
    q, k, v = _layouts()[name]
    assert_right(Emulator(KERNEL, TILE), q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("name", _layouts())
def test_tiles_of_rows_that_ascend_on_a_gpu(name: str) -> None:
    import cupy

    q, k, v = _layouts()[name]
    on_gpu = []
    for x in (q, k, v):  # with the same strides, in memory of its own
        low, high = extent(0, x.shape, x.strides, x.itemsize)
        memory = cupy.full(high - low, 0xFF, np.uint8)
        view = cupy.ndarray(x.shape, x.dtype, memory.data - low, x.strides)
        view[...] = cupy.asarray(np.ascontiguousarray(x))
        on_gpu.append(view)
    with cuflash.options(kernel=KERNEL, tile=TILE):
        out = cuflash.attention(*on_gpu)
    np.testing.assert_allclose(out.get().astype(np.float64), reference.attention(q, k, v)[0], atol=2e-3)


@pytest.mark.parametrize("row_stride", [-144, 2**24 + 16])
def test_rows_that_are_no_tiles_are_refused(row_stride: int) -> None:
    q, v = (ArrayInfo(None, (5, 150, 72), (150 * 144, 144, 2), "float16", 0, 0, True) for _ in range(2))
    problem, _ = describe_attention(q, q._replace(strides=(144, row_stride, 2)), v)
    assert not problem.traits.keys_are_tiles and problem.traits.alignment == 16
    spec = next(spec for spec in KERNELS if spec.name == KERNEL)
    words = "k or v have rows that are not 0 to 16777216 bytes apart, in steps of 16: they are no tiles"
    assert spec.refusal(problem.traits, device_of(90)) == words
    assert make_plan(problem, device_of(90), Settings("", "", False)).kernel == "forward_mma"


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
def test_tiles_do_not_know_who_else_is_worked_on() -> None:
    """The bits of a row are those of a block of its own."""
    q, k = draw(5, 290, 64), draw(5, 290, 64, seed=1)
    alone = Emulator(KERNEL, TILE.rstrip("w")).attention(q, k, k, causal=True)
    emulator = Emulator(KERNEL, TILE)
    emulator.device = emulator.device._replace(num_multiprocessors=3)
    assert alone.tobytes() == emulator.attention(q, k, k, causal=True).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"options": {"causal": True}},
        {"options": {"window": (100, 20)}},
        {"options": {"causal": True, "out_dtype": "float32"}},
        {"arrays": {"alibi_slopes": ((21,), "float32")}},
    ],
    ids=str,
)
def test_blocks_walk_on_a_gpu(fields: dict[str, Any], head_dim: int, dtype: str) -> None:
    """With every tile that does; odd numbers of heads and of tiles, and the lse."""
    import cupy

    shape = (17, 21, 330, head_dim)
    case, device = Case("walks", shape, shape, **fields), device_info(0)
    spec = next(spec for spec in KERNELS if spec.name == KERNEL)
    problem = describe(case, dtype)
    if spec.refusal(problem.traits, device) is not None:
        pytest.skip(f"{KERNEL} is not for {device.arch}")
    tiles = [str(tile) for tile in spec.tiles(problem.traits, device) if tile.walks_on]
    assert tiles
    data = make_data(case, dtype)
    for tile in tiles:
        assert make_plan(problem, device, Settings(KERNEL, tile, False)).num_stops
        with cuflash.options(kernel=KERNEL, tile=tile):
            first, second = (run(case, data, cupy) for _ in range(2))
        check(case, data, first, rounds_weights=True)
        assert first.out.tobytes() == second.out.tobytes() and first.lse.tobytes() == second.lse.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "tile"), [(128, TILE), (128, "192x64x3w"), (192, "128x96x2w")])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_walk_on_through_packed_sequences_on_a_gpu(causal: bool, head_dim: int, tile: str) -> None:
    """Equal lengths, lengths drawn, and none."""
    import cupy

    rng = np.random.default_rng(5)
    for lengths in ([512] * 24, [*rng.integers(0, 900, 40), 0, 3000]):
        boundaries = np.cumsum([0, *lengths])
        q, k, v = (rng.standard_normal((boundaries[-1] + 77, 12, head_dim)).astype(np.float16) for _ in range(3))
        call = [cupy.asarray(x) for x in (q, k, v, boundaries, boundaries)]
        problem = describe_varlen(*call, causal=causal)[0]
        spec = next(spec for spec in KERNELS if spec.name == KERNEL)
        if spec.refusal(problem.traits, device_info(0)) is not None:
            pytest.skip(f"{KERNEL} is not for this GPU")
        assert make_plan(problem, device_info(0), Settings(KERNEL, tile, False)).num_stops
        found = []
        for _ in range(2):
            out, lse = cupy.full_like(call[0], np.nan), cupy.full(q.shape[:-1], np.nan, np.float32)
            with cuflash.options(kernel=KERNEL, tile=tile):
                cuflash.attention_varlen(*call, causal=causal, out=out, lse=lse)
            found.append((out.get(), lse.get()))
        assert found[0][0].tobytes() == found[1][0].tobytes() and found[0][1].tobytes() == found[1][1].tobytes()
        with cuflash.options(kernel="forward_mma"):
            out, lse = cuflash.attention_varlen(*call, causal=causal, return_lse=True)
        np.testing.assert_allclose(found[0][0].astype("f"), out.get().astype("f"), atol=4e-3)
        np.testing.assert_allclose(found[0][1], lse.get(), rtol=1e-5, atol=1e-5)
