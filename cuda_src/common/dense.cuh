// Dense calls: the lengths of a tile of some batch, head and rows, and the addresses of its arrays.
#pragma once

#include "common/cache.cuh"

namespace cuflash {

// Where a batch of an array begins.
__device__ __forceinline__ const char* batch_address(const AttentionParams& params, const char* array,
                                                     const Strides& strides, long long batch) {
#pragma unroll 1
    for (int axis = kBatchAxes - 1; batch != 0; --axis) {
        const Divisor& length = params.batch_shape[axis];
        // right either way: the division gives 0 too
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
    tile.per_head = head_values(params, head);
    if constexpr (kPaged) tile.set_pages(pages_of(params, place.batch));
    long long batch = place.batch;
#pragma unroll 1
    for (int axis = kBatchAxes - 1; batch != 0; --axis) {
        const Divisor& length = params.batch_shape[axis];
        // right either way: the division gives 0 too
        const long long rest = batch < length ? 0 : divide(batch, length);
        const long long index = batch - rest * length;
        batch = rest;
        tile.q += index * params.q_strides.batch[axis];
        if constexpr (!kPaged) tile.k += index * params.k_strides.batch[axis];
        if constexpr (!kPaged) tile.v += index * params.v_strides.batch[axis];
        tile.out += index * params.out_strides.batch[axis];
        tile.lse += index * params.lse_strides.batch[axis];
        if constexpr (kBiasDtype != 0) tile.bias += index * params.bias_strides.batch[axis];
        if constexpr (kHasMask) tile.mask += index * params.mask_strides.batch[axis];
        tile.per_head.advance(params, axis, index);
    }
}

__device__ __forceinline__ TileExtent dense_extent(const AttentionParams& params, const DensePlace& place) {
    long long query_offset = params.query_offset_value;
    if (params.query_offset) {
        const char* address = batch_address(params, params.query_offset, params.query_offset_strides, place.batch);
        // Beyond 2^60 every key is on one side, and open windows (2^61) reach across.
        query_offset = min(max(load_integer(address, params.query_offset_size), -(1LL << 60)), 1LL << 60);
    }
    long long seqlen_k = params.seqlen_k;
    if constexpr (kHasLengths) {
        seqlen_k = min(cached_keys(params, place.batch) + params.seqlen_new, seqlen_k);
        if (params.offset_from_lengths) query_offset = seqlen_k - params.seqlen_q;
    }
    return {params.seqlen_q,
            seqlen_k,
            query_offset,
            0,
            seqlen_k,
            place.m_block * kBlockM,
            params.seqlen_q * params.packed_heads};
}

}  // namespace cuflash
