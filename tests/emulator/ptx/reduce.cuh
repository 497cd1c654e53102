// cuda_src/ptx/reduce.cuh on the CPU.
#pragma once

namespace cuflash {

inline unsigned int warp_maximum(unsigned int value) {
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const unsigned int other = __shfl_xor_sync(0xffffffffu, value, lanes);
        if (other > value) value = other;
    }
    return value;
}

inline unsigned int warp_union(unsigned int bits) {
    for (int lanes = 1; lanes < 32; lanes *= 2) bits |= __shfl_xor_sync(0xffffffffu, bits, lanes);
    return bits;
}

}  // namespace cuflash
