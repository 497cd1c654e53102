// The scale that the products of weights and values of a tile have in common.
#pragma once

#include "precise/prepared_rows.cuh"

namespace cuflash {

// right either way: what is asked is whether the slow way, which is always right, has to be taken
__device__ __forceinline__ bool any_thread(bool predicate) { return __syncthreads_or(predicate) != 0; }

// A word that is rarely looked at, in memory where registers are scarce.
template <bool kInMemory>
struct RareWord {
    unsigned int value;
};
template <>
struct RareWord<true> {
    volatile unsigned int value;
};

// Weights are multiplied by the scales of their rows of V, relative to one that is not below any of them.
struct ValueScale {
    static constexpr unsigned int kRange = 26;  // in bits: lower ones would cost weights their digits
    static constexpr unsigned int kReserve = 2;
    RareWord<kPrepared> common;  // exponent; 0: the rows of the tile are not to be multiplied by pairs

    __device__ __forceinline__ unsigned int exponent() const { return common.value; }
    __device__ __forceinline__ bool by_pairs() const { return exponent() != 0; }
    // right either way: it only keeps the difference in range
    __device__ __forceinline__ unsigned int least() const { return max(exponent(), kLeastExponent + kRange) - kRange; }
    // Finds another one for a tile with rows out of range, or tiny elements. Called by the whole block.
    __device__ __forceinline__ void follow(const KeyRows<kBlockN, kHeadDimV>& v, unsigned int found) {
        unsigned int smallest = ~0u, largest = kLeastExponent;
#pragma unroll 1
        for (int row = 0; row < kBlockN; ++row) {
            const unsigned int of_row = __float_as_uint(v.scale(row)) >> 23;
            // right either way: zeros only make it slower
            if (of_row != 0) smallest = min(smallest, of_row), largest = max(largest, of_row);
        }
        common.value = largest + kReserve;
        // right either way: the slow way is right, too
        if (any_thread((found & kHasTiny) || smallest < least() || largest > kMostExponent)) common.value = 0;
    }
};

}  // namespace cuflash
