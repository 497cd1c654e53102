// Rows of q, k and v on their way to the tensor cores.
#pragma once

#include "common/mask.cuh"
#include "decode/layout.cuh"

namespace cuflash {

// Queries, as a lane of any warp multiplies them.
using SharedQueries = Words[kHeadDim / 32][2][32];

// The part of them that a warp has sent for.
struct LoadedQueries {
    static constexpr int kVectors = kHeadDim / 32, kWarps = kThreads / 32, kCount = (kVectors + kWarps - 1) / kWarps;
    Words rows[kCount][kRows];

    __device__ __forceinline__ LoadedQueries(const AttentionParams& params, const TileMap& tile, const Place& place) {
        const char* addresses[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            addresses[r] = query_row(params, tile, find_row(params, tile, place.tile_row(r)));
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int feature = (threadIdx.x / 32 + i * kWarps) * 32 + place.quarter * 8;
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                rows[i][r] = load_once_if(addresses[r] && feature < params.head_dim, addresses[r] + feature * 2);
        }
    }
    __device__ __forceinline__ void store(SharedQueries& q, const Place& place) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int vector = threadIdx.x / 32 + i * kWarps;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Words(&from)[kRows] = rows[i];
                const Words operand = {from[0].at[half * 2], from[1].at[half * 2], from[0].at[half * 2 + 1],
                                       from[1].at[half * 2 + 1]};
                if (vector < kVectors) q[vector][half][place.lane] = operand;
            }
        }
    }
};

// Where the key of a step that has the lane's number lies in its array, and its value: in pages. To find a page takes a
// division and a load, so lanes do it for each other, and a step ahead.
struct Places {
    long long k, v;
};

// Keys and values. Rows that no query sees are read as the nearest one that some query sees, and features of a value
// behind the last as the first one: they count nothing, and 0 x NaN is NaN. Those of a key are zeros.
struct Reader {
    const AttentionParams& params;
    const TileMap& tile;
    const KeyRange& seen;  // some row sees them
    Place place;

    __device__ __forceinline__ Places find(long long n_begin) const {
        if constexpr (kPaged) {
            const long long key = n_begin + nearest(n_begin, place.lane % kBlockN);
            const PagedKey found = readable_key(params, tile, key);
            return {found.offset(params.k_strides), found.offset(params.v_strides)};
        }
        return {};
    }
    __device__ __forceinline__ void load_keys(Keys& k, long long n_begin, const Places& places) const {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
            const char* row = row_of(tile.k, params.k_strides, n_begin, place.key_k(j), places.k);
#pragma unroll
            for (int c = 0; c < kVectorsK; ++c) {
                const char* address = row + place.feature_k(c) * 2;
                if (kPair == 1 && c < kVectorsK - 2) k[j][c] = load_once(address);
                else k[j][c] = load_once_if(place.feature_k(c) < params.head_dim, address);
            }
        }
    }
    __device__ __forceinline__ void load_values(Values& v, long long n_begin, const Places& places) const {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const char* row = row_of(tile.v, params.v_strides, n_begin, place.key_v(i), places.v);
#pragma unroll
            for (int c = 0; c < kVectorsV; ++c) {
                const bool is_there = (kPair == 1 && c < kVectorsV - 1) || place.feature_v(c) < params.head_dim_v;
                v[i][c] = load_once(row + (is_there ? place.feature_v(c) * 2 : 0));
            }
        }
    }

  private:
    // Number of the key in a step, or of the nearest one that some row sees.
    __device__ __forceinline__ int nearest(long long n_begin, int key) const {
        const int first = static_cast<int>(max(seen.begin - n_begin, 0LL));
        // right either way: it only keeps the cast in range
        const int last = static_cast<int>(min(seen.end - n_begin, static_cast<long long>(first + kBlockN))) - 1;
        return min(max(key, first), last);
    }
    // Called by all lanes of a warp.
    __device__ __forceinline__ const char* row_of(const char* array, const Strides& strides, long long n_begin, int key,
                                                  long long place_of_lane) const {
        if constexpr (kPaged) return array + __shfl_sync(0xffffffffu, place_of_lane, key);
        else return array + n_begin * strides.row + nearest(n_begin, key) * strides.row;
    }
};

}  // namespace cuflash
