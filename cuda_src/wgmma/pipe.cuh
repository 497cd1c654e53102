// Who waits for whom: loaders for free buffers, warpgroups for what is loaded, and for each other's products.
#pragma once

#include "mma/layout.cuh"
#include "ptx/mbarrier.cuh"

namespace cuflash {

constexpr int kGroupThreads = 128, kConsumers = kNumWarps / 4;  // warpgroups that multiply

// Buffers for tiles, tile i in buffer i % kStages.
struct Pipe {
    Mbarrier ready[kStages], released[kStages];

    // Called by one thread, before a barrier of the block.
    __device__ __forceinline__ void init() {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(ready[stage], kProducers / 32);
            mbarrier_init(released[stage], kNumWarps);
        }
    }
    __device__ __forceinline__ void wait_until_free(int i) { mbarrier_wait(released[i % kStages], i / kStages - 1); }
    __device__ __forceinline__ void arrive_with_copies(int i) { mbarrier_arrive_with_copies(ready[i % kStages]); }
    // To be followed by fence_async_proxy(), before the products.
    __device__ __forceinline__ void wait_until_ready(int i) { mbarrier_wait(ready[i % kStages], i / kStages); }
    __device__ __forceinline__ void release(int i) { mbarrier_release(released[i % kStages]); }
};

// Warpgroups issue the products of a tile one after the other: one multiplies while others compute weights.
struct Turns {
    Mbarrier over[kConsumers];

    // Called by one thread, before a barrier of the block.
    __device__ __forceinline__ void init() {
#pragma unroll
        for (int group = 0; group < kConsumers; ++group) mbarrier_init(over[group], 4);
    }
    __device__ __forceinline__ void wait(int group, int i) {
        // right either way: products may be issued at any time
        if (group == 0) mbarrier_wait(over[kConsumers - 1], i - 1);
        // right either way: products may be issued at any time
        else mbarrier_wait(over[group - 1], i);
    }
    __device__ __forceinline__ void pass(int group) { mbarrier_release(over[group]); }
};

}  // namespace cuflash
