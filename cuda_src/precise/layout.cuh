// How scores, weights and output of mma.sync lie in the registers of a warp, as floats or doubles, and warps in their
// block.
#pragma once

#include "common/numeric.cuh"

namespace cuflash {

constexpr int kNumWarps = (kThreads - kProducers) / 32;
constexpr int kRowsPerWarp = kBlockM * kWarpsPerRow / kNumWarps, kRowTiles = kRowsPerWarp / 16;
constexpr int kRows = 2 * kRowTiles;                                          // of a lane
constexpr int kWarpKeys = kBlockN / kKeyShares;                               // of a tile, of which a warp has scores
constexpr int kKeyTiles = kWarpKeys / 8, kColumns = 2 * kKeyTiles;            // of a lane, in each of its rows
constexpr int kSteps = kHeadDim / 16;                                         // of the sum over features
constexpr int kPiecesV = (kHeadDimV / 16 + kWarpsPerRow - 1) / kWarpsPerRow;  // 16 features each, of which a warp has
constexpr int kFeatureTiles = 2 * kPiecesV;                                   // ... output

static_assert(kRowsPerWarp * kNumWarps == kBlockM * kWarpsPerRow && kRowsPerWarp % 16 == 0, "mma has 16 rows");
static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0 && kWarpKeys % 16 == 0, "mma is 16 deep");

// Rows are padded by 16 bytes, so that lanes reading from consecutive ones meet different banks.
constexpr int kPitch = kHeadDim + 16 / sizeof(Element);
constexpr int kPitchV = (kHasValues ? kHeadDimV : 0) + 16 / sizeof(Element);

using Scores = Accumulator[kRowTiles * kKeyTiles][4];
using Output = Accumulator[kRowTiles * kFeatureTiles][4];

// Value i of a lane's row r.
template <int kTiles>
__device__ __forceinline__ Accumulator& at(Accumulator (&tiles)[kTiles][4], int r, int i) {
    return tiles[r / 2 * (kTiles / kRowTiles) + i / 2][r % 2 * 2 + i % 2];
}

// A warp's place in its block, and a lane's in the fragments.
struct Place {
    int lane, row, run;  // row: the first of the lane's; run: of features or keys that are its own
    int group;           // of warps that share their rows
    int share;           // which features, or keys, are the warp's

    __device__ __forceinline__ explicit Place(unsigned int thread)
        : lane(thread % 32),
          row(thread / (32 * kWarpsPerRow) * kRowsPerWarp + thread % 32 / 4),
          run(thread % 4),
          group(thread / (32 * kWarpsPerRow)),
          share(thread / 32 % kWarpsPerRow) {}
    __device__ __forceinline__ int tile_row(int r) const { return row + 8 * r; }
    // Column i of the lane, in each of its rows.
    __device__ __forceinline__ int column(int i) const { return i / 2 * 8 + run * 2 + i % 2; }
    // The feature of its value i of the output. Warps that share their rows take turns, 16 features each.
    __device__ __forceinline__ int feature(int i) const {
        return (i / 4 * kWarpsPerRow + share) * 16 + i / 2 % 2 * 8 + run * 2 + i % 2;
    }
};

}  // namespace cuflash
