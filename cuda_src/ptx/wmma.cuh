// WMMA: products of 16 x 16 tiles by one warp, from sm_70 on (bfloat16 and tf32: sm_80). One instruction per function,
// called by all 32 lanes. How a fragment lies in the registers of the lanes is the hardware's affair: all that may be
// relied on is that fragments of one type agree, element by element.
//
// Memory is `shared` + kOffset, a multiple of 32 bytes, at a pitch that is a multiple of 16; both count elements.
// Offsets are part of the instruction, so that neighbouring loads share one computation of the lanes' addresses; from
// sm_75 on loads of 16-bit operands are then nothing but LDSM.
#pragma once

#include "common/config.cuh"

namespace cuflash {

struct WmmaC {  // 16 x 16 in float32
    float x[8];
};

__device__ __forceinline__ unsigned int wmma_address(const void* shared) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(shared));
}

#define CUFLASH_4(constraint, x) constraint((x)[0]), constraint((x)[1]), constraint((x)[2]), constraint((x)[3])
#define CUFLASH_8(constraint, x) \
    CUFLASH_4(constraint, x), constraint((x)[4]), constraint((x)[5]), constraint((x)[6]), constraint((x)[7])

// Every column becomes the same 16 values: the columns lie on top of each other, at a pitch of 0.
__device__ __forceinline__ void wmma_load_column(WmmaC& c, const float* shared) {
    asm volatile("wmma.load.c.sync.aligned.col.m16n16k16.shared.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
                 : CUFLASH_8("=f", c.x)
                 : "r"(wmma_address(shared)), "r"(0)
                 : "memory");
}

template <int kOffset>
__device__ __forceinline__ void wmma_store(float* shared, const WmmaC& c, int pitch) {
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%8 + %10], {%0, %1, %2, %3, %4, %5, %6, %7}, %9;"
                 :
                 : CUFLASH_8("f", c.x), "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * 4)
                 : "memory");
}

// Does nothing, but the compiler moves no loads across it. Without it, it fetches as many operands ahead as there are
// registers, and then has too few for what it can't delay.
__device__ __forceinline__ void wmma_fence() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

enum class WmmaRole { kA, kB, kBTransposed };
template <WmmaRole role, int kRegisters>
struct WmmaOperand {
    unsigned int x[kRegisters];
};

// By dtype: how deep a product is, its operands, loads and multiply-add. Rows of memory are rows of A (16 x kDepth) and
// of B (kDepth x 16), but columns of BTransposed.
template <int dtype>
struct Wmma;

// Operands as sm_70 holds them, every element twice; later architectures leave half of the registers out.
template <>
struct Wmma<CUFLASH_FLOAT16> {
    static constexpr int kDepth = 16;
    using A = WmmaOperand<WmmaRole::kA, 8>;
    using B = WmmaOperand<WmmaRole::kB, 8>;
    using BTransposed = WmmaOperand<WmmaRole::kBTransposed, 8>;
    template <int kOffset>
    static __device__ __forceinline__ void load(A& a, const unsigned short* shared, int pitch) {
        asm volatile(
            "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8 + %10], %9;"
            : CUFLASH_8("=r", a.x)
            : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(unsigned short)))
            : "memory");
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(B& b, const unsigned short* shared, int pitch) {
        asm volatile(
            "wmma.load.b.sync.aligned.row.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8 + %10], %9;"
            : CUFLASH_8("=r", b.x)
            : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(unsigned short)))
            : "memory");
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(BTransposed& b, const unsigned short* shared, int pitch) {
        asm volatile(
            "wmma.load.b.sync.aligned.col.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8 + %10], %9;"
            : CUFLASH_8("=r", b.x)
            : "r"(wmma_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(unsigned short)))
            : "memory");
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const B& b) {
        asm volatile(
            "wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11, %12, "
            "%13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : CUFLASH_8("+f", c.x)
            : CUFLASH_8("r", a.x), CUFLASH_8("r", b.x));
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const BTransposed& b) {
        asm volatile(
            "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11, %12, "
            "%13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : CUFLASH_8("+f", c.x)
            : CUFLASH_8("r", a.x), CUFLASH_8("r", b.x));
    }
};

#undef CUFLASH_4
#undef CUFLASH_8

}  // namespace cuflash
