// WMMA: products of 16 x 16 tiles by one warp, from sm_70 on (bfloat16 and tf32: sm_80). One instruction per function,
// called by all 32 lanes. How a fragment lies in the registers of the lanes is the hardware's affair: all that may be
// relied on is that fragments of one type agree, element by element.
//
// Memory is `shared` + kOffset, a multiple of 32 bytes, at a pitch that is a multiple of 16; both count elements.
// Offsets are part of the instruction, so that neighbouring loads share one computation of the lanes' addresses; from
// sm_75 on loads of 16-bit operands are then nothing but LDSM.
#pragma once

#include "common/config.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

struct WmmaC {  // 16 x 16 in float32
    float x[8];
};

// A fragment's registers in the operand list of an instruction, and in its text.
#define CUFLASH_4(constraint, x) constraint((x)[0]), constraint((x)[1]), constraint((x)[2]), constraint((x)[3])
#define CUFLASH_8(constraint, x) \
    CUFLASH_4(constraint, x), constraint((x)[4]), constraint((x)[5]), constraint((x)[6]), constraint((x)[7])
#define CUFLASH_LOADED_4 " {%0, %1, %2, %3}, [%4 + %6], %5;"
#define CUFLASH_LOADED_8 " {%0, %1, %2, %3, %4, %5, %6, %7}, [%8 + %10], %9;"
#define CUFLASH_PRODUCT_4 \
    " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
#define CUFLASH_PRODUCT_8                                                                                   \
    " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19, %20, " \
    "%21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"

// Every column becomes the same 16 values: the columns lie on top of each other, at a pitch of 0.
__device__ __forceinline__ void wmma_load_column(WmmaC& c, const float* shared) {
    asm volatile("wmma.load.c.sync.aligned.col.m16n16k16.shared.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
                 : CUFLASH_8("=f", c.x)
                 : "r"(shared_address(shared)), "r"(0)
                 : "memory");
}

template <int kOffset>
__device__ __forceinline__ void wmma_store(float* shared, const WmmaC& c, int pitch) {
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%8 + %10], {%0, %1, %2, %3, %4, %5, %6, %7}, %9;"
                 :
                 : CUFLASH_8("f", c.x), "r"(shared_address(shared)), "r"(pitch), "n"(kOffset * 4)
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

#define CUFLASH_WMMA_LOAD(Operand, num_registers, instruction)                                                  \
    template <int kOffset>                                                                                      \
    static __device__ __forceinline__ void load(Operand& operand, const Stored* shared, int pitch) {            \
        asm volatile(instruction CUFLASH_LOADED_##num_registers                                                 \
                     : CUFLASH_##num_registers("=r", operand.x)                                                 \
                     : "r"(shared_address(shared)), "r"(pitch), "n"(kOffset * static_cast<int>(sizeof(Stored))) \
                     : "memory");                                                                               \
    }
#define CUFLASH_WMMA_MULTIPLY_ADD(Operand, num_registers, instruction)                            \
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const Operand& b) { \
        asm volatile(instruction CUFLASH_PRODUCT_##num_registers                                  \
                     : CUFLASH_8("+f", c.x)                                                       \
                     : CUFLASH_##num_registers("r", a.x), CUFLASH_##num_registers("r", b.x));     \
    }

// As sm_70 holds them, every element twice; later architectures leave half of the registers out.
template <>
struct Wmma<CUFLASH_FLOAT16> {
    using Stored = unsigned short;
    static constexpr int kDepth = 16;
    using A = WmmaOperand<WmmaRole::kA, 8>;
    using B = WmmaOperand<WmmaRole::kB, 8>;
    using BTransposed = WmmaOperand<WmmaRole::kBTransposed, 8>;
    CUFLASH_WMMA_LOAD(A, 8, "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16")
    CUFLASH_WMMA_LOAD(B, 8, "wmma.load.b.sync.aligned.row.m16n16k16.shared.f16")
    CUFLASH_WMMA_LOAD(BTransposed, 8, "wmma.load.b.sync.aligned.col.m16n16k16.shared.f16")
    CUFLASH_WMMA_MULTIPLY_ADD(B, 8, "wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32")
    CUFLASH_WMMA_MULTIPLY_ADD(BTransposed, 8, "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32")
};

// sm_80 and newer.
template <>
struct Wmma<CUFLASH_BFLOAT16> {
    using Stored = unsigned short;
    static constexpr int kDepth = 16;
    using A = WmmaOperand<WmmaRole::kA, 4>;
    using B = WmmaOperand<WmmaRole::kB, 4>;
    using BTransposed = WmmaOperand<WmmaRole::kBTransposed, 4>;
    CUFLASH_WMMA_LOAD(A, 4, "wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16")
    CUFLASH_WMMA_LOAD(B, 4, "wmma.load.b.sync.aligned.row.m16n16k16.shared.bf16")
    CUFLASH_WMMA_LOAD(BTransposed, 4, "wmma.load.b.sync.aligned.col.m16n16k16.shared.bf16")
    CUFLASH_WMMA_MULTIPLY_ADD(B, 4, "wmma.mma.sync.aligned.row.row.m16n16k16.f32.bf16.bf16.f32")
    CUFLASH_WMMA_MULTIPLY_ADD(BTransposed, 4, "wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.bf16.f32")
};

// tf32, sm_80 and newer. Elements are floats, rounded by the caller: the 13 bits that tf32 has not are ignored.
template <>
struct Wmma<CUFLASH_FLOAT32> {
    using Stored = float;
    static constexpr int kDepth = 8;
    using A = WmmaOperand<WmmaRole::kA, 4>;
    using B = WmmaOperand<WmmaRole::kB, 4>;
    using BTransposed = WmmaOperand<WmmaRole::kBTransposed, 4>;
    CUFLASH_WMMA_LOAD(A, 4, "wmma.load.a.sync.aligned.row.m16n16k8.shared.tf32")
    CUFLASH_WMMA_LOAD(B, 4, "wmma.load.b.sync.aligned.row.m16n16k8.shared.tf32")
    CUFLASH_WMMA_LOAD(BTransposed, 4, "wmma.load.b.sync.aligned.col.m16n16k8.shared.tf32")
    CUFLASH_WMMA_MULTIPLY_ADD(B, 4, "wmma.mma.sync.aligned.row.row.m16n16k8.f32.tf32.tf32.f32")
    CUFLASH_WMMA_MULTIPLY_ADD(BTransposed, 4, "wmma.mma.sync.aligned.row.col.m16n16k8.f32.tf32.tf32.f32")
};

#undef CUFLASH_WMMA_MULTIPLY_ADD
#undef CUFLASH_WMMA_LOAD
#undef CUFLASH_PRODUCT_8
#undef CUFLASH_PRODUCT_4
#undef CUFLASH_LOADED_8
#undef CUFLASH_LOADED_4
#undef CUFLASH_8
#undef CUFLASH_4

}  // namespace cuflash
