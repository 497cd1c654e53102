// Loads of rows of tokens and of states into shared memory, for 16-bit floats.
#pragma once

#include "common/load.cuh"

namespace cuflash {

// The first `num_rows` of kNumRows rows from an address on, of which `num_features` are there; others become zeros.
// kLoaders threads share the work; one has the same columns of each of its rows, so that addresses are but added to.
template <int kNumRows, int kWidth, int kLoaders = kThreads, int kPitch>
__device__ __forceinline__ void load_rows(Element (*target)[kPitch], const char* source, long long row_stride,
                                          long long column_stride, long long num_rows, int num_features,
                                          int loader = threadIdx.x) {
    if constexpr (kVectorLoads) {
        constexpr int kChunks = kWidth / 8, kStep = kLoaders / kChunks;
        static_assert(kWidth % 8 == 0 && kStep > 0);
        // Without signs, which would take registers of their own.
        const unsigned int thread = loader, row = thread / kChunks, byte = thread % kChunks * 16;
        // right either way: threads behind the last whole row would load rows of others again
        if (kLoaders % kChunks != 0 && row >= kStep) return;
        // Behind this thread's first one: compared with constants, where each row would take a register.
        // right either way: what is rounded to int are rows of one array
        const int first = static_cast<int>(row), last = static_cast<int>(min(num_rows, 1LL * kNumRows));
        const int rows_left = static_cast<int>(byte) < 2 * num_features ? last - first : 0;
        source += row * row_stride + byte;
        const SharedAddress shared = shared_address(target[row]) + byte;
#pragma unroll
        for (int i = 0; i < kNumRows; i += kStep) {
            // right either way: the second says it all, the first at compile time
            if (i + kStep <= kNumRows || row + i < kNumRows)
                cp_async_16(shared + i * kPitch * 2, source, i < rows_left);
            source += kStep * row_stride;
        }
    } else {
        load_tile<kNumRows, kWidth>(
            target, 0, 0, num_features, column_stride,
            [&](int row) { return row < num_rows ? source + row * row_stride : nullptr; }, loader, kLoaders);
    }
}

}  // namespace cuflash
