// Which rows of points a thread has, and what it holds of them.
#pragma once

#include "points/references.cuh"

namespace cuflash {

constexpr int kLanes = kThreads > kBlockM ? kThreads / kBlockM : 1;
constexpr int kGroups = kThreads / kLanes;  // of lanes that share their rows
constexpr int kQueries = kBlockM / kGroups;
constexpr int kChunk = 8;
constexpr int kVector = 16 / sizeof(Accumulator);  // keys that one shared-memory instruction loads
constexpr int kPitch = kBlockN + kVector;          // features begin in different banks
constexpr int kKeysPerSum = kBlockN < 512 ? 512 : kBlockN;
constexpr int kPerTotal = 64;
constexpr int kSums = kHeadDimV + 1;  // of a row: features of the output, and weights

static_assert(kDtype == CUFLASH_FLOAT32 || kDtype == CUFLASH_FLOAT64);
static_assert(kQueries * kGroups == kBlockM && kGroups * kLanes == kThreads, "threads divide the rows evenly");
static_assert(kLanes <= 32 && kThreads % 32 == 0, "lanes that share their rows are of one warp");
static_assert(kBlockN % kThreads == 0 && kBlockN % kChunk == 0, "threads load as many keys, chunks are whole");
static_assert(kKeysPerSum % kBlockN == 0, "sums are of whole tiles");

using Scores = Accumulator[kQueries][kChunk];

// What a thread holds of its rows.
struct Rows {
    Accumulator q[kQueries][kHeadDim];
    Reference references[kQueries];
    Accumulator sums[kQueries][kSums] = {};
};

// A thread's place in its block.
struct Place {
    int lane;  // of those that share the rows
    int group;

    __device__ __forceinline__ explicit Place(unsigned int thread) : lane(thread % kLanes), group(thread / kLanes) {}
    __device__ __forceinline__ int tile_row(int r) const { return group + r * kGroups; }
};

}  // namespace cuflash
