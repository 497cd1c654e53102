// Running maxima of rows that lie in fragments of mma.sync, and O as it is rescaled.
#pragma once

#include "common/softmax.cuh"
#include "mma/capped_scores.cuh"
#include "ptx/subnormal.cuh"

namespace cuflash {

// Weights are relative to a reference that is the row's maximum, or was it until a few tiles ago: the output is
// rescaled only when some row's maximum has outgrown its reference by so many bits that weights might leave the range.
constexpr float kSlackBits = kBfloat16 ? 8 : 4;
constexpr float kReferenceBits = kBfloat16 ? 0 : kWeightBits - kSlackBits;
constexpr float kReferenceUnit = kBfloat16 ? 1.0f : 1.0f / (1 << static_cast<int>(kReferenceBits));

// Running maxima of the rows of each warp, at the four lanes that share them. All builds have it, whether they use it
// or not, so that who allocates shared memory need not know how few registers are.
using RowMaxima = RowValues[kNumWarps][8];

// Running maximum and sum of a lane's rows. Where registers are few, the maxima lie in shared memory: they rarely
// change.
struct RowStates {
    RowMaxima& shared;
    RowValues held;
    RowValues row_sum;  // of the lane's own keys; the lanes' sums are added once, at the end

    __device__ __forceinline__ RowStates(RowMaxima& shared, const Warp& warp) : shared(shared) {
        RowValues none;
#pragma unroll
        for (int r = 0; r < kRows; ++r) row_sum[r] = 0, none[r] = -infinity();
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
            __syncwarp();  // right either way: barriers come before they are read
        } else {
            held = values;
        }
    }
};

__device__ __forceinline__ bool any_nan(const RowValues& values) {
    bool any = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) any |= values[r] != values[r];  // right either way: hiding does no harm
    return __any_sync(0xffffffffu, any);
}

// The largest of the lane's scores in each row, or a size that is as good. What the bias hides is hidden here if its
// score is not finite; `make_view` has the view then.
template <typename MakeView>
__device__ __forceinline__ RowValues find_largest(const TileLogits& logits, Scores& scores, MakeView make_view) {
    if constexpr (kPolynomialLogits) return logits.largest;
    RowValues largest = largest_scores<kBiasDtype != 0>(scores);
    if constexpr (kBiasDtype != 0) {
        if (any_nan(largest)) {  // right either way: hiding does no harm
            hide_by_bias(make_view(), scores);
            largest = largest_scores<false>(scores);
        }
    }
    return largest;
}

// The largest logit of the lane's keys in a row, from their largest score.
__device__ __forceinline__ float largest_logit(const TileLogits& logits, int r, float score) {
    if constexpr (kShiftedLogits) score += logits.shift[r];
    if constexpr (!kPolynomialLogits) return score;
    // Without a branch: one for each row would keep them from being worked on together.
    return score == kLowestScore ? -infinity() : multiply_subnormal(score, logits.factor(score));
}

// The maxima of rows over the keys of both warps that share them.
__device__ __forceinline__ void exchange_maxima(RowValues& largest, Exchange& exchange, const Warp& warp) {
    float (&maxima)[kWarpsPerRow][32] = exchange[warp.group];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        if (warp.lane % 4 == 0) maxima[warp.share][row_of(r, warp.lane)] = largest[r];
    }
    warp.wait();
#pragma unroll
    for (int r = 0; r < kRows; ++r) largest[r] = maximum(largest[r], maxima[1 - warp.share][row_of(r, warp.lane)]);
}

// The lane's largest logit of each row, given its largest score. True if one has outgrown the row's reference.
__device__ __forceinline__ bool outgrow(const RowValues& maxima, const RowValues& largest, const TileLogits& logits,
                                        float multiplier, RowValues& largest_logits) {
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        largest_logits[r] = largest_logit(logits, r, largest[r]);
        // right either way: maxima may grow at any time
        outgrown |= (largest_logits[r] - maxima[r]) * multiplier > kSlackBits;
    }
    return outgrown;
}

// Leaves in `maxima` the references of the rows' weights. Where one has been outgrown, all follow, as do the sums; O
// has to be multiplied by `factors` then. Most tiles of capped scores need only this one vote.
template <typename MakeView>
__device__ __forceinline__ bool follow_maxima(RowValues& maxima, const View& view, bool at_edge, Scores& scores,
                                              TileLogits& logits, float multiplier, RowStates& states,
                                              RowValues& factors, Exchange& exchange, MakeView make_view) {
    const Warp& warp = view.warp;
    RowValues largest;
    bool changes = outgrow(maxima, find_largest(logits, scores, make_view), logits, multiplier, largest);
    if constexpr (kPolynomialLogits) changes |= at_edge | beyond(logits.largest, view.unit.small);
    if (!warp.any(changes)) return false;  // right either way: maxima may grow at any time
    if constexpr (kPolynomialLogits) {
        cap_large_scores(view.unit, scores, logits);
        // right either way: all of it is visible
        if (at_edge) hide_scores(make_view(), logits, scores);
        changes = outgrow(maxima, logits.largest, logits, multiplier, largest);
        if (!warp.any(changes)) return false;  // right either way: maxima may grow at any time
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) largest[r] = maximum(maxima[r], quad_maximum(largest[r]));
    if constexpr (kWarpsPerRow > 1) exchange_maxima(largest, exchange, warp);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        factors[r] = exp2_approximate((maxima[r] - finite_maximum(largest[r])) * multiplier);
        states.row_sum[r] *= factors[r];
    }
    maxima = largest;
    states.set_maxima(maxima, warp);
    return true;
}

__device__ __forceinline__ void rescale(Output& o, const RowValues& factors) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < 2 * kFeatureTiles; ++i) at(o, r, i) = multiply_subnormal(at(o, r, i), factors[r]);
    }
}

}  // namespace cuflash
