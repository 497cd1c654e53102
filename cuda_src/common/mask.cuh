// Which keys a query sees by its position: causal, window, lengths. (The mask and bias arrays are read in score.cuh.)
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
    return {max(position - params.window_left, 0LL), min(position + params.window_right + 1, tile.seqlen_k)};
}

// Columns of the key tile from `n_begin` on that one of the tile's rows sees by its position: begin <= column < end.
struct ColumnRange {
    int begin;
    int end;

    __device__ __forceinline__ bool has(int column) const { return begin <= column && column < end; }
};

__device__ __forceinline__ ColumnRange visible_columns(const AttentionParams& params, const TileMap& tile, int tile_row,
                                                       long long n_begin) {
    const KeyRange visible = visible_keys(params, tile, row_at(params, tile, tile_row).query);
    return {static_cast<int>(max(visible.begin - n_begin, 0LL)),
            static_cast<int>(min(visible.end - n_begin, static_cast<long long>(kBlockN)))};
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

}  // namespace cuflash
