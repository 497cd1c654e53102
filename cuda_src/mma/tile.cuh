// Tiles for mma.sync: how scores, weights and output lie in the registers of a warp, and operands in shared memory.
//
// A lane holds two neighbouring columns in every eight of its rows, and four lanes share a row. Which key a column
// stands for is free, as long as K and V agree: rows of their tiles are stored in such an order that the columns of a
// lane are runs of neighbouring keys, which bias and mask are then read by.
//
// Where the output is wide, two warps share their rows: each multiplies Q by half of the keys, and the weights of both
// by half of the features of V. One warp would have registers for half as many rows, and read K and V twice as often.
#pragma once

#include "common/tile.cuh"
#include "common/weights.cuh"

namespace cuflash {

constexpr int kNumWarps = kThreads / 32;
constexpr int kShare = kHeadDimV > 128 ? 2 : 1;
// warps that share their rows
constexpr int kRowsPerWarp = kBlockM / kNumWarps * kShare;
constexpr int kRowTiles = kRowsPerWarp / 16;
constexpr int kRows = 2 * kRowTiles;  // of a lane
constexpr int kWarpKeys = kBlockN / kShare, kWarpFeatures = kHeadDimV / kShare;
constexpr int kKeyTiles = kWarpKeys / 8, kFeatureTiles = kWarpFeatures / 8;
constexpr int kColumns = 2 * kKeyTiles;            // of a lane, in each of its rows
constexpr int kRun = kWarpKeys % 32 == 0 ? 8 : 4;  // of them that are neighbours
constexpr int kStepsK = kHeadDim / 16, kStepsV = kBlockN / 16;
constexpr bool kBfloat16 = kDtype == CUFLASH_BFLOAT16;

// Padding by 16 bytes puts the eight rows that a matrix is loaded from into different banks.
constexpr int kPitchK = kHeadDim + 8, kPitchV = kHeadDimV + 8, kPitchP = kBlockN + 8;
constexpr int kPitchQ = kPitchK > kPitchV ? kPitchK : kPitchV;  // the output passes through the rows of Q
constexpr int kRowBytesQ = 2 * kPitchQ, kRowBytesK = 2 * kPitchK, kRowBytesV = 2 * kPitchV, kRowBytesP = 2 * kPitchP;

// With two warps to a scheduler, one half of the block multiplies by V a tile later than the other: one multiplies
// while the other one computes weights. Each half then loads what it is through with first.
constexpr bool kStaggered = kShare > 1 && kStages > 1 && kNumWarps == 8 && kHeadDim == kHeadDimV;

static_assert(kDtype == CUFLASH_FLOAT16 || kDtype == CUFLASH_BFLOAT16, "mma.m16n8k16 multiplies 16-bit floats");
static_assert(kNumWarps % kShare == 0, "the warps that share rows are of one block");
static_assert(kRowTiles * 16 * kNumWarps == kBlockM * kShare, "warps own whole tiles of 16 rows");
static_assert(kWarpKeys % 16 == 0 && kHeadDim % 16 == 0 && kWarpFeatures % 16 == 0, "mma is 16 deep");

constexpr bool kHasArrays = kBiasDtype != 0 || kHasMask;  // one is read for every logit

// Q stays in registers where it takes few and others leave them, else it is read again for every tile of keys.
constexpr bool kKeepQ = kRowTiles * kStepsK * 4 <= 32 && kRowTiles * kFeatureTiles * 4 <= 64 && !kHasArrays;

struct Queries {
    unsigned int tiles[kRowTiles][4];
};
using KeptQueries = Queries[kKeepQ ? kStepsK : 1];
using Scores = float[kRowTiles][kKeyTiles][4];
using Weights = unsigned int[kRowTiles][kKeyTiles / 2][4];
using Output = float[kRowTiles][kFeatureTiles][4];

// Row of the warp that a lane's row r is, and column of the warp's keys that its value i of a row is.
__device__ __forceinline__ int row_of(int r, int lane) { return r * 8 + lane / 4; }
__device__ __forceinline__ int column_of(int i, int lane) { return i / kRun * kRun * 4 + lane % 4 * kRun + i % kRun; }
// Key, counted from the tile's first, whose K and V lie in a row of the tile. Over bits it is linear: that of a sum
// whose terms share no bits is the sum of theirs.
__device__ __forceinline__ constexpr int key_of(int row) {
    return row / (4 * kRun) * (4 * kRun) + row / 2 % 4 * kRun + row / 8 % (kRun / 2) * 2 + row % 2;
}
// Value i of a lane's row r.
template <int kTiles>
__device__ __forceinline__ float& at(float (&tiles)[kRowTiles][kTiles][4], int r, int i) {
    return tiles[r / 2][i / 2][r % 2 * 2 + i % 2];
}

}  // namespace cuflash
