// cuda_src/ptx/mbarrier.cuh on the CPU.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

struct alignas(8) Mbarrier {
    unsigned long long bits;
};

inline void mbarrier_init(Mbarrier& barrier, int num_warps) {
    barrier.bits = 0;
    cpu_cuda_mbarrier_init(&barrier, num_warps);
}

inline void mbarrier_arrive(Mbarrier& barrier) { cpu_cuda_mbarrier_arrive(&barrier); }

inline void mbarrier_release(Mbarrier& barrier) { mbarrier_arrive(barrier); }

inline void mbarrier_arrive_with_copies(Mbarrier& barrier) {
    cp_async_wait();
    mbarrier_arrive(barrier);
}

inline void mbarrier_wait(Mbarrier& barrier, int phase) { cpu_cuda_mbarrier_wait(&barrier, phase & 1); }

inline void meet(Mbarrier& barrier, int phase) {
    mbarrier_arrive(barrier);
    mbarrier_wait(barrier, phase);
}

}  // namespace cuflash
