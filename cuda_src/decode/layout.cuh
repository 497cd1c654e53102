// How the warps of a block share out rows and keys, and what a lane holds of them.
//
// Lanes load 16 bytes of a row each, and what they get is an operand of mma.sync as it is: sums over features and keys
// may be taken in any order, as long as both operands have the same one. A lane has the scores of four neighbouring
// keys of every 16, in rows `eighth` and + 8.
#pragma once

#include "common/numeric.cuh"
#include "ptx/words.cuh"

namespace cuflash {

constexpr bool kBfloat16 = kDtype == CUFLASH_BFLOAT16;
constexpr int kRows = 2;  // of a lane
// Where values are too wide for the registers of one warp, two share their keys: each has half of the features.
constexpr int kPair = kHeadDimV > 192 ? 2 : 1;
constexpr int kTeam = kThreads / (32 * kPair);  // warps, or pairs of them, each with keys of its own
constexpr int kKeyTiles = kBlockN / 8, kKeySteps = kBlockN / 16;
constexpr int kVectorsK = kHeadDim / (32 * kPair), kVectorsV = kHeadDimV / (64 * kPair);  // that a lane loads of a row
constexpr int kRun = 4;                                                                   // neighbouring keys of a lane
constexpr int kColumns = kKeySteps * kRun;                                                // keys of a lane
// Whether the next values are on their way with the next keys. Else one follows the other, in the same registers.
constexpr bool kBothAhead = kVectorsV * 32 + kBlockN * (kVectorsK + 2 * kVectorsV) / 2 < 160;

static_assert(kBlockM == 16, "a warp has all rows");
static_assert(kBlockN % 16 == 0, "tensor cores multiply weights of 16 keys");
static_assert(!kPaged || kBlockN <= 32, "a lane looks up the page of one key of a step");
static_assert(kHeadDim % 64 == 0 && kHeadDimV % (64 * kPair) == 0,
              "eight lanes load 64 neighbouring features of a value");
static_assert(kVectorLoads && kHasValues, "rows are read in vectors of 16 bytes");

using Keys = Words[kKeyTiles][kVectorsK];
using Values = Words[kColumns][kVectorsV];
using Scores = float[kKeyTiles][4];
using Weights = unsigned int[kKeySteps][4];
using Output = float[kVectorsV][8][4];
using RowValues = float[kRows];

struct Place {
    int lane, eighth, quarter;
    int half;   // of the features
    int share;  // of the keys

    __device__ __forceinline__ explicit Place(unsigned int thread)
        : lane(thread % 32),
          eighth(lane / 4),
          quarter(lane % 4),
          half(thread / 32 % kPair),
          share(thread / 32 / kPair) {}

    __device__ __forceinline__ int tile_row(int r) const { return r * 8 + eighth; }
    // The first feature of one of the lane's vectors of a key or a query; and of a value.
    __device__ __forceinline__ int feature_k(int vector) const {
        return (half * kVectorsK + vector) * 32 + quarter * 8;
    }
    __device__ __forceinline__ int feature_v(int vector) const { return (half * kVectorsV + vector) * 64 + eighth * 8; }
    // The first of 16 features of a value, those of a lane's vector of output.
    __device__ __forceinline__ int column_v(int vector) const {
        return (half * kVectorsV + vector) * 64 + quarter * 16;
    }
    // The key, counted from the first of a step, whose row the lane loads for a tile of scores; and of its values.
    __device__ __forceinline__ int key_k(int j) const {
        return j / 2 * 16 + eighth / 2 * kRun + j % 2 * 2 + eighth % 2;
    }
    __device__ __forceinline__ int key_v(int i) const { return i / kRun * 16 + quarter * kRun + i % kRun; }
};

// The score of a lane's row r at its key number i.
__device__ __forceinline__ float& at(Scores& scores, int r, int i) { return scores[i / 2][r * 2 + i % 2]; }

}  // namespace cuflash
