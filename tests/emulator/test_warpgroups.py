"""Instructions of Hopper, on the CPU as on a GPU: stores of matrices, products of four warps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cuflash.gpu.tensor_maps import tile_map
from cuflash.problem.arrays import DTYPES

from .emulator import tile_map as emulated_map
from .test_emulator import EmulationError, _assert_close, _compile, _emulate, _run, _source, backends


@backends
def test_mbarrier(back_end: str, tmp_path: Path) -> None:
    """One warp writes, three read what is there in their phase; all meet from different places."""
    body = """
        auto& barrier = *reinterpret_cast<Mbarrier*>(shared + 1024);
        if (threadIdx.x == 0) mbarrier_init(barrier, 4);
        __syncthreads();
        int sum = 0;
        for (int round = 0; round < 5; ++round) {
            if (threadIdx.x < 32) {
                shared[round % 2 * 32 + lane] = in[lane] * round;
                meet(barrier, round);
            } else {
                mbarrier_arrive(barrier);
                mbarrier_wait(barrier, round);
                sum += shared[round % 2 * 32 + 31 - lane];
            }
        }
        out[threadIdx.x] = sum;
    """
    values = np.random.default_rng(0).permutation(32).astype(np.int32)
    arrays = values, values, np.empty(128, np.int32)
    out = _run(back_end, body, arrays, tmp_path, "mbarrier", ("int", "int"), 128)
    assert (out.reshape(4, 32) == [[0], [1], [1], [1]] * values[::-1] * 10).all()


def test_mbarrier_orders_nothing_before_its_phase(tmp_path: Path) -> None:
    body = """
        auto& barrier = *reinterpret_cast<Mbarrier*>(shared + 1024);
        if (threadIdx.x == 0) mbarrier_init(barrier, 1);
        __syncthreads();
        if (threadIdx.x < 32) {
            shared[lane] = in[lane];
            mbarrier_arrive(barrier);
        } else {
            mbarrier_wait(barrier, -1);  // over from the beginning
            out[lane] = shared[lane];
        }
    """
    source = _source(body, '#include "ptx/mbarrier.cuh"')
    with pytest.raises(EmulationError, match="shared byte"):
        _emulate(_compile(source, tmp_path), tuple(np.zeros(64, np.float32) for _ in range(3)), 64, 8192, 0)


TILE = """
    auto& barrier = *reinterpret_cast<Mbarrier*>(shared + 4096);
    const auto& map = *reinterpret_cast<const TensorMap*>(in_2);
    if (threadIdx.x == 0) mbarrier_init(barrier, 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        if (lane == 0) {
            mbarrier_expect(barrier, 2 * 24 * 128);
            for (int panel = 0; panel < 2; ++panel)
                tensor_copy(shared + panel * 24 * 64, map, reinterpret_cast<const char*>(in + 160), panel * 64, HIDDEN,
                            barrier);
        }
        mbarrier_arrive_with_tiles(barrier);
    }
    mbarrier_wait(barrier, 0);
    for (int i = threadIdx.x; i < 2 * 24 * 64; i += 64) {
        const int row = i / 64 % 24, column = i % 64;
        out[i] = shared[i / 64 * 64 + (column / 8 ^ row % 8) * 8 + column % 8];
    }
