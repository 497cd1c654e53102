// The end of a warp's rows but for their features, for mma.sync: sums, sinks and the lse.
#pragma once

#include "common/epilogue.cuh"
#include "mma/softmax.cuh"

namespace cuflash {

// Reference and sum of the row that a lane finishes, over all of its keys.
struct RowTotal {
    float row_max;
    float row_sum;
};
__device__ __forceinline__ RowTotal total_of_lane(const RowStates& states, Exchange& exchange, const Warp& warp) {
    const int lane = warp.lane;
    const RowValues maxima = states.maxima(warp);
    RowTotal total = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float sum = states.row_sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float maximum_of_row = __shfl_sync(0xffffffffu, maxima[r], lane % 8 * 4);
        const float sum_of_row = __shfl_sync(0xffffffffu, sum, lane % 8 * 4);
        if (lane / 8 == r) total = {maximum_of_row, sum_of_row};
    }
    if constexpr (kWarpsPerRow > 1) {
        float (&sums)[kWarpsPerRow][32] = exchange[warp.group];
        warp.wait();  // right either way: the last exchange of weights was later than the reads of Q
        sums[warp.share][lane] = total.row_sum;
        warp.wait();
        total.row_sum = sums[0][lane] + sums[1][lane];
    }
    return total;
}

// What a lane knows of the row that it finishes: where its features go, null for none, and what they are multiplied by.
struct FinishedLane {
    char* address;
    float factor;
};

// Finishes the warp's rows, one in each lane, but for their features: stores their lse.
__device__ __forceinline__ FinishedLane finish_lane(const AttentionParams& params, const TileMap& tile,
                                                    const LogitUnit& unit, const RowStates& states, Exchange& exchange,
                                                    const Warp& warp) {
    const RowTotal total = total_of_lane(states, exchange, warp);
    const Row row = row_at(params, tile, warp.first_row + warp.lane);
    if (warp.lane >= kRowsPerWarp || !row.valid) return {};
    const FinishedRow finished =
        finish_row(params, tile, row, total.row_max * unit.factor, total.row_sum * kReferenceUnit);
    if (warp.share == 0) store_lse(params, tile, row, finished);
    return {output_row(params, tile, row), finished.multiplier / finished.divisor * kReferenceUnit};
}

}  // namespace cuflash
