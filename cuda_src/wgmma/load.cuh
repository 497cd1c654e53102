// What lies in shared memory, and how Q, K and V get there.
#pragma once

#include "wgmma/key_rows.cuh"
#include "wgmma/store.cuh"

namespace cuflash {

using QueryRows = Panels<64, kHeadDim>;  // of a warpgroup

static_assert(kBlockM == 64 * kConsumers && (kProducers == kGroupThreads || (kProducers == 0 && kConsumers == 1)));
static_assert(sizeof(QueryRows) <= 64 * kRowBytesQ && 64 * kRowBytesQ % 1024 == 0);

// Where blocks walk on, the next queries come while the last rows are finished: into another buffer or, where there is
// no room for one, as soon as nobody multiplies by the last ones any more. Output of 16 bits then has rows of its own
// to pass through, else those of Q.
constexpr int kQueryBuffers = kWalksOn && kHeadDim <= 128 && kHeadDimV <= 128 ? 2 : 1;
constexpr bool kStagesOutput = kWalksOn && kQueryBuffers == 1 && sizeof(OutElement) == 2;
using RowsInQueries = StagedRows<kHeadDimV <= 32 ? 4 : 8>;
static_assert(sizeof(RowsInQueries) <= 16 * kRowBytesQ);

struct SharedTiles {
    // A warpgroup's queries lie where its output passes through in the end.
    alignas(1024) Element q[kQueryBuffers][kBlockM][kPitchQ];
    Panels<kBlockN, kHeadDim> k[kStages];
    Panels<kBlockN, kHeadDimV> v[kStages];
    StagedRows<4> staged[kStagesOutput ? kNumWarps : 1];
    alignas(16) TileRow rows[kBlockM];
    RowMaxima maxima;
    Exchange exchange;
    Place places[kPlaces];
    Segment of_pair;  // that the places' tiles are of
    LogitUnit unit;
    Pipe<kPlaces> placed;
    Pipe<kQueryBuffers> loaded_queries;
    Pipe<kStages> keys, values;
    Turns turns;

    __device__ __forceinline__ void init() {
        placed.init(1, kThreads / 32), loaded_queries.init(kProducers / 32, kNumWarps);
        keys.init(kProducers / 32, kNumWarps), values.init(kProducers / 32, kNumWarps);
        turns.init();
    }
    __device__ __forceinline__ QueryRows& queries(int number, int group) {
        return *reinterpret_cast<QueryRows*>(&q[number % kQueryBuffers][64 * group][0]);
    }
    __device__ __forceinline__ auto& output_rows(int number, const Warp& warp) {
        if constexpr (kStagesOutput) return staged[warp.group];
        else return *reinterpret_cast<RowsInQueries*>(&q[number % kQueryBuffers][warp.first_row][0]);
    }
};

// Loads the queries of a warpgroup's rows, by 128 threads. From row to row it is so many heads and queries farther, and
// one query farther where the packed heads end.
__device__ __forceinline__ void load_queries(const AttentionParams& params, const TileMap& tile, QueryRows& target,
                                             int group, int thread) {
    const Strides& strides = params.q_strides;
    const PanelCopy<kHeadDim> copy(strides.row, params.head_dim, thread);
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

// Loads K and V, by the threads of a warpgroup, the last keys first.
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
__device__ __forceinline__ unsigned int thread_of_loader() { return thread_index_again() - kConsumers * kGroupThreads; }

// For a tile of rows.
__device__ __forceinline__ void load_keys(const AttentionParams& params, SharedTiles& shared, const Place& place) {
    const int begin = place.begin(), end = place.end();
    if (begin == end) return;
    KeyLoader loader(params, shared, place, thread_of_loader());
    loader.look_up(place.walk.last_keys);
    loader.load_next<false>(begin, place.walk.last_keys);
#pragma unroll 1
    for (int i = begin + 1; i < end; ++i) loader.load_next<true>(i, kBlockN);
}
// For all tiles of rows, whose places the first warp finds on the way; and their queries where there are two buffers.
__device__ __forceinline__ void load_all_keys(const AttentionParams& params, SharedTiles& shared) {
    if constexpr (kWalksOn) {
        if (thread_of_loader() < 32) shared.placed.arrive(0);
        shared.placed.wait_until_ready(0);  // right either way: it is there, but each phase is to be waited for
    }
#pragma unroll 1
    for (int number = 0;; ++number) {
        const Place& place = shared.places[number % kPlaces];
        if (place.is_empty()) return;
        if constexpr (kWalksOn) {
            if constexpr (kQueryBuffers == 1) shared.loaded_queries.wait_until_free(number);
            for (int group = 0; group < kConsumers; ++group)
                load_queries(params, place.tile, shared.queries(number, group), group, thread_of_loader());
            shared.loaded_queries.arrive_with_copies(number);
        }
        load_keys(params, shared, place);
        const int half = place.next, keys_before = place.end();
        if (!kWalksOn || half == 0) return;
        shared.placed.release_read(number);
        if (thread_of_loader() < 32) {
            shared.placed.wait_until_free(number + 1);
            shared.places[(number + 1) % kPlaces].find(params, half, keys_before, shared.of_pair);
            shared.placed.arrive(number + 1);
        }
        shared.placed.wait_until_ready(number + 1);
    }
}

}  // namespace cuflash
