// Who waits for whom: loaders for free buffers, warpgroups for what is loaded, and for each other's products.
#pragma once

#include "common/config.cuh"
#include "ptx/mbarrier.cuh"

namespace cuflash {

constexpr int kGroupThreads = 128, kConsumers = (kThreads - kProducers) / kGroupThreads;  // warpgroups that multiply

// Number of the warpgroup, found again.
__device__ __forceinline__ int group_of_thread() { return uniform(thread_index_again() / kGroupThreads); }

// Buffers that loaders fill and warpgroups read, the i-th time buffer i % kBuffers.
template <int kBuffers>
struct Pipe {
    Mbarrier ready[kBuffers], released[kBuffers];

    // Called by one thread, before a barrier of the block.
    __device__ __forceinline__ void init(int num_filling_warps, int num_reading_warps) {
#pragma unroll
        for (int buffer = 0; buffer < kBuffers; ++buffer) {
            mbarrier_init(ready[buffer], num_filling_warps);
            mbarrier_init(released[buffer], num_reading_warps);
        }
    }
    __device__ __forceinline__ void wait_until_free(int i) { mbarrier_wait(released[i % kBuffers], i / kBuffers - 1); }
    __device__ __forceinline__ void arrive(int i) { mbarrier_arrive(ready[i % kBuffers]); }
    __device__ __forceinline__ void arrive_with_copies(int i) { mbarrier_arrive_with_copies(ready[i % kBuffers]); }
    // Before products by what has been copied, fence_async_proxy() is to follow.
    __device__ __forceinline__ void wait_until_ready(int i) { mbarrier_wait(ready[i % kBuffers], i / kBuffers); }
    __device__ __forceinline__ void release(int i) { mbarrier_release(released[i % kBuffers]); }
    // The same where lanes have read, not products.
    __device__ __forceinline__ void release_read(int i) { mbarrier_arrive(released[i % kBuffers]); }
};

// Warpgroups issue the products of a tile one after the other.
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
