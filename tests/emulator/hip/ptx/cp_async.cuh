// cuda_src/ptx/cp_async.cuh for AMD GPUs: RDNA copies to shared memory through registers, done when the call returns.
#pragma once

namespace cuflash {

__device__ __forceinline__ void cp_async_16(void* shared_target, const void* source, bool valid) {
    using Vector = unsigned int __attribute__((ext_vector_type(4)));
    *static_cast<Vector*>(shared_target) = valid ? *static_cast<const Vector*>(source) : Vector{0, 0, 0, 0};
}

__device__ __forceinline__ void cp_async_commit() {}

template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {}

__device__ __forceinline__ void cp_async_wait() {}

}  // namespace cuflash
