// Scores of a warp's rows and of one tile of keys: what warps that share their rows and features add up, and how logits
// come of them.
#pragma once

#include "common/mask.cuh"
#include "common/score.cuh"
#include "precise/layout.cuh"
#include "ptx/barrier.cuh"

namespace cuflash {

// What a warp has of the scores of rows that it shares.
using PartialScores = Accumulator[kWarpsPerRow > 1 ? kRows * kColumns : 1][32];

// Adds up what the warps that share their rows have of the scores, in their order.
__device__ __forceinline__ void sum_scores(PartialScores* partial, const Place& place, Scores& scores) {
    if constexpr (kWarpsPerRow > 1) {
        const int first_warp = place.group * kWarpsPerRow;
#pragma unroll
        for (int i = 0; i < kRows * kColumns; ++i)
            partial[first_warp + place.share][i][place.lane] = scores[i / 4][i % 4];
        barrier_wait(1 + place.group, 32 * kWarpsPerRow);
#pragma unroll
        for (int i = 0; i < kRows * kColumns; ++i) {
            Accumulator sum = partial[first_warp][i][place.lane];
#pragma unroll
            for (int warp = 1; warp < kWarpsPerRow; ++warp) sum += partial[first_warp + warp][i][place.lane];
            scores[i / 4][i % 4] = sum;
        }
    }
}

// What rows need for every tile of keys, worked out each time.
struct RowsWorkedOut {
    const AttentionParams& params;
    const TileMap& tile;

    __device__ __forceinline__ KeyRange visible(int row) const {
        return visible_keys(params, tile, row_at(params, tile, row).query);
    }
    __device__ __forceinline__ LogitRow logit(int row) const { return logit_row(params, tile, row); }
};

// Whether a row of the warp sees a key of the tile by its position. `rows` is as RowsWorkedOut.
template <typename Rows>
__device__ __forceinline__ bool any_row_sees(const Rows& rows, const TileKeys& keys, long long n_begin,
                                             const Place& place) {
    // Warps that share rows meet at each tile: where some leave that out, compute-sanitizer sees races where none are.
    // right either way: tiles may be looked at in vain
    if (kWarpsPerRow > 1 || !keys.at_edge(n_begin, kWarpKeys)) return true;
    const ColumnRange visible =
        columns_of(rows.visible(place.group * kRowsPerWarp + place.lane % kRowsPerWarp), n_begin);
    // right either way: tiles may be looked at in vain
    return __any_sync(0xffffffffu, visible.begin < visible.end);
}

template <typename Rows>
__device__ __forceinline__ void scores_to_logits(const AttentionParams& params, const TileMap& tile, const Rows& rows,
                                                 const ScoreScale& scale, bool at_edge, long long n_begin,
                                                 const Place& place, Scores& scores) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) at(scores, r, i) = scaled_score(scale, at(scores, r, i));
        if constexpr (kHasRowTerms) {
            const RowContext row = row_context(params, tile, rows.logit(place.tile_row(r)), n_begin);
#pragma unroll
            for (int i = 0; i < kColumns; i += 2) {
                Accumulator logits[2] = {at(scores, r, i), at(scores, r, i + 1)};
                RowColumns<2> columns;
                columns.load<Reads::kElements>(params, row, place.column(i));
                scores_to_row_logits<true>(row, columns, place.column(i), logits);
                at(scores, r, i) = logits[0], at(scores, r, i + 1) = logits[1];
            }
        }
        if (at_edge) {  // right either way: all of it is visible
            const ColumnRange visible = columns_of(rows.visible(place.tile_row(r)), n_begin);
#pragma unroll
            for (int i = 0; i < kColumns; ++i)
                if (!visible.has(place.column(i))) at(scores, r, i) = -infinity();
        }
    }
}

}  // namespace cuflash
