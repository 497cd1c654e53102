// cuda_src/ptx/maximum.cuh on the CPU.
#pragma once

#include "ptx/convert.cuh"

namespace cuflash {

inline float maximum_or_nan(float a, float b) {
    if (a != a) return a;
    return b != b || b > a ? b : a;
}

inline float larger_magnitude(float a, float b) {
    // Below the normal range is 0.
    const auto magnitude = [](float x) { return fabsf(x) < 0x1p-126f ? 0.0f : fabsf(x); };
    return maximum_or_nan(magnitude(a), magnitude(b));
}

inline unsigned int smaller_magnitudes(unsigned int a, unsigned int b) {
    unsigned int smaller = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const unsigned int x = a >> shift & 0x7fff, y = b >> shift & 0x7fff;
        const float of_x = float_from_half_bits(static_cast<unsigned short>(x));
        const float of_y = float_from_half_bits(static_cast<unsigned short>(y));
        smaller |= (of_x != of_x || of_y < of_x ? y : x) << shift;
    }
    return smaller;
}

// By the bits, as floats below the normal range are 0 to other arithmetic.
inline float largest_of_warp(float value) {
    const auto order = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    int largest = order(static_cast<int>(__float_as_uint(value)));
    for (int distance = 16; distance > 0; distance /= 2) {
        const int other = __shfl_xor_sync(0xffffffffu, largest, distance);
        largest = other > largest ? other : largest;
    }
    return __uint_as_float(static_cast<unsigned int>(order(largest)));
}

}  // namespace cuflash
