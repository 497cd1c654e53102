// Which keys a query sees by its position: causal, window, lengths, and the split of the keys that its block works on.
// (The mask and bias arrays are read in score.cuh.)
#pragma once

#include "common/dense.cuh"

namespace cuflash {

// Keys begin <= j < end; empty when end <= begin.
struct KeyRange {
    long long begin;
    long long end;
};

constexpr long long kOpenWindow = 1LL << 61;  // reaches across, whatever the offset is

__device__ __forceinline__ KeyRange visible_keys(const AttentionParams& params, const TileExtent& tile,
                                                 long long query) {
    const long long position = query + tile.query_offset;
    return {max(position - params.window_left, tile.key_begin), min(position + params.window_right + 1, tile.key_end)};
}

// Columns of the key tile from `n_begin` on that one of the tile's rows sees by its position: begin <= column < end.
struct ColumnRange {
    int begin;
    int end;

    __device__ __forceinline__ bool has(int column) const { return begin <= column && column < end; }
};

__device__ __forceinline__ ColumnRange columns_of(KeyRange visible, long long n_begin) {
    return {static_cast<int>(max(visible.begin - n_begin, 0LL)),
            static_cast<int>(min(visible.end - n_begin, static_cast<long long>(kBlockN)))};
}

__device__ __forceinline__ ColumnRange visible_columns(const AttentionParams& params, const TileMap& tile, int tile_row,
                                                       long long n_begin) {
    return columns_of(visible_keys(params, tile, row_at(params, tile, tile_row).query), n_begin);
}

// Ranges that hold for a whole tile. Both ends of a row's range grow with its query, so the first and the last row
// decide.
struct TileKeys {
    KeyRange any;  // outside: no row sees the key
    KeyRange all;  // inside: every row does
};

__device__ __forceinline__ TileKeys tile_keys(const AttentionParams& params, const TileExtent& tile) {
    if (params.window_left >= kOpenWindow && params.window_right >= kOpenWindow) {
        const KeyRange every = {tile.key_begin, tile.key_end};
        return {every, every};
    }
    long long first_query = tile.row_begin;
    long long last_query = min(first_query + kBlockM, tile.num_rows) - 1;
    if (params.packed_heads != 1) {
        first_query = divide(first_query, params.packed_heads);
        last_query = divide(last_query, params.packed_heads);
    }
    const KeyRange first = visible_keys(params, tile, first_query);
    const KeyRange last = visible_keys(params, tile, last_query);
    return {{first.begin, last.end}, {last.begin, first.end}};
}

// Leaves the block one part of the keys that its tile sees: one more bound on what its rows see, so that kernels need
// no other loop, and rows that see nothing of it give 0 and -inf. Borders are multiples of kBlockN from key 0, for
// kernels that walk whole tiles from there; all parts but the last ones are equally long.
__device__ __forceinline__ void take_split(const AttentionParams& params, long long split, TileMap& tile,
                                           TileKeys& keys) {
    const long long first = keys.any.begin / kBlockN;
    const long long num_tiles = (keys.any.end + kBlockN - 1) / kBlockN - first;
    const long long num_keys = divide(num_tiles + params.num_splits - 1, params.num_splits) * kBlockN;
    tile.key_begin = first * kBlockN + split * num_keys;
    tile.key_end = min(tile.key_end, tile.key_begin + num_keys);
    keys.any = {max(keys.any.begin, tile.key_begin), min(keys.any.end, tile.key_end)};
    keys.all = {max(keys.all.begin, tile.key_begin), min(keys.all.end, tile.key_end)};
    tile.out += split * params.out_split_stride;
    tile.lse += split * params.lse_split_stride;
    if (split != 0) tile.sinks = nullptr;  // one more logit per row, not per part
}

// Fills `tile` for this block, visible to others after a barrier; tile.num_rows is 0 if it has nothing to do. Called by
// all threads of warp 0; true for one of them, which has `keys` too.
//
// The splits of a tile are neighbours in the grid, which leaves tiles in their order, longest first. Other orders would
// not help L2: splits are for grids that are resident as a whole.
__device__ __forceinline__ bool map_block(const AttentionParams& params, TileMap& tile, TileKeys& keys) {
    const long long block = params.first_block + blockIdx.x;
    const bool is_split = params.num_splits > 1;
    const long long tile_idx = is_split ? divide(block, params.num_splits) : block;
    TileMap mapped;
    if constexpr (kVarlen) {
        if (threadIdx.x == 0) tile.num_rows = 0;
        __syncwarp();
        if (!map_packed_tile(params, tile_idx, mapped)) return false;
    } else {
        if (threadIdx.x != 0) return false;
        const DensePlace place = dense_place(params, tile_idx);
        map_arrays(params, place, mapped);
        static_cast<TileExtent&>(mapped) = dense_extent(params, place);
    }
    keys = tile_keys(params, mapped);
    if (is_split) take_split(params, block - tile_idx * params.num_splits, mapped, keys);
    tile = mapped;
    return true;
}

}  // namespace cuflash
