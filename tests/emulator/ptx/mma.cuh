// cuda_src/ptx/mma.cuh on the CPU: products exact, sums as tensor cores round them (tensor_cores.cpp).
#pragma once

#include "ptx/convert.cuh"

extern "C" {
void cpu_cuda_mma_half(const void* const* inputs, void* const* outputs);
void cpu_cuda_mma_bfloat16(const void* const* inputs, void* const* outputs);
}

namespace cuflash {

struct MmaInput {
    const unsigned int* a;
    const unsigned int* b;
    const float* c;
};

template <bool kBfloat16>
inline void mma_m16n8k16(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    const float c[4] = {d[0], d[1], d[2], d[3]};
    const MmaInput input = {a, b, c};
    cpu_cuda_collective("mma.m16n8k16", &input, &d, false, kBfloat16 ? cpu_cuda_mma_bfloat16 : cpu_cuda_mma_half);
}

}  // namespace cuflash
