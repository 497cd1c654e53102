// How scores, weights and output of mma.sync lie in the registers of a warp, operands in shared memory, and warps in
// their block.
//
// A lane holds two neighbouring columns in every eight of its rows, and four lanes share a row. Which key a column
// stands for is free, as long as K and V agree: rows of their tiles are stored in such an order that the columns of a
// lane are runs of neighbouring keys, which bias and mask are then read by.
//
// Where the output is wide, two warps share their rows: each multiplies Q by half of the keys, and the weights of both
// by half of the features of V. One warp would have registers for half as many rows, and read K and V twice as often.
#pragma once

#include "common/numeric.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

constexpr int kNumWarps = (kThreads - kProducers) / 32;  // that multiply
constexpr int kRowsPerWarp = kBlockM / kNumWarps * kWarpsPerRow;
constexpr int kRowTiles = kRowsPerWarp / 16;
constexpr int kRows = 2 * kRowTiles;  // of a lane
constexpr int kWarpKeys = kBlockN / kWarpsPerRow, kWarpFeatures = kHeadDimV / kWarpsPerRow;
constexpr int kKeyTiles = kWarpKeys / 8, kFeatureTiles = kWarpFeatures / 8;
constexpr int kColumns = 2 * kKeyTiles;  // of a lane, in each of its rows
// Of them that are neighbours.
constexpr int kRun = kWarpgroups && !kHasArrays ? 2 : kWarpKeys % 32 == 0 ? 8 : 4;
constexpr int kStepsK = kHeadDim / 16, kStepsV = kBlockN / 16;
constexpr bool kBfloat16 = kDtype == CUFLASH_BFLOAT16;

// Padding by 16 bytes puts the eight rows that a matrix is loaded from into different banks.
constexpr int kPitchK = (kWarpgroups ? (kHeadDim + 63) / 64 * 64 : kHeadDim) + 8;
constexpr int kPitchV = (kHasValues ? kHeadDimV : 0) + 8, kPitchP = kBlockN + 8;
constexpr int kPitchQ = kPitchK > kPitchV ? kPitchK : kPitchV;  // the output passes through the rows of Q
constexpr int kRowBytesQ = 2 * kPitchQ, kRowBytesK = 2 * kPitchK, kRowBytesV = 2 * kPitchV, kRowBytesP = 2 * kPitchP;

// With two warps to a scheduler, one half of the block multiplies by V a tile later than the other: one multiplies
// while the other one computes weights. Each half then loads what it is through with first.
constexpr bool kPingPong = kWarpsPerRow > 1 && kStages > 1 && kNumWarps == 8 && kHeadDim == kHeadDimV;

static_assert(kDtype == CUFLASH_FLOAT16 || kDtype == CUFLASH_BFLOAT16, "mma.m16n8k16 multiplies 16-bit floats");
static_assert(kNumWarps % kWarpsPerRow == 0, "the warps that share rows are of one block");
static_assert(kRowTiles * 16 * kNumWarps == kBlockM * kWarpsPerRow, "warps own whole tiles of 16 rows");
static_assert(kWarpKeys % 16 == 0 && kHeadDim % 16 == 0 && kWarpFeatures % 16 == 0, "mma is 16 deep");

struct Queries {
    unsigned int tiles[kRowTiles][4];
};
using Scores = float[kRowTiles][kKeyTiles][4];
using Weights = unsigned int[kRowTiles][kKeyTiles / 2][4];
using Output = float[kRowTiles][kFeatureTiles][4];

// A value for each row of a lane.
struct alignas(4 * kRows) RowValues {
    float values[kRows];

    __device__ __forceinline__ float& operator[](int r) { return values[r]; }
    __device__ __forceinline__ float operator[](int r) const { return values[r]; }
};

// Value i of a lane's row r.
template <int kTiles>
__device__ __forceinline__ float& at(float (&tiles)[kRowTiles][kTiles][4], int r, int i) {
    return tiles[r / 2][i / 2][r % 2 * 2 + i % 2];
}
// Row of the warp that a lane's row r is, and column of the warp's keys that its value i of a row is.
__device__ __forceinline__ int row_of(int r, int lane) { return r * 8 + lane / 4; }
__device__ __forceinline__ int column_of(int i, int lane) { return i / kRun * kRun * 4 + lane % 4 * kRun + i % kRun; }
// Key, counted from the tile's first, whose K and V lie in a row of the tile. Over bits it is linear: that of a sum
// whose terms share no bits is the sum of theirs.
__device__ __forceinline__ constexpr int key_of(int row) {
    return row / (4 * kRun) * (4 * kRun) + row / 2 % 4 * kRun + row / 8 % (kRun / 2) * 2 + row % 2;
}

// Place of a warp in its block.
struct Warp {
    unsigned int thread;
    int lane;
    int group;      // of warps that share their rows
    int share;      // which part of keys and features is its own
    int first_row;  // of the tile

    __device__ __forceinline__ explicit Warp(unsigned int thread)
        : thread(thread),
          lane(thread % 32),
          group(thread / (32 * kWarpsPerRow)),
          share(thread / 32 % kWarpsPerRow),
          first_row(group * kRowsPerWarp) {}

    // Whether it multiplies by V a tile later than others.
    __device__ __forceinline__ bool lags() const { return kPingPong && thread >= kThreads / 2; }
    // Barriers with the warps that share its rows.
    __device__ __forceinline__ void wait() const {
        if constexpr (kWarpsPerRow == 1) __syncwarp();
        else barrier_wait(1 + group, 32 * kWarpsPerRow);
    }
    __device__ __forceinline__ bool any(bool predicate) const {
        if constexpr (kWarpsPerRow == 1) return __any_sync(0xffffffffu, predicate);
        else return barrier_any(1 + group, 32 * kWarpsPerRow, predicate);
    }
};

// Values of a warp's rows on their way to the others of its group.
using Exchange = float[kWarpsPerRow > 1 ? kNumWarps / kWarpsPerRow : 1][kWarpsPerRow][32];

}  // namespace cuflash
