// Conversions between float and the 16-bit formats, one instruction per function. Written in PTX because cuda_fp16.h
// and cuda_bf16.h cost more compile time than a kernel of ours.
#pragma once

namespace cuflash {

__device__ __forceinline__ float float_from_half_bits(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// The result passes through a 32-bit register: the assembler of CUDA 13.0 turns a byte store of a 16-bit float register
// into a conversion of the float's value to an integer.
__device__ __forceinline__ unsigned short half_bits_from_float(float value) {
    unsigned int bits;
    asm("{ .reg .b16 half; cvt.rn.f16.f32 half, %1; mov.b32 %0, {half, 0}; }" : "=r"(bits) : "f"(value));
    return static_cast<unsigned short>(bits);
}

__device__ __forceinline__ float float_from_bfloat16_bits(unsigned short bits) {
    return __uint_as_float(static_cast<unsigned int>(bits) << 16);
}

__device__ __forceinline__ unsigned short bfloat16_bits_from_float(float value) {
#if __CUDA_ARCH__ >= 800
    unsigned int bits;
    asm("{ .reg .b16 half; cvt.rn.bf16.f32 half, %1; mov.b32 %0, {half, 0}; }" : "=r"(bits) : "f"(value));
    return static_cast<unsigned short>(bits);
#else
    unsigned int bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    bits += 0x7fff + ((bits >> 16) & 1);  // round to nearest, ties to even
    return static_cast<unsigned short>(bits >> 16);
#endif
}

// Two at a time, `low` in the lower half.
__device__ __forceinline__ unsigned int half2_bits_from_floats(float low, float high) {
    unsigned int bits;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
    asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
        : "=r"(bits)
        : "f"(low), "f"(high));
#endif
    return bits;
}

__device__ __forceinline__ unsigned int bfloat162_bits_from_floats(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned int bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return bfloat16_bits_from_float(low) | static_cast<unsigned int>(bfloat16_bits_from_float(high)) << 16;
#endif
}

// To nearest, ties away from zero, the only rounding that sm_80 has for tf32.
__device__ __forceinline__ unsigned int tf32_bits_from_float(float value) {
#if __CUDA_ARCH__ >= 800
    unsigned int bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
#else
    return (__float_as_uint(value) + 0x1000) & ~0x1fffu;
#endif
}

}  // namespace cuflash
