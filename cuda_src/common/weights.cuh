// Softmax weights as tensor cores take them: powers of two, rounded to the dtype of the operands.
#pragma once

#include "common/numeric.cuh"
#include "ptx/exp2.cuh"

namespace cuflash {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Weights are relative to a reference, kWeightBits below the largest logit in units of log2(e). float16 then keeps its
// full precision for weights down to 2^-29 of the largest, and many small ones do not become 0 or round the same way.
// The other formats have range enough.
constexpr int kWeightBits = kDtype == CUFLASH_FLOAT16 ? 15 : 0;
constexpr float kWeightUnit = 1.0f / (1 << kWeightBits);

// Reference of the weights 2^(score * multiplier - reference) of scores up to `largest`. Rounded up, so that none of
// them exceeds 2^kWeightBits, however large the logits are.
__device__ __forceinline__ float weight_reference(float largest, float multiplier) {
    return __fsub_ru(__fmul_ru(largest, multiplier), static_cast<float>(kWeightBits));
}

// Logit in natural units whose weight is 1.
__device__ __forceinline__ float natural_maximum(float reference) { return (reference + kWeightBits) * kLn2; }

}  // namespace cuflash
