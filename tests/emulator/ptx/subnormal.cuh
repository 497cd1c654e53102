// cuda_src/ptx/subnormal.cuh on the CPU, where other arithmetic of floats takes what is below the normal range for 0.
#pragma once

namespace cuflash {

// Whether arithmetic that flushes to 0 may have lost something.
inline bool is_lost(float a, float b, float c, float result) {
    const auto is_subnormal = [](float value) { return (__float_as_uint(value) & 0x7fffffffu) - 1 < 0x7fffffu; };
    return result == 0 || is_subnormal(a) || is_subnormal(b) || is_subnormal(c);
}

inline float multiply_subnormal(float a, float b) {
    const float product = a * b;
    return is_lost(a, b, 0, product) ? cpu_cuda_multiply(a, b) : product;
}

inline float multiply_add_subnormal(float a, float b, float c) {
    const float sum = fmaf(a, b, c);
    return is_lost(a, b, c, sum) ? cpu_cuda_multiply_add(a, b, c) : sum;
}

inline float divide_subnormal(float a, float b) {
    const float quotient = a / b;
    return is_lost(a, b, 0, quotient) ? cpu_cuda_divide(a, b) : quotient;
}

inline double widen_subnormal(float value) {
    const unsigned int bits = __float_as_uint(value);
    return (bits & 0x7f800000u) == 0 ? __builtin_copysign((bits & 0x7fffffu) * 0x1p-149, value) : value;
}

inline float narrow_subnormal(double value) {
    const bool is_normal = !(fabs(value) < 0x1p-126);
    const unsigned int units = is_normal ? 0 : static_cast<unsigned int>(__builtin_nearbyint(fabs(value) * 0x1p149));
    return is_normal ? static_cast<float>(value) : __uint_as_float(units | (value < 0 ? 0x80000000u : 0));
}

}  // namespace cuflash
