// Rows of results of mma.sync, stored as 16-bit floats.
#pragma once

#include "common/store.cuh"
#include "gated/fragments.cuh"

namespace cuflash {

// Row r of a lane's two (lane / 4 and 8 behind it), of 8 kTiles features from `column` on, times `scale`; `row` is its
// address, null for none. Of neighbouring lanes one has four features of a tile, the other one four of the next tile,
// so that whole sectors are written. Called by all 32 lanes.
template <bool kVectors, int kTiles>
__device__ __forceinline__ void store_row(char* row, int column, int num_features, long long feature_stride,
                                          const float (&tiles)[kTiles][4], int r, float scale, int lane) {
    const int run = lane % 4 * 2;
    if constexpr (kVectors) {
        struct alignas(8) Words {
            unsigned int first, second;
        };
        const bool is_odd = lane % 2 != 0;
#pragma unroll
        for (int f = 0; f < kTiles; f += 2) {
            const unsigned int own = pack(scale * tiles[f][2 * r], scale * tiles[f][2 * r + 1]);
            const unsigned int next = pack(scale * tiles[f + 1][2 * r], scale * tiles[f + 1][2 * r + 1]);
            const unsigned int other = __shfl_xor_sync(0xffffffffu, is_odd ? own : next, 1);
            const int at = column + (is_odd ? (f + 1) * 8 + run - 2 : f * 8 + run);
            const Words words = {is_odd ? other : own, is_odd ? next : other};
            if (row != nullptr && at < num_features) *reinterpret_cast<Words*>(row + at * 2) = words;
        }
    } else if (row != nullptr) {
#pragma unroll
        for (int f = 0; f < kTiles; ++f) {
            const float pair[2] = {scale * tiles[f][2 * r], scale * tiles[f][2 * r + 1]};
            store_features(row, column + f * 8 + run, num_features, feature_stride, pair);
        }
    }
}

}  // namespace cuflash
