// Where the elements of a tile's rows lie in shared memory, and in rows that are prepared in memory.
#pragma once

#include "common/load.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/wgmma.cuh"

namespace cuflash {

// A prepared row of `width` elements: the firsts of all of them, their seconds, and what has been found in it.
__host__ __device__ constexpr int prepared_found(int width) { return (kProducts > 1 ? 4 : 2) * width; }
__host__ __device__ constexpr int prepared_bytes(int width) { return prepared_found(width) + 16; }

// Rows for mma.sync, one behind the other as they are prepared. Padded by 16 bytes, they begin in different banks.
template <int kNumRows, int kWidth, bool kWithSeconds, bool kForWarpgroups = kWarpgroups>
struct RowLayout {
    static constexpr int kRowBytes = (kWithSeconds ? 4 : 2) * kWidth + 16,
                         kSecond = 2 * kWidth;  // bytes to the seconds
    static constexpr int kChunks = kNumRows * kRowBytes / 16;
    alignas(16) char rows[kNumRows][kRowBytes];

    // Four elements as they arrive, where their row's pairs will be.
    __device__ __forceinline__ float* floats(int row, int column) {
        return reinterpret_cast<float*>(&rows[row][column * 4]);
    }
    __device__ __forceinline__ char* firsts(int row, int column) { return &rows[row][column * 2]; }

    // The thread's part of prepared rows, the first `num_rows` of them; others become zeros.
    __device__ __forceinline__ void copy(const char* source, int thread, int num_rows) {
        const SharedAddress target = shared_address(rows[0]) + thread * 16;
        source += thread * 16;
        const int chunks_left = num_rows * (kRowBytes / 16) - thread;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; chunk += kThreads)
            if (chunk + kThreads <= kChunks ||  // right either way: it spares a look at the thread
                chunk + thread < kChunks)
                cp_async_16(target + chunk * 16, source + chunk * 16, chunk < chunks_left);
    }
};

// Rows for warpgroups: panels of 64 firsts, swizzled, each followed by one of their seconds.
template <int kNumRows, int kWidth, bool kWithSeconds>
struct alignas(1024) RowLayout<kNumRows, kWidth, kWithSeconds, true> {
    static constexpr int kSecond = kNumRows * 128, kPanelBytes = (kWithSeconds ? 2 : 1) * kSecond;
    alignas(1024) char rows[(kWidth + 63) / 64 * kPanelBytes];

    static constexpr int kCopiers = 128;  // threads
    // 16 bytes of a row in a panel, or in that of the seconds behind it.
    __device__ __forceinline__ char* piece(int row, int index) {
        return rows + index / 8 * kSecond + row * 128 + (index % 8 ^ row % 8) * 16;
    }
    __device__ __forceinline__ float* floats(int row, int column) {
        return reinterpret_cast<float*>(piece(row, column / 4));
    }
    __device__ __forceinline__ char* firsts(int row, int column) {
        return piece(row, column / 64 * (kPanelBytes / kSecond) * 8 + column % 64 / 8) + column % 8 * 2;
    }

    __device__ __forceinline__ void copy(const char* source, int thread, int num_rows) {
        constexpr int kPieces = prepared_found(kWidth) / 16, kStep = kCopiers / kPieces;
        static_assert(kCopiers % kPieces == 0, "every thread has a piece of some rows");
        const int row = thread / kPieces, chunk = thread % kPieces;
        const int of_part = chunk % (kWidth / 8);
        const int index = kWithSeconds ? (of_part / 8 * 2 + chunk / (kWidth / 8)) * 8 + of_part % 8 : chunk;
        const SharedAddress target = shared_address(rows);
        const int offset = unknown(static_cast<int>(piece(row, index) - rows));
        source += row * prepared_bytes(kWidth) + chunk * 16;
#pragma unroll
        for (int i = 0; i < kNumRows; i += kStep) {
            cp_async_16(target + (offset ^ i % 8 * 16) + i * 128, source, row + i < num_rows);
            source =
                unknown(source + kStep * prepared_bytes(kWidth));  // else all of a tile's would be kept, and spilled
        }
    }

    // Rows as columns of a right operand, or rows of a left one: 16 firsts of features, those of a step.
    static __device__ __forceinline__ int features_at(int step) { return step / 4 * kPanelBytes + step % 4 * 32; }
    __device__ __forceinline__ SharedMatrix features(int step) {
        return SharedMatrix::swizzled(shared_address(rows), 8 * 128).at(features_at(step));
    }
    // Rows as rows of a right operand, 64 features as its columns: the firsts of 16 rows, those of a step.
    __device__ __forceinline__ SharedMatrix tokens(int step, int panel) {
        return SharedMatrix::swizzled(shared_address(rows), 8 * 128).at(step * 16 * 128 + panel * kPanelBytes);
    }
};

}  // namespace cuflash
