// Functions of the special function unit.
#pragma once

namespace cuflash {

// 2^x within 2 ulp; results below the normal range become 0, and so does the power of -infinity.
__device__ __forceinline__ float exp2_approximate(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// 1 / x within 1 ulp; 0 for infinity.
__device__ __forceinline__ float reciprocal_approximate(float x) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
    return reciprocal;
}

}  // namespace cuflash
