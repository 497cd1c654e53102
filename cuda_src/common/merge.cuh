// Results over disjoint keys become one: the algebra of a row, in which each part counts by the exponential of its lse.
#pragma once

#include "common/softmax.cuh"

namespace cuflash {

// A sum of exponentials, as its largest exponent and the sum relative to that.
struct ExponentialSum {
    Accumulator largest;
    Accumulator sum;
};

__device__ __forceinline__ ExponentialSum empty_sum() { return {-infinity(), 0}; }

// The sum whose only exponent is the lse of a part.
__device__ __forceinline__ ExponentialSum sum_of(Accumulator lse) { return {lse, 1}; }

__device__ __forceinline__ ExponentialSum join(ExponentialSum a, ExponentialSum b) {
    const Accumulator largest = maximum(a.largest, b.largest);
    const Accumulator subtract = finite_maximum(largest);
    const Accumulator of_b = b.sum * exponential(b.largest - subtract);
    return {largest, multiply_add(a.sum, exponential(a.largest - subtract), of_b)};
}

__device__ __forceinline__ Accumulator log_of(ExponentialSum total) {
    return total.sum == 0 ? -infinity() : total.largest + logarithm(total.sum);
}

// What the output of a part that has seen keys is multiplied by: its share of the total.
struct PartWeight {
    Accumulator subtract;
    Accumulator factor;

    __device__ __forceinline__ explicit PartWeight(ExponentialSum total)
        : subtract(total.largest), factor(1 / total.sum) {}

    __device__ __forceinline__ Accumulator operator()(Accumulator lse) const {
        return exponential(lse - subtract) * factor;
    }
};

}  // namespace cuflash
