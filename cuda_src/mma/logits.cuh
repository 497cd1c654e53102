// From the scores of a tile, as mma.sync leaves them, to logits in units of LogitUnit::factor: softcap, bias, mask,
// ALiBi and hidden keys.
//
// Two features have a short form of their own. ALiBi alone is what the products are added to: on one side of the row's
// position it is linear, and what all keys share joins the reference of the row. Softcap alone stays a polynomial of
// the score, for the exponential to apply, as long as scores are small.
#pragma once

#include "mma/alibi.cuh"
#include "mma/arrays.cuh"

namespace cuflash {

// What is left to do with the scores of a tile.
struct TileLogits {
    RowValues shift;     // kOnlyAlibi: to be added
    float odd[3];        // kOnlySoftcap: the logit as a polynomial of the score, see LogitUnit::odd
    bool is_polynomial;  // more than the score itself
    // Then: the lane's largest score or, where all keys are seen, size of one, a reference as good.
    RowValues largest;
    ArrayRows arrays;  // kHasArrays: on the way
};

// What a score is multiplied by.
__device__ __forceinline__ float capped_factor(const TileLogits& logits, float square) {
    const float (&odd)[3] = logits.odd;
    return multiply_add(square, kSoftcapDegree == 3 ? odd[1] : multiply_add(square, odd[2], odd[1]), odd[0]);
}

constexpr float kLowestScore = -1e18f;

// A score whose weight is 0. With softcap it will be squared, and comes with the sign that the polynomial's last term
// makes low.
__device__ __forceinline__ float hidden_score(const TileLogits& logits) {
    if constexpr (!kOnlySoftcap) return -infinity();
    return kSoftcapDegree == 3 && logits.is_polynomial ? -kLowestScore : kLowestScore;
}

// Hides keys that a row does not see by its position.
__device__ __forceinline__ void hide_scores(const TileRow* rows, long long n_begin, int lane, TileLogits& logits,
                                            Scores& scores) {
    const float hidden = hidden_score(logits);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        __syncwarp();  // one row after the other: together they take more registers than there are
        const ColumnRange visible = columns_of(rows[row_of(r, lane)].visible, n_begin);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            if (!visible.has(column_of(i, lane))) at(scores, r, i) = hidden;
        }
        if constexpr (kOnlySoftcap) {
            __syncwarp();
            float largest = kLowestScore;
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                const float score = at(scores, r, i);
                largest = maximum(largest, score == hidden ? kLowestScore : score);
            }
            logits.largest.of[r] = largest;
        }
    }
}

// What the products of a tile are added to.
__device__ __forceinline__ void begin_scores(const AttentionParams& params, const TileMap& tile, const LogitUnit& unit,
                                             const TileRow* rows, long long n_begin, int lane, Scores& scores,
                                             TileLogits& logits) {
    if constexpr (kHasArrays) {
        logits.arrays.begin(params, tile, rows, n_begin, lane);
        logits.arrays.fetch<kRowsAhead>(params, tile, rows, n_begin, lane, 0);
    }
    logits.shift = {};
    if (kOnlyAlibi && !unit.scaled) {
        AlibiRow alibi[kRows];
        bool beside = true;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            alibi[r] = alibi_row(rows, r, n_begin, lane);
            beside &= alibi[r].is_beside();
        }
        if (__all_sync(0xffffffffu, beside)) {  // where registers are few, shifts are found behind the products
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if constexpr (!kFewRegisters) logits.shift.of[r] = alibi[r].shift(lane);
#pragma unroll
                for (int i = 0; i < kColumns; ++i)
                    at(scores, r, i) = alibi[r].gradient() * static_cast<float>(column_of(i, 0));
            }
        } else {
            const float own_column = static_cast<float>(column_of(0, lane));
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
                for (int i = 0; i < kColumns; ++i)
                    at(scores, r, i) = -alibi[r].slope *
                                       absolute(alibi[r].distance - own_column - static_cast<float>(column_of(i, 0)));
            }
        }
        return;
    }
    // A known 0 would be where the other values begin, too: an instruction for each of them.
    const float zero = kOnlyAlibi ? unit.zero : 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) at(scores, r, i) = zero;
    }
}

__device__ __forceinline__ void cap_scores(const LogitUnit& unit, Scores& scores) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
        __syncwarp();  // few at a time: together they take more registers than there are
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if constexpr (!kUsualSoftcap) __syncwarp();
            at(scores, r, i) = capped_score(unit, at(scores, r, i));
        }
    }
}

// What becomes of the products before keys are hidden.
__device__ __forceinline__ void scores_to_logits(const AttentionParams& params, const TileMap& tile,
                                                 const LogitUnit& unit, const TileRow* rows, long long n_begin,
                                                 int lane, Scores& scores, TileLogits& logits) {
    logits.is_polynomial = false;
    if constexpr (kOnlySoftcap) {
        bool small = true;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                const float size = absolute(at(scores, r, i));
                logits.largest.of[r] = i == 0 ? size : maximum(logits.largest.of[r], size);
            }
            small &= logits.largest.of[r] <= unit.small;
        }
        logits.is_polynomial = __all_sync(0xffffffffu, small);
#pragma unroll
        for (int i = 0; i < 3; ++i) logits.odd[i] = logits.is_polynomial ? unit.odd[i] : i == 0;
        if (logits.is_polynomial) return;
        cap_scores(unit, scores);
    } else if constexpr (kPerRow) {
        if (kOnlyAlibi && !unit.scaled) {
            if constexpr (kFewRegisters) find_shifts(rows, n_begin, lane, logits.shift);
            return;
        }
        add_row_logits(params, tile, unit, rows, n_begin, lane, logits.arrays, scores);
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
