// The warps of a block, which have seen different keys, merge what they have.
#pragma once

#include "common/epilogue.cuh"
#include "common/weights.cuh"
#include "decode/layout.cuh"
#include "decode/shares.cuh"
#include "ptx/barrier.cuh"

namespace cuflash {

// What two warps that share their keys have of the scores, by turns in two buffers.
struct alignas(16) HalfScores {
    Scores halves[2][kPair][32];
};
using PairScores = HalfScores[kPair > 1 ? kTeam : 1];

// Adds the scores of the other half of the features. Called by both warps of a pair.
__device__ __forceinline__ void add_other_half(PairScores& pairs, int turn, const Place& place, Scores& scores) {
    auto& halves = pairs[place.share].halves[turn];
    Scores& own = halves[place.half][place.lane];
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) memcpy(own[j], scores[j], sizeof(own[j]));
    barrier_wait(1 + place.share, 32 * kPair);
    const Scores& others = halves[kPair - 1 - place.half][place.lane];
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[j][e] += others[j][e];
    }
}

// What warps have of the rows of a tile, weights being relative to their own maxima.
struct TeamShares {
    static constexpr int kPitch = kHeadDimV + 8;  // neighbouring rows begin in other banks

    alignas(16) float o[kTeam][kBlockM][kPitch];
    float row_max[kTeam][kBlockM];
    float row_sum[kTeam][kBlockM];

    // Called by all lanes of a warp; rows from `num_rows` on are none.
    __device__ __forceinline__ void store(const Place& place, int num_rows, const OnlineSoftmax<kRows>& softmax,
                                          const Output& values) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float sum = softmax.row_sum[r];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            const int row = place.tile_row(r);
            if (row >= num_rows) continue;  // right either way: nobody looks at others
            if (place.quarter == 0 && place.half == 0) {
                row_max[place.share][row] = softmax.row_max[r];
                row_sum[place.share][row] = sum;
            }
#pragma unroll
            for (int c = 0; c < kVectorsV; ++c) {
#pragma unroll
                for (int first = 0; first < 16; first += 4) {
                    Vector16 four;
#pragma unroll
                    for (int e = 0; e < 4; ++e) four.values[e] = values[c][(first + e) % 8][r * 2 + first / 8];
                    float* const to = &o[place.share][row][place.column_v(c) + first];
                    memcpy(reinterpret_cast<Vector16*>(to), &four, sizeof(four));
                }
            }
        }
    }
};

// A row of a block in the registers of a warp, finished: a lane has every 32nd vector of 4 features.
struct TeamRow {
    static constexpr int kVectors = (kHeadDimV + 127) / 128;

    Row row;
    FinishedRow finished;
    float values[kVectors][4];

    __device__ __forceinline__ static int column(int vector) { return vector * 128 + threadIdx.x % 32 * 4; }

    // Called by all lanes of a warp. Warps' shares are added in their order.
    __device__ __forceinline__ TeamRow(const AttentionParams& params, const TileMap& tile, const TeamShares& shares,
                                       int tile_row)
        : row(row_at(params, tile, tile_row)) {
        const ShareWeights<kTeam> merged(shares.row_max, shares.row_sum, tile_row);
        finished = finish_row(params, tile, row, merged.row_max, merged.row_sum * kWeightUnit);
        const float factor = finished.multiplier / finished.divisor * kWeightUnit;
#pragma unroll
        for (int c = 0; c < kVectors; ++c) {
#pragma unroll
            for (int e = 0; e < 4; ++e) values[c][e] = 0;
            if (column(c) >= kHeadDimV) continue;
#pragma unroll
            for (int i = 0; i < kTeam; ++i) {
                const Vector16 share = *reinterpret_cast<const Vector16*>(&shares.o[i][tile_row][column(c)]);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    values[c][e] = multiply_add_subnormal(share.values[e], merged.weights[i], values[c][e]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) values[c][e] = multiply_subnormal(values[c][e], factor);
        }
    }
};

}  // namespace cuflash
