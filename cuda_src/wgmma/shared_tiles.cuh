// What lies in shared memory, and who waits for it.
#pragma once

#include "wgmma/panels.cuh"
#include "wgmma/place.cuh"
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

// Whether loaders have parts to play: one of their warps asks for tiles of keys, which come by one instruction each,
// another finds places, and each warpgroup's queries have one. Else all of their threads copy. Pages, and keys in
// another order than theirs, are no tiles.
constexpr bool kHasRoles = kProducers != 0 && !kPaged && !kHasArrays;
constexpr int kCopyingWarps = kHasRoles ? 1 : kProducers / 32;

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
    Pipe<kQueryBuffers> loaded_queries[kConsumers];
    Pipe<kStages> keys, values;
    Turns turns;

    __device__ __forceinline__ void init() {
        placed.init(1, kThreads / 32);
#pragma unroll
        for (int group = 0; group < kConsumers; ++group) loaded_queries[group].init(kCopyingWarps, 4);
        keys.init(kCopyingWarps, kNumWarps), values.init(kCopyingWarps, kNumWarps);
        turns.init();
        if constexpr (kHasRoles) fence_async_proxy();  // tensor copies find barriers as they are now
    }
    __device__ __forceinline__ QueryRows& queries(int number, int group) {
        return *reinterpret_cast<QueryRows*>(&q[number % kQueryBuffers][64 * group][0]);
    }
    __device__ __forceinline__ auto& output_rows(int number, const Warp& warp) {
        if constexpr (kStagesOutput) return staged[warp.group];
        else return *reinterpret_cast<RowsInQueries*>(&q[number % kQueryBuffers][warp.first_row][0]);
    }
};

}  // namespace cuflash
