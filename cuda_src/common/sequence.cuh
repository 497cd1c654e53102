// The row map: which head, query and output row a row of a tile stands for - dense or packed sequences, one head per
// tile or the query heads of a group packed into it. Everything after this header works per row and does not know the
// difference.
#pragma once

#include "common/segment.cuh"

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

// The same with the arrays. Addresses point at the batch, the first head and the first token of the sequence; those of
// arrays that the call has not are null, as their strides are 0.
struct TileMap : TileExtent {
    const char* q;
    const char* k;
    const char* v;
    char* out;
    char* lse;
    const char* bias;
    const char* mask;
    const char* alibi_slopes;
    const char* sinks;  // null also for rows that belong to no sequence
};

// Query and head (relative to the tile's first) of one tile row.
struct Row {
    long long query;
    int head;
    bool valid;
};

__device__ __forceinline__ Row row_at(const AttentionParams& params, const TileExtent& tile, int tile_row) {
    const long long row = tile.row_begin + tile_row;
    if (params.packed_heads == 1) return {row, 0, row < tile.num_rows};
    const long long query = divide(row, params.packed_heads);
    return {query, static_cast<int>(row - query * params.packed_heads), row < tile.num_rows};
}

// Rows from `row` on that the sequence has, as far as a tile reaches.
__device__ __forceinline__ int rows_left(const TileExtent& tile, long long row) {
    return static_cast<int>(min(tile.num_rows - row, static_cast<long long>(kBlockM)));
}

// Fills `tile` with a tile of packed sequences. Called by all threads of warp 0; true for the one that has done it.
__device__ __forceinline__ bool map_packed_tile(const AttentionParams& params, long long tile_idx, TileMap& tile) {
    const long long segment_tile = divide(tile_idx, params.head_tiles);
    const int head = static_cast<int>((tile_idx - segment_tile * params.head_tiles) * params.packed_heads);
    Segment segment;
    if (!find_segment(params, segment_tile, segment)) return false;
    const long long begin_q = segment.begin;
    const bool is_sequence = segment.index >= 0 && segment.index < params.num_sequences;
    long long begin_k = 0;
    long long end_k = 0;
    if (is_sequence) {
        const char* boundaries = params.cu_seqlens_k + segment.index * params.cu_seqlens_k_stride;
        begin_k = min(max(load_integer(boundaries, params.cu_seqlens_k_size), 0LL), params.seqlen_k);
        end_k = load_integer(boundaries + params.cu_seqlens_k_stride, params.cu_seqlens_k_size);
        end_k = min(max(end_k, begin_k), params.seqlen_k);
    }
    const int head_kv = static_cast<int>(divide(head, params.group_size));
    const long long sequence = is_sequence ? segment.index : 0;
    tile.q = params.q + head * params.q_strides.head + begin_q * params.q_strides.row;
    tile.k = params.k + head_kv * params.k_strides.head + begin_k * params.k_strides.row;
    tile.v = params.v + head_kv * params.v_strides.head + begin_k * params.v_strides.row;
    tile.out = params.out + head * params.out_strides.head + begin_q * params.out_strides.row;
    tile.lse = params.lse + head * params.lse_strides.head + begin_q * params.lse_strides.row;
    tile.bias = nullptr;
    tile.mask = nullptr;
    tile.alibi_slopes =
        params.alibi_slopes + sequence * params.alibi_strides.batch[0] + head * params.alibi_strides.head;
    tile.sinks = is_sequence ? params.sinks + sequence * params.sink_strides.batch[0] + head * params.sink_strides.head
                             : nullptr;
    tile.seqlen_q = segment.end - segment.begin;
    tile.seqlen_k = end_k - begin_k;
    tile.query_offset = params.offset_from_lengths ? tile.seqlen_k - tile.seqlen_q : params.query_offset;
    tile.key_begin = 0;
    tile.key_end = tile.seqlen_k;
    tile.row_begin = segment.tile * kBlockM;
    tile.num_rows = tile.seqlen_q * params.packed_heads;
    return true;
}

}  // namespace cuflash
