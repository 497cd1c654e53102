// WMMA: products of 16 x 16 tiles by one warp, from sm_70 on (bfloat16 and tf32: sm_80). One instruction per function,
// called by all 32 lanes. How a fragment lies in the registers of the lanes is the hardware's affair: all that may be
// relied on is that fragments of one type agree, element by element.
//
// Memory is `shared` + kOffset, a multiple of 32 bytes, at a pitch that is a multiple of 16; both count elements.
// Offsets are part of the instruction, so that all loads of a tile share one computation of the lanes' addresses; from
// sm_75 on a load of a 16-bit operand is then nothing but one LDSM.
#pragma once

#include "common/config.cuh"

namespace cuflash {

struct WmmaC {  // 16 x 16 in float32
    float x[8];
};

__device__ __forceinline__ unsigned int wmma_address(const void* shared) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(shared));
}

// Every column becomes the same 16 values: the columns lie on top of each other, at a pitch of 0.
__device__ __forceinline__ void wmma_load_column(WmmaC& c, const float* shared) {
    asm volatile("wmma.load.c.sync.aligned.col.m16n16k16.shared.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
                 : "=f"(c.x[0]), "=f"(c.x[1]), "=f"(c.x[2]), "=f"(c.x[3]), "=f"(c.x[4]), "=f"(c.x[5]), "=f"(c.x[6]),
                   "=f"(c.x[7])
                 : "r"(wmma_address(shared)), "r"(0)
                 : "memory");
}

template <int kOffset>
__device__ __forceinline__ void wmma_store(float* shared, const WmmaC& c, int pitch) {
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%0 + %10], {%2, %3, %4, %5, %6, %7, %8, %9}, %1;"
                 :
                 : "r"(wmma_address(shared)), "r"(pitch), "f"(c.x[0]), "f"(c.x[1]), "f"(c.x[2]), "f"(c.x[3]),
                   "f"(c.x[4]), "f"(c.x[5]), "f"(c.x[6]), "f"(c.x[7]), "n"(kOffset * 4)
                 : "memory");
}

// Operands by dtype: A is 16 x kDepth with rows of memory as rows; B is kDepth x 16, from rows of memory, and
// BTransposed the same with rows of memory as columns.
template <int dtype>
struct Wmma;

