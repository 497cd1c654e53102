// Floats as pairs of float16, which tensor cores multiply: what a pair leaves out is 2^-24 of its value.
//
// A row of Q, K or V arrives as it is and is turned into pairs where it lies. It is scaled by a power of two of its
// own, so that its largest element is just below 2^15. The second of a pair is what the first leaves out, times 2^11.
// Both are float16 of full precision for elements down to 2^-27 of the largest; where there are smaller ones, a warp
// may multiply the rows one by one (precise/one_by_one.cuh).
#pragma once

#include "common/math.cuh"

namespace cuflash {

constexpr int kPairBits = 14;                             // largest elements are 2^14 and more, below 2^15
constexpr float kPairStep = 1 << 11;                      // of the second of a pair
constexpr float kUnscaled = 1.0f / (1 << 2 * kPairBits);  // of products of two scaled elements
// Scaled elements down to this have exact pairs: the second is a multiple of what float16 counts in.
constexpr float kLeastScaled = 1.0f / (1 << 13);
// Exponents of rows, biased as a float's are: the product of two rows' scales and kUnscaled is finite, as 0 times
// infinity would be NaN.
constexpr unsigned int kLeastExponent = 127 - 90, kMostExponent = 127 + 77;
static_assert(2 * (kMostExponent - 127) - 2 * kPairBits <= 127);

// What a lane has found in its part of rows.
constexpr unsigned int kHasTiny = 1, kHasZero = 2;  // elements that are below kLeastScaled, but not 0; or may be 0, too
constexpr unsigned int kOutOfRange = 4;             // a row with an exponent that is not wanted

struct FoundInRow {
    float scale;  // what the row's elements are to be multiplied by, beside 2^-kPairBits; 0 for zeros
    unsigned int kinds;
};

__device__ __forceinline__ unsigned int out_of_range(float scale, unsigned int least, unsigned int most) {
    const unsigned int exponent = __float_as_uint(scale) >> 23;
    if (exponent == 0) return 0;  // right either way: one by one is right for zeros, too, if slower
    return exponent < least || exponent > most ? kOutOfRange : 0;
}

// Whether there are tiny elements that are not 0, those below a float's normal range among them.
template <int kChunks>
__device__ __forceinline__ unsigned int tiny_ones(const Vector16 (&chunks)[kChunks], float factor) {
    bool tiny = false;
#pragma unroll
    for (const Vector16& chunk : chunks) {
#pragma unroll
        for (const float value : chunk.values)
            // right either way: one by one is right for all, if slower
            tiny |= __float_as_uint(value) << 1 != 0 && absolute(value * factor) < kLeastScaled;
    }
    // right either way: one by one is right for all, if slower
    return tiny ? kHasTiny : 0;
}

// The pairs of two neighbouring elements, which are below 2^16.
__device__ __forceinline__ void pair_of(float low, float high, unsigned int& first, unsigned int& second) {
    first = half2_bits_from_floats(low, high);
    const float low_rest = low - float_from_half_bits(static_cast<unsigned short>(first));
    const float high_rest = high - float_from_half_bits(static_cast<unsigned short>(first >> 16));
    second = half2_bits_from_floats(low_rest * kPairStep, high_rest * kPairStep);
}

// What a pair leaves out of a value, which is 0 or neither tiny nor huge: rows of others have no pairs.
__device__ __forceinline__ float rest_of_pair(float value) {
    const unsigned int exponent = __float_as_uint(absolute(value)) >> 23;
    unsigned int first, second;
    const float scaled = value * __uint_as_float((254 - exponent) << 23);
    pair_of(scaled, 0, first, second);
    const float of_pair = float_from_half_bits(static_cast<unsigned short>(second)) / kPairStep;
    const float rest = scaled - float_from_half_bits(static_cast<unsigned short>(first)) - of_pair;
    return rest * __uint_as_float(exponent << 23);
}

}  // namespace cuflash
