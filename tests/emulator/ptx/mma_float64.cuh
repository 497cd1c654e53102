// cuda_src/ptx/mma_float64.cuh on the CPU: terms joined one after the other (tensor_cores.cpp).
#pragma once

extern "C" void cpu_cuda_mma_float64(const void* const* inputs, void* const* outputs);

namespace cuflash {

struct MmaInputFloat64 {
    const double* a;
    const double* b;
    const double* c;
};

inline void mma_m16n8k16(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
    const double c[4] = {d[0], d[1], d[2], d[3]};
    const MmaInputFloat64 input = {a, b, c};
    cpu_cuda_collective("mma.m16n8k16.f64", &input, &d, false, cpu_cuda_mma_float64);
}

}  // namespace cuflash
