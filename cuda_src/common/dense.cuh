// Where a tile lies: the addresses of its arrays; and the lengths of dense calls.
#pragma once

#include "common/cache.cuh"

namespace cuflash {

// Where a batch of an array begins, counted along the axes up to `axis`.
static __device__ CUFLASH_ONE_COPY const char* batch_address(const AttentionParams& params, const char* array,
                                                             const Strides& strides, unsigned int batch,
                                                             int axis = kBatchAxes - 1) {
#pragma unroll 1
    for (; batch != 0; --axis) {
        const Divided index(batch, params.batch_shape[axis]);
        array += index.rest * strides.batch[axis];
        batch = index.quotient;
    }
    return array;
}

// A tile's batch or sequence, its first head, its number among those of a head, and where its sequence begins.
struct TilePlace {
    unsigned int batch;
    int head;
    unsigned int m_block;
    long long first_query, first_key;
};

// An array as a lane finds its address for a tile: the arrays, their strides and their addresses follow each other in
// the same order. What it takes from memory does not wait for the place of the tile.
struct LaneArray {
    const Strides& strides;
    const char* address;
    long long head_stride, batch_stride, row_stride;
    int number;

    __device__ __forceinline__ LaneArray(const AttentionParams& params, int lane)
        // right either way: lanes beyond the last array find nothing
        : strides((&params.q_strides)[min(lane, kTileArrays - 1)]),
          // right either way: lanes beyond the last array find nothing
          address((&params.q)[min(lane, kTileArrays - 1)]),
          head_stride(strides.head),
          batch_stride(strides.batch[kBatchAxes - 1]),
          row_stride(strides.row),
          number(lane) {}

    // Called by all lanes of a warp while the block waits.
    __device__ __forceinline__ void map(const AttentionParams& params, const TilePlace& place, unsigned int split,
                                        TileMap& tile) {
        const bool is_of_keys = number == kTileArrayK || number == kTileArrayV;
        const int head_kv = static_cast<int>(Divided(place.head, params.group_size).quotient);
        address += (is_of_keys ? head_kv : place.head) * head_stride;
        if constexpr (kVarlen) {
            address += place.batch * batch_stride + (is_of_keys ? place.first_key : place.first_query) * row_stride;
        } else if (!kPaged || !is_of_keys) {
            const Divided index(place.batch, params.batch_shape[kBatchAxes - 1]);
            address += index.rest * batch_stride;
            // right either way: no axis is left
            if (index.quotient != 0) address = batch_address(params, address, strides, index.quotient, kBatchAxes - 2);
        }
        if (number == kTileArrayOut) address += split * params.out_split_stride;
        if (number == kTileArrayLse) address += split * params.lse_split_stride;
        if (number < kTileArrays) (&tile.q)[number] = address;
        if (kPaged && number == 0) tile.set_pages(pages_of(params, place.batch));
    }
};

// Apart from the way of most calls: a block that begins waits for all instructions that lie there.
static __device__ CUFLASH_ONE_COPY long long offset_of_batch(const AttentionParams& params, unsigned int batch) {
    const char* address = batch_address(params, params.query_offset, params.query_offset_strides, batch);
    // Beyond 2^60 every key is on one side, and open windows (2^61) reach across.
    return min(max(load_integer(address, params.query_offset_size), -(1LL << 60)), 1LL << 60);
}

__device__ __forceinline__ TileExtent dense_extent(const AttentionParams& params, const TilePlace& place) {
    long long query_offset = params.query_offset_value;
    if (params.query_offset) query_offset = offset_of_batch(params, place.batch);
    long long seqlen_k = params.seqlen_k;
    if constexpr (kHasLengths) {
        seqlen_k = min(cached_keys(params, place.batch) + params.seqlen_new, seqlen_k);
        if (params.offset_from_lengths) query_offset = seqlen_k - params.seqlen_q;
    }
    TileExtent extent = {params.seqlen_q, seqlen_k, query_offset, 0, seqlen_k};
    extent.begin_at(params, place.m_block);
    return extent;
}

}  // namespace cuflash
