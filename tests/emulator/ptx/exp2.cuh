// cuda_src/ptx/exp2.cuh on the CPU.
#pragma once

namespace cuflash {

inline float exp2_approximate(float x) {
    const float power = exp2f(x);
    return power < 0x1p-126f ? 0.0f : power;
}

inline float reciprocal_approximate(float x) { return 1 / x; }

}  // namespace cuflash
