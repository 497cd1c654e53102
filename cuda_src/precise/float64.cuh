// Logits in double precision become weights.
#pragma once

#include "common/exponential.cuh"
#include "precise/output.cuh"

namespace cuflash {

static_assert(kDtype == CUFLASH_FLOAT64);

// The exponentials of logits less the maxima of their rows, and their sums.
__device__ __forceinline__ void weigh(const Exponentials& exponentials, const double (&maxima)[kRows], Scores& scores,
                                      OnlineSoftmax<kRows>& softmax) {
    constexpr int kAtOnce = 2;  // columns: all together would take more registers than there are
    const int zero = unknown_zero();
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            double value = at(scores, r, i) - maxima[r];
            if (i >= kAtOnce) value = behind(at(scores, r, i - kAtOnce), value, zero);
            at(scores, r, i) = exponentials.of_negative(value);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        double tile_sum = 0;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) tile_sum += at(scores, r, i);
        softmax.row_sum[r] += tile_sum;
    }
}

}  // namespace cuflash
