// Arithmetic by the same names for float and double, and the ends of the accumulator's range.
#pragma once

#include "common/numeric.cuh"
#include "ptx/subnormal.cuh"

namespace cuflash {

__device__ __forceinline__ Accumulator infinity() {
    if constexpr (sizeof(Accumulator) == 8) return __longlong_as_double(0x7ff0000000000000LL);
    else return __int_as_float(0x7f800000);
}

__device__ __forceinline__ Accumulator largest_finite() {
    if constexpr (sizeof(Accumulator) == 8) return __longlong_as_double(0x7fefffffffffffffLL);
    else return __int_as_float(0x7f7fffff);
}

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }
__device__ __forceinline__ float maximum(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double maximum(double a, double b) { return fmax(a, b); }
// The same of numbers. Where one is none, either of them: what minds that takes twice as many instructions.
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return a > b ? a : b; }
__device__ __forceinline__ float minimum(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ double minimum(double a, double b) { return fmin(a, b); }
__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
__device__ __forceinline__ double absolute(double x) { return fabs(x); }
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }
// For values far below others: the compiler's own float arithmetic takes what is below the normal range for 0.
__device__ __forceinline__ double multiply_subnormal(double a, double b) { return a * b; }
__device__ __forceinline__ double multiply_add_subnormal(double a, double b, double c) { return fma(a, b, c); }
__device__ __forceinline__ double divide_subnormal(double a, double b) { return a / b; }
__device__ __forceinline__ double widen_subnormal(double value) { return value; }
__device__ __forceinline__ void narrow_subnormal(double value, float& rounded) { rounded = narrow_subnormal(value); }
__device__ __forceinline__ void narrow_subnormal(double value, double& rounded) { rounded = value; }

__device__ __forceinline__ Accumulator bounded(Accumulator value, Accumulator bound) {
    return maximum(minimum(value, bound), -bound);
}

}  // namespace cuflash
