// The warps that load for others (producers): keys as buffers become free, queries, and places of tiles of rows.
#pragma once

#include "wgmma/load.cuh"

namespace cuflash {

__device__ __forceinline__ unsigned int thread_of_loader() { return thread_index_again() - kConsumers * kGroupThreads; }

// Loads the keys of a tile of rows: by all loading threads, or by one warp that asks for tiles.
template <bool kOfRole>
struct LoadKeys {
    static __device__ __forceinline__ void run(const AttentionParams& params, const KeyMaps&, SharedTiles& shared,
                                               const Place& place) {
        const int begin = place.begin(), end = place.end();
        if (begin == end) return;
        KeyLoader loader(params, shared, place, thread_of_loader());
        loader.look_up(place.walk.last_keys);
        loader.load_next<false>(begin, place.walk.last_keys);
#pragma unroll 1
        for (int i = begin + 1; i < end; ++i) loader.load_next<true>(i, kBlockN);
    }
};
template <>
struct LoadKeys<true> {
    static __device__ __forceinline__ void run(const AttentionParams& params, const KeyMaps& maps, SharedTiles& shared,
                                               const Place& place) {
        const int end = place.end();
        const long long first_key = place.walk.first_key(0);
        PanelTiles<kHeadDim> k(maps.k, place.tile.k, params.k_strides.row, first_key);
        PanelTiles<kHeadDimV> v(maps.v, place.tile.v, params.v_strides.row, first_key);
        int num_keys = place.walk.last_keys;
#pragma unroll 1
        for (int i = place.begin(); i < end; ++i, num_keys = kBlockN) {
            const int buffer = i % kStages;
            shared.keys.wait_until_free(i);
            k.copy(shared.k[buffer], shared.keys.ready[buffer], num_keys);
            shared.values.wait_until_free(i);
            v.copy(shared.v[buffer], shared.values.ready[buffer], num_keys);
        }
    }
};

// For all of a block's tiles of rows; where it walks on, their queries, and the places that are found on the way, too.
__device__ __forceinline__ void load_all(const AttentionParams& params, const KeyMaps& maps, SharedTiles& shared) {
    const int warp = uniform(thread_of_loader() / 32);
    const bool finds_places = warp == (kHasRoles ? 1 : 0);
    if constexpr (kWalksOn) {
        if (finds_places) shared.placed.arrive(0);
        shared.placed.wait_until_ready(0);  // right either way: it is there, but each phase is to be waited for
    }
#pragma unroll 1
    for (int number = 0;; ++number) {
        const Place& place = shared.places[number % kPlaces];
        if (place.is_empty()) return;
        if constexpr (kWalksOn) {
#pragma unroll 1
            for (int group = 0; group < kConsumers; ++group) {
                if (kHasRoles && warp != group + 1) continue;
                if constexpr (kQueryBuffers == 1) shared.loaded_queries[group].wait_until_free(number);
                load_queries<32 * kCopyingWarps>(params, place.tile, shared.queries(number, group), group);
                shared.loaded_queries[group].arrive_with_copies(number);
            }
        }
        if (!kHasRoles || warp == 0) LoadKeys<kHasRoles>::run(params, maps, shared, place);
        const int half = place.next, keys_before = place.end();
        if (!kWalksOn || half == 0) return;
        shared.placed.release_read(number);
        if (finds_places) {
            shared.placed.wait_until_free(number + 1);
            shared.places[(number + 1) % kPlaces].find(params, half, keys_before, shared.of_pair);
            shared.placed.arrive(number + 1);
        }
        shared.placed.wait_until_ready(number + 1);
    }
}

}  // namespace cuflash
