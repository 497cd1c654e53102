// cuda_src/ptx/convert.cuh on the CPU, bit by bit: nothing here relies on a compiler's 16-bit floats.
#pragma once

namespace cuflash {

inline float float_from_half_bits(unsigned short bits) {
    const unsigned int sign = (bits & 0x8000u) << 16;
    const unsigned int exponent = bits >> 10 & 0x1fu;
    const unsigned int fraction = bits & 0x3ffu;
    if (exponent == 0x1f) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return __uint_as_float(sign | __float_as_uint(magnitude));
}

// To nearest, ties to even; NaN becomes the instruction's one NaN.
inline unsigned short half_bits_from_float(float value) {
    const unsigned int bits = __float_as_uint(value);
    const unsigned int sign = bits >> 16 & 0x8000u;
    const float magnitude = fabsf(value);
    if (value != value) return 0x7fff;
    if (magnitude >= 65520.0f) return static_cast<unsigned short>(sign | 0x7c00u);
    if (magnitude < 0x1p-14f) {
        // Adding 0.5 puts the last bit of a subnormal half at the last bit of the sum, which the addition then rounds.
        const unsigned int rounded = __float_as_uint(magnitude + 0.5f) - __float_as_uint(0.5f);
        return static_cast<unsigned short>(sign | rounded);
    }
    unsigned int rounded = bits & 0x7fffffffu;
    rounded += 0xfffu + (rounded >> 13 & 1);
    return static_cast<unsigned short>(sign | (rounded - (112u << 23)) >> 13);
}

inline float float_from_bfloat16_bits(unsigned short bits) {
    return __uint_as_float(static_cast<unsigned int>(bits) << 16);
}

inline unsigned short bfloat16_bits_from_float(float value) {
    unsigned int bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    bits += 0x7fffu + (bits >> 16 & 1);
    return static_cast<unsigned short>(bits >> 16);
}

inline unsigned int half2_bits_from_floats(float low, float high) {
    return half_bits_from_float(low) | static_cast<unsigned int>(half_bits_from_float(high)) << 16;
}

inline unsigned int bfloat162_bits_from_floats(float low, float high) {
    return bfloat16_bits_from_float(low) | static_cast<unsigned int>(bfloat16_bits_from_float(high)) << 16;
}

// To nearest, ties away from zero.
inline unsigned int tf32_bits_from_float(float value) {
    if (value != value) return 0x7fffffffu;
    if (fabsf(value) == INFINITY) return __float_as_uint(value);
    return (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
}

}  // namespace cuflash
