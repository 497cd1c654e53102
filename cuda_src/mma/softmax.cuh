// Online softmax of rows that lie in fragments of mma.sync, and O as it is rescaled.
#pragma once

#include "mma/logits.cuh"
#include "common/softmax.cuh"

namespace cuflash {

// Weights are relative to a reference that is the row's maximum, or was it until a few tiles ago: the output is
// rescaled only when some row's maximum has outgrown its reference by so many bits that weights might leave the range.
constexpr float kSlackBits = kBfloat16 ? 8 : 4;
constexpr float kReferenceBits = kBfloat16 ? 0 : kWeightBits - kSlackBits;
constexpr float kReferenceUnit = kBfloat16 ? 1.0f : 1.0f / (1 << static_cast<int>(kReferenceBits));
// References beyond this many bits are subtracted before scores are scaled: as products their rounding would count.
constexpr float kLargeReference = 1 << 12;
// Output that is not rounded to 16 bits shows even the rounding of small ones: a row that sees one key is to be its
// value.
constexpr bool kExactReference = sizeof(OutElement) > 2;

// Running maxima of the rows of each warp, at the four lanes that share them.
using RowMaxima = RowValues[kFewRegisters ? kNumWarps : 1][8];

// Running maximum and sum of a lane's rows. Where registers are few, the maxima lie in shared memory: they rarely
// change.
struct RowStates {
    RowMaxima& shared;
    RowValues held;
    RowValues row_sum;  // of the lane's own keys; the lanes' sums are added once, at the end

    __device__ __forceinline__ RowStates(RowMaxima& shared, const Warp& warp) : shared(shared) {
        RowValues none;
#pragma unroll
        for (int r = 0; r < kRows; ++r) row_sum.of[r] = 0, none.of[r] = -infinity();
        set_maxima(none, warp);
    }
    __device__ __forceinline__ RowValues maxima(const Warp& warp) const {
        if constexpr (kFewRegisters) return shared[warp.thread / 32][warp.lane / 4];
        else return held;
    }
    __device__ __forceinline__ void set_maxima(const RowValues& values, const Warp& warp) {
        if constexpr (kFewRegisters) {
            __syncwarp();
            if (warp.lane % 4 == 0) shared[warp.thread / 32][warp.lane / 4] = values;
            __syncwarp();
        } else {
            held = values;
        }
    }
};

// The largest logit of a row, from the largest score of the lane's keys.
__device__ __forceinline__ float largest_logit(const TileLogits& logits, int r, float score) {
    if constexpr (kOnlyAlibi) score += logits.shift.of[r];
    score = quad_maximum(score);
    if constexpr (!kOnlySoftcap) return score;
    // Without a branch: one for each row would keep them from being worked on together.
    return score == kLowestScore ? -infinity() : multiply_subnormal(score, capped_factor(logits, score * score));
}

// Scores become weights relative to the maxima of `states`, to which O is rescaled where they have outgrown it.
// `hide_nan` hides those among scores that are NaN which should be hidden.
template <typename HideNan>
__device__ __forceinline__ void scores_to_weights(Scores& scores, float multiplier, TileLogits& logits,
                                                  RowStates& states, Output& o, Exchange& exchange, const Warp& warp,
                                                  HideNan hide_nan) {
    RowValues maxima = states.maxima(warp), largest = logits.largest;
    bool outgrown = false;
    if (!kOnlySoftcap || !logits.is_polynomial) largest = largest_scores<kBiasDtype != 0>(scores);
    if constexpr (kBiasDtype != 0) {
        bool any_nan = false;
#pragma unroll
        for (int r = 0; r < kRows; ++r) any_nan |= largest.of[r] != largest.of[r];
        if (__any_sync(0xffffffffu, any_nan)) {
            hide_nan();
            largest = largest_scores<false>(scores);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        largest.of[r] = maximum(maxima.of[r], largest_logit(logits, r, largest.of[r]));
        outgrown |= (largest.of[r] - maxima.of[r]) * multiplier > kSlackBits;
    }
    if (warp.any(outgrown)) {
        if constexpr (kShare > 1) {
            float (&shared_maxima)[kShare][32] = exchange[warp.group];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (warp.lane % 4 == 0) shared_maxima[warp.share][row_of(r, warp.lane)] = largest.of[r];
            }
            warp.wait();
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                largest.of[r] = maximum(largest.of[r], shared_maxima[1 - warp.share][row_of(r, warp.lane)]);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float factor = exp2_approximate((maxima.of[r] - finite_maximum(largest.of[r])) * multiplier);
            states.row_sum.of[r] *= factor;
#pragma unroll
            for (int i = 0; i < 2 * kFeatureTiles; ++i) at(o, r, i) *= factor;
        }
        maxima = largest;
        states.set_maxima(maxima, warp);
    }
    RowValues offsets;
    float largest_reference = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        maxima.of[r] = finite_maximum(maxima.of[r]);
        const float offset = (kOnlyAlibi ? logits.shift.of[r] : 0.0f) - maxima.of[r];
        offsets.of[r] = multiply_add(offset, multiplier, kReferenceBits);
        largest_reference = maximum(largest_reference, absolute(offsets.of[r]));
        if (kOnlyAlibi) largest_reference = maximum(largest_reference, absolute(maxima.of[r] * multiplier));
    }
    if (kExactReference || (!kOnlySoftcap && largest_reference > kLargeReference)) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            offsets.of[r] = kReferenceBits;
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                float& score = at(scores, r, i);
                // These round as they did for the maximum.
                if (kOnlySoftcap) score = multiply_subnormal(score, capped_factor(logits, score * score));
                if (kOnlyAlibi) score += logits.shift.of[r];
                score -= maxima.of[r];
            }
        }
        if (kOnlySoftcap) logits.odd[0] = 1, logits.odd[1] = logits.odd[2] = 0;
    }
#pragma unroll
    for (float& factor : logits.odd) factor *= multiplier;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float sums[2] = {};
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            float& score = at(scores, r, i);
            const float factor = kOnlySoftcap ? capped_factor(logits, score * score) : multiplier;
            score = exp2_approximate(multiply_add(score, factor, offsets.of[r]));
            sums[i % 2] += score;
        }
        states.row_sum.of[r] += sums[0] + sums[1];
    }
}

}  // namespace cuflash
