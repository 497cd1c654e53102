// The two products of attention by mma.sync: S += Q K^T and O += P V.
#pragma once

#include "mma/budget.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

namespace cuflash {

// `q` is the lane's address in the warp's rows of Q.
__device__ __forceinline__ void load_queries(Queries& queries, SharedAddress q, int step) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) ldmatrix_x4(queries.tiles[m], q + m * 16 * kRowBytesQ + step * 32);
}

// scores += Q K^T. `between(step)` is called kStepsK times, for work that the tensor cores hide.
template <typename Between>
__device__ __forceinline__ void multiply_qk(Scores& scores, SharedAddress q, const KeptQueries& kept, SharedAddress k,
                                            Between between) {
#pragma unroll
    for (int step = 0; step < kStepsK; ++step) {
        Queries loaded;
        if constexpr (!kKeepQ) load_queries(loaded, q, step);
        const Queries& queries = kKeepQ ? kept[step] : loaded;
#pragma unroll
        for (int n = 0; n < kKeyTiles; n += 2) {
            unsigned int keys[4];
            ldmatrix_x4(keys, k + n * 8 * kRowBytesK + step * 32);
            // Behind some loads: the compiler moves none across a copy to shared memory.
            if (n == (kKeyTiles > 2 ? 2 : 0)) between(step);
            const unsigned int first[2] = {keys[0], keys[1]}, second[2] = {keys[2], keys[3]};
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                mma_m16n8k16<kBfloat16>(scores[m][n], queries.tiles[m], first);
                mma_m16n8k16<kBfloat16>(scores[m][n + 1], queries.tiles[m], second);
            }
        }
    }
}

// To 16 bits. Two neighbouring key tiles of a product are what the next one takes as its first operand.
__device__ __forceinline__ void round_weights(Weights& rounded, const Scores& weights) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float low = weights[m][n][2 * i], high = weights[m][n][2 * i + 1];
                rounded[m][n / 2][n % 2 * 2 + i] =
                    kBfloat16 ? bfloat162_bits_from_floats(low, high) : half2_bits_from_floats(low, high);
            }
        }
    }
}

// Leaves a warp's weights in the rows that it shares.
__device__ __forceinline__ void store_weights(Element (*rows)[kPitchP], int first_column, const Weights& weights,
                                              int lane) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                *reinterpret_cast<unsigned int*>(
                    &rows[m * 16 + i * 8 + lane / 4][first_column + n * 8 + lane % 4 * 2]) =
                    weights[m][n / 2][n % 2 * 2 + i];
        }
    }
}

// o += P V with weights that lie at `p`. What is multiplied next is on the way from shared memory meanwhile, and no
// more than that: the compiler would fetch further ahead than it has registers for.
template <typename Between>
__device__ __forceinline__ void multiply_shared_pv(Output& o, SharedAddress p, SharedAddress v, Between between) {
    constexpr int kGroups = kMatricesV / kMatricesAhead;
    unsigned int weights[2][kRowTiles][4], values[2][kMatricesAhead][4];
    const auto fetch = [&](int group) {
        const int step = group / kGroups, first = group % kGroups * kMatricesAhead;
        if (first == 0) {  // right either way: the same weights once more
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) ldmatrix_x4(weights[step % 2][m], p + m * 16 * kRowBytesP + step * 32);
        }
#pragma unroll
        for (int i = 0; i < kMatricesAhead; ++i)
            ldmatrix_x4_transposed(values[group % 2][i], v + step * 16 * kRowBytesV + (first + i) * 32);
    };
    fetch(0);
#pragma unroll
    for (int group = 0; group < kStepsV * kGroups; ++group) {
        __syncwarp();  // fence: nothing is fetched further ahead
        if (group + 1 < kStepsV * kGroups) fetch(group + 1);
        const int step = group / kGroups, first = group % kGroups * kMatricesAhead;
        if (first == 0) between(step);
#pragma unroll
        for (int i = 0; i < kMatricesAhead; ++i) {
            const unsigned int (&both)[4] = values[group % 2][i];
            const unsigned int even[2] = {both[0], both[1]}, odd[2] = {both[2], both[3]};
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                mma_m16n8k16<kBfloat16>(o[m][2 * (first + i)], weights[step % 2][m], even);
                mma_m16n8k16<kBfloat16>(o[m][2 * (first + i) + 1], weights[step % 2][m], odd);
            }
        }
    }
}

// o += P V with the warp's own weights. `between(step)` is called kStepsV times.
template <typename Between>
__device__ __forceinline__ void multiply_own_pv(Output& o, const Weights& weights, SharedAddress v, Between between) {
#pragma unroll
    for (int step = 0; step < kStepsV; ++step) {
        // fence: nothing is fetched further ahead
        __syncwarp();  // the compiler fetches no further ahead, which it has no registers for
#pragma unroll
        for (int f = 0; f < kFeatureTiles; f += 2) {
            unsigned int values[4];
            ldmatrix_x4_transposed(values, v + step * 16 * kRowBytesV + f * 16);
            if (f == (kFeatureTiles > 2 ? 2 : 0)) between(step);
            const unsigned int first[2] = {values[0], values[1]}, second[2] = {values[2], values[3]};
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                mma_m16n8k16<kBfloat16>(o[m][f], weights[m][step], first);
                mma_m16n8k16<kBfloat16>(o[m][f + 1], weights[m][step], second);
            }
        }
    }
}

// Without values what is left is the work between.
template <typename Between>
__device__ __forceinline__ void multiply_pv(Output& o, const Weights& own, SharedAddress p, SharedAddress v,
                                            Between between) {
    if constexpr (!kHasValues) {
#pragma unroll
        for (int step = 0; step < kStepsV; ++step) between(step);
    } else if constexpr (kWarpsPerRow > 1) {
        multiply_shared_pv(o, p, v, between);
    } else {
        multiply_own_pv(o, own, v, between);
    }
}

}  // namespace cuflash
