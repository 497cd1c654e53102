// cuda_src/ptx/barrier.cuh on the CPU.
#pragma once

namespace cuflash {

// A place of its own for each call, as on a GPU.
__forceinline__ void barrier_wait(int barrier, int num_threads) {
    cpu_cuda_sync_some(barrier, num_threads, false, false);
}

__forceinline__ void barrier_arrive(int barrier, int num_threads) { cpu_cuda_arrive_some(barrier, num_threads); }

__forceinline__ bool barrier_any(int barrier, int num_threads, bool predicate) {
    return cpu_cuda_sync_some(barrier, num_threads, true, predicate);
}

}  // namespace cuflash
