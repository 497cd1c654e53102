// Softmax weights as tensor cores take them: powers of two, rounded to the format of the operands.
#pragma once

#include "common/numeric.cuh"
#include "ptx/exp2.cuh"

namespace cuflash {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLargestFloat = 3.402823466e38f;

// Weights are relative to a reference, kWeightBits below the largest logit in units of log2(e). float16 then keeps its
// full precision for weights down to 2^-29 of the largest, and many small ones do not become 0 or round the same way.
// The other formats have range enough.
constexpr int kWeightBits = kDtype == CUFLASH_FLOAT16 ? 15 : 0;
constexpr float kWeightUnit = 1.0f / (1 << kWeightBits);

// From natural units to those of log2(e). What is finite stays so: -3.4e38 is a bias that people use, and not hidden.
__device__ __forceinline__ float logit_in_bits(float logit) {
    const float bits = logit * kLog2E;
    if (bits == -infinity() && logit != -infinity()) return -kLargestFloat;
    return bits == infinity() && logit != infinity() ? kLargestFloat : bits;
}

// Reference of the weights 2^(score * multiplier - reference) of scores up to `largest`. Rounded up, so that none of
// them exceeds 2^kWeightBits, however large the logits are.
__device__ __forceinline__ float weight_reference(float largest, float multiplier) {
    return __fsub_ru(__fmul_ru(largest, multiplier), static_cast<float>(kWeightBits));
}

// What a lane knows of its rows so far.
template <int kRows>
struct RunningWeights {
    float reference[kRows];
    float row_sum[kRows];  // of this lane's keys alone

    __device__ __forceinline__ RunningWeights() {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            reference[i] = -infinity();
            row_sum[i] = 0;
        }
    }
};

// The largest logit, in natural units again.
__device__ __forceinline__ float largest_logit(float reference) {
    const float bits = reference + kWeightBits;
    return bits == kLargestFloat || bits == -kLargestFloat ? bits : bits * kLn2;
}

// Four neighbouring weights, rounded. (tf32 is rounded when it is loaded, as the other operands are.)
struct alignas(4 * sizeof(Element)) FourWeights {
    unsigned int words[sizeof(Element)];
};
__device__ __forceinline__ FourWeights round_weights(const float (&weights)[4]) {
    constexpr int kPerWord = 4 / sizeof(Element);
    FourWeights rounded;
#pragma unroll
    for (int i = 0; i < 4; i += kPerWord) {
        unsigned int& word = rounded.words[i / kPerWord];
        if constexpr (kDtype == CUFLASH_FLOAT16) word = half2_bits_from_floats(weights[i], weights[i + 1]);
        else if constexpr (kDtype == CUFLASH_BFLOAT16) word = bfloat162_bits_from_floats(weights[i], weights[i + 1]);
        else word = __float_as_uint(weights[i]);
    }
    return rounded;
}

}  // namespace cuflash
