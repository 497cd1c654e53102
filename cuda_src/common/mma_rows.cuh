// What the rows of a tile are looked up for once, which keys they do not see by their position, and what bias, mask and
// ALiBi make of their scores.
#pragma once

#include "common/logit_unit.cuh"
#include "common/mma_warp.cuh"

namespace cuflash {

constexpr bool kPerRow = kHasArrays || kHasAlibi;  // logits need more than their scores
constexpr bool kOnlyAlibi = kHasAlibi && !kHasSoftcap && !kHasArrays;
constexpr bool kOnlySoftcap = kUsualSoftcap && !kPerRow;

// What a tile row needs for every tile of keys, looked up once.
struct TileRow {
    KeyRange visible;
    LogitRow logit;  // with the slope in units of LogitUnit::factor
};

// Whether a row of the warp sees a key of the tile by its position.
__device__ __forceinline__ bool any_row_sees(const TileRow* rows, long long n_begin, int lane) {
    const ColumnRange visible = columns_of(rows[lane % kRowsPerWarp].visible, n_begin);
    return __any_sync(0xffffffffu, visible.begin < visible.end);
}

// Gives keys that a row does not see by its position the score `hidden`.
__device__ __forceinline__ void hide_scores(const TileRow* rows, long long n_begin, int lane, float hidden,
                                            Scores& scores) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        __syncwarp();  // one row after the other: together they take more registers than there are
        const ColumnRange visible = columns_of(rows[row_of(r, lane)].visible, n_begin);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            if (!visible.has(column_of(i, lane))) at(scores, r, i) = hidden;
        }
    }
}

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
    if constexpr (!kHasArrays) return true;
    const RowContext row = row_context(params, tile, rows[lane % kRowsPerWarp].logit, n_begin);
    return __all_sync(0xffffffffu, has_vectors<kRun>(params, row));
}

}  // namespace cuflash
