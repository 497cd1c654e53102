// The row map: which head, query and output row a row of a tile stands for - dense or packed sequences, one head per
// tile or the query heads of a group packed into it. Everything after this header works per row and does not know the
// difference.
#pragma once

#include "common/segment.cuh"

namespace cuflash {

// One block's share of the work. Addresses point at the batch, the first head and the first token of the sequence;
// those of arrays that the call has not are null, as their strides are 0.
struct TileMap {
    const char* q;
    const char* k;
    const char* v;
    char* out;
    char* lse;
    const char* bias;
    const char* mask;
    const char* alibi_slopes;
    const char* sinks;  // null also for rows that belong to no sequence
    long long seqlen_q;
    long long seqlen_k;
    long long query_offset;
    long long key_begin;  // keys that the block is to look at, at most: all of them, or its split
    long long key_end;
    long long row_begin;  // first row of the tile, counted over queries x packed heads
    long long num_rows;   // rows of the whole sequence; 0: the block has nothing to do
};

// Query and head (relative to the tile's first) of one tile row.
struct Row {
    long long query;
    int head;
    bool valid;
};

__device__ __forceinline__ Row row_at(const AttentionParams& params, const TileMap& tile, int tile_row) {
    const long long row = tile.row_begin + tile_row;
    if (params.packed_heads == 1) return {row, 0, row < tile.num_rows};
    const long long query = divide(row, params.packed_heads);
    return {query, static_cast<int>(row - query * params.packed_heads), row < tile.num_rows};
}

__device__ __forceinline__ void map_packed_sequence(const AttentionParams& params, const Segment& segment, int head,
                                                    TileMap& tile) {
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
    const int head_kv = head / params.group_size;
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
}

// One thread does this while the block waits, hence no step for what the call has not.
__device__ __forceinline__ void map_dense(const AttentionParams& params, long long batch, int head, long long m_block,
                                          TileMap& tile) {
    long long at[kBatchAxes] = {};
    if (params.num_batches > 1) {
#pragma unroll
        for (int axis = kBatchAxes - 1; axis >= 0; --axis) {
            if (params.batch_shape[axis] == 1) continue;
            const long long rest = divide(batch, params.batch_shape[axis]);
            at[axis] = batch - rest * params.batch_shape[axis];
            batch = rest;
        }
    }
    const auto offset = [&](const Strides& strides, int head_idx) {
        return (params.num_batches > 1 ? batch_offset(strides, at) : 0) + head_idx * strides.head;
    };
    const int head_kv = params.group_size == 1 ? head : head / params.group_size;
    tile.q = params.q + offset(params.q_strides, head);
    tile.k = params.k + offset(params.k_strides, head_kv);
    tile.v = params.v + offset(params.v_strides, head_kv);
    tile.out = params.out + offset(params.out_strides, head);
    tile.lse = params.lse ? params.lse + offset(params.lse_strides, head) : nullptr;
    tile.bias = kBiasDtype != 0 ? params.bias + offset(params.bias_strides, head) : nullptr;
    tile.mask = kHasMask ? params.mask + offset(params.mask_strides, head) : nullptr;
    tile.alibi_slopes = kHasAlibi ? params.alibi_slopes + offset(params.alibi_strides, head) : nullptr;
    tile.sinks = params.sinks ? params.sinks + offset(params.sink_strides, head) : nullptr;
    tile.seqlen_q = params.seqlen_q;
    tile.seqlen_k = params.seqlen_k;
    tile.query_offset = params.query_offset;
    if (params.query_offsets) {
        const char* address = params.query_offsets + batch_offset(params.query_offset_strides, at);
        // Beyond 2^60 every key is on one side, and open windows (2^61) reach across.
        tile.query_offset = min(max(load_integer(address, params.query_offset_size), -(1LL << 60)), 1LL << 60);
    }
    tile.key_begin = 0;
    tile.key_end = tile.seqlen_k;
    tile.row_begin = m_block * kBlockM;
    tile.num_rows = params.seqlen_q * params.packed_heads;
}

// Fills `tile` with tile number `block`. Called by all threads of warp 0; true for the one that has written it.
__device__ __forceinline__ bool map_tile(const AttentionParams& params, long long block, TileMap& tile) {
    const int num_head_tiles = params.num_heads_q / params.packed_heads;
    if constexpr (kVarlen) {
        const long long tile_idx = divide(block, num_head_tiles);
        const int head = static_cast<int>(block - tile_idx * num_head_tiles) * params.packed_heads;
        if (threadIdx.x == 0) tile.num_rows = 0;
        __syncwarp();
        Segment segment;
        const bool found = find_segment(params, tile_idx, segment);
        if (found) map_packed_sequence(params, segment, head, tile);
        return found;
    } else if (threadIdx.x == 0) {
        const long long num_planes = params.num_batches * num_head_tiles;
        long long m_block, plane;
        if (params.longest_first) {
            m_block = divide(block, num_planes);
            plane = block - m_block * num_planes;
            m_block = params.num_m_blocks - 1 - m_block;
        } else {
            plane = divide(block, params.num_m_blocks);
            m_block = block - plane * params.num_m_blocks;
        }
        const long long batch = divide(plane, num_head_tiles);
        map_dense(params, batch, static_cast<int>(plane - batch * num_head_tiles) * params.packed_heads, m_block, tile);
    }
    return threadIdx.x == 0;
}

}  // namespace cuflash
