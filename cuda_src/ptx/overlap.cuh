// Launches that begin while the one in front of them ends (sm_90 and newer; on others they begin later).
#pragma once

namespace cuflash {

// From here on the next launch may begin, if that is one that may; it waits for the end of this one. Called by all
// threads, of a block that is there: one that waits for a place among the multiprocessors has not come here.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Sends for the line of memory at an address, as far as the L2 cache, where the launch in front may still write it. Who
// reads it later has the address at hand, and knows the page.
__device__ __forceinline__ void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// Waits until the launch in front of this one has ended, and what it has written is there.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace cuflash
