// cuda_src/ptx/exp2.cuh for AMD GPUs.
#pragma once

namespace cuflash {

__device__ __forceinline__ float exp2_approximate(float x) { return __builtin_amdgcn_exp2f(x); }

__device__ __forceinline__ float reciprocal_approximate(float x) { return __builtin_amdgcn_rcpf(x); }

}  // namespace cuflash
