// cuda_src/ptx/subnormal.cuh on the CPU.
#pragma once

namespace cuflash {

inline float multiply_subnormal(float a, float b) { return a * b; }

inline float multiply_add_subnormal(float a, float b, float c) { return fmaf(a, b, c); }

inline float divide_subnormal(float a, float b) { return a / b; }

}  // namespace cuflash
