// cuda_src/ptx/maximum.cuh on the CPU.
#pragma once

namespace cuflash {

inline float maximum_or_nan(float a, float b) {
    if (a != a) return a;
    return b != b || b > a ? b : a;
}

}  // namespace cuflash
