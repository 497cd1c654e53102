// Bias and mask of a row, as they are read: neighbouring elements, in vectors where they lie so, in pieces of memory
// that hold them where they lie between others.
#pragma once

#include "common/numeric.cuh"
#include "common/params.cuh"

namespace cuflash {

// How neighbouring elements of a row are read.
enum class Reads {
    kElements,  // one by one
    kPieces,    // by the aligned pieces that hold them, and neighbours up to kMostBeside of them
    kVectors,   // at once
};
constexpr int kMostBeside = 8;

// Whether kCount neighbouring columns of a row can be read at once, wherever they begin in steps of kCount.
template <int kCount, typename Value>
__device__ __forceinline__ bool is_vector(const char* row, long long column_stride) {
    constexpr int kBytes = kCount * static_cast<int>(sizeof(Value));
    return column_stride == sizeof(Value) &&
           reinterpret_cast<unsigned long long>(row) % (kBytes < 16 ? kBytes : 16) == 0;
}

// Neighbouring elements of a row, in as few registers as hold them. Behind the last column they are those of others.
template <typename Value, int kCount>
struct Columns {
    static constexpr int kBytes = kCount * static_cast<int>(sizeof(Value));
    struct alignas(kBytes < 4 ? 4 : kBytes < 16 ? kBytes : 16) Words {
        unsigned int words[(kBytes + 3) / 4];
    };
    Words packed;

    template <Reads kReads>
    __device__ __forceinline__ void load(const char* row, long long column_stride, int column, int last_column) {
        static_assert(kReads == Reads::kElements || kBytes >= 4);
        if constexpr (kReads == Reads::kVectors) {
            const int first = min(column, last_column + 1 - kCount);
            packed = *reinterpret_cast<const Words*>(row + first * static_cast<int>(sizeof(Value)));
        } else if constexpr (kReads == Reads::kPieces) {
            load_pieces(row + column * static_cast<int>(sizeof(Value)));
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
    // Reads a piece more than the elements fill, and leaves out what is in front of them.
    __device__ __forceinline__ void load_pieces(const char* address) {
        constexpr int kWords = kBytes / 4, kWordsOfPiece = sizeof(Value) >= 4 ? 4 : kBytes < 8 ? 1 : 2;
        static_assert(kBytes % 4 == 0 && kWords % kWordsOfPiece == 0);
        struct alignas(4 * kWordsOfPiece) Piece {
            unsigned int words[kWordsOfPiece];
        };
        const unsigned int before = reinterpret_cast<unsigned long long>(address) % sizeof(Piece);
        constexpr int kNumPieces = kWords / kWordsOfPiece + 1, kNumRead = kNumPieces * kWordsOfPiece;
        Piece pieces[kNumPieces];
#pragma unroll
        for (int i = 0; i < kNumPieces; ++i) pieces[i] = reinterpret_cast<const Piece*>(address - before)[i];
        unsigned int words[kNumRead];
        memcpy(words, pieces, sizeof(words));
#pragma unroll
        for (int step = kWordsOfPiece / 2; step > 0; step /= 2) {
#pragma unroll
            for (int i = 0; i < kNumRead - 1; ++i) {  // a length that compilers know
                if (before / 4 & step && i + step < kNumRead) words[i] = words[i + step];
            }
        }
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            packed.words[i] = words[i];
            if constexpr (sizeof(Value) < 4) {
                const unsigned long long both = static_cast<unsigned long long>(words[i + 1]) << 32 | words[i];
                packed.words[i] = static_cast<unsigned int>(both >> before % 4 * 8);
            }
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
    bool vectors = kHasArrays && (row.last_column + 1) % kCount == 0;
    if constexpr (kBiasDtype != 0)
        vectors &= is_vector<kCount, ElementOf<kBiasDtype>::Type>(row.bias, params.bias_strides.column);
    if constexpr (kHasMask) vectors &= is_vector<kCount, unsigned char>(row.mask, params.mask_strides.column);
    return vectors;
}

// Whether they can be read in pieces, where kMostBeside elements on either side are of the row, too.
__device__ __forceinline__ bool has_pieces(const AttentionParams& params, const BiasMaskRow& row) {
    bool pieces = kHasArrays;
    if constexpr (kBiasDtype != 0)
        pieces &= is_vector<1, ElementOf<kBiasDtype>::Type>(row.bias, params.bias_strides.column);
    if constexpr (kHasMask) pieces &= is_vector<1, unsigned char>(row.mask, params.mask_strides.column);
    return pieces;
}

// Bias and mask of a row at kCount neighbouring columns.
template <int kCount>
struct RowColumns {
    using Bias = ElementOf<kBiasDtype>::Type;
    Columns<Bias, kCount> biases;
    Columns<unsigned char, kCount> visible;

    // `kReads` asks for what has_vectors<kCount> or has_pieces has found to be so.
    template <Reads kReads>
    __device__ __forceinline__ void load(const AttentionParams& params, const BiasMaskRow& row, int column) {
        if constexpr (kBiasDtype != 0)
            biases.template load<kReads>(row.bias, params.bias_strides.column, column, row.last_column);
        if constexpr (kHasMask)
            visible.template load<kReads>(row.mask, params.mask_strides.column, column, row.last_column);
    }
};

}  // namespace cuflash
