// Queries in shared memory, for mma.sync in double precision.
#pragma once

#include "common/rows.cuh"

namespace cuflash {

// Q as mma takes it from the lanes: 16 rows and 16 features at a time, pairs of a feature of both of a lane's rows.
using Queries = Vector16[kBlockM / 16][kHeadDim / 16][4][32];

// Called by all threads of the block. A warp has rows of its own, each of which is looked up by one lane, and several
// loads of each lane are on their way at a time.
__device__ __forceinline__ void load_queries(const AttentionParams& params, const TileMap& tile, Queries& q) {
    constexpr int kWarpRows = kBlockM * 32 / kThreads;
    constexpr int kVector = kVectorLoads ? 2 : 1, kVectors = kHeadDim / kVector, kAll = kWarpRows * kVectors;
    static_assert(kAll % 32 == 0, "lanes have as many loads each");
    constexpr int kPasses = kAll / 32, kAtOnce = kPasses % 8 == 0 ? 8 : kPasses & -kPasses;
    const int lane_of_warp = threadIdx.x % 32, first_row = threadIdx.x / 32 * kWarpRows;
    const char* const looked_up = query_row(params, tile, first_row + lane_of_warp % kWarpRows);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kAtOnce) {
        Vector16 values[kAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int place = (pass + i) * 32 + lane_of_warp, feature = place % kVectors * kVector;
            const char* source = address_of_lane(looked_up, place / kVectors);
            if (source == nullptr || feature >= params.head_dim) continue;
            if constexpr (kVectorLoads) values[i] = *reinterpret_cast<const Vector16*>(source + feature * 8);
            else values[i].values[0] = load_bits<double>(source + feature * params.q_strides.column);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int place = (pass + i) * 32 + lane_of_warp;
            const int row = first_row + place / kVectors, feature = place % kVectors * kVector;
            const int lane = row % 8 * 4 + feature % 16 / 4;
#pragma unroll
            for (int e = 0; e < kVector; ++e)
                q[row / 16][feature / 16][feature % 4 + e][lane].values[row % 16 / 8] = values[i].values[e];
        }
    }
}

}  // namespace cuflash
