// cuda_src/ptx/wgmma.cuh on the CPU: each warp multiplies its rows where the instruction stands, and has the results at
// the wait and not before.
#pragma once

#include "ptx/mma.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

struct SharedMatrix {
    char* address;
    int leading, stride;
    bool is_swizzled;

    static SharedMatrix swizzled(SharedAddress address, int stride, int leading = 16) {
        return {address, leading, stride, true};
    }
    static SharedMatrix plain(SharedAddress address, int leading, int stride) {
        return {address, leading, stride, false};
    }
    SharedMatrix at(int bytes) const { return {address + bytes, leading, stride, is_swizzled}; }

    // Address of a row's and column's element; either the rows or the columns are contiguous.
    unsigned short* element(int row, int column, bool rows) const {
        long long offset = 0;
        if (!is_swizzled) offset = column / 8 * stride + row / 8 * leading + column % 8 * 16 + row % 8 * 2;
        else if (rows) offset = column / 64 * leading + row / 8 * stride + row % 8 * 128 + column % 64 * 2;
        else offset = column / 8 * stride + column % 8 * 128 + row * 2;
        auto place = reinterpret_cast<unsigned long long>(address) + static_cast<unsigned long long>(offset);
        if (is_swizzled) place ^= (place >> 7 & 7) << 4;
        return reinterpret_cast<unsigned short*>(place);
    }
};

// Results that a thread can't look at before it waits for their group: until then its registers hold NaN.
struct WgmmaResult {
    float (*registers)[4];
    int num_tiles, group;
    float tiles[32][4];
};
struct WgmmaThread {
    unsigned int block;
    int num_results, num_groups;
    WgmmaResult results[4];
};

// Not checked as the kernel's own memory is.
#define CUFLASH_UNCHECKED __attribute__((no_sanitize("thread"), noinline))

CUFLASH_UNCHECKED inline WgmmaThread& wgmma_thread() {
    static WgmmaThread threads[1024];
    WgmmaThread& thread = threads[threadIdx.x];
    if (thread.block != blockIdx.x + 1) thread.num_results = thread.num_groups = 0, thread.block = blockIdx.x + 1;
    return thread;
}

inline void wgmma_fence() {}
CUFLASH_UNCHECKED inline void wgmma_commit() { ++wgmma_thread().num_groups; }

template <int kPending, int kTiles>
CUFLASH_UNCHECKED inline void wgmma_wait(float (&)[kTiles][4]) {
    WgmmaThread& thread = wgmma_thread();
    int kept = 0;
    for (int i = 0; i < thread.num_results; ++i) {
        WgmmaResult& result = thread.results[i];
        if (result.group >= thread.num_groups - kPending) {
            thread.results[kept++] = result;
            continue;
        }
        for (int tile = 0; tile < result.num_tiles; ++tile) {
            for (int e = 0; e < 4; ++e) result.registers[tile][e] = result.tiles[tile][e];
        }
    }
    thread.num_results = kept;
}

template <int kPending, int kCount, int kTiles>
CUFLASH_UNCHECKED inline void wgmma_wait(float (&d)[kCount][kTiles][4]) {
    wgmma_wait<kPending>(d[0]);
}

inline void fence_async_proxy() {}

// The right operand of a warp's product, which one of its lanes reads.
template <bool kRows, int kTiles>
struct WgmmaRight {
    unsigned short columns[kTiles * 8][16];
};
template <bool kRows, int kTiles>
CUFLASH_UNCHECKED inline const WgmmaRight<kRows, kTiles>& wgmma_right(SharedMatrix b) {
    using Right = WgmmaRight<kRows, kTiles>;
    static Right rights[32];
    struct Input {
        SharedMatrix b;
        Right* right;
    };
    const Input input = {b, &rights[threadIdx.x / 32]};
    for (int column = static_cast<int>(threadIdx.x % 32); column < kTiles * 8; column += 32) {
        for (int row = 0; row < 16; ++row) cpu_cuda_read(b.element(row, column, kRows), 2);
    }
    cpu_cuda_collective("wgmma", &input, nullptr, false, [](const void* const* inputs, void* const*) {
        const Input& first = *static_cast<const Input*>(inputs[0]);
        for (int column = 0; column < kTiles * 8; ++column) {
            for (int row = 0; row < 16; ++row) first.right->columns[column][row] = *first.b.element(row, column, kRows);
        }
    });
    return rights[threadIdx.x / 32];
}

template <bool kBfloat16, bool kRows, bool kAdd, int kTiles>
CUFLASH_UNCHECKED inline void wgmma(float (&d)[kTiles][4], const unsigned int (&a)[4], SharedMatrix b) {
    const auto& matrix = wgmma_right<kRows, kTiles>(b).columns;
    WgmmaThread& thread = wgmma_thread();
    int at = 0;
    while (at < thread.num_results && thread.results[at].registers != d) ++at;
    if (at == 4) cpu_cuda_fail("wgmma: more results under way than are covered");
    WgmmaResult& result = thread.results[at];
    const auto nothing = __uint_as_float(0x7fc00000u);
    if (at == thread.num_results) {
        result.registers = d, result.num_tiles = kTiles, ++thread.num_results;
        for (int tile = 0; tile < kTiles; ++tile) {
            for (int e = 0; e < 4; ++e) result.tiles[tile][e] = d[tile][e], d[tile][e] = nothing;
        }
    }
    if (kTiles > result.num_tiles) cpu_cuda_fail("wgmma: a result that is wider than when it began");
    result.group = thread.num_groups;
    for (int tile = 0; tile < kTiles; ++tile) {
        unsigned int right[2];
        const unsigned short* const column = matrix[tile * 8 + threadIdx.x % 32 / 4];
        for (int i = 0; i < 2; ++i) {
            const int row = i * 8 + static_cast<int>(threadIdx.x % 4) * 2;
            right[i] = column[row] | static_cast<unsigned int>(column[row + 1]) << 16;
        }
        float sums[4];
        for (int e = 0; e < 4; ++e) sums[e] = kAdd ? result.tiles[tile][e] : 0;
        mma_m16n8k16<kBfloat16>(sums, a, right);
        for (int e = 0; e < 4; ++e) result.tiles[tile][e] = sums[e];
    }
}

template <bool kBfloat16, bool kRows, bool kAdd, int kTiles>
CUFLASH_UNCHECKED inline void wgmma(float (&d)[kTiles][4], SharedMatrix left, SharedMatrix b) {
    unsigned int a[4];
    for (int i = 0; i < 4; ++i) {
        const int row = static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) + i % 2 * 8;
        const int feature = static_cast<int>(threadIdx.x % 4) * 2 + i / 2 * 8;
        const unsigned short* const pair = left.element(feature, row, false);
        cpu_cuda_read(pair, 4);
        a[i] = pair[0] | static_cast<unsigned int>(pair[1]) << 16;
    }
    wgmma<kBfloat16, kRows, kAdd>(d, a, b);
}

}  // namespace cuflash
