// Which keys a query sees by its position: causal, window, lengths, and the split of the keys that its block works on.
// (The mask and bias arrays are read in score.cuh.)
#pragma once

#include "common/sequence.cuh"

namespace cuflash {

// Keys begin <= j < end; empty when end <= begin.
struct KeyRange {
    long long begin;
    long long end;
};

__device__ __forceinline__ KeyRange visible_keys(const AttentionParams& params, const TileMap& tile, long long query) {
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

__device__ __forceinline__ TileKeys tile_keys(const AttentionParams& params, const TileMap& tile) {
    const int last_row = static_cast<int>(min(tile.num_rows - tile.row_begin, static_cast<long long>(kBlockM))) - 1;
    const KeyRange first = visible_keys(params, tile, row_at(params, tile, 0).query);
    const KeyRange last = visible_keys(params, tile, row_at(params, tile, last_row).query);
    return {{first.begin, last.end}, {last.begin, first.end}};
}

// Leaves the block one part of the keys that its tile sees: one more bound on what its rows see, so that kernels need
// no other loop, and rows that see nothing of it give 0 and -inf. Borders are multiples of kBlockN from key 0, for
// kernels that walk whole tiles from there; all parts but the last ones are equally long.
__device__ __forceinline__ void take_split(const AttentionParams& params, long long split, TileMap& tile) {
    const KeyRange any = tile_keys(params, tile).any;
    const long long first = any.begin / kBlockN;
    const long long num_tiles = (any.end + kBlockN - 1) / kBlockN - first;
    const long long num_keys = divide(num_tiles + params.num_splits - 1, params.num_splits) * kBlockN;
    tile.key_begin = first * kBlockN + split * num_keys;
    tile.key_end = min(tile.key_end, tile.key_begin + num_keys);
    tile.out += split * params.out_split_stride;
    tile.lse += split * params.lse_split_stride;
    if (split != 0) tile.sinks = nullptr;  // one more logit per row, not per part
}

// Fills `tile` for this block. Called by all threads of warp 0; visible to the others after a barrier.
//
// The splits of a tile are neighbours in the grid, which leaves tiles in their order, longest first. Other orders would
// not help L2: splits are for grids that are resident as a whole.
__device__ __forceinline__ void map_block(const AttentionParams& params, TileMap& tile) {
    const long long block = params.first_block + blockIdx.x;
    const long long tile_idx = divide(block, params.num_splits);
    const bool mapped = map_tile(params, tile_idx, tile);
    if (mapped && params.num_splits > 1) take_split(params, block - tile_idx * params.num_splits, tile);
}

}  // namespace cuflash
