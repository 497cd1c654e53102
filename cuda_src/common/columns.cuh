// Neighbouring elements of a row of bias or mask, as they are read.
#pragma once

#include "common/numeric.cuh"

namespace cuflash {

// Whether kCount neighbouring columns of a row can be read at once, wherever they begin in steps of kCount.
template <int kCount, typename Value>
__device__ __forceinline__ bool is_vector(const char* row, long long column_stride) {
    return column_stride == sizeof(Value) && reinterpret_cast<unsigned long long>(row) % (kCount * sizeof(Value)) == 0;
}

// Neighbouring elements of a row, in as few registers as hold them. Behind the last column they are those of others.
template <typename Value, int kCount>
struct Columns {
    static constexpr int kBytes = kCount * static_cast<int>(sizeof(Value));
    struct alignas(kBytes < 4 ? 4 : kBytes) Words {
        unsigned int words[(kBytes + 3) / 4];
    };
    Words packed;

    template <bool kVectors>
    __device__ __forceinline__ void load(const char* row, long long column_stride, int column, int last_column) {
        static_assert(!kVectors || kBytes >= 4);
        if constexpr (kVectors) {
            const int first = min(column, last_column + 1 - kCount);
            packed = *reinterpret_cast<const Words*>(row + first * static_cast<int>(sizeof(Value)));
        } else {
            Value values[kCount];
            const char* address = row + min(column, last_column) * column_stride;
#pragma unroll
            for (int e = 0; e < kCount; ++e) {
                values[e] = load_bits<Value>(address);
                if (column + e < last_column) address += column_stride;
            }
            memcpy(packed.words, values, kBytes);
        }
    }
    __device__ __forceinline__ void unpack(Value (&values)[kCount]) const { memcpy(values, packed.words, kBytes); }
};

}  // namespace cuflash
