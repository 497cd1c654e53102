// Softmax weights as tensor cores take them: powers of two, rounded to the format of the operands.
#pragma once

#include "common/softmax.cuh"
#include "ptx/exp2.cuh"

namespace cuflash {

constexpr float kWeightUnit = 1.0f / (1 << kWeightBits);

// Weight of a score `difference` from the row's largest, `difference * multiplier` in units of log2(e). (The product of
// the score itself, less that of the largest, would spare a subtraction; but logits can be so large that the rounding
// of the latter is no small difference.)
__device__ __forceinline__ float relative_weight(float difference, float multiplier) {
    return exp2_approximate(multiply_add(difference, multiplier, static_cast<float>(kWeightBits)));
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
