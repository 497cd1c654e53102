// Rows of q, k and v on their way to the tensor cores.
#pragma once

#include "common/mask.cuh"
#include "decode/layout.cuh"
#include "decode/steps.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// Queries, as a lane of any warp multiplies them: words of its two rows by turns.
using SharedQueries = Words[kHeadDim / 32][2][32];

// Sends for them, each warp for some. Features and rows behind the last are zeros.
__device__ __forceinline__ void send_for_queries(const AttentionParams& params, const TileMap& tile, const Place& place,
                                                 SharedQueries& q) {
    const char* addresses[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) addresses[r] = query_row(params, tile, find_row(params, tile, place.tile_row(r)));
#pragma unroll
    for (int vector = threadIdx.x / 32; vector < kHeadDim / 32; vector += kThreads / 32) {
        const int feature = vector * 32 + place.quarter * 8;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const bool is_there = addresses[r] && feature < params.head_dim;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                cp_async_4(&q[vector][i / 2][place.lane].at[i % 2 * 2 + r], addresses[r] + feature * 2 + i * 4,
                           is_there);
        }
    }
}

// Where the key of a step that has the lane's number lies in its array, and its value: in pages. To find a page takes a
// division and a load, so lanes do it for each other, and two steps ahead: nobody waits for the table.
struct Places {
    long long k, v;
};

// Keys and values. Rows that no query sees are read as the nearest one that some query sees, and features of a value
// behind the last as the first ones of the lane: they count nothing, and 0 x NaN is NaN. Those of a key are zeros.
struct Reader {
    const AttentionParams& params;
    const TileMap& tile;
    const KeyRange& seen;  // some row sees them
    Place place;

    // What the table of pages says of a step, once it is there.
    __device__ __forceinline__ PagedKey look_up(long long n_begin) const {
        if constexpr (!kPaged) return {};
        const unsigned int key = static_cast<unsigned int>(n_begin) + place.lane % kBlockN;
        const unsigned int first = static_cast<unsigned int>(seen.begin), end = static_cast<unsigned int>(seen.end);
        return PagedKey(params, tile.pages(), min(max(key, first), end - 1));
    }
    __device__ __forceinline__ Places find(const PagedKey& looked_up) const {
        if constexpr (!kPaged) return {};
        const PagedKey found = looked_up.readable(params);
        return {found.offset(params.k_strides), found.offset(params.v_strides)};
    }
    __device__ __forceinline__ void load_keys(Keys& k, long long n_begin, const StepKeys& keys,
                                              const Places& places) const {
        const char* const first = first_row(tile.k, params.k_strides, n_begin, place.feature_k(0));
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
            const char* row = row_of(first, params.k_strides, keys, place.key_k(j), places.k);
#pragma unroll
            for (int c = 0; c < kVectorsK; ++c) {
                const char* address = row + (place.feature_k(c) - place.feature_k(0)) * 2;
                if (c < kVectorsK - 2) k[j][c] = load_once(address);
                else k[j][c] = load_once_if(place.feature_k(c) < params.head_dim, address);
            }
        }
    }
    __device__ __forceinline__ void load_values(Values& v, long long n_begin, const StepKeys& keys,
                                                const Places& places) const {
        const bool has_first = kVectorsV > 1 || place.feature_v(0) < params.head_dim_v;
        const char* const first = first_row(tile.v, params.v_strides, n_begin, has_first ? place.feature_v(0) : 0);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const char* row = row_of(first, params.v_strides, keys, place.key_v(i), places.v);
#pragma unroll
            for (int c = 0; c < kVectorsV; ++c) {
                // right either way: only the last vectors reach behind the features
                const bool is_there = c < kVectorsV - 1 || place.feature_v(c) < params.head_dim_v;
                v[i][c] = load_once(row + (is_there ? (place.feature_v(c) - place.feature_v(0)) * 2 : 0));
            }
        }
    }

  private:
    // Of a step, or where there are pages of the array, from a feature on. Unknown: else compilers would multiply anew
    // for each row.
    __device__ __forceinline__ static const char* first_row(const char* array, const Strides& strides,
                                                            long long n_begin, int feature) {
        return unknown(array + feature * 2 + (kPaged ? 0 : n_begin * strides.row));
    }
    // Called by all lanes of a warp.
    __device__ __forceinline__ const char* row_of(const char* first, const Strides& strides, const StepKeys& keys,
                                                  int key, long long place_of_lane) const {
        if constexpr (kPaged) return first + __shfl_sync(0xffffffffu, place_of_lane, key);
        else return first + static_cast<unsigned int>(keys.nearest(key)) * static_cast<size_t>(strides.row);
    }
};

}  // namespace cuflash
