// From the scores of a tile, as mma.sync leaves them, to logits in units of LogitUnit::factor.
//
// Two features have a short form of their own. Slopes alone are linear in the key, and what the products are added to
// (kShiftedLogits, mma/rows.cuh). Softcap alone stays a polynomial of the score, for the exponential to apply, as long
// as scores are small (kPolynomialLogits).
#pragma once

#include "mma/bias_mask.cuh"

namespace cuflash {

constexpr float kLowestScore = -1e18f;

// What is left to do with the scores of a tile.
struct TileLogits {
    RowValues shift;     // kShiftedLogits: to be added
    float odd[3];        // kPolynomialLogits: the logit as a polynomial of the score, see LogitUnit::odd
    bool is_polynomial;  // more than the score itself
    // Then: the lane's largest score or, where all keys are seen, size of one, a reference as good.
    RowValues largest;
    ArrayRows arrays;  // kHasArrays: on the way

    // What a score is multiplied by.
    __device__ __forceinline__ float factor(float score) const {
        const float square = score * score;
        return multiply_add(square, kSoftcapDegree == 3 ? odd[1] : multiply_add(square, odd[2], odd[1]), odd[0]);
    }
    // A score whose weight is 0. What will be squared comes with the sign that the polynomial's last term makes low.
    __device__ __forceinline__ float hidden_score() const {
        if constexpr (!kPolynomialLogits) return -infinity();
        return kSoftcapDegree == 3 && is_polynomial ? -kLowestScore : kLowestScore;
    }
};

// Of a lane's columns, counted from its first one, a bit for each that lies in front of another one.
__device__ __forceinline__ unsigned int columns_before(int column) {
    static_assert(kColumns <= 32);
    constexpr unsigned int kOfRun = kRun, kOfLanes = 4 * kRun;
    const unsigned int before = max(column, 0);
    const unsigned int count = before / kOfLanes * kOfRun + min(before % kOfLanes, kOfRun);
    // right either way: a shift by all bits
    return count >= 32 ? ~0u : (1u << count) - 1;
}

// Hides keys that a row does not see by its position.
__device__ __forceinline__ void hide_scores(const View& view, TileLogits& logits, Scores& scores) {
    const float hidden = logits.hidden_score();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        // fence: few at a time
        __syncwarp();  // one row after the other: together they take more registers than there are
        const ColumnRange visible = view.visible(r).counted_from(column_of(0, view.lane));
        // Bits become predicates several at a time; comparisons would be two for each score.
        const unsigned int seen = columns_before(visible.end) & ~columns_before(visible.begin);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            if (!(seen >> i & 1)) at(scores, r, i) = hidden;
        }
        if constexpr (kPolynomialLogits) {
            __syncwarp();  // fence: few at a time
            float largest = kLowestScore;
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                const float score = at(scores, r, i);
                largest = maximum(largest, score == hidden ? kLowestScore : score);
            }
            logits.largest[r] = largest;
        }
    }
}

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

__device__ __forceinline__ void cap_scores(const LogitUnit& unit, Scores& scores) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
        // fence: few at a time
        __syncwarp();  // few at a time: together they take more registers than there are
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if constexpr (!kUsualSoftcap) __syncwarp();  // fence: few at a time
            at(scores, r, i) = capped_score(unit, at(scores, r, i));
        }
    }
}

// Finds the form of the tile's logits and, in TileLogits::largest, how large scores are. Those that are not small
// become logits by themselves.
__device__ __forceinline__ void find_polynomial(const LogitUnit& unit, Scores& scores, TileLogits& logits) {
    bool small = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const float size = absolute(at(scores, r, i));
            // right either way (on the CPU, where what is unset is NaN)
            logits.largest[r] = i == 0 ? size : maximum(logits.largest[r], size);
        }
        small &= logits.largest[r] <= unit.small;
    }
    logits.is_polynomial = __all_sync(0xffffffffu, small);
#pragma unroll
    for (int i = 0; i < 3; ++i) logits.odd[i] = logits.is_polynomial ? unit.odd[i] : i == 0;
    if (!logits.is_polynomial) cap_scores(unit, scores);
}

// What becomes of the products before keys are hidden.
__device__ __forceinline__ void scores_to_logits(const View& view, Scores& scores, TileLogits& logits) {
    const LogitUnit& unit = view.unit;
    logits.is_polynomial = false;
    if constexpr (kPolynomialLogits) {
        find_polynomial(unit, scores, logits);
    } else if constexpr (kPerRow) {
        if (!kShiftedLogits || unit.scaled) add_row_logits(view, logits.arrays, scores);
        else if constexpr (kFewRegisters) find_shifts(view, logits.shift);
    } else if constexpr (kHasSoftcap) {
        cap_scores(unit, scores);
    } else if (unit.scaled) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) at(scores, r, i) *= unit.scale.scale;
        }
    }
}

}  // namespace cuflash