"""
"""Two panels of a tile of 24 rows, from the third row of `in` on."""


def _tile_arrays(back_end: str, row_stride: int) -> tuple[np.ndarray, ...]:
    """Rows of 80 elements, a map of tiles of 24 rows with 72 of them, and room for the tile."""
    rows = np.random.default_rng(0).permutation(50 * 80).astype(np.uint16)
    make_map = emulated_map if back_end == "cpu" else tile_map
    memory = np.zeros(96, np.uint16)  # a map begins on a 64-byte boundary
    skip = -memory.ctypes.data % 64 // 2
    memory[skip : skip + 64] = np.frombuffer(make_map(row_stride, 72, 24), np.uint16)
    return rows, memory[skip : skip + 64], np.empty(2 * 24 * 64, np.uint16)


@backends
@pytest.mark.parametrize(("row_stride", "hidden"), [(160, 0), (160, 5), (160, 23), (0, 3)])
def test_tensor_copy(back_end: str, row_stride: int, hidden: int, tmp_path: Path) -> None:
    arrays = _tile_arrays(back_end, row_stride)
    body = TILE.replace("HIDDEN", str(hidden))
    out = _run(back_end, body, arrays, tmp_path, "tensor_copy", ("unsigned short", "unsigned short"), 64, 16384)
    expected = np.zeros((24, 128), np.uint16)
    there = 2 + (hidden + np.arange(24 - hidden)) * row_stride // 160
    expected[: 24 - hidden, :72] = arrays[0].reshape(50, 80)[there, :72]
    assert (out.reshape(2, 24, 64).swapaxes(0, 1).reshape(24, 128) == expected).all()


@pytest.mark.parametrize(
    ("found", "changed", "message"),
    [
        ("2 * 24 * 128", "24 * 128", "a phase is to end with -3072 bytes expected"),
        ("panel < 2", "panel < 1", "a phase is to end with 3072 bytes expected"),
        ("shared + panel * 24 * 64", "shared + 8 + panel * 24 * 64", "on no 1024-byte boundary"),
        ("HIDDEN", "24", "more rows are hidden than there are"),
        ("in + 160", "in + 3200", "reads"),
        ("mbarrier_wait(barrier, 0);", "", "shared byte"),
    ],
)
def test_notices_at_tensor_copies(found: str, changed: str, message: str, tmp_path: Path) -> None:
    body = TILE.replace(found, changed).replace("HIDDEN", "0")
    source = _source(body, '#include "ptx/tensor_copy.cuh"', ("unsigned short", "unsigned short"))
    with pytest.raises(EmulationError, match=message):
        _emulate(_compile(source, tmp_path), _tile_arrays("cpu", 160), 64, 16384, 0)


@backends
@pytest.mark.parametrize("name", ["stmatrix_x4", "stmatrix_x4_transposed"])
def test_stmatrix(name: str, back_end: str, tmp_path: Path) -> None:
    body = """
        unsigned int matrices[4];
        for (int i = 0; i < 4; ++i)
            matrices[i] = in[i * 64 + lane * 2] | static_cast<unsigned int>(in[i * 64 + lane * 2 + 1]) << 16;
        STORE(shared_address(shared + lane * 24), matrices);
        __syncwarp();
        for (int i = lane; i < 256; i += 32) out[i] = shared[i / 8 * 24 + i % 8];  // rows 48 bytes apart
    """
    values = np.random.default_rng(0).permutation(256).astype(np.uint16)
    arrays = values, values, np.empty(256, np.uint16)
    body = body.replace("STORE", name)
    out = _run(back_end, body, arrays, tmp_path, "stmatrix", ("unsigned short", "unsigned short")).reshape(4, 8, 8)
    stored = out.swapaxes(1, 2) if name.endswith("transposed") else out
    assert (stored == values.reshape(4, 8, 8)).all()


PLACES = {
    "columns": "column * 64 + (piece ^ column % 8) * 8 + row % 8",
    "rows": "column / 64 * 1024 + row * 64 + (column % 64 / 8 ^ row % 8) * 8 + column % 8",
    "plain": "column / 8 * 128 + row / 8 * 64 + column % 8 * 8 + row % 8",
}
"""Where an element of B lies: pieces of 16 bytes are two behind the first of a column."""
MATRICES = {
    "columns": "SharedMatrix::swizzled(shared_address(shared), 1024).at(32)",
    "rows": "SharedMatrix::swizzled(shared_address(shared), 1024, 2048)",
    "plain": "SharedMatrix::plain(shared_address(shared), 128, 256)",
}


@backends
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("num_columns", [16, 32, 48, 64, 80, 128])
@pytest.mark.parametrize("layout", PLACES)
def test_wgmma(back_end: str, dtype: str, num_columns: int, layout: str, tmp_path: Path) -> None:
    """Twice, so that what there is is added to; A is in registers."""
    kind = f"{'true' if dtype == 'bfloat16' else 'false'}, {'true' if layout == 'rows' else 'false'}"
    body = f"""
        for (int i = threadIdx.x; i < 16 * {num_columns}; i += 128) {{
            const int row = i / {num_columns}, column = i % {num_columns}, piece = 2 + row / 8;
            (void)piece;
            shared[{PLACES[layout]}] = in_2[i];
        }}
        fence_async_proxy();
        __syncthreads();
        const int row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
        unsigned int a[4];
        for (int i = 0; i < 4; ++i) {{
            const unsigned short* const pair = in + (row + i % 2 * 8) * 16 + column + i / 2 * 8;
            a[i] = static_cast<unsigned int>(pair[0]) | static_cast<unsigned int>(pair[1]) << 16;
        }}
        float d[{num_columns // 8}][4];
        wgmma_fence();
        wgmma<{kind}, false>(d, a, {MATRICES[layout]});
        wgmma<{kind}, true>(d, a, {MATRICES[layout]});
        wgmma_commit();
        wgmma_wait<0>(d);
        for (int tile = 0; tile < {num_columns // 8}; ++tile) {{
            for (int i = 0; i < 4; ++i)
                out[(row + i / 2 * 8) * {num_columns} + tile * 8 + column + i % 2] = d[tile][i];
        }}
    """
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in ((64, 16), (16, num_columns)))
    arrays = a.view(np.uint16), b.view(np.uint16), np.empty((64, num_columns), np.float32)
    out = _run(back_end, body, arrays, tmp_path, "wgmma", ("unsigned short", "float"), 128, 16384)
    _assert_close(out.reshape(64, num_columns) / 2, a, b, np.zeros((64, num_columns)))
