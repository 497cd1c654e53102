// Online softmax of rows that lie in fragments of mma.sync, and O as it is rescaled.
#pragma once

#include "common/mma_logits.cuh"
#include "common/softmax.cuh"

namespace cuflash {

// Weights are relative to a reference that is the row's maximum, or was it until a few tiles ago: the output is
// rescaled only when some row's maximum has outgrown its reference by so many bits that weights might leave the range.
constexpr float kSlackBits = kBfloat16 ? 8 : 4;
constexpr float kReferenceBits = kBfloat16 ? 0 : kWeightBits - kSlackBits;
constexpr float kReferenceUnit = kBfloat16 ? 1.0f : 1.0f / (1 << static_cast<int>(kReferenceBits));
// References beyond this many bits are subtracted before scores are scaled: as products their rounding would count.
constexpr float kLargeReference = 1 << 12;

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

// The logit of the row's largest score.
__device__ __forceinline__ float logit_of_maximum(const LogitUnit& unit, const TileLogits& logits, int r, float score) {
    if constexpr (kOnlyAlibi) return score + logits.shift.of[r];
    if constexpr (!kOnlySoftcap) return score;
    if (!logits.is_polynomial) return score == hidden_score() ? -infinity() : score;
    const float square = score * score;
    return score * multiply_add(square, multiply_add(square, unit.odd[2], unit.odd[1]), unit.odd[0]);
}

// Scores become weights relative to the maxima of `states`, to which O is rescaled where they have outgrown it.
__device__ __forceinline__ void scores_to_weights(Scores& scores, float multiplier, const LogitUnit& unit,
                                                  const TileLogits& logits, RowStates& states, Output& o,
                                                  Exchange& exchange, const Warp& warp) {
    RowValues maxima = states.maxima(warp), largest;
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float row_max = logits.largest.of[r];
        if (!kOnlySoftcap || !logits.is_polynomial) {
            row_max = at(scores, r, 0);
#pragma unroll
            for (int i = 1; i < kColumns; ++i) row_max = maximum(row_max, at(scores, r, i));
        }
        largest.of[r] = maximum(maxima.of[r], quad_maximum(logit_of_maximum(unit, logits, r, row_max)));
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
    float largest_offset = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float offset = (kOnlyAlibi ? logits.shift.of[r] : 0.0f) - finite_maximum(maxima.of[r]);
        offsets.of[r] = multiply_add(offset, multiplier, kReferenceBits);
        largest_offset = maximum(largest_offset, absolute(offsets.of[r]));
        maxima.of[r] = offset;
    }
    if (largest_offset > kLargeReference) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            offsets.of[r] = kReferenceBits;
#pragma unroll
            for (int i = 0; i < kColumns; ++i) at(scores, r, i) += maxima.of[r];
        }
    }
    const bool is_polynomial = kOnlySoftcap && logits.is_polynomial;
    const float factor = is_polynomial ? unit.odd[0] * multiplier : multiplier;
    const float factor_3 = is_polynomial ? unit.odd[1] * multiplier : 0;
    const float factor_5 = is_polynomial ? unit.odd[2] * multiplier : 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float sums[2] = {};
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            float& score = at(scores, r, i);
            float factor_of_score = factor;
            if constexpr (kOnlySoftcap) {
                const float square = score * score;
                factor_of_score = multiply_add(square, multiply_add(square, factor_5, factor_3), factor);
            }
            score = exp2_approximate(multiply_add(score, factor_of_score, offsets.of[r]));
            sums[i % 2] += score;
        }
        states.row_sum.of[r] += sums[0] + sums[1];
    }
}

}  // namespace cuflash
