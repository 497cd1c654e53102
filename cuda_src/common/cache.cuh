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

// The page that holds a key, as a batch's entries say, and its place in that page: both of 32 bits, as are keys.
struct PagedKey {
    int page;
    unsigned int place;

    PagedKey() = default;
    __device__ __forceinline__ PagedKey(const AttentionParams& params, const char* pages, unsigned int key) {
        const Divided entry(key, params.page_size);
        const char* const address = pages + entry.quotient * params.page_table_strides.head;
        place = entry.rest;
        // What most tables hold is taken as it is: nobody waits for it here.
        if (params.page_table_size == -4) page = load_bits<int>(address);
        else page = static_cast<int>(min(max(load_integer(address, params.page_table_size), -1LL), 0x7fffffffLL));
    }
    __device__ __forceinline__ bool exists(const AttentionParams& params) const {
        return 0 <= page && page < params.num_pages;
    }
    // Where it is read: where the table names no page, in the nearest one.
    __device__ __forceinline__ PagedKey readable(const AttentionParams& params) const {
        PagedKey nearest = *this;
        nearest.page = min(max(page, 0), static_cast<int>(params.num_pages) - 1);
        return nearest;
    }
    __device__ __forceinline__ long long offset(const Strides& strides) const {
        return static_cast<unsigned int>(page) * strides.batch + place * strides.row;
    }
};

// Where a key of a tile's sequence begins, or its value.
__device__ __forceinline__ const char* key_row(const AttentionParams& params, const TileMap& tile, const char* array,
                                               const Strides& strides, long long key) {
    if constexpr (kPaged) {
        const PagedKey found(params, tile.pages(), static_cast<unsigned int>(key));
        return array + found.readable(params).offset(strides);
    } else {
        return array + key * strides.row;
    }
}

}  // namespace cuflash
