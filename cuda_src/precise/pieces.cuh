// Keys and values on their way into shared memory in pieces of 16 keys and 16 features, for warps each of which has
// features of its own.
#pragma once

#include "common/load.cuh"
#include "common/mask.cuh"
#include "common/numeric.cuh"

namespace cuflash {

// A piece lies row by row. Its 16-byte units are swizzled, so that lanes meet different banks whether they read four
// neighbouring features of their keys or the same features of every other key.
struct alignas(128) Piece {
    char bytes[16 * 128];

    __device__ __forceinline__ static int offset(int row, int unit) { return row * 128 + (unit ^ row % 8) * 16; }
};

// Copies the first `num_keys` rows and `num_features` features of 16 each; others become zeros: they may hold anything,
// and 0 x NaN is NaN. `source`: the first of them, or, by vectors, the lane's own part. Called by a warp.
__device__ __forceinline__ void load_piece(Piece& piece, const char* source, const Strides& strides, int num_features,
                                           int num_keys, int lane) {
    if constexpr (kVectorLoads) {
        const SharedAddress target = shared_address(piece.bytes);
        const int offset = Piece::offset(lane / 8, lane % 8);
        const int rows_left = (lane % 8 * 2 < num_features ? num_keys : 0) - lane / 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            cp_async_16(target + (offset ^ i % 2 * 64) + i * 512, source, i * 4 < rows_left);
            source += 4 * strides.row;
        }
    } else {
        const int feature = lane % 16;
#pragma unroll 1
        for (int row = lane / 16; row < 16; row += 2) {
            double* target = reinterpret_cast<double*>(&piece.bytes[Piece::offset(row, feature / 2)]);
            target[lane % 2] = row < num_keys && feature < num_features
                                   ? load_bits<double>(source + row * strides.row + feature * strides.column)
                                   : 0;
        }
    }
}

}  // namespace cuflash
