// Stores of results: converted, and in vectors where the call has them.
#pragma once

#include "common/softmax.cuh"

namespace cuflash {

// Stores those of kCount neighbouring features of a row, from `column` on, that are below `num_features`. With
// kVectorLoads that number is a multiple of the elements in 16 bytes.
template <int kCount>
__device__ __forceinline__ void store_features(char* row, int column, int num_features, long long feature_stride,
                                               const Accumulator (&values)[kCount]) {
    struct alignas(kCount * sizeof(OutElement)) Packed {
        OutElement elements[kCount];
    };
    constexpr bool kWhole = kCount * sizeof(Element) <= 16;  // all or none of them are below it
    if constexpr (kVectorLoads && (kCount & (kCount - 1)) == 0 && sizeof(Packed) <= 16) {
        if (column + (kWhole ? 0 : kCount - 1) < num_features) {
            Packed packed;
#pragma unroll
            for (int e = 0; e < kCount; ++e) packed.elements[e] = to_output(values[e]);
            *reinterpret_cast<Packed*>(row + column * static_cast<int>(sizeof(OutElement))) = packed;
            return;
        }
        if (kWhole) return;
    }
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
        if (column + e < num_features) store_bits(row + (column + e) * feature_stride, to_output(values[e]));
    }
}

// Stores the logarithm of a sum less an offset; or, of a partial result, its largest exponent, the sum and the offset,
// each `column_stride` bytes behind the last. The offset is the same for all of them, which merge without it: beside
// a large one their exponents would be all alike.
__device__ __forceinline__ void store_sum(char* address, long long column_stride, ExponentialSum total,
                                          Accumulator offset) {
    if (column_stride == 0) return store_bits(address, log_of(total) - offset);
    store_bits(address, total.largest);
    store_bits(address + column_stride, total.sum);
    store_bits(address + 2 * column_stride, offset);
}

}  // namespace cuflash
