// Tiles for WMMA: who owns which rows, how operands and scores lie in shared memory, and what stays in registers.
#pragma once

#include "common/config.cuh"
#include "wmma/fragments.cuh"

namespace cuflash {

constexpr int kNumWarps = kThreads / 32;
constexpr int kRowsPerWarp = kBlockM / kNumWarps, kRowFragments = kRowsPerWarp / 16;
constexpr int kKeyFragments = kBlockN / 16;
constexpr int kFeatureFragments = kHeadDimV / 16;
constexpr int kDepth = Tensor::kDepth;
constexpr int kStepsK = kHeadDim / kDepth, kStepsV = kBlockN / kDepth;
constexpr int kLanesPerRow = 2, kColumns = kBlockN / kLanesPerRow;
constexpr int kChunk = 4;  // neighbouring scores of a lane; the next ones are its partner's
constexpr int kChunksAtOnce = !kHasArrays ? 1 : kHeadDimV <= 64 ? 4 : 2;  // so that loads overlap

// Rows are padded so that the eight rows of 16 bytes that one step of a load takes meet different banks.
constexpr int kPitchK = kHeadDim + 16 / static_cast<int>(sizeof(Element));
constexpr int kPitchV = (kHasValues ? kHeadDimV : 0) + 8;
constexpr int kPitchS = kBlockN + 8;

// Q stays in registers if there are enough beside O, the scores and operands on their way (found by compiling). If not,
// it is read a few steps at a time, in a loop that keeps the compiler from fetching it all.
constexpr int kWarpsPerScheduler = (kNumWarps * kMinBlocks + 3) / 4;
constexpr int kRegisters = 512 / kWarpsPerScheduler < 255 ? 512 / kWarpsPerScheduler : 255;
constexpr int kRegistersO = kRowFragments * kFeatureFragments * 8;
constexpr int kRegistersS = kRowFragments * kKeyFragments * 8;
constexpr int kRegistersQ = kRowFragments * kHeadDim * static_cast<int>(sizeof(Element)) / 8;
constexpr bool kKeepQ =
    kHeadDim * sizeof(Element) <= 256 && kRegistersO * 5 / 3 + kRegistersS + kRegistersQ + 36 <= kRegisters;
constexpr int kGroup = kKeepQ ? kStepsK : kStepsK % 4 == 0 ? 4 : kStepsK % 3 == 0 ? 3 : kStepsK % 2 == 0 ? 2 : kStepsK;

static_assert(kDtype != CUFLASH_FLOAT64, "WMMA multiplies float16, bfloat16 and tf32");
static_assert(kRowFragments * 16 * kNumWarps == kBlockM, "whole warps own whole fragments of 16 rows");
static_assert(kBlockN % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "fragments are 16 wide");

using Factors = float[kRowFragments][16];  // one for each row of a warp

// 16 rows of one warp, which reads all its scores before it writes the first weight over them.
union alignas(32) RowTile {
    float scores[16][kPitchS];
    Element weights[16][kPitchS];
};

// A lane's place in its block, and in the rows of its warp.
struct Place {
    int warp, lane;
    int first_row;     // of the warp
    int row;           // of the lane, in each row fragment
    int first_column;  // of the lane's scores, in each of its rows

    __device__ __forceinline__ explicit Place(unsigned int thread)
        : warp(thread / 32),
          lane(thread % 32),
          first_row(warp * kRowsPerWarp),
          row(lane / kLanesPerRow),
          first_column(lane % kLanesPerRow * kChunk) {}
};

}  // namespace cuflash
