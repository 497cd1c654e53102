// cuda_src/ptx/convert.cuh for AMD GPUs.
#pragma once

namespace cuflash {

__device__ __forceinline__ float float_from_half_bits(unsigned short bits) {
    return static_cast<float>(__builtin_bit_cast(_Float16, bits));
}

__device__ __forceinline__ unsigned short half_bits_from_float(float value) {
    return __builtin_bit_cast(unsigned short, static_cast<_Float16>(value));
}

__device__ __forceinline__ float float_from_bfloat16_bits(unsigned short bits) {
    return __uint_as_float(static_cast<unsigned int>(bits) << 16);
}

// No instruction before CDNA3: round to nearest, ties to even.
__device__ __forceinline__ unsigned short bfloat16_bits_from_float(float value) {
    if (value != value) return 0x7fff;
    unsigned int bits = __float_as_uint(value);
    bits += 0x7fff + ((bits >> 16) & 1);
    return static_cast<unsigned short>(bits >> 16);
}

__device__ __forceinline__ unsigned int half2_bits_from_floats(float low, float high) {
    return half_bits_from_float(low) | static_cast<unsigned int>(half_bits_from_float(high)) << 16;
}

__device__ __forceinline__ unsigned int bfloat162_bits_from_floats(float low, float high) {
    return bfloat16_bits_from_float(low) | static_cast<unsigned int>(bfloat16_bits_from_float(high)) << 16;
}

__device__ __forceinline__ unsigned int tf32_bits_from_float(float value) {
    return (__float_as_uint(value) + 0x1000) & ~0x1fffu;
}

}  // namespace cuflash
