// Softcap where nothing else joins the scores: a polynomial for the exponential to apply, of scores as long as they are
// small, of bent scores up to the softcap or some of it, and beyond of what was capped by an exponential of its own.
#pragma once

#include "mma/tile_logits.cuh"

namespace cuflash {

// tanh(x) up to x = limit as an odd polynomial of kCapDegree (outer) of x (1 + x^2 (inner[0] + x^2 inner[1])), to
// 2e-7 of 1, or 6e-7 if that is 5: the nearest of such form.
struct BentTanh {
    float limit, inner[2], outer[3];

    __device__ __forceinline__ float bend(float x) const {
        const float square = x * x;
        return x * multiply_add(square, multiply_add(square, inner[1], inner[0]), 1.0f);
    }
};

template <typename Cap>
__device__ __forceinline__ void cap_scores(Scores& scores, Cap cap) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
        // fence: few at a time
        __syncwarp();  // few at a time: together they take more registers than there are
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if constexpr (!kUsualSoftcap) __syncwarp();  // fence: few at a time
            at(scores, r, i) = cap(at(scores, r, i));
        }
    }
}

// Takes the tile's scores for small ones, and finds out how large they are.
__device__ __forceinline__ void measure_scores(const LogitUnit& unit, Scores& scores, TileLogits& logits) {
    logits.is_polynomial = true;
#pragma unroll
    for (int i = 0; i < 3; ++i) logits.odd[i] = unit.odd[i];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const float size = absolute(at(scores, r, i));
            // right either way (on the CPU, where what is unset is NaN)
            logits.largest[r] = i == 0 ? size : maximum(logits.largest[r], size);
        }
    }
}

// Whether the lane has scores beyond a size, given the largest size in each row.
__device__ __forceinline__ bool beyond(const RowValues& sizes, float size) {
    bool any = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) any |= !(sizes[r] <= size);
    return any;
}

// Where a lane of the warp has large scores, all are bent, and take another polynomial, or are capped by themselves.
__device__ __forceinline__ void cap_large_scores(const LogitUnit& unit, Scores& scores, TileLogits& logits) {
    // right either way: small ones may be taken for large
    if (!__any_sync(0xffffffffu, beyond(logits.largest, unit.small))) return;
    const float ratio = unit.scale.scale_by_softcap;
    constexpr BentTanh kTanh =
        kCapDegree == 3 ? BentTanh{0.55f, {-0.111121959f, 0.0577643579f}, {0.99999727f, -0.222087835f, 0}}
                        : BentTanh{1, {-0.183772986f, 0.0214277183f}, {0.999993643f, -0.149412532f, 0.0285228569f}};
    logits.is_polynomial = !__any_sync(0xffffffffu, beyond(logits.largest, kTanh.limit / absolute(ratio)));
#pragma unroll
    for (int i = 0; i < 3; ++i) logits.odd[i] = logits.is_polynomial ? kTanh.outer[i] : i == 0;
    if (logits.is_polynomial) cap_scores(scores, [&](float score) { return kTanh.bend(score * ratio); });
    else cap_scores(scores, [&](float score) { return capped_score(unit, score); });
    logits.largest = largest_scores<false>(scores);
}

}  // namespace cuflash
