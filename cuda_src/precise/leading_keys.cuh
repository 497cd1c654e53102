// What pairs leave out of a value that is the whole result of a row.
#pragma once

#include "precise/output.cuh"
#include "precise/pairs.cuh"

namespace cuflash {

// The key with the largest logit of each row. Where all others together weigh nothing beside it, the result is its
// value, to the bit, of which a pair leaves out the last digit.
struct LeadingKeys {
    volatile long long keys[kRows];  // in memory, as it is rare that they are looked at

    __device__ __forceinline__ LeadingKeys() {
#pragma unroll
        for (int r = 0; r < kRows; ++r) keys[r] = -1;
    }
    // Looks for weights of 1 in a tile. Without pairs there is nothing to complete.
    __device__ __forceinline__ void find(Scores& weights, long long n_begin, bool by_pairs, const Place& place) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            int last = -1;
#pragma unroll
            for (int i = 0; i < kColumns; ++i)
                if (at(weights, r, i) == 1) last = place.column(i);
            last = max(last, __shfl_xor_sync(0xffffffffu, last, 1));
            last = max(last, __shfl_xor_sync(0xffffffffu, last, 2));
            if (last >= 0) keys[r] = by_pairs ? n_begin + last : -1;
        }
    }
    // Adds what the pairs leave out of their values.
    __device__ __forceinline__ void complete(const AttentionParams& params, const TileMap& tile, const Place& place,
                                             OutputTotal& total) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const bool alone = quad_sum(total.sums[r][OutputTotal::kValues]) == 1;
            if (!alone || keys[r] < 0) continue;
            const char* value = tile.v + keys[r] * params.v_strides.row;
#pragma unroll 1
            for (int i = 0; i < OutputTotal::kValues; ++i) {
                const int column = place.feature(i);
                if (column >= params.head_dim_v) continue;
                const float rest = rest_of_pair(load_bits<float>(value + column * params.v_strides.column));
                total.sums[r][i] = total.sums[r][i] + rest;
            }
        }
    }
};

}  // namespace cuflash
