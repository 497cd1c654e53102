// Online softmax of rows that lie in fragments of mma.sync, and O as it is rescaled, restarted and joined.
#pragma once

#include "common/mma_tile.cuh"
#include "common/softmax.cuh"
#include "ptx/barrier.cuh"

namespace cuflash {

// Weights are relative to a reference that is the row's maximum, or was it until a few tiles ago: the output is
// rescaled only when some row's maximum has outgrown its reference by so many bits that weights might leave the range.
constexpr float kSlackBits = kBfloat16 ? 8 : 4;
constexpr float kReferenceBits = kBfloat16 ? 0 : kWeightBits - kSlackBits;
constexpr float kReferenceUnit = kBfloat16 ? 1.0f : 1.0f / (1 << static_cast<int>(kReferenceBits));
// References beyond this many bits are subtracted before scores are scaled: as products their rounding would count.
constexpr float kLargeReference = 1 << 12;

using RowStates = OnlineSoftmax<kRows>;

// Place of a warp in its block.
struct Warp {
    int lane;
    int first_row;  // of the tile
    int share;      // which part of keys and features is its own

    __device__ __forceinline__ Warp()
        : lane(threadIdx.x % 32),
          first_row(threadIdx.x / (32 * kShare) * kRowsPerWarp),
          share(threadIdx.x / 32 % kShare) {}

    // Whether it multiplies by V a tile later than others.
    __device__ __forceinline__ bool lags() const { return kStaggered && threadIdx.x >= kThreads / 2; }
    // Barriers with the warps that share its rows.
    __device__ __forceinline__ void wait() const {
        if constexpr (kShare == 1) __syncwarp();
        else barrier_wait(1 + threadIdx.x / (32 * kShare), 32 * kShare);
    }
    __device__ __forceinline__ bool any(bool predicate) const {
        if constexpr (kShare == 1) return __any_sync(0xffffffffu, predicate);
        else return barrier_any(1 + threadIdx.x / (32 * kShare), 32 * kShare, predicate);
    }
};

struct QuadMaximum {
    __device__ __forceinline__ float operator()(float value) const {
        value = maximum(value, __shfl_xor_sync(0xffffffffu, value, 1));
        return maximum(value, __shfl_xor_sync(0xffffffffu, value, 2));
    }
};

// Scores, of which `multiplier` makes logits in units of log2(e), become weights relative to states.row_max.
__device__ __forceinline__ void scores_to_weights(Scores& scores, float multiplier, RowStates& states, Output& o,
                                                  float (*exchange)[32], const Warp& warp) {
    float largest[kRows];
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float row_max = at(scores, r, 0);
#pragma unroll
        for (int i = 1; i < kColumns; ++i) row_max = maximum(row_max, at(scores, r, i));
        largest[r] = maximum(states.row_max[r], QuadMaximum()(row_max));
        outgrown |= (largest[r] - states.row_max[r]) * multiplier > kSlackBits;
    }
    if (warp.any(outgrown)) {
        if constexpr (kShare > 1) {
            float (*const maxima)[32] = exchange + threadIdx.x / 64 * 2;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (warp.lane % 4 == 0) maxima[warp.share][row_of(r, warp.lane)] = largest[r];
            }
            warp.wait();
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                largest[r] = maximum(largest[r], maxima[1 - warp.share][row_of(r, warp.lane)]);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float reference = finite_maximum(largest[r]);
            const float factor = exp2_approximate((states.row_max[r] - reference) * multiplier);
            states.row_max[r] = largest[r];
            states.row_sum[r] *= factor;
#pragma unroll
            for (int i = 0; i < 2 * kFeatureTiles; ++i) at(o, r, i) *= factor;
        }
    }
    float offsets[kRows];
    float largest_offset = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        offsets[r] = multiply_add(finite_maximum(states.row_max[r]), -multiplier, kReferenceBits);
        largest_offset = maximum(largest_offset, absolute(offsets[r]));
    }
    if (largest_offset > kLargeReference) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            offsets[r] = kReferenceBits;
#pragma unroll
            for (int i = 0; i < kColumns; ++i) at(scores, r, i) -= finite_maximum(states.row_max[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float sums[2] = {};
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            float& score = at(scores, r, i);
            score = exp2_approximate(multiply_add(score, multiplier, offsets[r]));
            sums[i % 2] += score;
        }
        states.row_sum[r] += sums[0] + sums[1];
    }
}

// O of the keys before the last restart. Volatile, so that it stays in memory.
struct OutputTotal {
    volatile float sums[kRows][2 * kFeatureTiles];
    volatile float row_max[kRows];  // that their weights are relative to
};

// o += total
__device__ __forceinline__ void add_total(Output& o, const OutputTotal& total, const RowStates& states,
                                          float multiplier) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float factor = exp2_approximate((total.row_max[r] - finite_maximum(states.row_max[r])) * multiplier);
#pragma unroll
        for (int i = 0; i < 2 * kFeatureTiles; ++i) at(o, r, i) = multiply_add(total.sums[r][i], factor, at(o, r, i));
    }
}

// total = o, o = 0
__device__ __forceinline__ void restart(Output& o, OutputTotal& total, const RowStates& states) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        total.row_max[r] = states.row_max[r];
#pragma unroll
        for (int i = 0; i < 2 * kFeatureTiles; ++i) {
            total.sums[r][i] = at(o, r, i);
            at(o, r, i) = 0;
        }
    }
}

}  // namespace cuflash
