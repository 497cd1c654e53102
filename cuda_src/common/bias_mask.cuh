// Bias and mask of a row, as they are read: neighbouring elements, in vectors where they lie so.
#pragma once

#include "common/numeric.cuh"
#include "common/params.cuh"

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
    // Sets bits, of which there are none: for the compiler, what is unpacked then depends on them.
    __device__ __forceinline__ void set(unsigned int bits) {
#pragma unroll
        for (unsigned int& word : packed.words) word |= bits;
    }
    __device__ __forceinline__ void unpack(Value (&values)[kCount]) const { memcpy(values, packed.words, kBytes); }
};

// Bias and mask of a row from the first key of a tile on, from which columns are counted.
struct BiasMaskRow {
    const char* bias;
    const char* mask;
    int last_column;  // that is a key: both must be read inside the arrays
};

// Whether bias and mask of a row can be read in vectors: the end of the keys cuts none of them.
template <int kCount>
__device__ __forceinline__ bool has_vectors(const AttentionParams& params, const BiasMaskRow& row) {
    bool vectors = (kBiasDtype != 0 || kHasMask) && (row.last_column + 1) % kCount == 0;
    if constexpr (kBiasDtype != 0)
        vectors &= is_vector<kCount, ElementOf<kBiasDtype>::Type>(row.bias, params.bias_strides.column);
    if constexpr (kHasMask) vectors &= is_vector<kCount, unsigned char>(row.mask, params.mask_strides.column);
    return vectors;
}

// Bias and mask of a row at kCount neighbouring columns.
template <int kCount>
struct RowColumns {
    using Bias = ElementOf<kBiasDtype>::Type;
    Columns<Bias, kCount> biases;
    Columns<unsigned char, kCount> visible;

    // `kVectors` asks for what has_vectors<kCount> has found to be so.
    template <bool kVectors>
    __device__ __forceinline__ void load(const AttentionParams& params, const BiasMaskRow& row, int column) {
        if constexpr (kBiasDtype != 0)
            biases.template load<kVectors>(row.bias, params.bias_strides.column, column, row.last_column);
        if constexpr (kHasMask)
            visible.template load<kVectors>(row.mask, params.mask_strides.column, column, row.last_column);
    }
};

}  // namespace cuflash
