"""Maps of tiles of keys and values for copies that one instruction begins: `TensorMap` of cuda_src/ptx/tensor_copy.cuh.

The driver makes a map of an array's address, shape and strides. These know no address: behind the axes of a tile they
have units of 16 bytes and of 4 GiB from address 0 on, and a copy says where its tile lies by a number of each. So a map
depends on the row stride, the features and the tile alone, and is made once for all calls that share them.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

from .installed import load_driver

MAP_BYTES = 128
"""sizeof(CUtensorMap)."""
_UNITS = 2**28, 2**16
"""Of 16 bytes, and of 4 GiB: 48 bits of an address."""
_UINT16, _NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTION, _ZEROS = 1, 0, 3, 2, 0


@lru_cache(maxsize=4096)
def tile_map(row_stride: int, head_dim: int, num_rows: int) -> bytes:
    """Describe tiles of so many rows of 16-bit elements, in panels of 64 features, zeros behind the last one.

    Parameters
    ----------
    row_stride : int
        Bytes from row to row, a multiple of 16, 0 or more.
    head_dim, num_rows : int
        Elements of a row, and rows of a tile.
    """
    memory = ctypes.create_string_buffer(MAP_BYTES + 63)
    place = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
    shape = (ctypes.c_uint64 * 4)(head_dim, num_rows, *_UNITS)
    strides = (ctypes.c_uint64 * 3)(row_stride, 16, 2**32)
    box, steps = (ctypes.c_uint32 * 4)(64, num_rows, 1, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    status = load_driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place), _UINT16, 4, None, shape, strides, box, steps,
        _NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTION, _ZEROS,
    )  # fmt: skip
    if status != 0:
        raise RuntimeError(f"the driver refused a map of tiles: cuTensorMapEncodeTiled returned {status}")
    return ctypes.string_at(place, MAP_BYTES)
