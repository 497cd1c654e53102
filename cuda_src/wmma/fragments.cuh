// WMMA fragments in arrays: operands from shared memory, scores into it, and sums that start again from zero.
#pragma once

#include "common/softmax.cuh"
#include "common/total.cuh"
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

template <int kRows, int kFeatures>
using OutputTotal = Total<kRows, 8 * kFeatures>;

// o += total
template <int kRows, int kFeatures>
__device__ __forceinline__ void add_total(WmmaC (&o)[kRows][kFeatures], const OutputTotal<kRows, kFeatures>& total,
                                          float (&factors)[kRows][16], float multiplier,
                                          const OnlineSoftmax<kRows>& states, int row, int first_column) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const float factor = total.factor(i, states.row_max[i], multiplier);
        if (first_column == 0) factors[i][row] = factor;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        WmmaC factor;
        wmma_load_column(factor, factors[i]);
        total.add_to(i, [&](int v) -> float& { return o[i][v / 8].x[v % 8]; }, [&](int v) { return factor.x[v % 8]; });
    }
}

// total = o, o = 0
template <int kRows, int kFeatures>
__device__ __forceinline__ void restart(WmmaC (&o)[kRows][kFeatures], OutputTotal<kRows, kFeatures>& total,
                                        const OnlineSoftmax<kRows>& states) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        total.row_max[i] = states.row_max[i];
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) {
#pragma unroll
            for (int e = 0; e < 8; ++e) total.sums[i][f * 8 + e] = o[i][f].x[e];
            o[i][f] = {};
        }
    }
}

}  // namespace cuflash
