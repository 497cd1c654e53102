// The row map: which head, query and output row a row of a tile stands for - dense or packed sequences, one head per
// tile or the query heads of a group packed into it. Everything after this header works per row and does not know the
// difference.
#pragma once

#include "common/heads.cuh"

namespace cuflash {

// Lengths and ranges of one block's share of the work.
struct TileExtent {
    long long seqlen_q;
    long long seqlen_k;
    long long query_offset;
    long long key_begin;  // keys that the block is to look at, at most: all of them, or its split
    long long key_end;
    long long row_begin;  // first row of the tile, counted over queries x packed heads
    long long num_rows;   // rows of the whole sequence; 0: the block has nothing to do
};

// Where a batch's entries of the page table begin, for calls that have one; it takes no room in others.
template <bool kIsThere>
struct Pages {
    __device__ __forceinline__ void set_pages(const char*) {}
    __device__ __forceinline__ const char* pages() const { return nullptr; }
};
template <>
struct Pages<true> {
    const char* entries;

    __device__ __forceinline__ void set_pages(const char* address) { entries = address; }
    __device__ __forceinline__ const char* pages() const { return entries; }
};

// The same with the arrays. Addresses point at the batch, the first head and the first token of the sequence; those of
// arrays that the call has not are null, as their strides are 0.
struct TileMap : TileExtent, Pages<kPaged> {
    const char* q;
    const char* k;
    const char* v;
    char* out;
    char* lse;
    const char* bias;
    const char* mask;
    HeadValues per_head;
};
constexpr int kTileArrays = 9;  // their addresses, in the order of AttentionParams, and two of them
constexpr int kTileArrayK = 1, kTileArrayV = 2;

// Query and head (relative to the tile's first) of one tile row.
struct Row {
    long long query;
    int head;
    bool valid;
};

__device__ __forceinline__ Row row_at(const AttentionParams& params, const TileExtent& tile, int tile_row) {
    const long long row = tile.row_begin + tile_row;
    if (params.packed_heads == 1)  // right either way: a division by 1
        return {row, 0, row < tile.num_rows};
    const long long query = divide(row, params.packed_heads);
    return {query, static_cast<int>(row - query * params.packed_heads), row < tile.num_rows};
}

// Where the query of a tile row begins; null for rows behind the last one.
__device__ __forceinline__ const char* query_row(const AttentionParams& params, const TileMap& tile, int tile_row) {
    const Row row = row_at(params, tile, tile_row);
    return row.valid ? tile.q + row.head * params.q_strides.head + row.query * params.q_strides.row : nullptr;
}

// Rows from `row` on that the sequence has, as far as a tile reaches.
__device__ __forceinline__ int rows_left(const TileExtent& tile, long long row) {
    // right either way: it only keeps the cast in range
    return static_cast<int>(min(tile.num_rows - row, static_cast<long long>(kBlockM)));
}

}  // namespace cuflash
