// How Q, K and V get into shared memory.
#pragma once

#include "wgmma/key_rows.cuh"
#include "wgmma/key_tiles.cuh"
#include "wgmma/shared_tiles.cuh"

namespace cuflash {

// Loads the queries of a warpgroup's rows, by 128 or 32 threads. From row to row it is so many heads and queries
// farther, and one query farther where the packed heads end.
template <int kNumThreads>
__device__ __forceinline__ void load_queries(const AttentionParams& params, const TileMap& tile, QueryRows& target,
                                             int group) {
    const Strides& strides = params.q_strides;
    const int thread = thread_index_again() % kNumThreads;
    const PanelCopy<kHeadDim, AsTheyCome, kNumThreads> copy(strides.row, params.head_dim, thread);
    const int first_row = 64 * group, num_rows = tile.num_rows - first_row;
    const int packed_heads = static_cast<int>(params.packed_heads);
    const Divided first(tile.first_head + first_row + copy.row, params.packed_heads);
    const Divided step(copy.kStep, params.packed_heads);
    const char* source = tile.q + (tile.first_query + first.quotient) * strides.row + first.rest * strides.head;
    const long long next = step.quotient * strides.row + step.rest * strides.head;
    const long long at_end = strides.row - packed_heads * strides.head;
    int heads_left = packed_heads - static_cast<int>(first.rest);
    source += copy.piece * 16;
#pragma unroll
    for (int i = 0; i < 64; i += copy.kStep) {
        copy.load_step(target, source, i, i + copy.row < num_rows);
        heads_left -= static_cast<int>(step.rest);
        source = unknown(source + next);  // else all would be kept, and spilled
        if (heads_left <= 0) heads_left += packed_heads, source += at_end;
    }
}

// Copies K and V, by the threads of a warpgroup, the last keys first.
struct KeyLoader : KeyRows<kPaged> {
    SharedTiles& shared;

    __device__ __forceinline__ KeyLoader(const AttentionParams& params, SharedTiles& shared, const Place& place,
                                         int thread)
        : KeyRows<kPaged>(params, place, thread), shared(shared) {}

    template <bool kWhole>
    __device__ __forceinline__ void load_keys(int i, int num_keys) {
        copy_keys<kWhole>(shared.k[i % kStages], num_keys);
    }
    template <bool kWhole>
    __device__ __forceinline__ void load_values(int i, int num_keys) {
        copy_values<kWhole>(shared.v[i % kStages], num_keys);
    }
    // As buffers become free.
    template <bool kWhole>
    __device__ __forceinline__ void load_next(int i, int num_keys) {
        find_tile();
        shared.keys.wait_until_free(i);
        load_keys<kWhole>(i, num_keys);
        shared.keys.arrive_with_copies(i);
        look_up(kBlockN);
        shared.values.wait_until_free(i);
        load_values<kWhole>(i, num_keys);
        shared.values.arrive_with_copies(i);
    }
};

}  // namespace cuflash
