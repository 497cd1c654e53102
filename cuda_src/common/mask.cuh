// Which keys a query sees by its position: causal, window, lengths. (Mask and bias arrays: bias_mask.cuh.)
#pragma once

#include "common/rows.cuh"

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
    __device__ __forceinline__ ColumnRange counted_from(int column) const { return {begin - column, end - column}; }
};

__device__ __forceinline__ ColumnRange columns_of(KeyRange visible, long long n_begin) {
    // right either way: it only keeps the cast in range
    return {static_cast<int>(max(visible.begin - n_begin, 0LL)),
            // right either way: it only keeps the cast in range
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

    // Whether some row may not see all of so many keys, from `first` on.
    __device__ __forceinline__ bool at_edge(long long first, int num_keys) const {
        return first < all.begin || first + num_keys > all.end;
    }
    // Keys of a tile, from `first` on, in front of the last that some row sees.
    __device__ __forceinline__ int count_from(long long first) const {
        // right either way: it only keeps the cast in range
        return static_cast<int>(min(any.end - first, static_cast<long long>(kBlockN)));
    }
};

__device__ __forceinline__ TileKeys tile_keys(const AttentionParams& params, const TileExtent& tile) {
    const KeyRange first = visible_keys(params, tile, tile.first_query);
    const KeyRange last = visible_keys(params, tile, find_row(params, tile, tile.num_rows - 1).query);
    return {{first.begin, last.end}, {last.begin, first.end}};
}

}  // namespace cuflash
