// A thread's place in its block, for mma.sync, and what warps that share their rows do together.
#pragma once

#include "mma/tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// Place of a warp in its block.
struct Warp {
    unsigned int thread;
    int lane;
    int group;      // of warps that share their rows
    int share;      // which part of keys and features is its own
    int first_row;  // of the tile

    __device__ __forceinline__ explicit Warp(unsigned int thread)
        : thread(thread),
          lane(thread % 32),
          group(thread / (32 * kShare)),
          share(thread / 32 % kShare),
          first_row(group * kRowsPerWarp) {}

    // Whether it multiplies by V a tile later than others.
    __device__ __forceinline__ bool lags() const { return kStaggered && thread >= kThreads / 2; }
    // Barriers with the warps that share its rows.
    __device__ __forceinline__ void wait() const {
        if constexpr (kShare == 1) __syncwarp();
        else barrier_wait(1 + group, 32 * kShare);
    }
    __device__ __forceinline__ bool any(bool predicate) const {
        if constexpr (kShare == 1) return __any_sync(0xffffffffu, predicate);
        else return barrier_any(1 + group, 32 * kShare, predicate);
    }
};

// Where registers are few, what is needed once per tile is not kept in them: addresses are computed again, and the
// rows' maxima lie in shared memory.
constexpr bool kFewRegisters =
    kStages == 1 || (kShare > 1 ? kHasArrays : kRowTiles * kFeatureTiles >= (kHasArrays ? 20 : 28));

// What follows from the index of a thread is kept, or computed again for every tile where registers are few.
__device__ __forceinline__ Warp warp_of_tile() {
    if constexpr (!kFewRegisters) return Warp(threadIdx.x);
    else return Warp(thread_index_again());
}

// A value for each row of a lane.
struct alignas(4 * kRows) RowValues {
    float of[kRows];
};

// Values of a warp's rows on their way to the others of its group.
using Exchange = float[kShare > 1 ? kNumWarps / kShare : 1][kShare][32];

// The largest value among the four lanes that share a row.
__device__ __forceinline__ float quad_maximum(float value) {
    value = maximum(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return maximum(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

}  // namespace cuflash
