// cuda_src/ptx/mma.cuh on the CPU: fragment layouts of the PTX ISA, products exact, sums as tensor cores round them.
#pragma once

#include "ptx/convert.cuh"

namespace cuflash {

struct MmaInput {
    const unsigned int* a;
    const unsigned int* b;
    const float* c;
};

template <bool kBfloat16>
inline float mma_element(unsigned int pair, int half) {
    const auto bits = static_cast<unsigned short>(pair >> 16 * half);
    return kBfloat16 ? float_from_bfloat16_bits(bits) : float_from_half_bits(bits);
}

// Addends lose what is two bits below a float's last of the largest, the sum what is below its own last.
template <int kCount>
inline float tensor_core_sum(const double (&addends)[kCount]) {
    double largest = 0, exact = 0, sum = 0;
    for (const double addend : addends) largest = fmax(largest, fabs(addend)), exact += addend;
    if (!(largest > 1e-200 && fabs(exact) < 3e38)) return static_cast<float>(exact);  // not a number, among others
    const double unit = __builtin_ldexp(1.0, __builtin_ilogb(largest) - 25), inverse = 1 / unit;
    for (const double addend : addends) sum += static_cast<double>(static_cast<long long>(addend * inverse)) * unit;
    return __double2float_rz(sum);
}

// Rows of A and columns of B are collected from the lanes that hold them, then every lane's four results computed.
template <int kDepth, typename LoadA, typename LoadB>
inline void mma_tile(const void* const* inputs, void* const* outputs, LoadA load_a, LoadB load_b) {
    for (int lane = 0; lane < 32; ++lane) {
        const auto* c = static_cast<const MmaInput*>(inputs[lane])->c;
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8;
            const int column = lane % 4 * 2 + i % 2;
            double addends[kDepth + 1] = {c[i]};
            for (int k = 0; k < kDepth; ++k) addends[k + 1] = static_cast<double>(load_a(row, k)) * load_b(k, column);
            static_cast<float*>(outputs[lane])[i] = tensor_core_sum(addends);
        }
    }
}

template <bool kBfloat16>
inline void mma_m16n8k16_lanes(const void* const* inputs, void* const* outputs) {
    const auto lane = [&](int index) { return static_cast<const MmaInput*>(inputs[index]); };
    mma_tile<16>(
        inputs, outputs,
        [&](int row, int k) {
            const int reg = row / 8 + k / 8 * 2;
            return mma_element<kBfloat16>(lane(row % 8 * 4 + k % 8 / 2)->a[reg], k % 2);
        },
        [&](int k, int column) { return mma_element<kBfloat16>(lane(column * 4 + k % 8 / 2)->b[k / 8], k % 2); });
}

template <bool kBfloat16>
inline void mma_m16n8k16(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    const float c[4] = {d[0], d[1], d[2], d[3]};
    const MmaInput input = {a, b, c};
    cpu_cuda_collective("mma.m16n8k16", &input, &d, false, mma_m16n8k16_lanes<kBfloat16>);
}

inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    const float c[4] = {d[0], d[1], d[2], d[3]};
    const MmaInput input = {a, b, c};
    cpu_cuda_collective("mma.m16n8k8.tf32", &input, &d, false, [](const void* const* inputs, void* const* outputs) {
        // The hardware ignores the 13 bits that TF32 has not.
        const auto value = [](unsigned int bits) { return __uint_as_float(bits & 0xffffe000u); };
        const auto lane = [&](int index) { return static_cast<const MmaInput*>(inputs[index]); };
        mma_tile<8>(
            inputs, outputs, [&](int row, int k) { return value(lane(row % 8 * 4 + k % 4)->a[row / 8 + k / 4 * 2]); },
            [&](int k, int column) { return value(lane(column * 4 + k % 4)->b[k / 4]); });
    });
}

}  // namespace cuflash
