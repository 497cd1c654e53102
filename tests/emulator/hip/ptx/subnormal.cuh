// cuda_src/ptx/subnormal.cuh for AMD GPUs.
#pragma once

namespace cuflash {

__device__ __forceinline__ float multiply_subnormal(float a, float b) { return a * b; }

__device__ __forceinline__ float multiply_add_subnormal(float a, float b, float c) { return fmaf(a, b, c); }

__device__ __forceinline__ float divide_subnormal(float a, float b) { return a / b; }

__device__ __forceinline__ double widen_subnormal(float value) { return value; }

__device__ __forceinline__ float narrow_subnormal(double value) { return static_cast<float>(value); }

}  // namespace cuflash
