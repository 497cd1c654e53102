// Rows in shared memory as warpgroups multiply them: panels of 64 features, swizzled, and how they get there.
#pragma once

#include "common/numeric.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/wgmma.cuh"

namespace cuflash {

template <int kNumRows, int kWidth>
struct alignas(1024) Panels {
    static constexpr int kRowBytes = 128, kPanelBytes = kNumRows * kRowBytes, kCount = (kWidth + 63) / 64;
    Element rows[kCount][kNumRows][64];

    // Rows as columns of a right operand, or rows of a left one: 16 features, those of a step.
    __device__ __forceinline__ SharedMatrix features(int step) {
        return SharedMatrix::swizzled(shared_address(rows), 8 * kRowBytes).at(step / 4 * kPanelBytes + step % 4 * 32);
    }
    // Rows as rows of a right operand, features as its columns: 16 rows, those of a step.
    __device__ __forceinline__ SharedMatrix tokens(int step) {
        return SharedMatrix::swizzled(shared_address(rows), 8 * kRowBytes, kPanelBytes).at(step * 16 * kRowBytes);
    }
};

// Which row of an array goes where: sums of rows that share no bits are those of their places.
struct AsTheyCome {
    static __device__ __forceinline__ constexpr int row_at(int place) { return place; }
};

// Copies rows into panels, by the threads of a warpgroup or of a warp: what a thread knows of all tiles.
template <int kWidth, typename Order = AsTheyCome, int kNumThreads = 128>
struct PanelCopy {
    static constexpr int kPanels = (kWidth + 63) / 64, kStep = kNumThreads / 8;
    long long stride;
    int row, piece;          // the first 16 bytes that are the thread's: of the array
    int offset;              // of where they go
    int num_bytes[kPanels];  // of them that the array has: all or none

    __device__ __forceinline__ PanelCopy(long long stride, int num_features, int thread)
        : stride(stride),
          row(Order::row_at(thread / 8)),
          piece(thread % 8),
          offset(thread / 8 * 128 + (piece ^ thread / 8 % 8) * 16) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) num_bytes[panel] = panel * 64 + piece * 8 < num_features ? 16 : 0;
    }
    // Where the thread's part of the rows from here on begins.
    __device__ __forceinline__ const char* own_part(const char* rows) const { return rows + row * stride + piece * 16; }
    // The thread's part of 16 rows, or zeros, to those from `place` on.
    template <int kNumRows>
    __device__ __forceinline__ void load_step(Panels<kNumRows, kWidth>& target, const char* source, int place,
                                              bool are_there) const {
        // Swizzles repeat every eight rows.
        const int offset_here = kStep == 4 ? offset ^ place / 4 % 2 * 64 : offset;
        const SharedAddress first = shared_address(target.rows) + offset_here + place * target.kRowBytes;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            cp_async_bytes(first + panel * target.kPanelBytes, source + panel * 128, are_there ? num_bytes[panel] : 0);
    }
    // Rows from `num_rows` on become zeros; kWhole: there are none. With kReversed the last 16 come first.
    template <bool kWhole, bool kReversed = false, int kNumRows>
    __device__ __forceinline__ void load(Panels<kNumRows, kWidth>& target, const char* source, int num_rows) const {
#pragma unroll
        for (int i = 0; i < kNumRows; i += kStep) {
            const int next = Order::row_at(i + kStep) - Order::row_at(i);
            load_step(target, source, kReversed ? kNumRows - kStep - i : i,
                      kWhole || row + Order::row_at(i) < num_rows);
            source = unknown(source + next * stride);  // else all of a tile's would be kept, and spilled
        }
    }
};

}  // namespace cuflash
