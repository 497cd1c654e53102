// What the rows of a tile are looked up for once, and which keys they do not see by their position.
#pragma once

#include "mma/logit_unit.cuh"
#include "mma/warp.cuh"
#include "ptx/maximum.cuh"

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

// The largest of the lane's scores in each row. `kKeepNan`: NaN if there is one, else the largest of the others.
template <bool kKeepNan>
__device__ __forceinline__ RowValues largest_scores(Scores& scores) {
    RowValues largest;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        largest.of[r] = at(scores, r, 0);
#pragma unroll
        for (int i = 1; i < kColumns; ++i) {
            const float score = at(scores, r, i);
            largest.of[r] = kKeepNan ? maximum_or_nan(largest.of[r], score) : maximum(largest.of[r], score);
        }
    }
    return largest;
}

}  // namespace cuflash
