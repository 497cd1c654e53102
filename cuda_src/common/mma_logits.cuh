// From the scores of a tile, as mma.sync leaves them, to logits in units of LogitUnit::factor: softcap, bias, mask,
// ALiBi and hidden keys.
//
// Two features have a short form of their own. ALiBi alone is what the products are added to: on one side of the row's
// position it is linear, and what all keys share joins the reference of the row. Softcap alone stays a polynomial of
// the score, for the exponential to apply, as long as scores are small.
#pragma once

#include "common/mma_rows.cuh"

namespace cuflash {

// What is left to do with the scores of a tile.
struct TileLogits {
    RowValues shift;     // kOnlyAlibi: to be added
    bool is_polynomial;  // kOnlySoftcap: of the score, see LogitUnit::odd
    RowValues largest;   // then: the lane's largest size of a score, a reference as good as the largest score
};

// Scores become logits, by all that they need beside the scores. `kVectors` asks for what has_vectors<kRun> has found
// in all rows.
template <bool kVectors>
__device__ __forceinline__ void add_row_logits(const AttentionParams& params, const TileMap& tile,
                                               const LogitUnit& unit, const TileRow* rows, long long n_begin, int lane,
                                               Scores& scores) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        __syncwarp();
        const RowContext row = row_context(params, tile, rows[row_of(r, lane)].logit, n_begin);
        constexpr int kAtOnce = kVectors ? kRun : 2;
#pragma unroll
        for (int i = 0; i < kColumns; i += kAtOnce) {
            if (!kVectors) __syncwarp();  // addresses of elements take registers as well
            float logits[kAtOnce];
#pragma unroll
            for (int e = 0; e < kAtOnce; ++e) logits[e] = unit_score(unit, at(scores, r, i + e));
            scores_to_row_logits<kVectors>(params, row, column_of(i, lane), logits);
#pragma unroll
            for (int e = 0; e < kAtOnce; ++e) at(scores, r, i + e) = logits[e];
        }
    }
}

// Whether all the warp's rows have bias and mask in vectors for this tile.
__device__ __forceinline__ bool rows_have_vectors(const AttentionParams& params, const TileMap& tile,
                                                  const TileRow* rows, long long n_begin, int lane) {
    if constexpr (kBiasDtype == 0 && !kHasMask) return true;
    const RowContext row = row_context(params, tile, rows[lane % kRowsPerWarp].logit, n_begin);
    return __all_sync(0xffffffffu, has_vectors<kRun>(params, row));
}

// What the products of a tile are added to.
__device__ __forceinline__ void begin_scores(const LogitUnit& unit, const TileRow* rows, long long n_begin, int lane,
                                             Scores& scores, TileLogits& logits) {
    logits.shift = {};
    if (kOnlyAlibi && !unit.scaled) {
        float slopes[kRows], distances[kRows];
        bool beside = true;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const LogitRow& row = rows[row_of(r, lane)].logit;
            slopes[r] = row.alibi_slope;
            distances[r] = static_cast<float>(row.position - n_begin);
            beside &= distances[r] >= kWarpKeys - 1 || distances[r] <= 0;
        }
        const float own_column = static_cast<float>(column_of(0, lane));
        if (__all_sync(0xffffffffu, beside)) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const float slope = distances[r] > 0 ? slopes[r] : -slopes[r];
                logits.shift.of[r] = slope * (own_column - distances[r]);
#pragma unroll
                for (int i = 0; i < kColumns; ++i) at(scores, r, i) = slope * static_cast<float>(column_of(i, 0));
            }
        } else {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
                for (int i = 0; i < kColumns; ++i)
                    at(scores, r, i) =
                        -slopes[r] * absolute(distances[r] - own_column - static_cast<float>(column_of(i, 0)));
            }
        }
        return;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) at(scores, r, i) = 0;
    }
}

// What becomes of the products before keys are hidden. `at_edge`: some will be.
__device__ __forceinline__ void scores_to_logits(const AttentionParams& params, const TileMap& tile,
                                                 const LogitUnit& unit, const TileRow* rows, long long n_begin,
                                                 int lane, bool at_edge, Scores& scores, TileLogits& logits) {
    logits.is_polynomial = false;
    if constexpr (kOnlySoftcap) {
        bool small = !at_edge;
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
        if (logits.is_polynomial) return;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) at(scores, r, i) = unit_score(unit, at(scores, r, i));
        }
    } else if constexpr (kPerRow) {
        if (kOnlyAlibi && !unit.scaled) return;
        if (rows_have_vectors(params, tile, rows, n_begin, lane))
            add_row_logits<true>(params, tile, unit, rows, n_begin, lane, scores);
        else add_row_logits<false>(params, tile, unit, rows, n_begin, lane, scores);
    } else if (unit.scaled) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) at(scores, r, i) *= unit.scale.scale;
        }
    }
}

}  // namespace cuflash
