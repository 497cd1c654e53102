// Barriers among some warps of a block.
#pragma once

namespace cuflash {

// Waits until `num_threads` threads of the block (whole warps) have come to barrier number `barrier` (1 to 15; 0 is
// that of __syncthreads). Orders memory among them as __syncthreads does for the block. All 32 lanes of a warp call it
// together.
__device__ __forceinline__ void barrier_wait(int barrier, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Comes to a barrier without waiting there: what is done after it is not ordered before what follows the others' wait.
// Whoever comes again has to know that the barrier is over from one that has waited.
__device__ __forceinline__ void barrier_arrive(int barrier, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Waits, and returns whether `predicate` holds for any of these threads. No other operation may meet it in one barrier.
__device__ __forceinline__ bool barrier_any(int barrier, int num_threads, bool predicate) {
    int any;
    asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.s32 %0, 1, 0, q; }"
                 : "=r"(any)
                 : "r"(barrier), "r"(num_threads), "r"(static_cast<int>(predicate))
                 : "memory");
    return any != 0;
}

}  // namespace cuflash
