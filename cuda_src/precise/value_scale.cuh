// The scale that the products of weights and values of a tile have in common.
#pragma once

#include "precise/prepared_rows.cuh"

namespace cuflash {

// right either way: what is asked for is whether to multiply one by one, which is right for all, if slower
__device__ __forceinline__ bool any_thread(bool predicate) { return __syncthreads_or(predicate) != 0; }

// Compilers spill for words in memory where output and pairs in the making take all registers, elsewhere for the
// others.
constexpr bool kWideOutput = !kPrepared && kHeadDimV > 128;

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
    // Exponent; 0: the rows of the tile are not to be multiplied by pairs.
    RareWord<!kWarpgroups && !kWideOutput> common;

    __device__ __forceinline__ unsigned int exponent() const { return common.value; }
    __device__ __forceinline__ bool by_pairs() const { return exponent() != 0; }
    __device__ __forceinline__ unsigned int least() const { return max(exponent(), kLeastExponent + kRange) - kRange; }
    // Finds another one for a tile with rows out of range, or with tiny elements.
    __device__ __forceinline__ void follow(const KeyRows<kBlockN, kHeadDimV>& v, bool has_tiny) {
        unsigned int smallest = ~0u, largest = kLeastExponent;
#pragma unroll 1
        for (int row = 0; row < kBlockN; ++row) {
            const unsigned int of_row = __float_as_uint(v.scale(row)) >> 23;
            if (of_row == 0) continue;  // right either way: one by one is right for zeros, too, if slower
            smallest = min(smallest, of_row);
            largest = max(largest, of_row);
        }
        common.value = largest + kReserve;
        if (has_tiny || smallest < least() || largest > kMostExponent) common.value = 0;
    }
};

}  // namespace cuflash
