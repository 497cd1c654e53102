// Softmax of rows that lie in fragments of mma.sync.
#pragma once

#include "mma/maxima.cuh"

namespace cuflash {

// References beyond this many bits are subtracted before scores are scaled: as products their rounding would count.
constexpr float kLargeReference = 1 << 12;
// Output that is not rounded to 16 bits shows even the rounding of small ones: a row that sees one key is to be its
// value.
constexpr bool kExactReference = sizeof(OutElement) > 2;

// What is added to each row's scores in the exponential: the reference, in bits. Where it is large, it has been
// subtracted from the scores themselves.
__device__ __forceinline__ RowValues subtract_references(Scores& scores, TileLogits& logits, RowValues& maxima,
                                                         float multiplier) {
    RowValues offsets;
    float largest_reference = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        maxima[r] = finite_maximum(maxima[r]);
        const float offset = (kShiftedLogits ? logits.shift[r] : 0.0f) - maxima[r];
        offsets[r] = multiply_add(offset, multiplier, kReferenceBits);
        largest_reference = maximum(largest_reference, absolute(offsets[r]));
        if (kShiftedLogits) largest_reference = maximum(largest_reference, absolute(maxima[r] * multiplier));
    }
    // right either way: exact is right for all, if slower
    if (kExactReference || (!kPolynomialLogits && largest_reference > kLargeReference)) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            offsets[r] = kReferenceBits;
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                float& score = at(scores, r, i);
                // These round as they did for the maximum.
                if (kPolynomialLogits) score = multiply_subnormal(score, logits.factor(score));
                if (kShiftedLogits) score += logits.shift[r];
                score -= maxima[r];
            }
        }
    }
    return offsets;
}

// Scores become weights relative to the references in `maxima`, and join the sums of their rows.
__device__ __forceinline__ void scores_to_weights(Scores& scores, TileLogits& logits, RowValues& maxima,
                                                  float multiplier, RowValues& row_sum) {
    const RowValues offsets = subtract_references(scores, logits, maxima, multiplier);
#pragma unroll
    for (float& factor : logits.odd) factor *= multiplier;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float sums[2] = {};
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            float& score = at(scores, r, i);
            const float factor = kPolynomialLogits && !kExactReference ? logits.factor(score) : multiplier;
            score = exp2_approximate(multiply_add(score, factor, offsets[r]));
            sums[i % 2] += score;
        }
        row_sum[r] += sums[0] + sums[1];
    }
}

}  // namespace cuflash
