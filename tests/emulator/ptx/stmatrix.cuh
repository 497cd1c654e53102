// cuda_src/ptx/stmatrix.cuh on the CPU.
#pragma once

#include "ptx/shared.cuh"

namespace cuflash {

struct StmatrixInput {
    char* row;
    const unsigned int* matrices;
};

template <bool kTransposed>
inline void stmatrix(SharedAddress row, const unsigned int (&matrices)[4]) {
    if (reinterpret_cast<unsigned long long>(row) % 16 != 0) cpu_cuda_fail("stmatrix: a row on no 16-byte boundary");
    cpu_cuda_write(row, 16);
    const StmatrixInput input = {row, matrices};
    cpu_cuda_collective("stmatrix", &input, nullptr, false, [](const void* const* inputs, void* const*) {
        const auto lane = [&](int index) { return static_cast<const StmatrixInput*>(inputs[index]); };
        for (int i = 0; i < 32; ++i) {
            auto* const target = reinterpret_cast<unsigned short*>(lane(i)->row);
            for (int column = 0; column < 8; ++column) {
                const int major = kTransposed ? column : i % 8, minor = kTransposed ? i % 8 : column;
                const unsigned int pair = lane(major * 4 + minor / 2)->matrices[i / 8];
                target[column] = static_cast<unsigned short>(pair >> 16 * (minor % 2));
            }
        }
    });
}

inline void stmatrix_x4(SharedAddress row, const unsigned int (&matrices)[4]) { stmatrix<false>(row, matrices); }
inline void stmatrix_x4_transposed(SharedAddress row, const unsigned int (&matrices)[4]) {
    stmatrix<true>(row, matrices);
}

}  // namespace cuflash
