// Products of a warpgroup on the tensor cores of Hopper, D (+)= A B with float accumulators, that run beside other
// instructions (sm_90a). Called by all 128 threads of four warps, the first of which has a number divisible by 4. Warp
// w of them has rows 16 w to 16 w + 15 of A and D, in the layouts of ptx/mma.cuh.
#pragma once

#include "ptx/shared.cuh"

namespace cuflash {

// Where B lies in shared memory: 8 x 8 matrices, each of eight times 16 bytes.
struct SharedMatrix {
    unsigned long long bits;

    // Rows of columns of B, 128 bytes each, eight of them on a 1024-byte boundary, 16-byte pieces swizzled: piece p of
    // row r is at p ^ r % 8. Eight rows are `stride` bytes from the next eight. Where rows of B are contiguous instead,
    // 64 of its columns are `leading` bytes from the next 64.
    static __device__ __forceinline__ SharedMatrix swizzled(SharedAddress address, int stride, int leading = 16) {
        return {part(address & 0x3ffff, 0) | part(leading, 16) | part(stride, 32) | 1ull << 62};
    }
    // Columns of B in matrices of 8 x 8 elements, one behind the other: those of the same columns are `leading` bytes
    // apart, eight columns `stride` bytes.
    static __device__ __forceinline__ SharedMatrix plain(SharedAddress address, int leading, int stride) {
        return {part(address & 0x3ffff, 0) | part(leading, 16) | part(stride, 32)};
    }
    // The same, `bytes` further on.
    __device__ __forceinline__ SharedMatrix at(int bytes) const { return {bits + (bytes >> 4)}; }

  private:
    static __device__ __forceinline__ unsigned long long part(unsigned int bytes, int shift) {
        return static_cast<unsigned long long>(bytes >> 4) << shift;
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

// Makes what this thread has written to shared memory visible to products, behind a barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define CUFLASH_TILES_2(t) CUFLASH_TILE(t), CUFLASH_TILE(t + 1)
#define CUFLASH_TILE(t) "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
#define CUFLASH_TILES_4(t) CUFLASH_TILES_2(t), CUFLASH_TILES_2(t + 2)
#define CUFLASH_TILES_8(t) CUFLASH_TILES_4(t), CUFLASH_TILES_4(t + 4)
#define CUFLASH_WGMMA_16(type, ...)                                                                                 \
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type \
                 " {"                                                                                               \
                 "%0, %1, %2, %3, %4, %5, %6, %7}, "                                                                \
                 "{%8, %9, %10, %11}, %12, p, 1, 1, %14; }"                                                         \
                 : __VA_ARGS__                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "n"(kAdd), "n"(kRows))
#define CUFLASH_WGMMA_32(type, ...)                                                                                 \
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type \
                 " {"                                                                                               \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "                          \
                 "{%16, %17, %18, %19}, %20, p, 1, 1, %22; }"                                                       \
                 : __VA_ARGS__                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "n"(kAdd), "n"(kRows))
#define CUFLASH_WGMMA_48(type, ...)                                                                                 \
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %29, 0; wgmma.mma_async.sync.aligned.m64n48k16.f32." type "." type \
                 " {"                                                                                               \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                           \
                 "%16, %17, %18, %19, %20, %21, %22, %23}, "                                                        \
                 "{%24, %25, %26, %27}, %28, p, 1, 1, %30; }"                                                       \
                 : __VA_ARGS__                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "n"(kAdd), "n"(kRows))
#define CUFLASH_WGMMA_64(type, ...)                                                                                 \
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type \
                 " {"                                                                                               \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                           \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                \
                 "{%32, %33, %34, %35}, %36, p, 1, 1, %38; }"                                                       \
                 : __VA_ARGS__                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "n"(kAdd), "n"(kRows))
#define CUFLASH_WGMMA_128(type, ...)                                                                                 \
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type \
                 " {"                                                                                                \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                            \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                 \
                 "{%64, %65, %66, %67}, %68, p, 1, 1, %70; }"                                                        \
                 : __VA_ARGS__                                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "n"(kAdd), "n"(kRows))

// D and A 64 x kColumns and 64 x 16 of float16 or bfloat16. B has 16 rows, its columns contiguous or, with kRows, its
// rows. Without kAdd D is written, not added to.
template <bool kBfloat16, bool kRows, bool kAdd, int kTiles>
__device__ __forceinline__ void wgmma(float (&d)[kTiles][4], const unsigned int (&a)[4], SharedMatrix b) {
    if constexpr (kTiles == 2) {
        if constexpr (kBfloat16) CUFLASH_WGMMA_16("bf16", CUFLASH_TILES_2(0));
        else CUFLASH_WGMMA_16("f16", CUFLASH_TILES_2(0));
    } else if constexpr (kTiles == 4) {
        if constexpr (kBfloat16) CUFLASH_WGMMA_32("bf16", CUFLASH_TILES_4(0));
        else CUFLASH_WGMMA_32("f16", CUFLASH_TILES_4(0));
    } else if constexpr (kTiles == 6) {
        if constexpr (kBfloat16) CUFLASH_WGMMA_48("bf16", CUFLASH_TILES_4(0), CUFLASH_TILES_2(4));
        else CUFLASH_WGMMA_48("f16", CUFLASH_TILES_4(0), CUFLASH_TILES_2(4));
    } else if constexpr (kTiles == 8) {
        if constexpr (kBfloat16) CUFLASH_WGMMA_64("bf16", CUFLASH_TILES_8(0));
        else CUFLASH_WGMMA_64("f16", CUFLASH_TILES_8(0));
    } else if constexpr (kTiles == 16) {
        if constexpr (kBfloat16) CUFLASH_WGMMA_128("bf16", CUFLASH_TILES_8(0), CUFLASH_TILES_8(8));
        else CUFLASH_WGMMA_128("f16", CUFLASH_TILES_8(0), CUFLASH_TILES_8(8));
    }
    static_assert(kTiles == 2 || kTiles == 4 || kTiles == 6 || kTiles == 8 || kTiles == 16);
}

}  // namespace cuflash
