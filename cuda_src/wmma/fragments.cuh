// WMMA fragments in arrays: operands from shared memory, scores into it, and sums that start again from zero.
#pragma once

#include "common/softmax.cuh"
#include "common/weights.cuh"
#include "ptx/wmma.cuh"

namespace cuflash {

using Tensor = Wmma<kDtype>;

// Loads operands that lie kDistance elements apart.
template <int kDistance, int kFirst = 0, typename Operand, int kCount>
__device__ __forceinline__ void load_operands(Operand (&operands)[kCount], const Element* shared, int pitch) {
    if constexpr (kFirst < kCount) {
        Tensor::load<kFirst * kDistance>(operands[kFirst], shared, pitch);
        if constexpr (kDtype == CUFLASH_FLOAT32) {
#pragma unroll
            for (unsigned int& x : operands[kFirst].x) x = tf32_bits_from_float(__uint_as_float(x));
        }
        load_operands<kDistance, kFirst + 1>(operands, shared, pitch);
    }
}

template <int kPitch, int kFirst = 0, int kCount>
__device__ __forceinline__ void store_scores(float* shared, const WmmaC (&scores)[kCount]) {
    if constexpr (kFirst < kCount) {
        wmma_store<kFirst * 16>(shared, scores[kFirst], kPitch);
        store_scores<kPitch, kFirst + 1>(shared, scores);
    }
}

// A thread's part of O for the keys before the last restart. Volatile, so that it stays in memory.
template <int kRows, int kFeatures>
struct Total {
    volatile float sums[kRows][kFeatures][8];
    volatile float row_max[kRows];  // that their weights are relative to
};

// o += total
template <int kRows, int kFeatures>
__device__ __forceinline__ void add_total(WmmaC (&o)[kRows][kFeatures], const Total<kRows, kFeatures>& total,
                                          float (&factors)[kRows][16], float multiplier,
                                          const OnlineSoftmax<kRows>& states, int row, int first_column) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const float difference = total.row_max[i] - finite_maximum(states.row_max[i]);
        if (first_column == 0) factors[i][row] = exp2_approximate(difference * multiplier);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        WmmaC factor;
        wmma_load_column(factor, factors[i]);
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) {
#pragma unroll
            for (int e = 0; e < 8; ++e) o[i][f].x[e] = multiply_add(total.sums[i][f][e], factor.x[e], o[i][f].x[e]);
        }
    }
}

// total = o, o = 0
template <int kRows, int kFeatures>
__device__ __forceinline__ void restart(WmmaC (&o)[kRows][kFeatures], Total<kRows, kFeatures>& total,
                                        const OnlineSoftmax<kRows>& states) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        total.row_max[i] = states.row_max[i];
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) {
#pragma unroll
            for (int e = 0; e < 8; ++e) total.sums[i][f][e] = o[i][f].x[e];
            o[i][f] = {};
        }
    }
}

}  // namespace cuflash
