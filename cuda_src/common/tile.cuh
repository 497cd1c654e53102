// Loads of rows from global into shared memory.
#pragma once

#include "common/numeric.cuh"
#include "ptx/cp_async.cuh"

namespace cuflash {

// An element as it is or, for a target of the accumulator's type, widened.
template <typename Target>
__device__ __forceinline__ Target load_element(const char* address) {
    if constexpr (sizeof(Element) == sizeof(Target)) return load_bits<Element>(address);
    else return load_as<kDtype>(address);
}

// Copies a [kNumRows][kWidth] piece into shared memory, as it is or, where the target is of the accumulator's type,
// widened. `row_address` gives a row's address, or null for a row of zeros.
template <int kNumRows, int kWidth, typename Target, int kPitch, typename RowAddress>
__device__ __forceinline__ void load_tile(Target (*target)[kPitch], int target_column, int first_feature,
                                          int num_features, long long feature_stride, RowAddress row_address) {
    if constexpr (kVectorLoads) {
        constexpr int kElements = 16 / sizeof(Element);
        constexpr int kVector = 16 / sizeof(Accumulator);
        constexpr int kChunks = kWidth / kElements;
        for (int chunk = threadIdx.x; chunk < kNumRows * kChunks; chunk += kThreads) {
            const int row = chunk / kChunks;
            const int column = chunk % kChunks * kElements;
            const char* source = row_address(row);
            const bool valid = source != nullptr && first_feature + column < num_features;
            source += (first_feature + column) * static_cast<int>(sizeof(Element));
            Target* shared = &target[row][target_column + column];
            if constexpr (sizeof(Element) == sizeof(Target)) {
                cp_async_16(shared, source, valid);
            } else {
                Elements16 elements = {};
                if (valid) elements = *reinterpret_cast<const Elements16*>(source);
#pragma unroll
                for (int e = 0; e < kElements; e += kVector) {
                    Vector16 vector;
#pragma unroll
                    for (int i = 0; i < kVector; ++i) vector.values[i] = widen<kDtype>(elements.values[e + i]);
                    *reinterpret_cast<Vector16*>(shared + e) = vector;
                }
            }
        }
    } else {
        for (int element = threadIdx.x; element < kNumRows * kWidth; element += kThreads) {
            const int row = element / kWidth;
            const int column = element % kWidth;
            const char* source = row_address(row);
            const bool valid = source != nullptr && first_feature + column < num_features;
            target[row][target_column + column] =
                valid ? load_element<Target>(source + (first_feature + column) * feature_stride) : Target(0);
        }
    }
}

__host__ __device__ constexpr int power_of_two_above(int value) {
    int power = 1;
    while (power < value) power *= 2;
    return power;
}

// The same for kNumRows rows that lie one `row_stride` behind the other, as elements, with zeros from row `num_rows`
// on. Each thread walks down one column of vectors by adding a constant: the row map's multiplications would take half
// as many instructions as the tensor cores get for the tile, and hoisting them out of the loop all the registers.
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

}  // namespace cuflash
