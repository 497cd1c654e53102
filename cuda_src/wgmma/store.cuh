// Rows of output on their way from registers to memory, where they do not pass through those of Q.
#pragma once

#include "mma/output.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/words.cuh"

namespace cuflash {

// 32 features of a warp's 16 rows of 16-bit output, in which its lanes exchange them: neighbouring lanes then store
// neighbouring vectors. Vector p of row r lies at p ^ r / 2 % 4.
struct alignas(128) StagedRows {
    static constexpr int kVectors = 4;
    Words rows[16][kVectors];

    __device__ __forceinline__ Words& vector(int row, int place) { return rows[row][place ^ row / 2 % kVectors]; }
};

// Stores the features of rows that are finished.
__device__ __forceinline__ void store_rows(const AttentionParams& params, Output& o, const FinishedLane& finished,
                                           StagedRows& staged, const Warp& warp) {
    constexpr int kTiles = StagedRows::kVectors, kPasses = 2;
    const int lane = warp.lane;
    float factors[2];
    char* addresses[kPasses];
#pragma unroll
    for (int r = 0; r < 2; ++r) factors[r] = __shfl_sync(0xffffffffu, finished.factor, row_of(r, lane));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
        addresses[pass] = address_of_lane(finished.address, pass * 8 + lane / kTiles);
#pragma unroll
    for (int first = 0; first < kFeatureTiles; first += kTiles) {
        __syncwarp();  // what was here has been read
#pragma unroll
        for (int f = 0; f < kTiles && first + f < kFeatureTiles; f += 2) {
            unsigned int pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int feature = (first + f + i / 2) * 2, r = i % 2;
                const float values[2] = {multiply_subnormal(at(o, r, feature), factors[r]),
                                         multiply_subnormal(at(o, r, feature + 1), factors[r])};
                pairs[i] = output_pair(values);
            }
            stmatrix_x4(shared_address(&staged.vector(lane % 16, f + lane / 16)), pairs);
        }
        __syncwarp();
        Words vectors[kPasses];
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
            vectors[pass] = staged.vector(pass * 8 + lane / kTiles, lane % kTiles);
        const int column = (first + lane % kTiles) * 8;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
            store_if(addresses[pass] && column < params.head_dim_v, addresses[pass] + column * 2, vectors[pass]);
    }
}

}  // namespace cuflash
