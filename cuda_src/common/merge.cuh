// Results over disjoint keys become one: the algebra of a row, in which each part counts by its sum of exponentials.
#pragma once

#include "common/softmax.cuh"

namespace cuflash {

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

__device__ __forceinline__ ExponentialSum join(ExponentialSum a, ExponentialSum b) {
    const Accumulator largest = maximum(a.largest, b.largest);
    const Accumulator of_b = b.sum * relative_exponential(b.largest, largest);
    return {largest, multiply_add(a.sum, relative_exponential(a.largest, largest), of_b)};
}

__device__ __forceinline__ Accumulator log_of(ExponentialSum total) {
    return total.sum == 0 ? -infinity() : total.largest + logarithm(total.sum);
}

// What the output of a part that has seen keys is multiplied by.
__device__ __forceinline__ Accumulator share_of(ExponentialSum part, ExponentialSum total) {
    return part.sum * relative_exponential(part.largest, total.largest) / total.sum;
}

}  // namespace cuflash
