// Reductions over the lanes of a warp, by one instruction (sm_80 and newer). Called by all 32 lanes.
#pragma once

namespace cuflash {

__device__ __forceinline__ unsigned int warp_maximum(unsigned int value) {
    unsigned int largest;
    asm("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
    return largest;
}

// All bits that a lane has.
__device__ __forceinline__ unsigned int warp_union(unsigned int bits) {
    unsigned int all;
    asm("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(all) : "r"(bits));
    return all;
}

}  // namespace cuflash
