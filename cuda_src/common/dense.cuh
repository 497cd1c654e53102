// Where a tile lies: the addresses of its arrays; and the lengths of dense calls.
#pragma once

#include "common/cache.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// Where a batch of an array begins, counted along all leading axes but the last. `number`: the array's.
static __device__ CUFLASH_ONE_COPY const char* outer_address(const AttentionParams& params, const char* array,
                                                             int number, unsigned int batch) {
#pragma unroll 1
    for (int axis = kBatchAxes - 2; batch != 0; --axis) {
        const Divided index(batch, params.outer_shape[axis]);
        array += index.rest * params.outer_strides[number].axes[axis];
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
    int number;
    const Strides& strides;
    const char* address;
    long long head_stride, batch_stride, row_stride;

    __device__ __forceinline__ LaneArray(const AttentionParams& params, int lane)
        : number(min(lane, last_array(params))),
          strides((&params.q_strides)[number]),
          address((&params.q)[number]),
          head_stride(strides.head),
          batch_stride(strides.batch),
          row_stride(strides.row) {}

    // Of those that are looked up, once more by all lanes behind it: arguments that the call does not need are not
    // read.
    __device__ __forceinline__ static int last_array(const AttentionParams& params) {
        // right either way: the others' address is null
        return kHasRowTerms || has_sink_per_head(params) ? kLastTileArray : kArrayLse;
    }
    // Called by all lanes of a warp while the block waits.
    __device__ __forceinline__ void map(const AttentionParams& params, const TilePlace& place, unsigned int split,
                                        TileMap& tile) {
        const bool is_of_keys = number == kArrayK || number == kArrayV;
        const int head_kv = static_cast<int>(Divided(place.head, params.group_size).quotient);
        address += (is_of_keys ? head_kv : place.head) * head_stride;
        if constexpr (kVarlen) {
            address += place.batch * batch_stride + (is_of_keys ? place.first_key : place.first_query) * row_stride;
        } else if (!kPaged || !is_of_keys) {
            const Divided index(place.batch, params.batch_shape);
            address += index.rest * batch_stride;
            // right either way: no axis is left
            if (index.quotient != 0) address = outer_address(params, address, number, index.quotient);
        }
        if (number == kArrayOut) address += split * params.out_split_stride;
        if (number == kArrayLse) address += split * params.lse_split_stride;
        if (thread_index_again() % 32 == number) (&tile.q)[number] = address;
        if (kPaged && number == 0) tile.set_pages(pages_of(params, place.batch));
    }
};

__device__ __forceinline__ long long offset_of_batch(const AttentionParams& params, unsigned int batch) {
    const Divided index(batch, params.batch_shape);
    const char* const address = params.query_offset + index.rest * params.query_offset_strides.batch;
    const char* const outer = outer_address(params, address, kArrayQueryOffset, index.quotient);
    // Beyond 2^60 every key is on one side, and open windows (2^61) reach across.
    return min(max(load_integer(outer, params.query_offset_size), -(1LL << 60)), 1LL << 60);
}

__device__ __forceinline__ TileExtent dense_extent(const AttentionParams& params, const TilePlace& place) {
    long long query_offset = params.query_offset_value;
    if constexpr (kHasOffsets) query_offset = offset_of_batch(params, place.batch);
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
