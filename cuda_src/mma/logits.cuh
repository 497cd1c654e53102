// From the scores of a tile, as mma.sync leaves them, to logits in units of LogitUnit::factor.
//
// Two features have a short form of their own. Slopes alone are linear in the key, and what the products are added to
// (kShiftedLogits, mma/rows.cuh). A cap alone is a polynomial for the exponential to apply (kPolynomialLogits,
// mma/capped_scores.cuh).
#pragma once

#include "mma/capped_scores.cuh"

namespace cuflash {

__device__ __forceinline__ void fill_scores(Scores& scores, float value) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) at(scores, r, i) = value;
    }
}

// What the products of a tile are added to. Bias and mask are sent for.
__device__ __forceinline__ void begin_scores(const View& view, Scores& scores, TileLogits& logits) {
    if constexpr (kHasArrays) logits.arrays.begin(view);
    logits.shift = {};
    if (kShiftedLogits && !view.unit.scaled) begin_shifted(view, scores, logits.shift);
    // A known 0 would be where the other values begin, too: an instruction for each of them.
    else fill_scores(scores, kShiftedLogits ? view.unit.zero : 0);
}

// What becomes of the products. Keys that rows do not see are hidden, but where that waits for follow_maxima.
__device__ __forceinline__ void scores_to_logits(const View& view, bool at_edge, Scores& scores, TileLogits& logits) {
    const LogitUnit& unit = view.unit;
    if constexpr (kPolynomialLogits) {
        measure_scores(unit, scores, logits);
    } else if constexpr (kHasRowTerms) {
        if (!kShiftedLogits || unit.scaled) add_row_logits(view, logits.arrays, scores);
        else if constexpr (kFewRegisters) find_shifts(view, logits.shift);
    } else if constexpr (kCapsOneByOne) {
        cap_scores(scores, [&](float score) { return capped_score(unit, score); });
    } else if (unit.scaled) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) at(scores, r, i) *= unit.scale.scale;
        }
    }
    // right either way: all of it is visible
    if (!kPolynomialLogits && at_edge) hide_scores(view, logits, scores);
}

}  // namespace cuflash
