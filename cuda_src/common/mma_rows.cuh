// What the rows of a tile are looked up for once, and which keys they do not see by their position.
#pragma once

#include "common/logit_unit.cuh"
#include "common/mma_warp.cuh"

namespace cuflash {

constexpr bool kPerRow = kBiasDtype != 0 || kHasMask || kHasAlibi;  // logits need more than their scores
constexpr bool kOnlyAlibi = kHasAlibi && !kHasSoftcap && !kHasMask && kBiasDtype == 0;
constexpr bool kOnlySoftcap = kHasSoftcap && !kPerRow;

// What a tile row needs for every tile of keys, looked up once.
struct TileRow {
    KeyRange visible;
    LogitRow logit;  // with the slope in units of LogitUnit::factor
};

// -inf, or where it will be squared a score so low that its weight is 0.
__device__ __forceinline__ float hidden_score() { return kOnlySoftcap ? -1e18f : -infinity(); }

// Whether a row of the warp sees a key of the tile by its position.
__device__ __forceinline__ bool any_row_sees(const TileRow* rows, long long n_begin, int lane) {
    const ColumnRange visible = columns_of(rows[lane % kRowsPerWarp].visible, n_begin);
    return __any_sync(0xffffffffu, visible.begin < visible.end);
}

// Hides the scores of keys that a row does not see by its position.
__device__ __forceinline__ void hide_scores(const TileRow* rows, long long n_begin, int lane, Scores& scores) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        __syncwarp();  // one row after the other: together they take more registers than there are
        const ColumnRange visible = columns_of(rows[row_of(r, lane)].visible, n_begin);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            if (!visible.has(column_of(i, lane))) at(scores, r, i) = hidden_score();
        }
    }
}

}  // namespace cuflash
