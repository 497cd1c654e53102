// Running maxima of rows that lie in fragments of mma.sync, and O as it is rescaled.
#pragma once

#include "common/softmax.cuh"
#include "mma/logits.cuh"
#include "ptx/maximum.cuh"

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

// The largest of the lane's scores in each row. `kKeepNan`: NaN if there is one, else the largest of the others.
template <bool kKeepNan>
__device__ __forceinline__ RowValues largest_scores(Scores& scores) {
    RowValues largest;
    const auto larger = [](float a, float b) { return kKeepNan ? maximum_or_nan(a, b) : maximum(a, b); };
    constexpr int kChains = kRows > 2 ? 1 : 2;  // of each row: four in all, as one maximum waits for another
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float chains[kChains];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const float score = at(scores, r, i);
            chains[i % kChains] = i < kChains ? score : larger(chains[i % kChains], score);
        }
        largest[r] = kChains == 1 ? chains[0] : larger(chains[0], chains[kChains - 1]);
    }
    return largest;
}

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
    RowValues largest = logits.largest;
    if (!kPolynomialLogits || !logits.is_polynomial) largest = largest_scores<kBiasDtype != 0>(scores);
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

// Leaves in `maxima` the references of the rows' weights, given the largest score of the lane in each. Where one has
// been outgrown, the sums follow; O has to be multiplied by `factors` then.
__device__ __forceinline__ bool follow_maxima(RowValues& maxima, RowValues largest, const TileLogits& logits,
                                              float multiplier, RowStates& states, RowValues& factors,
                                              Exchange& exchange, const Warp& warp) {
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        largest[r] = largest_logit(logits, r, largest[r]);
        // right either way: maxima may grow at any time
        outgrown |= (largest[r] - maxima[r]) * multiplier > kSlackBits;
    }
    if (!warp.any(outgrown)) return false;  // right either way: maxima may grow at any time
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
        for (int i = 0; i < 2 * kFeatureTiles; ++i) at(o, r, i) *= factors[r];
    }
}

}  // namespace cuflash
