// cuda_src/ptx/wgmma.cuh on the CPU: each warp multiplies its rows where the instruction stands.
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

inline void wgmma_fence() {}
inline void wgmma_commit() {}

template <int kPending, int kTiles>
inline void wgmma_wait(float (&)[kTiles][4]) {}

inline void fence_async_proxy() {}

template <bool kBfloat16, bool kRows, bool kAdd, int kTiles>
inline void wgmma(float (&d)[kTiles][4], const unsigned int (&a)[4], SharedMatrix b) {
    // Lanes look at the columns of B in turn, and all have them then.
    unsigned short matrix[kTiles * 8][16];
    for (int column = 0; column < kTiles * 8; ++column) {
        for (int row = 0; row < 16; ++row) {
            const unsigned short* const element = b.element(row, column, kRows);
            if (column % 32 == static_cast<int>(threadIdx.x % 32)) cpu_cuda_read(element, 2);
            matrix[column][row] = *element;
        }
    }
    for (int tile = 0; tile < kTiles; ++tile) {
        unsigned int right[2];
        const unsigned short* const column = matrix[tile * 8 + threadIdx.x % 32 / 4];
        for (int i = 0; i < 2; ++i) {
            const int row = i * 8 + static_cast<int>(threadIdx.x % 4) * 2;
            right[i] = column[row] | static_cast<unsigned int>(column[row + 1]) << 16;
        }
        if (!kAdd) {
            for (float& x : d[tile]) x = 0;
        }
        mma_m16n8k16<kBfloat16>(d[tile], a, right);
    }
}

}  // namespace cuflash
