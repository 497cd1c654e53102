// exp in double precision for softmax, without branches: CUDA's own has one, and takes more registers.
#pragma once

#include "common/math.cuh"

namespace cuflash {

// exp(x) for x up to 200, -inf and NaN included, to 1.05 units in the last place: 2^k exp(r), where |r| <= log(2) / 2
// and exp(r) is the polynomial of degree 11 that is exact at Chebyshev's points, but for its first three terms, which
// are known.
__device__ __forceinline__ double exponential_of_negative(double x) {
    constexpr double kTerms[] = {0.5,
                                 0.16666666666666666,
                                 0.04166666666665136,
                                 0.008333333333332155,
                                 0.0013888888905881542,
                                 0.0001984126985433861,
                                 2.4801536388690766e-05,
                                 2.755728006701698e-06,
                                 2.761380686153829e-07,
                                 2.5095554677111112e-08};
    constexpr double kShift = 6755399441055744.0;  // 1.5 2^52, in front of which a sum is an integer
    const double shifted = multiply_add(x, 1.4426950408889634, kShift);
    const double k = shifted - kShift;
    const double r = multiply_add(k, -2.3190468138462996e-17, multiply_add(k, -0.6931471805599453, x));
    double sum = kTerms[9];
#pragma unroll
    for (int i = 8; i >= 0; --i) sum = multiply_add(sum, r, kTerms[i]);
    sum = multiply_add(multiply_add(sum, r, 1.0), r, 1.0);
    // In two steps, as 2^k may be below the normal range: 600 more, and 600 less.
    sum *= __hiloint2double((__double2loint(shifted) + 600 + 1023) << 20, 0);
    sum *= 0x1p-600;
    // From -746 down to -inf; not a number is not among them.
    const unsigned int below = static_cast<unsigned int>(__double2hiint(x)) - 0xc0875000u;
    return below <= 0xfff00000u - 0xc0875000u ? 0 : sum;
}

// The value, which seems to depend on another one: the compiler begins with it only behind that.
__device__ __forceinline__ double behind(double other, double value, int zero) {
    return __hiloint2double(__double2hiint(value) | (__double2hiint(other) & zero), __double2loint(value));
}

}  // namespace cuflash
