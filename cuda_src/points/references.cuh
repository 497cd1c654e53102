// What a thread's weights are relative to, and queries that hold the scale, so that a weight takes one multiply-add and
// one exponential.
#pragma once

#include "common/exponential.cuh"
#include "common/score.cuh"
#include "common/softmax.cuh"
#include "ptx/exp2.cuh"
#include "ptx/subnormal.cuh"

namespace cuflash {

constexpr bool kIsDouble = sizeof(Accumulator) == 8;
// Exponents of weights are bits, or, in double precision, natural ones.
constexpr double kPerLogit = kIsDouble ? 1.0 : 1.4426950408889634;
// A reference stays until a score is this much of an exponent above it: weights are 16 at most.
constexpr Accumulator kSlack = kIsDouble ? 2.772588722239781 : 4;

__device__ __forceinline__ int exponent_of(double value) { return (__double2hiint(value) >> 20 & 0x7ff) - 1023; }

// 2^exponent, from -1022 to 1023.
__device__ __forceinline__ double power_of_two(int exponent) { return __hiloint2double((exponent + 1023) << 20, 0); }

// Makes the scores of a query exponents divided by a power of two, which is returned: features of the query are below
// 1/16, however large it and the scale are, unless the power would be larger than any scale. So scores leave the range
// of their type only if unscaled ones do, and what distinguishes logits of order 1 stays above its least normal number,
// but for features of a query that are 1e30 times smaller than its largest one.
__device__ __forceinline__ Accumulator fold_scale(const AttentionParams& params, Accumulator (&q)[kHeadDim]) {
    constexpr int kLargest = kIsDouble ? 998 : 102;
    double largest = 0;
#pragma unroll
    for (int d = 0; d < kHeadDim; ++d) largest = fmax(largest, fabs(widen_subnormal(q[d])));
    const double scale = params.scale * kPerLogit;
    const int exponent = min(exponent_of(largest), 1022);
    int of_unit = exponent + exponent_of(scale) + 6;
    // right either way on a CPU; but to a GPU floats below the normal range are 0
    of_unit = min(of_unit, kLargest);
    of_unit = max(of_unit, -kLargest);
    const double shrink = power_of_two(-exponent), factor = scale * power_of_two(exponent - of_unit);
#pragma unroll
    for (int d = 0; d < kHeadDim; ++d) narrow_subnormal(widen_subnormal(q[d]) * shrink * factor, q[d]);
    return static_cast<Accumulator>(power_of_two(of_unit));
}

// Powers of two or, in double precision, of e, for lanes of a warp together.
template <bool kOfDoubles>
struct Powers {
    __device__ __forceinline__ explicit Powers(int) {}
    __device__ __forceinline__ float of_negative(float exponent) const { return exp2_approximate(exponent); }
};
template <>
struct Powers<true> : Exponentials {
    using Exponentials::Exponentials;
};
using RowPowers = Powers<kIsDouble>;

// For lanes that differ in what they do.
__device__ __forceinline__ Accumulator power(Accumulator exponent) {
    if constexpr (kIsDouble) return exponential(exponent);
    else return exp2_approximate(exponent);
}

// Of a row of a thread. Exponents are scores, or logits if they are more than scores times the scale, times the unit.
struct Reference {
    Accumulator row_max = -infinity();  // of the keys so far, or less by as much as the slack
    Accumulator limit = -infinity();    // above which scores raise it
    Accumulator row_unit = static_cast<Accumulator>(kPerLogit);
    Accumulator unit = 1, offset = 0;  // see weight

    // What sums relative to an earlier reference must be multiplied by.
    __device__ __forceinline__ Accumulator factor(Accumulator earlier_max) const {
        return power((earlier_max - finite_maximum(row_max)) * row_unit);
    }
    // Takes a larger maximum. Where it is no exponent of a float any more, all that differs differs by far more than
    // exponents reach, so that a smaller unit does.
    __device__ __forceinline__ void raise(Accumulator larger) {
        row_max = larger;
        limit = larger + kSlack / row_unit;
        unit = row_unit;
        if constexpr (!kIsDouble) {
            if (absolute(larger * unit) > largest_finite()) unit *= 0.25f;
        }
        offset = -(larger * unit);
    }
    // Exactly 1 for the maximum itself, as products with powers of two are exact. Called by all lanes.
    __device__ __forceinline__ Accumulator weight(const RowPowers& powers, Accumulator score) const {
        if constexpr (kOnlyScale) return powers.of_negative(multiply_add(score, unit, offset));
        else return powers.of_negative((score - finite_maximum(row_max)) * static_cast<Accumulator>(kPerLogit));
    }
    // The maximum as a logit.
    __device__ __forceinline__ Accumulator largest_logit() const {
        if constexpr (!kOnlyScale) return row_max;
        else if constexpr (kIsDouble) return row_max * row_unit;
        else return static_cast<float>(static_cast<double>(row_max) * row_unit * 0.6931471805599453);
    }
};

}  // namespace cuflash
