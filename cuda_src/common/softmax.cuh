// Online softmax: running maximum and sum of a thread's rows, from which output and log-sum-exp follow at the end.
#pragma once

#include "common/numeric.cuh"

namespace cuflash {

// A maximum to subtract: 0 in place of -inf, so that rows without a visible key give exp(-inf) = 0 and no NaN.
__device__ __forceinline__ Accumulator finite_maximum(Accumulator row_max) {
    return row_max == -infinity() ? Accumulator(0) : row_max;
}

template <int kRows>
struct OnlineSoftmax {
    Accumulator row_max[kRows];  // of all lanes that share the row
    Accumulator row_sum[kRows];  // of this lane's own keys; the lanes' sums are added once, by the epilogue

    __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            row_max[i] = -infinity();
            row_sum[i] = 0;
        }
    }

    // Turns the logits of one key tile into weights relative to the new maximum; `correction` is what earlier results
    // must be multiplied by. `reduce_max` takes the maximum over the lanes that share a row and is called by all of
    // them.
    template <int kColumns, typename ReduceMax>
    __device__ __forceinline__ void update(Accumulator (&logits)[kRows][kColumns], Accumulator (&correction)[kRows],
                                           ReduceMax reduce_max) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            Accumulator tile_max = logits[i][0];
#pragma unroll
            for (int j = 1; j < kColumns; ++j) tile_max = maximum(tile_max, logits[i][j]);
            const Accumulator new_max = maximum(row_max[i], reduce_max(tile_max));
            const Accumulator subtract = finite_maximum(new_max);
            correction[i] = exponential(row_max[i] - subtract);
            row_max[i] = new_max;
            Accumulator tile_sum = 0;
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
                logits[i][j] = exponential(logits[i][j] - subtract);
                tile_sum += logits[i][j];
            }
            row_sum[i] = multiply_add(row_sum[i], correction[i], tile_sum);
        }
    }
};

}  // namespace cuflash
