// Rows of K and V that the threads of a warpgroup copy, tile after tile, the last keys first: one behind the other, or
// in pages.
#pragma once

#include "wgmma/panels.cuh"
#include "wgmma/place.cuh"

namespace cuflash {

// Bias and mask are read by longer runs of neighbouring keys than scores have as they come.
struct KeyOrder {
    static __device__ __forceinline__ constexpr int row_at(int place) { return kHasArrays ? key_of(place) : place; }
};
struct KeyCopies {
    PanelCopy<kHeadDim, KeyOrder> copy_k;
    PanelCopy<kHeadDimV, KeyOrder> copy_v;

    __device__ __forceinline__ KeyCopies(const AttentionParams& params, int thread)
        : copy_k(params.k_strides.row, params.head_dim, thread),
          copy_v(params.v_strides.row, params.head_dim_v, thread) {}
};

template <bool kInPages>
struct KeyRows : KeyCopies {
    const char *k, *v;  // the thread's part of the next tile

    __device__ __forceinline__ KeyRows(const AttentionParams& params, const Place& place, int thread)
        : KeyCopies(params, thread) {
        const long long first_key = place.walk.first_key(0);
        k = copy_k.own_part(place.tile.k + first_key * params.k_strides.row);
        v = copy_v.own_part(place.tile.v + first_key * params.v_strides.row);
    }
    __device__ __forceinline__ void look_up(int) {}
    __device__ __forceinline__ void find_tile() {}
    // The next tile's keys, of which there are so many.
    template <bool kWhole>
    __device__ __forceinline__ void copy_keys(Panels<kBlockN, kHeadDim>& target, int num_keys) {
        copy_k.load<kWhole>(target, k, num_keys);
        k -= kBlockN * copy_k.stride;
    }
    template <bool kWhole>
    __device__ __forceinline__ void copy_values(Panels<kBlockN, kHeadDimV>& target, int num_keys) {
        copy_v.load<kWhole>(target, v, num_keys);
        v -= kBlockN * copy_v.stride;
    }
};

// A lane looks up one key for all lanes of its warp that copy a part of it, a tile ahead: nobody but the first tile
// waits for the table. Called by all lanes of a warp.
template <>
struct KeyRows<true> : KeyCopies {
    const AttentionParams& params;
    const Place& place;
    int first_key;  // of the tile that is looked up next
    PagedKey looked_up, found;

    __device__ __forceinline__ KeyRows(const AttentionParams& params, const Place& place, int thread)
        : KeyCopies(params, thread),
          params(params),
          place(place),
          first_key(static_cast<int>(place.walk.first_key(0))) {}
    // Sends for what the table says of the next tile, which has so many keys. Behind the last one it is the first key.
    __device__ __forceinline__ void look_up(int num_keys) {
        const int thread = thread_index_again() % kGroupThreads, lane = thread % 32;
        const int row = lane / 4 * 16 + thread / 32 * 4 + lane % 4;  // of the tile, the one that the lane looks up
        const int key = max(first_key + min(KeyOrder::row_at(row), num_keys - 1), static_cast<int>(place.walk.begin));
        looked_up = PagedKey(params, place.tile.pages(), key);
        first_key -= kBlockN;
    }
    // Takes what was looked up: keys and values are copied from there.
    __device__ __forceinline__ void find_tile() { found = looked_up.readable(params); }
    template <bool kWhole>
    __device__ __forceinline__ void copy_keys(Panels<kBlockN, kHeadDim>& target, int num_keys) {
        copy<kWhole>(copy_k, target, place.tile.k, params.k_strides, num_keys);
    }
    template <bool kWhole>
    __device__ __forceinline__ void copy_values(Panels<kBlockN, kHeadDimV>& target, int num_keys) {
        copy<kWhole>(copy_v, target, place.tile.v, params.v_strides, num_keys);
    }

  private:
    template <bool kWhole, int kWidth>
    __device__ __forceinline__ void copy(const PanelCopy<kWidth, KeyOrder>& copied, Panels<kBlockN, kWidth>& target,
                                         const char* array, const Strides& strides, int num_keys) const {
        const char* const first = array + copied.piece * 16;
        const long long offset = found.offset(strides);
        const int lane = thread_index_again() % 32;
#pragma unroll
        for (int i = 0; i < kBlockN; i += copied.kStep) {
            const char* const row = first + __shfl_sync(0xffffffffu, offset, i / copied.kStep * 4 + lane / 8);
            copied.load_step(target, row, i, kWhole || copied.row + KeyOrder::row_at(i) < num_keys);
        }
    }
};

}  // namespace cuflash
