// Stores of matrix fragments to shared memory (sm_90 and newer).
#pragma once

#include "ptx/shared.cuh"

namespace cuflash {

// Stores four 8x8 matrices of 16-bit elements. Lane i names row i % 8 of matrix i / 8, eight elements on a 16-byte
// boundary, and has two neighbouring elements of row lane / 4 of each: the fragment that mma gives. Called by all 32
// lanes.
__device__ __forceinline__ void stmatrix_x4(SharedAddress row, const unsigned int (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
}

// The same, each transposed. Lane i names row i % 8 of matrix i / 8 of what is stored, and has two neighbouring
// elements of its column lane / 4.
__device__ __forceinline__ void stmatrix_x4_transposed(SharedAddress row, const unsigned int (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
}

}  // namespace cuflash
