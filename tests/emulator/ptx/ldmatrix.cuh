// cuda_src/ptx/ldmatrix.cuh on the CPU.
#pragma once

#include "ptx/shared.cuh"

namespace cuflash {

struct LdmatrixInput {
    const void* row;
    bool transposed;
};

inline void ldmatrix_lanes(unsigned int (&matrices)[4], const void* row, bool transposed) {
    if (reinterpret_cast<unsigned long long>(row) % 16 != 0) cpu_cuda_fail("ldmatrix: a row on no 16-byte boundary");
    cpu_cuda_read(row, 16);
    const LdmatrixInput input = {row, transposed};
    cpu_cuda_collective("ldmatrix", &input, &matrices, false, [](const void* const* inputs, void* const* outputs) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int matrix = 0; matrix < 4; ++matrix) {
                unsigned int pair = 0;
                for (int i = 0; i < 2; ++i) {
                    const bool transposed = static_cast<const LdmatrixInput*>(inputs[0])->transposed;
                    const int row = transposed ? lane % 4 * 2 + i : lane / 4;
                    const int column = transposed ? lane / 4 : lane % 4 * 2 + i;
                    const auto* source = static_cast<const LdmatrixInput*>(inputs[matrix * 8 + row])->row;
                    pair |= static_cast<unsigned int>(static_cast<const unsigned short*>(source)[column]) << 16 * i;
                }
                static_cast<unsigned int*>(outputs[lane])[matrix] = pair;
            }
        }
    });
}

inline void ldmatrix_x4(unsigned int (&matrices)[4], SharedAddress row) { ldmatrix_lanes(matrices, row, false); }

inline void ldmatrix_x4_transposed(unsigned int (&matrices)[4], SharedAddress row) {
    ldmatrix_lanes(matrices, row, true);
}

}  // namespace cuflash
