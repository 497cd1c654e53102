// Dense calls: from the number of a tile to its batch, head and rows, and the addresses of its arrays.
#pragma once

#include "common/sequence.cuh"

namespace cuflash {

// Where a batch of an array begins.
__device__ __forceinline__ const char* batch_address(const AttentionParams& params, const char* array,
                                                     const Strides& strides, long long batch) {
#pragma unroll 1
    for (int axis = kBatchAxes - 1; batch != 0; --axis) {
        const Divisor& length = params.batch_shape[axis];
        const long long rest = batch < length ? 0 : divide(batch, length);
        array += (batch - rest * length) * strides.batch[axis];
        batch = rest;
    }
    return array;
}

// A tile of a dense call: its batch, its first head, and where its rows begin.
struct DensePlace {
    long long batch;
    int head;
    long long m_block;
};

__device__ __forceinline__ DensePlace dense_place(const AttentionParams& params, long long tile_idx) {
    const long long num_planes = params.num_batches * params.head_tiles;
    long long plane, m_block;
    if (params.planes_at_once != 0) {
        const long long turn = tile_idx < params.tiles_at_once ? 0 : divide(tile_idx, params.tiles_at_once);
        const long long first_plane = turn * params.planes_at_once;
        const long long planes = num_planes - first_plane, rest = tile_idx - turn * params.tiles_at_once;
        const bool is_whole = planes >= params.planes_at_once;
        m_block = is_whole ? divide(rest, params.planes_at_once) : divide(rest, planes);
        plane = first_plane + rest - m_block * (is_whole ? params.planes_at_once : planes);
        m_block = params.num_m_blocks - 1 - m_block;
    } else {
        plane = divide(tile_idx, params.num_m_blocks);
        m_block = tile_idx - plane * params.num_m_blocks;
    }
    const bool counts_on = params.num_batches == 1 || params.heads_continue;
    const long long batch = counts_on ? 0 : divide(plane, params.head_tiles);
    return {batch, static_cast<int>((plane - batch * params.head_tiles) * params.packed_heads), m_block};
}

// Fills in the addresses of a dense call. One thread does this while the block waits.
__device__ __forceinline__ void map_arrays(const AttentionParams& params, const DensePlace& place, TileMap& tile) {
    const int head = place.head, head_kv = static_cast<int>(divide(head, params.group_size));
    tile.q = params.q + head * params.q_strides.head;
    tile.k = params.k + head_kv * params.k_strides.head;
    tile.v = params.v + head_kv * params.v_strides.head;
    tile.out = params.out + head * params.out_strides.head;
    tile.lse = params.lse + head * params.lse_strides.head;
    tile.bias = kBiasDtype != 0 ? params.bias + head * params.bias_strides.head : nullptr;
    tile.mask = kHasMask ? params.mask + head * params.mask_strides.head : nullptr;
    tile.alibi_slopes = kHasAlibi ? params.alibi_slopes + head * params.alibi_strides.head : nullptr;
    tile.sinks = params.sinks + head * params.sink_strides.head;
    long long batch = place.batch;
#pragma unroll 1
    for (int axis = kBatchAxes - 1; batch != 0; --axis) {
        const Divisor& length = params.batch_shape[axis];
        const long long rest = batch < length ? 0 : divide(batch, length);
        const long long index = batch - rest * length;
        batch = rest;
        tile.q += index * params.q_strides.batch[axis];
        tile.k += index * params.k_strides.batch[axis];
        tile.v += index * params.v_strides.batch[axis];
        tile.out += index * params.out_strides.batch[axis];
        tile.lse += index * params.lse_strides.batch[axis];
        if constexpr (kBiasDtype != 0) tile.bias += index * params.bias_strides.batch[axis];
        if constexpr (kHasMask) tile.mask += index * params.mask_strides.batch[axis];
        if constexpr (kHasAlibi) tile.alibi_slopes += index * params.alibi_strides.batch[axis];
        tile.sinks += index * params.sink_strides.batch[axis];
    }
}

__device__ __forceinline__ TileExtent dense_extent(const AttentionParams& params, const DensePlace& place) {
    long long query_offset = params.query_offset;
    if (params.query_offsets) {
        const char* address = batch_address(params, params.query_offsets, params.query_offset_strides, place.batch);
        // Beyond 2^60 every key is on one side, and open windows (2^61) reach across.
        query_offset = min(max(load_integer(address, params.query_offset_size), -(1LL << 60)), 1LL << 60);
    }
    return {params.seqlen_q,
            params.seqlen_k,
            query_offset,
            0,
            params.seqlen_k,
            place.m_block * kBlockM,
            params.seqlen_q * params.packed_heads};
}

}  // namespace cuflash
