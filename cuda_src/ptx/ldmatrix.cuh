// Loads of matrix fragments from shared memory (sm_75 and newer).
#pragma once

#include "ptx/shared.cuh"

namespace cuflash {

// Loads four 8x8 matrices of 16-bit elements. Lane i names row i % 8 of matrix i / 8, eight elements on a 16-byte
// boundary; each lane gets two neighbouring elements of row lane / 4 of each matrix: the fragment that mma takes.
// Called by all 32 lanes.
__device__ __forceinline__ void ldmatrix_x4(unsigned int (&matrices)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(row)
                 : "memory");
}

// The same with each matrix transposed: the lane's two elements come from column lane / 4.
__device__ __forceinline__ void ldmatrix_x4_transposed(unsigned int (&matrices)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(row)
                 : "memory");
}

}  // namespace cuflash
