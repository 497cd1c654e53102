// Barriers in shared memory, in phases 0, 1, 2 and so on: who arrives goes on, and others wait (sm_80 and newer). All
// 32 lanes of a warp call these functions together, but for the first.
#pragma once

#include "ptx/shared.cuh"

namespace cuflash {

struct alignas(8) Mbarrier {
    unsigned long long bits;
};

// Each phase is over when `num_warps` warps have arrived. Called by one thread, before a barrier of the block.
__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, int num_warps) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(32 * num_warps) : "memory");
}

// What the warp has read and written comes before what others do when they have waited for this phase.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(&barrier))
                 : "memory");
}

// The same by one lane for all of them, as arrivals come one after another: for products that have been waited for
// (sm_90).
__device__ __forceinline__ void mbarrier_release(Mbarrier& barrier) {
    __syncwarp();
    asm volatile("{ .reg .pred first; setp.eq.u32 first, %1, 0; @first mbarrier.arrive.shared.b64 _, [%0], 32; }" ::"r"(
                     shared_address(&barrier)),
                 "r"(threadIdx.x % 32)
                 : "memory");
}

// Arrives when all copies that the warp has issued by cp.async are there. Who waits for this phase sees them.
__device__ __forceinline__ void mbarrier_arrive_with_copies(Mbarrier& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Waits for the end of a phase, the one under way or the one before it; that before phase 0 is over.
__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, int phase) {
#if __CUDA_ARCH__ >= 900
#define CUFLASH_WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define CUFLASH_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
    asm volatile("{ .reg .pred over; again: " CUFLASH_WAIT
                 " over, [%0], %1; @!over bra again; }" ::"r"(shared_address(&barrier)),
                 "r"(phase & 1)
                 : "memory");
}

// Waits for all warps of a barrier in a phase. Unlike __syncthreads, they may come from different places.
__device__ __forceinline__ void meet(Mbarrier& barrier, int phase) {
    mbarrier_arrive(barrier);
    mbarrier_wait(barrier, phase);
}

}  // namespace cuflash
