// K and V as a warpgroup that multiplies by them meets them: loaded by others, or by itself.
#pragma once

#include "wgmma/loaders.cuh"

namespace cuflash {

// Warpgroups take turns to issue products: one multiplies while others compute weights. Where blocks walk on they drift
// apart, and where products are long, too, waiting costs more than it gains.
constexpr bool kTakesTurns = !kWalksOn || kHeadDim <= 80;
// Two that begin together would stay in step: the second one begins when the first one has its first scores. Where
// products are longest they drift apart by themselves.
constexpr bool kBeginApart = !kTakesTurns && kConsumers == 2 && kHeadDim <= 128;

// Where a warpgroup's K and V come from: others load them, and wait until these are done with.
struct KeysOfOthers {
    SharedTiles& shared;
    int group;

    __device__ __forceinline__ KeysOfOthers(const AttentionParams&, SharedTiles& shared, const Place&, int group)
        : shared(shared), group(group) {}
    __device__ __forceinline__ void wait_for_queries(int number) {
        if constexpr (kWalksOn) {
            shared.loaded_queries[own_group()].wait_until_ready(number);
            fence_async_proxy();
        } else {
            cp_async_wait();
            fence_async_proxy();
            barrier_wait(1 + group, kGroupThreads);
        }
    }
    // Products by them are over.
    __device__ __forceinline__ void release_queries(int number) {
        if constexpr (kWalksOn && kQueryBuffers == 1) shared.loaded_queries[own_group()].release(number);
    }
    __device__ __forceinline__ int own_group() const { return kFewRegisters ? group_of_thread() : group; }

    // Around the first scores of the block's first rows.
    __device__ __forceinline__ void wait_to_begin(int number) {
        // right either way: they may begin at any time
        if (kBeginApart && number == 0) shared.turns.wait(own_group(), 0);
    }
    __device__ __forceinline__ void let_next_begin(int number) {
        // right either way: nobody waits for it again
        if (kBeginApart && number == 0) shared.turns.pass(own_group());
    }

    // Waits for K and V, before products by them, and sees what threads have copied; tiles are seen as they are.
    __device__ __forceinline__ void wait_for_keys(int i) { shared.keys.wait_until_ready(i); }
    __device__ __forceinline__ void wait_for_values(int i) { shared.values.wait_until_ready(i); }
    __device__ __forceinline__ void see() {
        if constexpr (!kHasRoles) fence_async_proxy();
    }
    // Products by K of tile i, and by V of the one before, are issued in between.
    __device__ __forceinline__ void begin_products(int i) {
        if constexpr (kTakesTurns) shared.turns.wait(own_group(), i);
    }
    template <bool kFirst>
    __device__ __forceinline__ void end_products(int) {
        if constexpr (kTakesTurns) shared.turns.pass(own_group());
    }
    // Products by them are over.
    __device__ __forceinline__ void release_keys(int i) { shared.keys.release(i); }
    __device__ __forceinline__ void release_values(int i) { shared.values.release(i); }
};
// It is alone in its block, and loads them itself, a tile ahead.
struct OwnKeys : KeyLoader {
    const KeyWalk& walk;
    int group;

    __device__ __forceinline__ OwnKeys(const AttentionParams& params, SharedTiles& shared, const Place& place,
                                       int group)
        : KeyLoader(params, shared, place, threadIdx.x), walk(place.walk), group(group) {
        if (walk.num_tiles > 0) {  // an empty split may begin behind the table of pages
            look_up(walk.last_keys);
            find_tile();
            load_keys<false>(0, walk.last_keys);
            look_up(kBlockN);
        }
    }
    // Where keys follow, they are waited for together.
    __device__ __forceinline__ void wait_for_queries(int) {
        if (walk.num_tiles == 0) see();  // right either way: they are waited for once more
    }
    __device__ __forceinline__ void release_queries(int) {}
    __device__ __forceinline__ int own_group() const { return group; }

    __device__ __forceinline__ void wait_to_begin(int) {}
    __device__ __forceinline__ void let_next_begin(int) {}
    __device__ __forceinline__ void wait_for_keys(int) {}
    __device__ __forceinline__ void wait_for_values(int) {}
    __device__ __forceinline__ void see() {
        cp_async_wait();
        fence_async_proxy();
        __syncthreads();
    }
    __device__ __forceinline__ void begin_products(int) {}
    template <bool kFirst>
    __device__ __forceinline__ void end_products(int i) {
        const auto load_values_now = [&] { load_values<!kFirst>(i, kFirst ? walk.last_keys : kBlockN); };
        if constexpr (kPaged) load_values_now();  // they are where the tile is that was found last
        if (i + 1 < walk.num_tiles) {
            find_tile();
            load_keys<true>(i + 1, kBlockN);
            look_up(kBlockN);
        }
        if constexpr (!kPaged) load_values_now();
    }
    __device__ __forceinline__ void release_keys(int) {}
    __device__ __forceinline__ void release_values(int) {}
};
template <bool kOwn>
struct SelectKeys {
    using Type = KeysOfOthers;
};
template <>
struct SelectKeys<true> {
    using Type = OwnKeys;
};
using KeySource = SelectKeys<kProducers == 0>::Type;

}  // namespace cuflash
