// Division of indices by lengths. A block cannot begin to load before it knows which tile is its own, and the division
// instructions of a GPU take as long as a load.
#pragma once

#include "common/config.cuh"

namespace cuflash {

// A length that much is divided by, with (2^64 - 1) / value rounded down.
struct Divisor {
    long long value;
    unsigned long long reciprocal;

    __host__ __device__ __forceinline__ operator long long() const { return value; }
};

// There is one copy of each: they are long, and blocks that begin wait for their instructions.
static __device__ CUFLASH_ONE_COPY long long divide(long long a, long long b) {
    // right either way: the long division is slower
    if (((a | b) >> 31) == 0) return static_cast<unsigned int>(a) / static_cast<unsigned int>(b);
    return a / b;
}

// By multiplication, of what is not negative: the rounding of the reciprocal and of the product leave out one at most.
static __device__ CUFLASH_ONE_COPY long long divide(long long a, const Divisor by) {
    const unsigned long long low = static_cast<unsigned int>(a), high = static_cast<unsigned long long>(a) >> 32;
    const unsigned long long low_by = static_cast<unsigned int>(by.reciprocal), high_by = by.reciprocal >> 32;
    const unsigned long long middle = high * low_by + (low * low_by >> 32);
    const unsigned long long other = low * high_by + static_cast<unsigned int>(middle);
    const long long quotient = static_cast<long long>(high * high_by + (middle >> 32) + (other >> 32));
    return a - quotient * by.value < by.value ? quotient : quotient + 1;
}

// An index below 2^32 - 1 by a length: a few instructions, and no branch.
struct Divided {
    unsigned int quotient, rest;

    // The reciprocal makes less than (index + 1) / value of index + 1, but by 1 / value at most.
    __device__ __forceinline__ Divided(unsigned int index, const Divisor& by) {
        const unsigned long long next = index + 1, low_by = static_cast<unsigned int>(by.reciprocal);
        quotient = static_cast<unsigned int>((next * (by.reciprocal >> 32) + (next * low_by >> 32)) >> 32);
        rest = index - quotient * static_cast<unsigned int>(by.value);
    }
};

}  // namespace cuflash
