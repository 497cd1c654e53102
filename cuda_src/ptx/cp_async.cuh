// Copies from global to shared memory that run beside the arithmetic (sm_80 and newer; a plain copy before that).
#pragma once

#include "ptx/shared.cuh"

namespace cuflash {

// Copies the first `num_bytes` of 16 bytes, all or none, and writes zero bytes for the others. Both addresses on
// 16-byte boundaries. Visible to this thread after cp_async_wait(), to the block after a barrier behind that. (sm_80
// and newer.)
__device__ __forceinline__ void cp_async_bytes(SharedAddress target, const void* source, int num_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(num_bytes)
                 : "memory");
}

// Copies 4 bytes, or writes 4 zero bytes when `valid` is false (then `source` is not read). (sm_80 and newer.)
__device__ __forceinline__ void cp_async_4(void* target, const void* source, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(target)), "l"(source),
                 "r"(valid ? 4 : 0)
                 : "memory");
}

// Copies 16 bytes, or writes 16 zero bytes when `valid` is false (then `source` is not read).
__device__ __forceinline__ void cp_async_16(SharedAddress target, const void* source, bool valid) {
    cp_async_bytes(target, source, valid ? 16 : 0);
}

// The same if `wanted`, without a branch: one between the products of a loop would separate them.
__device__ __forceinline__ void cp_async_16_if(bool wanted, SharedAddress target, const void* source, bool valid) {
    const int num_bytes = valid ? 16 : 0;
    asm volatile(
        "{ .reg .pred p; setp.ne.s32 p, %3, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2; }" ::"r"(
            target),
        "l"(source), "r"(num_bytes), "r"(static_cast<int>(wanted))
        : "memory");
}

// The same, with a plain copy before sm_80.
__device__ __forceinline__ void cp_async_16(void* target, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
    cp_async_16(shared_address(target), source, valid);
#else
    *static_cast<int4*>(target) = valid ? *static_cast<const int4*>(source) : make_int4(0, 0, 0, 0);
#endif
}

// Makes a group of the copies that this thread has issued since the last group.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all of this thread's groups but the newest kPending.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Waits for all copies that this thread has issued.
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace cuflash
