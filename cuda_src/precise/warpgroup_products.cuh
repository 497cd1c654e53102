// Both products of a tile by a warpgroup, of rows of pairs: S = Q K^T, and O += P V.
#pragma once

#include "precise/value_scale.cuh"
#include "ptx/wgmma.cuh"

namespace cuflash {

using Fragment = unsigned int[4];

static_assert(kWarpgroups && kPrepared && kWarpsPerRow == 1);

// Sums of products of queries and keys, on their way.
using ScoreSums = float[kProducts > 1 ? 2 : 1][kKeyTiles][4];  // of firsts, and of firsts and seconds

// Issues S = Q K^T.
__device__ __forceinline__ void issue_qk(PairRows<kBlockM, kHeadDim>& q, KeyRows<kBlockN, kHeadDim>& k, int group,
                                         ScoreSums& sums) {
    const SharedMatrix queries = q.features(0).at(group * 64 * 128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const SharedMatrix a = queries.at(q.features_at(step)), b = k.features(step);
        if (step == 0) wgmma<false, false, false>(sums[0], a, b);
        else wgmma<false, false, true>(sums[0], a, b);
        if constexpr (kProducts > 1) {
            if (step == 0) wgmma<false, false, false>(sums[1], a, b.at(k.kSecond));
            else wgmma<false, false, true>(sums[1], a, b.at(k.kSecond));
            wgmma<false, false, true>(sums[1], a.at(q.kSecond), b);
        }
    }
    wgmma_commit();
}

// Waits for them.
__device__ __forceinline__ void finish_qk(const PairRows<kBlockM, kHeadDim>& q, const KeyRows<kBlockN, kHeadDim>& k,
                                          const Place& place, ScoreSums& sums, Scores& scores) {
    wgmma_wait<0>(sums);
    float scales[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) scales[r] = q.scale(place.tile_row(r)) * kUnscaled;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float sum = sums[0][n][i];
            if constexpr (kProducts > 1) sum = multiply_add(sums[1][n][i], 1 / kPairStep, sum);
            scores[n][i] = sum * (scales[i / 2] * k.scale(n * 8 + place.run * 2 + i % 2));
        }
    }
}

constexpr int kStepsV = kBlockN / 16, kSums = kProducts > 1 ? kBlockN / 32 : 1, kStepsPerSum = kStepsV / kSums;

// O += unit * P V, of 64 features or the last ones, and of those behind them.
template <int kPanel>
__device__ __forceinline__ void accumulate_panels(KeyRows<kBlockN, kHeadDimV>& v_rows, const Fragment (&p)[2][kStepsV],
                                                  float unit, Output& o) {
    constexpr int kTiles = kFeatureTiles - kPanel * 8 < 8 ? kFeatureTiles - kPanel * 8 : 8;
    float sums[kSums + (kProducts > 1)][kTiles][4];  // of firsts, and of firsts and seconds
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kStepsV; ++step) {
        const SharedMatrix values = v_rows.tokens(step, kPanel);
        float (&firsts)[kTiles][4] = sums[step / kStepsPerSum];
        if (step % kStepsPerSum == 0) wgmma<false, true, false>(firsts, p[0][step], values);
        else wgmma<false, true, true>(firsts, p[0][step], values);
        if constexpr (kProducts > 1) {
            if (step == 0) wgmma<false, true, false>(sums[kSums], p[0][step], values.at(v_rows.kSecond));
            else wgmma<false, true, true>(sums[kSums], p[0][step], values.at(v_rows.kSecond));
            wgmma<false, true, true>(sums[kSums], p[1][step], values);
        }
    }
    wgmma_commit();
    wgmma_wait<0>(sums);
#pragma unroll
    for (int f = 0; f < kTiles; ++f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& value = o[kPanel * 8 + f][i];
            if constexpr (kProducts > 1) sums[0][f][i] = multiply_add(sums[kSums][f][i], 1 / kPairStep, sums[0][f][i]);
#pragma unroll
            for (int s = 0; s < kSums; ++s) value = multiply_add(sums[s][f][i], unit, value);
        }
    }
    if constexpr ((kPanel + 1) * 64 < kHeadDimV) accumulate_panels<kPanel + 1>(v_rows, p, unit, o);
}

// O += P V. Tensor cores truncate what they add to their sums, the more the larger those are: a sum of firsts is over
// 32 keys at most, unless fewer digits are wanted.
__device__ __forceinline__ void accumulate(KeyRows<kBlockN, kHeadDimV>& v_rows, const Place& place,
                                           const ValueScale& scale, Scores& weights, Output& o) {
    const float relative = __uint_as_float((254 + kPairBits - scale.exponent()) << 23);
    const float unit = __uint_as_float(scale.exponent() << 23) * kUnscaled;
    Fragment p[2][kStepsV];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
        float scales[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) scales[e] = v_rows.scale(place.column(2 * n + e)) * relative;
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            pair_of(weights[n][2 * r] * scales[0], weights[n][2 * r + 1] * scales[1], p[0][n / 2][n % 2 * 2 + r],
                    p[1][n / 2][n % 2 * 2 + r]);
    }
    accumulate_panels<0>(v_rows, p, unit, o);
}

}  // namespace cuflash
