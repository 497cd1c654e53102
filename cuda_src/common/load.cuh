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
// widened. `row_address` gives a row's address, or null for a row of zeros. All threads of the block share the work, or
// `num_loaders` of them.
template <int kNumRows, int kWidth, typename Target, int kPitch, typename RowAddress>
__device__ __forceinline__ void load_tile(Target (*target)[kPitch], int target_column, int first_feature,
                                          int num_features, long long feature_stride, RowAddress row_address,
                                          int loader = threadIdx.x, int num_loaders = kThreads) {
    if constexpr (kVectorLoads) {
        constexpr int kElements = 16 / sizeof(Element);
        constexpr int kVector = 16 / sizeof(Accumulator);
        constexpr int kChunks = kWidth / kElements;
        for (int chunk = loader; chunk < kNumRows * kChunks; chunk += num_loaders) {
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
        for (int element = loader; element < kNumRows * kWidth; element += num_loaders) {
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

}  // namespace cuflash
