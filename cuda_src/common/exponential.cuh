// exp in double precision for softmax, without branches: CUDA's own has one, and takes more registers and instructions.
#pragma once

#include "common/math.cuh"

namespace cuflash {

// The value, which seems to depend on another one: the compiler begins with it only behind that.
__device__ __forceinline__ double behind(double other, double value, int zero) {
    return __hiloint2double(__double2hiint(value) | (__double2hiint(other) & zero), __double2loint(value));
}

// 2^(j / 32)
// clang-format off
__constant__ const double kPowers[] = {
    1.0, 1.0218971486541166, 1.0442737824274138, 1.0671404006768237,
    1.0905077326652577, 1.1143867425958924, 1.1387886347566916, 1.1637248587775775,
    1.189207115002721, 1.215247359980469, 1.241857812073484, 1.2690509571917332,
    1.2968395546510096, 1.3252366431597413, 1.3542555469368927, 1.383909881963832,
    1.4142135623730951, 1.4451808069770467, 1.4768261459394993, 1.5091644275934228,
    1.5422108254079407, 1.5759808451078865, 1.6104903319492543, 1.645755478153965,
    1.681792830507429, 1.718619298122478, 1.7562521603732995, 1.7947090750031072,
    1.8340080864093424, 1.8741676341103, 1.9152065613971474, 1.9571441241754002};
// clang-format on

// What all 32 lanes of a warp together need for exponentials: each has a power of two.
struct Exponentials {
    double power;  // number `lane` of them

    __device__ __forceinline__ explicit Exponentials(int lane) : power(kPowers[lane]) {}

    // exp(x) for x up to 200, -inf and NaN included, to 1 unit in the last place: 2^k 2^(j / 32) exp(r), where |r| is
    // at most log(2) / 64, so that six terms of its series do. Called by all lanes.
    __device__ __forceinline__ double of_negative(double x) const {
        constexpr double kTerms[] = {0.5, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720};
        constexpr double kShift = 6755399441055744.0;  // 1.5 2^52, in front of which a sum is an integer
        const double shifted = multiply_add(x, 46.16624130844683, kShift);
        const double n = shifted - kShift;
        const double r = multiply_add(n, -7.247021293269686e-19, multiply_add(n, -0.02166084939249829, x));
        double sum = kTerms[4];
#pragma unroll
        for (int i = 3; i >= 0; --i) sum = multiply_add(sum, r, kTerms[i]);
        sum = multiply_add(r * r, sum, r);
        const int j = __double2loint(shifted), k = j >> 5;
        double scaled = __shfl_sync(0xffffffffu, power, j);
        // In two steps, as 2^k may be below the normal range: 600 more, and 600 less.
        scaled = __hiloint2double(__double2hiint(scaled) + (k + 600) * (1 << 20), __double2loint(scaled));
        sum = multiply_add(scaled, sum, scaled) * 0x1p-600;
        // From -746 down to -inf; not a number is not among them.
        const unsigned int below = static_cast<unsigned int>(__double2hiint(x)) - 0xc0875000u;
        return below <= 0xfff00000u - 0xc0875000u ? 0 : sum;
    }
};

}  // namespace cuflash
