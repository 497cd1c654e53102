// A maximum that keeps what is not a number (sm_80 and newer).
#pragma once

namespace cuflash {

// The larger one; NaN if one of them is NaN.
__device__ __forceinline__ float maximum_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

}  // namespace cuflash
