// Products of a warpgroup on the tensor cores of Hopper, D (+)= A B with float accumulators, that run beside other
// instructions (sm_90a). Called by all 128 threads of four warps, the first of which has a number divisible by 4. Warp
// w of them has rows 16 w to 16 w + 15 of A and D, in the layouts of ptx/mma.cuh.
#pragma once

#include "ptx/shared.cuh"

namespace cuflash {

// Where an operand lies in shared memory: 8 x 8 matrices, each of eight times 16 bytes. Only the lower half of its
// description depends on the address.
struct SharedMatrix {
    unsigned int low, high;

    // Rows of columns of B, 128 bytes each, eight of them on a 1024-byte boundary, 16-byte pieces swizzled: piece p of
    // row r is at p ^ r % 8. Eight rows are `stride` bytes from the next eight. Where rows of B are contiguous instead,
    // 64 of its columns are `leading` bytes from the next 64. (Rows of A are as columns of B.)
    static __device__ __forceinline__ SharedMatrix swizzled(SharedAddress address, unsigned int stride,
                                                            unsigned int leading = 16) {
        return {address >> 4 | leading >> 4 << 16, stride >> 4 | 1u << 30};
    }
    // Columns of B in matrices of 8 x 8 elements, one behind the other: those of the same columns are `leading` bytes
    // apart, eight columns `stride` bytes.
    static __device__ __forceinline__ SharedMatrix plain(SharedAddress address, unsigned int leading,
                                                         unsigned int stride) {
        return {address >> 4 | leading >> 4 << 16, stride >> 4};
    }
    // The same, `bytes` further on.
    __device__ __forceinline__ SharedMatrix at(unsigned int bytes) const { return {low + (bytes >> 4), high}; }
    __device__ __forceinline__ unsigned long long bits() const {
        return static_cast<unsigned long long>(high) << 32 | low;
    }
};

// To be called before the first product, and whenever other instructions have written its registers.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Makes a group of the products since the last group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all groups but the newest kPending; `d` is what the compiler must not look at before.
template <int kPending, int kTiles>
__device__ __forceinline__ void wgmma_wait(float (&d)[kTiles][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

// The same for several of them.
template <int kPending, int kCount, int kTiles>
__device__ __forceinline__ void wgmma_wait(float (&d)[kCount][kTiles][4]) {
    wgmma_wait<kPending>(reinterpret_cast<float (&)[kCount * kTiles][4]>(d));
}

// Makes what this thread has written to shared memory visible to products, behind a barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define CUFLASH_TILES_2(t) CUFLASH_TILE(t), CUFLASH_TILE(t + 1)
#define CUFLASH_TILE(t) "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
#define CUFLASH_TILES_4(t) CUFLASH_TILES_2(t), CUFLASH_TILES_2(t + 2)
#define CUFLASH_TILES_8(t) CUFLASH_TILES_4(t), CUFLASH_TILES_4(t + 4)
#define CUFLASH_TILES_16(t) CUFLASH_TILES_8(t), CUFLASH_TILES_8(t + 8)
#define CUFLASH_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUFLASH_NAMES_16 CUFLASH_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUFLASH_NAMES_24 CUFLASH_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CUFLASH_NAMES_32 CUFLASH_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CUFLASH_NAMES_40 CUFLASH_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUFLASH_NAMES_48 CUFLASH_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUFLASH_NAMES_56 CUFLASH_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CUFLASH_NAMES_64 CUFLASH_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CUFLASH_NAMES_80 \
    CUFLASH_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define CUFLASH_NAMES_96 \
    CUFLASH_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define CUFLASH_NAMES_112 \
    CUFLASH_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define CUFLASH_NAMES_120 CUFLASH_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CUFLASH_NAMES_128 CUFLASH_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
// An instruction of either type; `behind` are its operands behind those of D.
#define CUFLASH_ISSUE(columns, names, add, behind, ...)                                          \
    if constexpr (kBfloat16) CUFLASH_ISSUE_OF("bf16", columns, names, add, behind, __VA_ARGS__); \
    else CUFLASH_ISSUE_OF("f16", columns, names, add, behind, __VA_ARGS__)
#define CUFLASH_ISSUE_OF(type, columns, names, add, behind, ...)                                         \
    asm volatile("{ .reg .pred p; setp.ne.s32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" #columns \
                 "k16.f32." type "." type " {" names "}, " behind "; }"                                  \
                 : __VA_ARGS__)
#define CUFLASH_FROM_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "n"(kAdd), "n"(kRows)
#define CUFLASH_FROM_MEMORY "l"(a.bits()), "l"(b.bits()), "n"(kAdd), "n"(kRows)

// D and A 64 x kColumns and 64 x 16 of float16 or bfloat16. B has 16 rows, its columns contiguous or, with kRows, its
// rows. Without kAdd D is written, not added to.
template <bool kBfloat16, bool kRows, bool kAdd, int kTiles>
__device__ __forceinline__ void wgmma(float (&d)[kTiles][4], const unsigned int (&a)[4], SharedMatrix b) {
    if constexpr (kTiles == 2) {
        CUFLASH_ISSUE(16, CUFLASH_NAMES_8, "%13", "{%8, %9, %10, %11}, %12, p, 1, 1, %14",
                      CUFLASH_TILES_2(0) : CUFLASH_FROM_REGISTERS);
    } else if constexpr (kTiles == 4) {
        CUFLASH_ISSUE(32, CUFLASH_NAMES_16, "%21", "{%16, %17, %18, %19}, %20, p, 1, 1, %22",
                      CUFLASH_TILES_4(0) : CUFLASH_FROM_REGISTERS);
    } else if constexpr (kTiles == 6) {
        CUFLASH_ISSUE(48, CUFLASH_NAMES_24, "%29", "{%24, %25, %26, %27}, %28, p, 1, 1, %30", CUFLASH_TILES_4(0),
                      CUFLASH_TILES_2(4) : CUFLASH_FROM_REGISTERS);
    } else if constexpr (kTiles == 8) {
        CUFLASH_ISSUE(64, CUFLASH_NAMES_32, "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, %38",
                      CUFLASH_TILES_8(0) : CUFLASH_FROM_REGISTERS);
    } else if constexpr (kTiles == 10) {
        CUFLASH_ISSUE(80, CUFLASH_NAMES_40, "%45", "{%40, %41, %42, %43}, %44, p, 1, 1, %46", CUFLASH_TILES_8(0),
                      CUFLASH_TILES_2(8) : CUFLASH_FROM_REGISTERS);
    } else if constexpr (kTiles == 12) {
        CUFLASH_ISSUE(96, CUFLASH_NAMES_48, "%53", "{%48, %49, %50, %51}, %52, p, 1, 1, %54", CUFLASH_TILES_8(0),
                      CUFLASH_TILES_4(8) : CUFLASH_FROM_REGISTERS);
    } else if constexpr (kTiles == 16) {
        CUFLASH_ISSUE(128, CUFLASH_NAMES_64, "%69", "{%64, %65, %66, %67}, %68, p, 1, 1, %70",
                      CUFLASH_TILES_16(0) : CUFLASH_FROM_REGISTERS);
    } else if constexpr (kTiles == 24) {
        CUFLASH_ISSUE(192, CUFLASH_NAMES_96, "%101", "{%96, %97, %98, %99}, %100, p, 1, 1, %102", CUFLASH_TILES_16(0),
                      CUFLASH_TILES_8(16) : CUFLASH_FROM_REGISTERS);
    } else if constexpr (kTiles == 32) {
        CUFLASH_ISSUE(256, CUFLASH_NAMES_128, "%133", "{%128, %129, %130, %131}, %132, p, 1, 1, %134",
                      CUFLASH_TILES_16(0), CUFLASH_TILES_16(16) : CUFLASH_FROM_REGISTERS);
    }
    static_assert((kTiles <= 12 && kTiles % 2 == 0) || kTiles == 16 || kTiles == 24 || kTiles == 32);
}

// The same with A in shared memory, its rows contiguous.
template <bool kBfloat16, bool kRows, bool kAdd, int kTiles>
__device__ __forceinline__ void wgmma(float (&d)[kTiles][4], SharedMatrix a, SharedMatrix b) {
    if constexpr (kTiles == 4) {
        CUFLASH_ISSUE(32, CUFLASH_NAMES_16, "%18", "%16, %17, p, 1, 1, 0, %19",
                      CUFLASH_TILES_4(0) : CUFLASH_FROM_MEMORY);
    } else if constexpr (kTiles == 8) {
        CUFLASH_ISSUE(64, CUFLASH_NAMES_32, "%34", "%32, %33, p, 1, 1, 0, %35",
                      CUFLASH_TILES_8(0) : CUFLASH_FROM_MEMORY);
    } else if constexpr (kTiles == 10) {
        CUFLASH_ISSUE(80, CUFLASH_NAMES_40, "%42", "%40, %41, p, 1, 1, 0, %43", CUFLASH_TILES_8(0),
                      CUFLASH_TILES_2(8) : CUFLASH_FROM_MEMORY);
    } else if constexpr (kTiles == 12) {
        CUFLASH_ISSUE(96, CUFLASH_NAMES_48, "%50", "%48, %49, p, 1, 1, 0, %51", CUFLASH_TILES_8(0),
                      CUFLASH_TILES_4(8) : CUFLASH_FROM_MEMORY);
    } else if constexpr (kTiles == 14) {
        CUFLASH_ISSUE(112, CUFLASH_NAMES_56, "%58", "%56, %57, p, 1, 1, 0, %59", CUFLASH_TILES_8(0), CUFLASH_TILES_4(8),
                      CUFLASH_TILES_2(12) : CUFLASH_FROM_MEMORY);
    } else if constexpr (kTiles == 16) {
        CUFLASH_ISSUE(128, CUFLASH_NAMES_64, "%66", "%64, %65, p, 1, 1, 0, %67",
                      CUFLASH_TILES_16(0) : CUFLASH_FROM_MEMORY);
    }
    static_assert(kTiles == 4 || (kTiles >= 8 && kTiles <= 16 && kTiles % 2 == 0));
}

}  // namespace cuflash
