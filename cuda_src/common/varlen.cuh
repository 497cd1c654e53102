// Tiles of packed sequences: the addresses of their arrays.
#pragma once

#include "common/rows.cuh"
#include "common/segments.cuh"

namespace cuflash {

// Fills `tile` with a tile of packed sequences. Called by all threads of warp 0; true for the one that has done it.
__device__ __forceinline__ bool map_packed_tile(const AttentionParams& params, long long tile_idx, TileMap& tile) {
    const long long segment_tile = divide(tile_idx, params.head_tiles);
    const int head = static_cast<int>((tile_idx - segment_tile * params.head_tiles) * params.packed_heads);
    Segment segment;
    const PackedSequences packed = {params.cu_seqlens_q,      params.cu_seqlens_q_stride,
                                    params.cu_seqlens_q_size, params.num_sequences,
                                    params.seqlen_q,          params.packed_heads};
    if (!find_segment(packed, segment_tile, segment)) return false;
    const long long begin_q = segment.begin;
    const bool is_sequence = segment.index >= 0 && segment.index < params.num_sequences;
    long long begin_k = 0;
    long long end_k = 0;
    if (is_sequence) {
        const char* boundaries = params.cu_seqlens_k + segment.index * params.cu_seqlens_k_stride;
        begin_k = max(load_integer(boundaries, params.cu_seqlens_k_size), 0LL);
        end_k = min(load_integer(boundaries + params.cu_seqlens_k_stride, params.cu_seqlens_k_size), params.seqlen_k);
        end_k = max(end_k, begin_k);  // right either way: less than no keys are none
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
    tile.per_head = head_values(params, head, sequence, is_sequence);
    tile.seqlen_q = segment.end - segment.begin;
    tile.seqlen_k = end_k - begin_k;
    tile.query_offset = params.offset_from_lengths ? tile.seqlen_k - tile.seqlen_q : params.query_offset_value;
    tile.key_begin = 0;
    tile.key_end = tile.seqlen_k;
    tile.row_begin = segment.tile * kBlockM;
    tile.num_rows = tile.seqlen_q * params.packed_heads;
    return true;
}

}  // namespace cuflash
