// Element types, the accumulator type, and loads and stores that convert between them.
#pragma once

#include "common/config.cuh"
#include "ptx/convert.cuh"
#include "ptx/subnormal.cuh"

namespace cuflash {

// Bits of an array element; arithmetic happens in Accumulator.
template <int dtype>
struct ElementOf;
template <>
struct ElementOf<0> {  // no array: clang compiles the branch that would read it all the same
    using Type = float;
};
template <>
struct ElementOf<CUFLASH_FLOAT16> {
    using Type = unsigned short;
};
template <>
struct ElementOf<CUFLASH_BFLOAT16> {
    using Type = unsigned short;
};
template <>
struct ElementOf<CUFLASH_FLOAT32> {
    using Type = float;
};
template <>
struct ElementOf<CUFLASH_FLOAT64> {
    using Type = double;
};

template <int dtype>
struct AccumulatorOf {
    using Type = float;
};
template <>
struct AccumulatorOf<CUFLASH_FLOAT64> {
    using Type = double;
};

using Element = ElementOf<kDtype>::Type;
using OutElement = ElementOf<kOutDtype>::Type;
using Accumulator = AccumulatorOf<kDtype>::Type;

// Reads a value of type T that may lie on any address when the call has unaligned arrays.
template <typename T>
__device__ __forceinline__ T load_bits(const char* address) {
    if constexpr (kAlignedElements) {
        return *reinterpret_cast<const T*>(address);
    } else {
        T value;
        for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) reinterpret_cast<char*>(&value)[i] = address[i];
        return value;
    }
}

template <typename T>
__device__ __forceinline__ void store_bits(char* address, T value) {
    if constexpr (kAlignedElements) {
        *reinterpret_cast<T*>(address) = value;
    } else {
        for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) address[i] = reinterpret_cast<const char*>(&value)[i];
    }
}

// Widens (or, for an option wider than the accumulator, rounds) the bits of one element. Rounded toward zero, what is
// finite stays finite: a bias of -1e300 is low, and does not hide.
template <int dtype>
__device__ __forceinline__ Accumulator widen(typename ElementOf<dtype>::Type bits) {
    if constexpr (dtype == CUFLASH_FLOAT16) return float_from_half_bits(bits);
    else if constexpr (dtype == CUFLASH_BFLOAT16) return float_from_bfloat16_bits(bits);
    else if constexpr (sizeof(bits) > sizeof(Accumulator)) return __double2float_rz(bits);
    else return static_cast<Accumulator>(bits);
}

template <int dtype>
__device__ __forceinline__ Accumulator load_as(const char* address) {
    return widen<dtype>(load_bits<typename ElementOf<dtype>::Type>(address));
}

// The same for options whose type is known only at run time (one value per head).
__device__ __forceinline__ Accumulator load_float(const char* address, int dtype) {
    switch (dtype) {
        case CUFLASH_FLOAT16: return load_as<CUFLASH_FLOAT16>(address);
        case CUFLASH_BFLOAT16: return load_as<CUFLASH_BFLOAT16>(address);
        case CUFLASH_FLOAT32: return load_as<CUFLASH_FLOAT32>(address);
        default: return load_as<CUFLASH_FLOAT64>(address);
    }
}

template <typename T, int kCount>
__device__ __forceinline__ void load_integers_as(const char* const (&addresses)[kCount], long long (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = static_cast<long long>(load_bits<T>(addresses[i]));
}

// Reads integers of `size` bytes, negative size meaning signed; unsigned 64-bit values beyond the signed range
// saturate.
template <int kCount>
__device__ __forceinline__ void load_integers(const char* const (&addresses)[kCount], int size,
                                              long long (&values)[kCount]) {
    switch (size) {
        case -1: return load_integers_as<signed char>(addresses, values);
        case 1: return load_integers_as<unsigned char>(addresses, values);
        case -2: return load_integers_as<short>(addresses, values);
        case 2: return load_integers_as<unsigned short>(addresses, values);
        case -4: return load_integers_as<int>(addresses, values);
        case 4: return load_integers_as<unsigned int>(addresses, values);
        case -8: return load_integers_as<long long>(addresses, values);
        default: load_integers_as<unsigned long long>(addresses, values);
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                if (values[i] < 0) values[i] = 0x7fffffffffffffffLL;
    }
}
__device__ __forceinline__ long long load_integer(const char* address, int size) {
    long long values[1];
    load_integers<1>({address}, size, values);
    return values[0];
}

// Rounds once, to nearest even: a double passes through a float rounded to odd, from which every 16-bit rounding is
// exact.
__device__ __forceinline__ float narrow_to_odd(double value) {
    const float truncated = __double2float_rz(value);
    const bool exact = static_cast<double>(truncated) == value;
    return exact ? truncated : __uint_as_float(__float_as_uint(truncated) | 1u);
}
__device__ __forceinline__ float narrow_to_odd(float value) { return value; }

__device__ __forceinline__ OutElement to_output(Accumulator value) {
    if constexpr (kOutDtype == CUFLASH_FLOAT16) return half_bits_from_float(narrow_to_odd(value));
    else if constexpr (kOutDtype == CUFLASH_BFLOAT16) return bfloat16_bits_from_float(narrow_to_odd(value));
    else if constexpr (sizeof(OutElement) > sizeof(Accumulator)) return widen_subnormal(value);
    else if constexpr (sizeof(OutElement) < sizeof(Accumulator)) return narrow_subnormal(value);
    else return value;
}

// The largest vector that one load or store instruction moves.
struct __align__(16) Vector16 {
    Accumulator values[16 / sizeof(Accumulator)];
};
struct __align__(16) Elements16 {
    Element values[16 / sizeof(Element)];
};

}  // namespace cuflash
