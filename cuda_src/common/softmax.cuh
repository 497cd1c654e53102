// Online softmax: running maximum and sum of a thread's rows, from which output and log-sum-exp follow at the end, and
// how sums over disjoint keys merge: each counts by its sum of exponentials.
#pragma once

#include "common/math.cuh"

namespace cuflash {

// Weights are 2^kWeightBits times those relative to the largest logit. float16 then keeps its full precision for
// weights down to 2^-29 of the largest, and many small ones do not become 0 or round the same way. The other formats
// have range enough.
constexpr int kWeightBits = kDtype == CUFLASH_FLOAT16 ? 15 : 0;

// A maximum to subtract: 0 in place of -inf, so that rows without a visible key give exp(-inf) = 0 and no NaN.
__device__ __forceinline__ Accumulator finite_maximum(Accumulator row_max) {
    return row_max == -infinity() ? Accumulator(0) : row_max;
}

// The largest value among the four lanes that share a row of mma.sync.
__device__ __forceinline__ Accumulator quad_maximum(Accumulator value) {
    value = larger(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return larger(value, __shfl_xor_sync(0xffffffffu, value, 2));
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

    // Takes the largest logit of a key tile, over all lanes that share the row; returns what earlier results must be
    // multiplied by.
    __device__ __forceinline__ Accumulator follow(int i, Accumulator tile_max) {
        const Accumulator new_max = maximum(row_max[i], tile_max);
        const Accumulator correction = exponential(row_max[i] - finite_maximum(new_max));
        row_max[i] = new_max;
        return correction;
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
            correction[i] = follow(i, reduce_max(tile_max));
            const Accumulator subtract = finite_maximum(row_max[i]);
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

// A sum of exponentials, as its largest exponent and the sum relative to that. Their logarithm alone would forget the
// sum where the exponent is so large that one more or less is less than its rounding.
struct ExponentialSum {
    Accumulator largest;
    Accumulator sum;
};

__device__ __forceinline__ ExponentialSum empty_sum() { return {-infinity(), 0}; }

// exp(exponent - largest) for exponent <= largest, infinities included: equal ones give 1.
__device__ __forceinline__ Accumulator relative_exponential(Accumulator exponent, Accumulator largest) {
    return exponential(exponent == largest ? Accumulator(0) : exponent - largest);
}

__device__ __forceinline__ ExponentialSum merge(ExponentialSum a, ExponentialSum b) {
    const Accumulator largest = maximum(a.largest, b.largest);
    const Accumulator of_b = b.sum * relative_exponential(b.largest, largest);
    return {largest, multiply_add(a.sum, relative_exponential(a.largest, largest), of_b)};
}

__device__ __forceinline__ Accumulator log_of(ExponentialSum total) {
    // right either way: the logarithm of 0 is -inf too
    return total.sum == 0 ? -infinity() : total.largest + logarithm(total.sum);
}

}  // namespace cuflash
