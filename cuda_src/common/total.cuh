// Sums that start again from zero, and the total that they join.
//
// Tensor cores round toward zero while they accumulate in float, so a sum over all keys would drift. O starts again
// from zero every few thousand keys; what it was joins a total by multiply-adds, in memory, as that is so rare. In
// double precision they round to nearest, but each time: sums are shorter, as nothing hides their last digit.
#pragma once

#include "common/softmax.cuh"
#include "ptx/exp2.cuh"

namespace cuflash {

// Until then the drift is a tenth of the rounding to 16 bits, or errors of doubles are a few units in the last place.
constexpr int kTilesPerSum = (kDtype == CUFLASH_FLOAT64 ? 256 : 4096) / kBlockN;

// A thread's part of O for the keys before the last restart: kValues of each of its rows. Volatile, so that it stays in
// memory.
template <int kRows, int kValues>
struct Total {
    volatile Accumulator sums[kRows][kValues];
    volatile Accumulator row_max[kRows];  // that their weights are relative to

    // What makes the sums of a row relative to a later maximum. Differences times `multiplier` are in units of log2(e),
    // or, in double precision, natural ones.
    __device__ __forceinline__ Accumulator factor(int r, Accumulator later_max, Accumulator multiplier) const {
        const Accumulator difference = (row_max[r] - finite_maximum(later_max)) * multiplier;
        if constexpr (sizeof(Accumulator) == 8) return exponential(difference);
        else return exp2_approximate(difference);
    }
    // o += total, `o(i)` being value i of row r as the kernel holds it, and `factor(i)` what the total's is multiplied
    // by.
    template <typename Values, typename Factors>
    __device__ __forceinline__ void add_to(int r, Values o, Factors factor) const {
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            o(i) = multiply_add_subnormal(static_cast<Accumulator>(sums[r][i]), factor(i), o(i));
    }
};

}  // namespace cuflash