template <>
struct Wmma<CUFLASH_FLOAT16> {
    static constexpr int kDepth = 16;
    struct A {
        unsigned int x[8];
    };
    struct B {
        unsigned int x[8];
    };
    struct BTransposed {
        unsigned int x[8];
    };
    template <int kOffset>
    static __device__ __forceinline__ void load(A& a, const unsigned short* shared, int pitch) {
        asm volatile(
            "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8 + %10], %9;"
            : "=r"(a.x[0]), "=r"(a.x[1]), "=r"(a.x[2]), "=r"(a.x[3]), "=r"(a.x[4]), "=r"(a.x[5]), "=r"(a.x[6]),
              "=r"(a.x[7])
            : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(*shared)))
            : "memory");
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(B& b, const unsigned short* shared, int pitch) {
        asm volatile(
            "wmma.load.b.sync.aligned.row.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8 + %10], %9;"
            : "=r"(b.x[0]), "=r"(b.x[1]), "=r"(b.x[2]), "=r"(b.x[3]), "=r"(b.x[4]), "=r"(b.x[5]), "=r"(b.x[6]),
              "=r"(b.x[7])
            : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(*shared)))
            : "memory");
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(BTransposed& b, const unsigned short* shared, int pitch) {
        asm volatile(
            "wmma.load.b.sync.aligned.col.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8 + %10], %9;"
            : "=r"(b.x[0]), "=r"(b.x[1]), "=r"(b.x[2]), "=r"(b.x[3]), "=r"(b.x[4]), "=r"(b.x[5]), "=r"(b.x[6]),
              "=r"(b.x[7])
            : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(*shared)))
            : "memory");
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const B& b) {
        asm volatile(
            "wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11, %12, "
            "%13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3]), "+f"(c.x[4]), "+f"(c.x[5]), "+f"(c.x[6]),
              "+f"(c.x[7])
            : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(a.x[4]), "r"(a.x[5]), "r"(a.x[6]), "r"(a.x[7]),
              "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]), "r"(b.x[4]), "r"(b.x[5]), "r"(b.x[6]), "r"(b.x[7]));
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const BTransposed& b) {
        asm volatile(
            "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11, %12, "
            "%13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3]), "+f"(c.x[4]), "+f"(c.x[5]), "+f"(c.x[6]),
              "+f"(c.x[7])
            : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(a.x[4]), "r"(a.x[5]), "r"(a.x[6]), "r"(a.x[7]),
              "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]), "r"(b.x[4]), "r"(b.x[5]), "r"(b.x[6]), "r"(b.x[7]));
    }
};

template <>
struct Wmma<CUFLASH_BFLOAT16> {
    static constexpr int kDepth = 16;
    struct A {
        unsigned int x[4];
    };
    struct B {
        unsigned int x[4];
    };
    struct BTransposed {
        unsigned int x[4];
    };
    template <int kOffset>
    static __device__ __forceinline__ void load(A& a, const unsigned short* shared, int pitch) {
        asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4 + %6], %5;"
                     : "=r"(a.x[0]), "=r"(a.x[1]), "=r"(a.x[2]), "=r"(a.x[3])
                     : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(*shared)))
                     : "memory");
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(B& b, const unsigned short* shared, int pitch) {
        asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4 + %6], %5;"
                     : "=r"(b.x[0]), "=r"(b.x[1]), "=r"(b.x[2]), "=r"(b.x[3])
                     : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(*shared)))
                     : "memory");
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(BTransposed& b, const unsigned short* shared, int pitch) {
        asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4 + %6], %5;"
                     : "=r"(b.x[0]), "=r"(b.x[1]), "=r"(b.x[2]), "=r"(b.x[3])
                     : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(*shared)))
                     : "memory");
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const B& b) {
        asm volatile(
            "wmma.mma.sync.aligned.row.row.m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, "
            "%11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3]), "+f"(c.x[4]), "+f"(c.x[5]), "+f"(c.x[6]),
              "+f"(c.x[7])
            : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]));
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const BTransposed& b) {
        asm volatile(
            "wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, "
            "%11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3]), "+f"(c.x[4]), "+f"(c.x[5]), "+f"(c.x[6]),
              "+f"(c.x[7])
            : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]));
    }
};

template <>
struct Wmma<CUFLASH_FLOAT32> {
    static constexpr int kDepth = 8;
    struct A {
        unsigned int x[4];
    };
    struct B {
        unsigned int x[4];
    };
    struct BTransposed {
        unsigned int x[4];
    };
    template <int kOffset>
    static __device__ __forceinline__ void load(A& a, const float* shared, int pitch) {
        asm volatile("wmma.load.a.sync.aligned.row.m16n16k8.shared.tf32 {%0, %1, %2, %3}, [%4 + %6], %5;"
                     : "=r"(a.x[0]), "=r"(a.x[1]), "=r"(a.x[2]), "=r"(a.x[3])
                     : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(*shared)))
                     : "memory");
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(B& b, const float* shared, int pitch) {
        asm volatile("wmma.load.b.sync.aligned.row.m16n16k8.shared.tf32 {%0, %1, %2, %3}, [%4 + %6], %5;"
                     : "=r"(b.x[0]), "=r"(b.x[1]), "=r"(b.x[2]), "=r"(b.x[3])
                     : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(*shared)))
                     : "memory");
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(BTransposed& b, const float* shared, int pitch) {
        asm volatile("wmma.load.b.sync.aligned.col.m16n16k8.shared.tf32 {%0, %1, %2, %3}, [%4 + %6], %5;"
                     : "=r"(b.x[0]), "=r"(b.x[1]), "=r"(b.x[2]), "=r"(b.x[3])
                     : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(*shared)))
                     : "memory");
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const B& b) {
        asm volatile(
            "wmma.mma.sync.aligned.row.row.m16n16k8.f32.tf32.tf32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, "
            "%11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3]), "+f"(c.x[4]), "+f"(c.x[5]), "+f"(c.x[6]),
              "+f"(c.x[7])
            : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]));
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const BTransposed& b) {
        asm volatile(
            "wmma.mma.sync.aligned.row.col.m16n16k8.f32.tf32.tf32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, "
            "%11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3]), "+f"(c.x[4]), "+f"(c.x[5]), "+f"(c.x[6]),
              "+f"(c.x[7])
            : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]));
    }
};

}  // namespace cuflash
