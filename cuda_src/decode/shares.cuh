// How what warps have of a row, each of other keys, is added up.
#pragma once

#include "common/softmax.cuh"

namespace cuflash {

// By what the share of each of kShares warps, relative to its own maximum, is multiplied; and the row's own.
template <int kShares>
struct ShareWeights {
    Accumulator weights[kShares];
    Accumulator row_max;
    Accumulator row_sum = 0;

    // Shares are added in their order.
    __device__ __forceinline__ ShareWeights(const Accumulator (&maxima)[kShares][kBlockM],
                                            const Accumulator (&sums)[kShares][kBlockM], int tile_row)
        : row_max(maxima[0][tile_row]) {
#pragma unroll
        for (int i = 1; i < kShares; ++i) row_max = maximum(row_max, maxima[i][tile_row]);
#pragma unroll
        for (int i = 0; i < kShares; ++i) {
            weights[i] = exponential(maxima[i][tile_row] - finite_maximum(row_max));
            row_sum = multiply_add(sums[i][tile_row], weights[i], row_sum);
        }
    }
};

}  // namespace cuflash
