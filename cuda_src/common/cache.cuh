// A cache of keys and values: how many keys each batch has, and where those lie that are in pages.
#pragma once

#include "common/rows.cuh"

namespace cuflash {

// Keys of a batch before new ones are appended; no more than there is room for, whatever the array holds. A call with a
// cache has one leading axis.
__device__ __forceinline__ long long cached_keys(const AttentionParams& params, long long batch) {
    if constexpr (!kHasLengths) return params.seqlen_k - params.seqlen_new;
    const char* address = params.seqlens_k + batch * params.seqlens_k_strides.batch;
    return min(max(load_integer(address, params.seqlens_k_size), 0LL), params.seqlen_k);
}

// Where a batch's entries of the page table begin.
__device__ __forceinline__ const char* pages_of(const AttentionParams& params, long long batch) {
    return params.page_table + batch * params.page_table_strides.batch;
}

// The page that holds a key, as a batch's entries say, and its place in that page.
struct PagedKey {
    long long page;
    long long place;

    __device__ __forceinline__ PagedKey(const AttentionParams& params, const char* pages, long long key) {
        const long long entry = divide(key, params.page_size);
        page = load_integer(pages + entry * params.page_table_strides.head, params.page_table_size);
        place = key - entry * params.page_size;
    }
    __device__ __forceinline__ bool exists(const AttentionParams& params) const {
        return 0 <= page && page < params.num_pages;
    }
    __device__ __forceinline__ long long offset(const Strides& strides) const {
        return page * strides.batch + place * strides.row;
    }
};

// Where a key of a tile's sequence is read: where the table names no page, in the nearest one.
__device__ __forceinline__ PagedKey readable_key(const AttentionParams& params, const TileMap& tile, long long key) {
    PagedKey found(params, tile.pages(), key);
    found.page = min(max(found.page, 0LL), params.num_pages - 1);
    return found;
}

// Where a key of a tile's sequence begins, or its value.
__device__ __forceinline__ const char* key_row(const AttentionParams& params, const TileMap& tile, const char* array,
                                               const Strides& strides, long long key) {
    if constexpr (kPaged) {
        return array + readable_key(params, tile, key).offset(strides);
    } else {
        return array + key * strides.row;
    }
}

}  // namespace cuflash
