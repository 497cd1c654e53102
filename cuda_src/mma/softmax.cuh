// Softmax of rows that lie in fragments of mma.sync.
#pragma once

#include "mma/maxima.cuh"

namespace cuflash {

// References beyond this many bits are subtracted before scores are scaled: as products their rounding would count.
constexpr float kLargeReference = 1 << 12;
// Output that is not rounded to 16 bits shows even the rounding of small ones: a row that sees one key is to be its
// value.
constexpr bool kExactReference = sizeof(OutElement) > 2;

// What the weights of a tile are relative to.
struct References {
    RowValues maxima;   // in units of logits
    RowValues offsets;  // what is added to each row's scores in the exponential: the reference, in bits
    bool are_large;     // they are subtracted from the scores themselves
};

__device__ __forceinline__ References references_of(RowValues maxima, const TileLogits& logits, float multiplier) {
    References references;
    float largest_reference = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        references.maxima[r] = finite_maximum(maxima[r]);
        const float offset = (kShiftedLogits ? logits.shift[r] : 0.0f) - references.maxima[r];
        references.offsets[r] = multiply_add(offset, multiplier, kReferenceBits);
        largest_reference = maximum(largest_reference, absolute(references.offsets[r]));
        if (kShiftedLogits) largest_reference = maximum(largest_reference, absolute(references.maxima[r] * multiplier));
    }
    // right either way: exact is right for all, if slower
    references.are_large = !kPolynomialLogits && largest_reference > kLargeReference;
    return references;
}

__device__ __forceinline__ void subtract_references(Scores& scores, TileLogits& logits, References& references) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        references.offsets[r] = kReferenceBits;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            float& score = at(scores, r, i);
            // These round as they did for the maximum.
            if (kPolynomialLogits) score = multiply_subnormal(score, logits.factor(score));
            if (kShiftedLogits) score += logits.shift[r];
            score -= references.maxima[r];
        }
    }
}

// What is to be done before rows of scores become weights.
__device__ __forceinline__ void begin_weights(Scores& scores, TileLogits& logits, References& references,
                                              float multiplier) {
    // right either way: exact is right for all, if slower
    if (kExactReference || references.are_large) subtract_references(scores, logits, references);
#pragma unroll
    for (float& factor : logits.odd) factor *= multiplier;
}

// Scores of a row become weights relative to its reference. Returns the sum of the lane's.
__device__ __forceinline__ float row_to_weights(Scores& scores, const TileLogits& logits, const References& references,
                                                float multiplier, int r) {
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
        float& score = at(scores, r, i);
        const float factor = kPolynomialLogits && !kExactReference ? logits.factor(score) : multiplier;
        score = exp2_approximate(multiply_add(score, factor, references.offsets[r]));
        sums[i % 2] += score;
    }
    return sums[0] + sums[1];
}

// Scores become weights relative to references, and join the sums of their rows.
__device__ __forceinline__ void scores_to_weights(Scores& scores, TileLogits& logits, References references,
                                                  float multiplier, RowValues& row_sum) {
    begin_weights(scores, logits, references, multiplier);
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_sum[r] += row_to_weights(scores, logits, references, multiplier, r);
}

}  // namespace cuflash
