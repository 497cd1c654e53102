// What tensor cores compute of the fragments of a warp's lanes: once compiled for all kernels, and behind the checks,
// as nothing here touches the memory of a kernel. Layouts are those of the PTX ISA.
#include "builtins.h"
#include "ptx/mma.cuh"
#include "ptx/mma_float64.cuh"

namespace {

using namespace cuflash;

using Inputs = const void* const*;
using Outputs = void* const*;

// A power of two, for exponents of normal numbers.
double power_of_two(int exponent) { return __longlong_as_double(static_cast<long long>(exponent + 1023) << 52); }

constexpr int kColumns = 8;

// Addends lose what is two bits below a float's last of the largest, the sum what is below its own last. Of all columns
// at once, for the compiler to use vectors.
template <int kCount>
void tensor_core_sums(const double (&addends)[kCount][kColumns], float (&sums)[kColumns]) {
    double largest[kColumns] = {}, exact[kColumns] = {}, unit[kColumns], inverse[kColumns], sum[kColumns] = {};
    for (const auto& row : addends) {
        for (int i = 0; i < kColumns; ++i) {
            const double size = __builtin_fabs(row[i]);
            largest[i] = size > largest[i] ? size : largest[i];
            exact[i] += row[i];
        }
    }
    for (int i = 0; i < kColumns; ++i) {
        const int exponent = (__double2hiint(largest[i] > 1e-200 ? largest[i] : 1.0) >> 20) - 1023 - 25;
        unit[i] = power_of_two(exponent);
        inverse[i] = power_of_two(-exponent);
    }
    for (const auto& row : addends) {
        for (int i = 0; i < kColumns; ++i)
            sum[i] += static_cast<double>(static_cast<long long>(row[i] * inverse[i])) * unit[i];
    }
    for (int i = 0; i < kColumns; ++i) {
        const bool is_usual = largest[i] > 1e-200 && __builtin_fabs(exact[i]) < 3e38;  // no NaN, among others
        sums[i] = is_usual ? __double2float_rz(sum[i]) : static_cast<float>(exact[i]);
    }
}

// Every lane's four results, given rows of A and columns of B.
template <int kDepth>
void multiply(const float (&a)[16][kDepth], const float (&b)[kDepth][kColumns], Inputs inputs, Outputs outputs) {
    for (int row = 0; row < 16; ++row) {
        const auto lane_of = [&](int column) { return row % 8 * 4 + column / 2; };
        const auto place_of = [&](int column) { return row / 8 * 2 + column % 2; };
        double addends[kDepth + 1][kColumns];
        for (int i = 0; i < kColumns; ++i)
            addends[0][i] = static_cast<const MmaInput*>(inputs[lane_of(i)])->c[place_of(i)];
        for (int k = 0; k < kDepth; ++k) {
            for (int i = 0; i < kColumns; ++i) addends[k + 1][i] = static_cast<double>(a[row][k]) * b[k][i];
        }
        float sums[kColumns];
        tensor_core_sums(addends, sums);
        for (int i = 0; i < kColumns; ++i) static_cast<float*>(outputs[lane_of(i)])[place_of(i)] = sums[i];
    }
}

template <float (*kValue)(unsigned short)>
void mma_of_pairs(Inputs inputs, Outputs outputs) {
    float a[16][16], b[16][kColumns];
    for (int lane = 0; lane < 32; ++lane) {
        const MmaInput& input = *static_cast<const MmaInput*>(inputs[lane]);
        for (int half = 0; half < 2; ++half) {
            const auto value = [&](unsigned int pair) {
                return kValue(static_cast<unsigned short>(pair >> 16 * half));
            };
            const int k = lane % 4 * 2 + half;
            for (int i = 0; i < 4; ++i) a[lane / 4 + i % 2 * 8][k + i / 2 * 8] = value(input.a[i]);
            for (int i = 0; i < 2; ++i) b[k + i * 8][lane / 4] = value(input.b[i]);
        }
    }
    multiply(a, b, inputs, outputs);
}

}  // namespace

extern "C" {

void cpu_cuda_mma_half(Inputs inputs, Outputs outputs) { mma_of_pairs<float_from_half_bits>(inputs, outputs); }
void cpu_cuda_mma_bfloat16(Inputs inputs, Outputs outputs) { mma_of_pairs<float_from_bfloat16_bits>(inputs, outputs); }

// Terms joined one after the other.
void cpu_cuda_mma_float64(Inputs inputs, Outputs outputs) {
    double a[16][16], b[8][16];
    for (int lane = 0; lane < 32; ++lane) {
        const MmaInputFloat64& input = *static_cast<const MmaInputFloat64*>(inputs[lane]);
        for (int i = 0; i < 8; ++i) a[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = input.a[i];
        for (int i = 0; i < 4; ++i) b[lane / 4][lane % 4 + i * 4] = input.b[i];
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
            double sum = static_cast<const MmaInputFloat64*>(inputs[lane])->c[i];
            for (int k = 0; k < 16; ++k) sum = fma(a[lane / 4 + i / 2 * 8][k], b[lane % 4 * 2 + i % 2][k], sum);
            static_cast<double*>(outputs[lane])[i] = sum;
        }
    }
}

}  // extern "C"
