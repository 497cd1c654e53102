// cuda_src/ptx/mma_float64.cuh on the CPU: fragment layouts of the PTX ISA, terms joined one after the other.
#pragma once

namespace cuflash {

struct MmaInputFloat64 {
    const double* a;
    const double* b;
    const double* c;
};

inline void mma_m16n8k16(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
    const double c[4] = {d[0], d[1], d[2], d[3]};
    const MmaInputFloat64 input = {a, b, c};
    cpu_cuda_collective("mma.m16n8k16.f64", &input, &d, false, [](const void* const* inputs, void* const* outputs) {
        const auto lane = [&](int index) { return static_cast<const MmaInputFloat64*>(inputs[index]); };
        for (int l = 0; l < 32; ++l) {
            for (int i = 0; i < 4; ++i) {
                const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
                double sum = lane(l)->c[i];
                for (int k = 0; k < 16; ++k)
                    sum =
                        fma(lane(row % 8 * 4 + k % 4)->a[k / 4 * 2 + row / 8], lane(column * 4 + k % 4)->b[k / 4], sum);
                static_cast<double*>(outputs[l])[i] = sum;
            }
        }
    });
}

}  // namespace cuflash
