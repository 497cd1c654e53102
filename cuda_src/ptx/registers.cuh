// Registers that warps give each other (sm_90a). Called by all warps of a warpgroup, with a multiple of 8 from 24 to
// 240.
#pragma once

namespace cuflash {

// Leaves a thread `kCount` of its registers.
template <int kCount>
__device__ __forceinline__ void registers_release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Waits until others have left so many that a thread can have `kCount`.
template <int kCount>
__device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace cuflash
