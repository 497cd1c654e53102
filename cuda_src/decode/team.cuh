// The warps of a block, which have seen different keys, merge what they have.
#pragma once

#include "common/softmax.cuh"
#include "decode/layout.cuh"
#include "ptx/barrier.cuh"

namespace cuflash {

// What a warp hands on to another one.
struct TeamShare {
    Vector16 o[kVectorsV * 8][32];
    float row_max[kRows][32];
    float row_sum[kRows][32];
};
using TeamShares = TeamShare[kTeam / 2][kPair];

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

// The later half hands on to the first one, until the first warp has all: always in the same order. Called by the whole
// block.
__device__ __forceinline__ void merge_team(TeamShares& shares, const Place& place, OnlineSoftmax<kRows>& softmax,
                                           Output& o) {
#pragma unroll 1
    for (int active = kTeam, half; active > 1; active = half) {
        half = (active + 1) / 2;
        if (half <= place.share && place.share < active) {
            TeamShare& share = shares[place.share - half][place.half];
#pragma unroll
            for (int i = 0; i < kVectorsV * 8; ++i) memcpy(&share.o[i][place.lane], o[i / 8][i % 8], sizeof(Vector16));
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                share.row_max[r][place.lane] = softmax.row_max[r];
                share.row_sum[r][place.lane] = softmax.row_sum[r];
            }
        }
        __syncthreads();
        if (place.share < active - half) {
            const TeamShare& share = shares[place.share][place.half];
            RowValues own, other;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const float other_max = share.row_max[r][place.lane];
                own[r] = softmax.follow(r, other_max);
                other[r] = exponential(other_max - finite_maximum(softmax.row_max[r]));
                softmax.row_sum[r] = softmax.row_sum[r] * own[r] + share.row_sum[r][place.lane] * other[r];
            }
#pragma unroll
            for (int i = 0; i < kVectorsV * 8; ++i) {
                float (&values)[4] = o[i / 8][i % 8];
                const Vector16 others = share.o[i][place.lane];
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    values[e] = multiply_add_subnormal(others.values[e], other[e / 2],
                                                       multiply_subnormal(values[e], own[e / 2]));
            }
        }
        __syncthreads();
    }
}

}  // namespace cuflash
