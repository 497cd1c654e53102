// Rows of 16-bit output on their way from registers to memory.
#pragma once

#include "mma/output.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/words.cuh"

namespace cuflash {

// Eight times kVectors features of a warp's 16 rows, in which its lanes exchange them: neighbouring lanes then store
// neighbouring vectors. What eight lanes read or write together lies in different banks.
template <int kVectors>
struct alignas(128) StagedRows {
    Words rows[16][kVectors];

    __device__ __forceinline__ Words& vector(int row, int place) {
        return rows[row][place ^ row * kVectors / 8 % kVectors];
    }
};

// Stores the features of rows that are finished.
template <int kVectors>
__device__ __forceinline__ void store_rows(const AttentionParams& params, Output& o, const FinishedLane& finished,
                                           StagedRows<kVectors>& staged, const Warp& warp) {
    constexpr int kAtOnce = 32 / kVectors, kPasses = 16 / kAtOnce;
    const int lane = warp.lane;
    float factors[2];
    char* addresses[kPasses];
#pragma unroll
    for (int r = 0; r < 2; ++r) factors[r] = __shfl_sync(0xffffffffu, finished.factor, row_of(r, lane));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
        addresses[pass] = address_of_lane(finished.address, pass * kAtOnce + lane / kVectors);
#pragma unroll
    for (int first = 0; first < kFeatureTiles; first += kVectors) {
        __syncwarp();  // what was here has been read
#pragma unroll
        for (int f = 0; f < kVectors && first + f < kFeatureTiles; f += 2) {
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
        const int own = min(lane % kVectors, kFeatureTiles - first - 1);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) vectors[pass] = staged.vector(pass * kAtOnce + lane / kVectors, own);
        const int column = (first + lane % kVectors) * 8;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
            store_if(addresses[pass] && column < params.head_dim_v, addresses[pass] + column * 2, vectors[pass]);
    }
}

}  // namespace cuflash
