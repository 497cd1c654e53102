// WMMA operands of sm_80 and newer: bfloat16, and tf32 in products that are 8 deep.
#pragma once

#include "ptx/wmma.cuh"

namespace cuflash {

#define CUFLASH_4(constraint, x) constraint((x)[0]), constraint((x)[1]), constraint((x)[2]), constraint((x)[3])
#define CUFLASH_8(constraint, x) \
    CUFLASH_4(constraint, x), constraint((x)[4]), constraint((x)[5]), constraint((x)[6]), constraint((x)[7])

template <>
struct Wmma<CUFLASH_BFLOAT16> {
    static constexpr int kDepth = 16;
    using A = WmmaOperand<WmmaRole::kA, 4>;
    using B = WmmaOperand<WmmaRole::kB, 4>;
    using BTransposed = WmmaOperand<WmmaRole::kBTransposed, 4>;
    template <int kOffset>
    static __device__ __forceinline__ void load(A& a, const unsigned short* shared, int pitch) {
        asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4 + %6], %5;"
                     : CUFLASH_4("=r", a.x)
                     : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(unsigned short)))
                     : "memory");
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(B& b, const unsigned short* shared, int pitch) {
        asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4 + %6], %5;"
                     : CUFLASH_4("=r", b.x)
                     : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(unsigned short)))
                     : "memory");
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(BTransposed& b, const unsigned short* shared, int pitch) {
        asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4 + %6], %5;"
                     : CUFLASH_4("=r", b.x)
                     : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(unsigned short)))
                     : "memory");
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const B& b) {
        asm volatile(
            "wmma.mma.sync.aligned.row.row.m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, "
            "%11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : CUFLASH_8("+f", c.x)
            : CUFLASH_4("r", a.x), CUFLASH_4("r", b.x));
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const BTransposed& b) {
        asm volatile(
            "wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, "
            "%11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : CUFLASH_8("+f", c.x)
            : CUFLASH_4("r", a.x), CUFLASH_4("r", b.x));
    }
};

// Elements are floats, rounded by the caller: the 13 bits that tf32 has not are ignored.
template <>
struct Wmma<CUFLASH_FLOAT32> {
    static constexpr int kDepth = 8;
    using A = WmmaOperand<WmmaRole::kA, 4>;
    using B = WmmaOperand<WmmaRole::kB, 4>;
    using BTransposed = WmmaOperand<WmmaRole::kBTransposed, 4>;
    template <int kOffset>
    static __device__ __forceinline__ void load(A& a, const float* shared, int pitch) {
        asm volatile("wmma.load.a.sync.aligned.row.m16n16k8.shared.tf32 {%0, %1, %2, %3}, [%4 + %6], %5;"
                     : CUFLASH_4("=r", a.x)
                     : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(float)))
                     : "memory");
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(B& b, const float* shared, int pitch) {
        asm volatile("wmma.load.b.sync.aligned.row.m16n16k8.shared.tf32 {%0, %1, %2, %3}, [%4 + %6], %5;"
                     : CUFLASH_4("=r", b.x)
                     : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(float)))
                     : "memory");
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(BTransposed& b, const float* shared, int pitch) {
        asm volatile("wmma.load.b.sync.aligned.col.m16n16k8.shared.tf32 {%0, %1, %2, %3}, [%4 + %6], %5;"
                     : CUFLASH_4("=r", b.x)
                     : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(float)))
                     : "memory");
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const B& b) {
        asm volatile(
            "wmma.mma.sync.aligned.row.row.m16n16k8.f32.tf32.tf32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, "
            "%11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : CUFLASH_8("+f", c.x)
            : CUFLASH_4("r", a.x), CUFLASH_4("r", b.x));
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const BTransposed& b) {
        asm volatile(
            "wmma.mma.sync.aligned.row.col.m16n16k8.f32.tf32.tf32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, "
            "%11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : CUFLASH_8("+f", c.x)
            : CUFLASH_4("r", a.x), CUFLASH_4("r", b.x));
    }
};

#undef CUFLASH_4
#undef CUFLASH_8

}  // namespace cuflash
