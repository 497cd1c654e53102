// Division of indices by lengths. A block cannot begin to load before it knows which tile is its own, and the division
// instructions of a GPU take as long as a load.
#pragma once

#include "common/config.cuh"

namespace cuflash {

// A length that much is divided by, with 2^63 / value rounded up, or 0 for values that 31 bits do not hold.
struct Divisor {
    long long value;
    unsigned long long reciprocal;

    __host__ __device__ __forceinline__ operator long long() const { return value; }
};

// There is one copy of it: it is long, and blocks that begin wait for their instructions.
static __device__ CUFLASH_ONE_COPY long long divide(long long a, long long b) {
    // right either way: the long division is slower
    if (((a | b) >> 31) == 0) return static_cast<unsigned int>(a) / static_cast<unsigned int>(b);
    return a / b;
}

// By multiplication where both have 31 bits: the rounding of the reciprocal adds less than a / 2^63 < 1 / value.
__device__ __forceinline__ long long divide(long long a, const Divisor& by) {
    // right either way: the plain division is slower
    if (by.reciprocal == 0 || (a >> 31) != 0) return divide(a, by.value);
    const unsigned long long twice = 2 * a, low = static_cast<unsigned int>(by.reciprocal);
    return static_cast<long long>((twice * (by.reciprocal >> 32) + (twice * low >> 32)) >> 32);
}

}  // namespace cuflash
