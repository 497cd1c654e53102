// The rows of a tile for mma.sync: what they are looked up for once, what a warp sees of them and of a tile of keys,
// and ALiBi, where nothing else joins their scores.
#pragma once

#include "mma/budget.cuh"
#include "mma/copy_queries.cuh"
#include "mma/key_walk.cuh"
#include "mma/logit_unit.cuh"

namespace cuflash {

// What a tile row needs for every tile of keys, looked up once.
struct TileRow {
    KeyRange visible;
    LogitRow logit;  // with the slope in units of LogitUnit::factor
};

// Looks up the warp's own rows for all warps that share them. `any_keys`: the block has some to walk through.
__device__ __forceinline__ void look_up_rows(const AttentionParams& params, const TileMap& tile, const LogitUnit& unit,
                                             bool any_keys, TileRow* rows, const Warp& warp) {
    // Lanes beyond the last row look up rows of others, so that no branch makes lanes diverge.
    const int tile_row = OwnRows(warp).first + warp.lane % OwnRows::kCount;
    const Row row = row_at(params, tile, tile_row);
    TileRow found = {};
    // right either way: rows behind the last go nowhere
    found.visible = row.valid ? visible_keys(params, tile, row.query) : KeyRange{0, 0};
    // Rows that see no key may belong to no sequence, which has no slopes.
    if (kHasRowTerms && any_keys) {
        found.logit = logit_row(params, tile, tile_row);
        // What all keys of a lane share is added to hidden ones, too, up to the end of the last tile.
        const long long num_keys = tile.seqlen_k + (kShiftedLogits ? kBlockN : 0);
        if (kHasAlibi) found.logit.alibi_slope = bounded_slope(num_keys, found.logit.alibi_slope * unit.inverse);
    }
    if (warp.lane >= OwnRows::kCount) return;
    rows[tile_row].visible = found.visible;
    if (kHasRowTerms) rows[tile_row].logit = found.logit;
}

// A warp's part of a tile of keys: its rows, and its keys from `n_begin` on.
struct View {
    const AttentionParams& params;
    const TileMap& tile;
    const LogitUnit& unit;
    Warp warp;
    const TileRow* rows;
    long long first_key;  // of the tile
    long long n_begin;
    int lane;

    __device__ __forceinline__ View(const AttentionParams& params, const TileMap& tile, const LogitUnit& unit,
                                    const TileRow* tile_rows, long long first_key, const Warp& warp)
        : params(params),
          tile(tile),
          unit(unit),
          warp(warp),
          rows(&tile_rows[warp.first_row]),
          first_key(first_key),
          n_begin(first_key + warp.share * kWarpKeys),
          lane(warp.lane) {}

    // Whether a row of the warp sees a key of the tile by its position.
    __device__ __forceinline__ bool any_row_sees() const {
        const ColumnRange visible = columns_of(rows[lane % kRowsPerWarp].visible, first_key);
        // right either way: tiles may be looked at in vain
        return __any_sync(0xffffffffu, visible.begin < visible.end);
    }
    // The lane's row r.
    __device__ __forceinline__ const TileRow& row(int r) const { return rows[row_of(r, lane)]; }
    __device__ __forceinline__ ColumnRange visible(int r) const { return columns_of(row(r).visible, n_begin); }
    __device__ __forceinline__ RowContext context(int r) const {
        return row_context(params, tile, row(r).logit, n_begin);
    }
};

// A row for ALiBi alone, and its distance to the first of the warp's keys: on one side of the row's position what is
// added to scores is linear in the key.
struct AlibiRow {
    float slope;
    float distance;

    // Whether all keys lie on one side of its position.
    // right either way: the way for both sides is slower
    __device__ __forceinline__ bool is_beside() const { return distance >= kWarpKeys - 1 || distance <= 0; }
    __device__ __forceinline__ float gradient() const { return distance > 0 ? slope : -slope; }
    // What all keys of the lane share.
    __device__ __forceinline__ float shift(int lane) const {
        return gradient() * (static_cast<float>(column_of(0, lane)) - distance);
    }
};

__device__ __forceinline__ AlibiRow alibi_row(const View& view, int r) {
    const LogitRow& row = view.row(r).logit;
    return {row.alibi_slope, static_cast<float>(row.position - view.n_begin)};
}

// What the products of a tile are added to, and the shifts, which join the references of the rows. Where registers are
// few, these are found behind the products.
__device__ __forceinline__ void begin_shifted(const View& view, Scores& scores, RowValues& shift) {
    AlibiRow alibi[kRows];
    bool beside = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        alibi[r] = alibi_row(view, r);
        beside &= alibi[r].is_beside();
    }
    if (__all_sync(0xffffffffu, beside)) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if constexpr (!kFewRegisters) shift[r] = alibi[r].shift(view.lane);
#pragma unroll
            for (int i = 0; i < kColumns; ++i)
                at(scores, r, i) = alibi[r].gradient() * static_cast<float>(column_of(i, 0));
        }
    } else {
        const float own_column = static_cast<float>(column_of(0, view.lane));
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i)
                at(scores, r, i) =
                    -alibi[r].slope * absolute(alibi[r].distance - own_column - static_cast<float>(column_of(i, 0)));
        }
    }
}

// The shifts of all rows; none of them where one lies across the position of its row.
__device__ __forceinline__ void find_shifts(const View& view, RowValues& shift) {
    bool beside = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) beside &= alibi_row(view, r).is_beside();
    if (!__all_sync(0xffffffffu, beside)) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) shift[r] = alibi_row(view, r).shift(view.lane);
}

}  // namespace cuflash
