// Maxima and minima as the arithmetic units have them (sm_80 and newer, but for that of a warp).
#pragma once

namespace cuflash {

// The larger one; NaN if one of them is NaN.
__device__ __forceinline__ float maximum_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// The larger magnitude; NaN if one of them is NaN.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
    float larger;
    asm("{ .reg .f32 x, y; abs.ftz.f32 x, %1; abs.ftz.f32 y, %2; max.NaN.ftz.f32 %0, x, y; }"
        : "=f"(larger)
        : "f"(a), "f"(b));
    return larger;
}

// Of two pairs of float16, each: the smaller magnitude; of a number and NaN the number.
__device__ __forceinline__ unsigned int smaller_magnitudes(unsigned int a, unsigned int b) {
    unsigned int smaller;
    asm("{ .reg .b32 x, y; abs.f16x2 x, %1; abs.f16x2 y, %2; min.f16x2 %0, x, y; }" : "=r"(smaller) : "r"(a), "r"(b));
    return smaller;
}

// The largest value of a warp's lanes; what it is where one is NaN is not said. Integers take one instruction, and
// floats are in the order of their bits, those below 0 in the reverse one.
__device__ __forceinline__ float largest_of_warp(float value) {
#if __CUDA_ARCH__ >= 800
    const int bits = __float_as_int(value);
    const int largest = __reduce_max_sync(0xffffffffu, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(largest ^ (largest >> 31 & 0x7fffffff));
#else
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
#endif
}

}  // namespace cuflash
