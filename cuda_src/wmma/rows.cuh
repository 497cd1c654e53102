// Rows of a tile between global and shared memory.
#pragma once

#include "common/epilogue.cuh"
#include "common/load.cuh"

namespace cuflash {

// Copies the elements of kNumRows rows that lie one `row_stride` behind the other into shared memory, zeros from row
// `num_rows` on. Each thread walks down one column of vectors by adding a constant: the row map's multiplications would
// take half as many instructions as the tensor cores get for the tile, and hoisting them out of the loop all the
// registers.
template <int kNumRows, int kWidth, int kPitch>
__device__ __forceinline__ void load_rows(Element (*target)[kPitch], const char* first, long long row_stride,
                                          long long feature_stride, int num_rows, int num_features) {
    if constexpr (kVectorLoads) {
        constexpr int kElements = 16 / sizeof(Element);
        constexpr int kVectors = kWidth / kElements;
        constexpr int kLanes = kVectors <= 32 ? power_of_two_above(kVectors) : 32;
        constexpr int kStep = kThreads / kLanes;
        static_assert(kNumRows % kStep == 0 || kStep % kNumRows == 0, "passes must be whole, or one that is too long");
        const int row = threadIdx.x / kLanes;
        if (kStep > kNumRows && row >= kNumRows) return;
#pragma unroll
        for (int column = threadIdx.x % kLanes * kElements; column < kWidth; column += kLanes * kElements) {
            const char* source = first + row * row_stride + column * static_cast<int>(sizeof(Element));
            const bool inside = column < num_features;
#pragma unroll
            for (int pass = 0; pass < kNumRows; pass += kStep, source += kStep * row_stride)
                cp_async_16(&target[row + pass][column], source, inside && row + pass < num_rows);
        }
    } else {
#pragma unroll 4
        for (int element = threadIdx.x; element < kNumRows * kWidth; element += kThreads) {
            const int row = element / kWidth;
            const int column = element % kWidth;
            const char* source = first + row * row_stride + column * feature_stride;
            target[row][column] = row < num_rows && column < num_features ? load_bits<Element>(source) : Element(0);
        }
    }
}

// Stores kNumRows rows of the tile, `num_columns` features each, that lie in shared memory. Called by the 32 lanes of a
// warp.
template <int kNumRows, int kPitch>
__device__ __forceinline__ void store_shared_rows(const AttentionParams& params, const TileMap& tile, int first_row,
                                                  int first_column, int num_columns,
                                                  const Accumulator (&rows)[kNumRows][kPitch], int lane) {
    constexpr int kOutputs = 16 / sizeof(OutElement);
    const int vectors = num_columns / kOutputs;
#pragma unroll 1
    for (int vector = lane; vector < kNumRows * vectors; vector += 32) {
        const Row row = row_at(params, tile, first_row + vector / vectors);
        if (!row.valid) continue;
        const int column = vector % vectors * kOutputs;
        Accumulator values[kOutputs];
#pragma unroll
        for (int e = 0; e < kOutputs; ++e) values[e] = rows[vector / vectors][column + e];
        store_output(params, output_row(params, tile, row), first_column + column, values);
    }
}

}  // namespace cuflash
