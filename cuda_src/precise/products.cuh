// Both products of a tile, of rows of pairs: S = Q K^T, and O += P V.
#pragma once

#include "precise/value_scale.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

namespace cuflash {

using Fragment = unsigned int[4];

// first += A B of the firsts of pairs, second += the two products of a first and a second. A has 16 rows, B 8 columns.
__device__ __forceinline__ void multiply_pairs(float (&first)[4], float (&second)[4], const Fragment (&a)[2],
                                               const unsigned int (&b_first)[2], const unsigned int (&b_second)[2]) {
    mma_m16n8k16<false>(first, a[0], b_first);
    if constexpr (kProducts > 1) {
        mma_m16n8k16<false>(second, a[0], b_second);
        mma_m16n8k16<false>(second, a[1], b_first);
    }
}

// scores = Q K^T, of the features that the warp sums over; so many keys at a time as there are registers for.
__device__ __forceinline__ void multiply_qk(PairRows<kBlockM, kHeadDim>& q_rows, KeyRows<kBlockN, kHeadDim>& k_rows,
                                            const Place& place, Scores& scores) {
    constexpr int kNumSteps = kSteps / kWarpsPerRow;
    static_assert(kNumSteps * kWarpsPerRow == kSteps, "each warp has as many");
    const SharedAddress q =
        shared_address(q_rows.rows[place.group * kRowsPerWarp + place.lane % 16]) + place.lane / 16 * 16;
    const SharedAddress k = shared_address(k_rows.rows[place.lane / 16 * 8 + place.lane % 8]) + place.lane / 8 % 2 * 16;
    constexpr int kAtOnce = kPrepared || kKeyTiles < 4 ? kKeyTiles : 4;
#pragma unroll
    for (int first = 0; first < kKeyTiles; first += kAtOnce) {
        float sums[2][kAtOnce][4] = {};
#pragma unroll(kNumSteps <= 8 ? kNumSteps : 2)
        for (int i = 0; i < kNumSteps; ++i) {
            const int step = i * kWarpsPerRow + place.share;
            if constexpr (!kPrepared || kProducts > 1)
                __syncwarp();  // fence: the compiler would fetch more than it has registers for
            Fragment queries[2];
            ldmatrix_x4(queries[0], q + step * 32);
            if constexpr (kProducts > 1) ldmatrix_x4(queries[1], q + q_rows.kSecond + step * 32);
#pragma unroll
            for (int n = 0; n < kAtOnce; n += 2) {
                const SharedAddress keys = k + (first + n) * 8 * k_rows.kRowBytes + step * 32;
                Fragment firsts, seconds = {};
                ldmatrix_x4(firsts, keys);
                if constexpr (kProducts > 1) ldmatrix_x4(seconds, keys + k_rows.kSecond);
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    multiply_pairs(sums[0][n + e], sums[1][n + e], queries, {firsts[2 * e], firsts[2 * e + 1]},
                                   {seconds[2 * e], seconds[2 * e + 1]});
            }
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[first + n][i] = sums[0][n][i];
                if constexpr (kProducts > 1)
                    scores[first + n][i] = multiply_add(sums[1][n][i], 1 / kPairStep, sums[0][n][i]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float scale = q_rows.scale(place.tile_row(r));
#pragma unroll
        for (int i = 0; i < kColumns; ++i) at(scores, r, i) *= scale * (k_rows.scale(place.column(i)) * kUnscaled);
    }
}

// O += P V, of the warp's features. Tensor cores truncate what they add to their sums, the more the larger those are: a
// sum is over 32 keys at most, unless fewer digits are wanted.
__device__ __forceinline__ void accumulate(KeyRows<kBlockN, kHeadDimV>& v_rows, const Place& place,
                                           const ValueScale& scale, Scores& weights, Output& o) {
    static_assert(kFeatureTiles * 8 * kWarpsPerRow == kHeadDimV, "each warp has as many");
    constexpr int kStepsV = kBlockN / 16, kAtOnce = kPrepared && (kProducts == 1 || kBlockN <= 32) ? 4 : 2;
    constexpr int kStepsPerSum = kProducts > 1 && kStepsV > 2 ? 2 : kStepsV;
    const float relative = __uint_as_float((254 + kPairBits - scale.exponent()) << 23);
    const SharedAddress v = shared_address(v_rows.rows[place.lane % 16]) + (place.share * 16 + place.lane / 16 * 8) * 2;
    const float unit = __uint_as_float(scale.exponent() << 23) * kUnscaled;
#pragma unroll 1
    for (int first = 0; first < kStepsV; first += kStepsPerSum) {
        Fragment p[kStepsPerSum][2];
#pragma unroll
        for (int n = 0; n < 2 * kStepsPerSum; ++n) {
            float scales[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) scales[e] = v_rows.scale(first * 16 + place.column(2 * n + e)) * relative;
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                pair_of(at(weights, r, 2 * n) * scales[0], at(weights, r, 2 * n + 1) * scales[1],
                        p[n / 2][0][n % 2 * 2 + r], p[n / 2][1][n % 2 * 2 + r]);
        }
        // The next ones are where these were: registers have no numbers that a loop could count.
#pragma unroll
        for (int n = 2 * kStepsPerSum; n < kKeyTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[n - 2 * kStepsPerSum][i] = weights[n][i];
        }
#pragma unroll
        for (int f = 0; f < kFeatureTiles; f += kAtOnce) {
            float sums[2][kAtOnce][4] = {};
#pragma unroll
            for (int step = 0; step < kStepsPerSum; ++step) {
                if constexpr (!kPrepared || kProducts > 1)
                    __syncwarp();  // fence: the compiler would fetch more than it has registers for
#pragma unroll
                for (int g = 0; g < kAtOnce; g += 2) {
                    const SharedAddress values =
                        v + (first + step) * 16 * v_rows.kRowBytes + (f + g) * 16 * kWarpsPerRow;
                    Fragment firsts, seconds = {};
                    ldmatrix_x4_transposed(firsts, values);
                    if constexpr (kProducts > 1) ldmatrix_x4_transposed(seconds, values + v_rows.kSecond);
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        multiply_pairs(sums[0][g + i], sums[1][g + i], p[step], {firsts[2 * i], firsts[2 * i + 1]},
                                       {seconds[2 * i], seconds[2 * i + 1]});
                }
            }
#pragma unroll
            for (int g = 0; g < kAtOnce; ++g) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& value = o[f + g][i];
                    float sum = sums[0][g][i];
                    if constexpr (kProducts > 1) sum = multiply_add(sums[1][g][i], 1 / kPairStep, sum);
                    value = multiply_add(sum, unit, value);
                }
            }
        }
    }
}

}  // namespace cuflash
