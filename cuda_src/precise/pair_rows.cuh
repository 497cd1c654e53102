// Rows of Q, K and V in shared memory: how they get there, and how they become pairs where they lie.
#pragma once

#include "common/load.cuh"
#include "precise/layout.cuh"
#include "precise/pairs.cuh"
#include "precise/row_layout.cuh"
#include "ptx/maximum.cuh"

namespace cuflash {

// Rows of a tile in shared memory, as they arrive or as pairs: first the firsts of all elements, then the seconds.
template <int kNumRows, int kWidth>
struct PairRows : RowLayout<kNumRows, kWidth, true> {
    float scales[kNumRows];  // see FoundInRow

    // Lanes take the chunks of four elements of a row by turns. Those that store at a time then reach all banks.
    static constexpr int kIdle = power_of_two_above(32 * kNumWarps / kNumRows), kWide = power_of_two_above(kWidth / 16);
    static constexpr int kWanted = kIdle > kWide ? kIdle : kWide;
    static constexpr int kLanes = kWanted < 8 ? 8 : kWanted > 32 ? 32 : kWanted;
    static constexpr int kChunks = (kWidth / 4 + kLanes - 1) / kLanes;
    static constexpr int kPasses = kNumRows * kLanes / (32 * kNumWarps);
    static_assert(kPasses * 32 * kNumWarps == kNumRows * kLanes, "each thread has a row in each pass");

    __device__ __forceinline__ float scale(int row) const { return scales[row]; }
    static __host__ __device__ constexpr int row_of(int thread, int pass) {
        const int lane = thread % 32, turn = pass * kNumWarps + thread / 32;
        return kLanes == 8 ? turn / 2 * 8 + turn % 2 * 2 + lane / 8 % 2 * 4 + lane / 16
                           : turn * (32 / kLanes) + lane / kLanes;
    }
    static __device__ __forceinline__ int column_of(int thread, int chunk) {
        return (thread % kLanes + chunk * kLanes) * 4;
    }

    __device__ __forceinline__ void load_row(int thread, int row, const char* source, bool valid, int num_features,
                                             long long feature_stride) {
        static_assert(kChunks * kLanes * 4 == kWidth || !kHasValues, "each lane has as many chunks");
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int column = column_of(thread, chunk);
            if constexpr (kVectorLoads) {
                cp_async_16(shared_address(this->floats(row, column)), source + column * 4,
                            valid && column < num_features);
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const bool has = valid && column + e < num_features;
                    this->floats(row, column)[e] =
                        has ? load_bits<float>(source + (column + e) * feature_stride) : 0.0f;
                }
            }
        }
    }
    // Rows of an array, the first `num_rows` of them; others become zeros.
    __device__ __forceinline__ void load(const char* array, const Strides& strides, int num_features,
                                         long long num_rows) {
        const int thread = thread_index_again();
        // right either way: it only keeps the cast in range
        const int rows_left = static_cast<int>(min(num_rows, static_cast<long long>(kNumRows)));
        const char* source = array + row_of(thread, 0) * strides.row;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int row = row_of(thread, pass);
            load_row(thread, row, source, row < rows_left, num_features, strides.column);
            source += (row_of(0, pass + 1) - row_of(0, pass)) * strides.row;
        }
    }
    // Rows that lie anywhere; `source(row)` is null for those of zeros.
    template <typename Source>
    __device__ __forceinline__ void gather(int num_features, long long feature_stride, Source source) {
#pragma unroll 1
        for (int pass = 0; pass < kPasses; ++pass) {
            const int row = row_of(threadIdx.x, pass);
            const char* const address = source(row);
            load_row(threadIdx.x, row, address, address != nullptr, num_features, feature_stride);
        }
    }

    // Turns what the warp has loaded into pairs, when it has arrived. Returns what the lane has found in it: exponents
    // are wanted from `least_exponent` to `most_exponent`.
    __device__ __forceinline__ unsigned int arrive(int num_features, unsigned int least_exponent,
                                                   unsigned int most_exponent) {
        const int thread = thread_index_again();
        unsigned int found = 0;
        cp_async_wait();
#pragma unroll 1
        for (int pass = 0; pass < kPasses; ++pass) {
            const int row = row_of(thread, pass);
            const FoundInRow in_row = make_pairs(thread, row, num_features);
            if (thread % kLanes == 0) scales[row] = in_row.scale;
            found |= in_row.kinds | out_of_range(in_row.scale, least_exponent, most_exponent);
        }
        if constexpr (kWarpgroups) fence_async_proxy();
        return found;
    }

    // Turns a row into pairs. Its lanes call this together.
    __device__ __forceinline__ FoundInRow make_pairs(int thread, int row, int num_features) {
        Vector16 chunks[kChunks] = {};
        float largest = 0;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int column = column_of(thread, chunk);
            chunks[chunk] = *reinterpret_cast<const Vector16*>(this->floats(row, column));
#pragma unroll
            for (const float value : chunks[chunk].values) largest = larger_magnitude(largest, value);
        }
#pragma unroll
        for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
            largest = larger_magnitude(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        const unsigned int exponent = __float_as_uint(largest) >> 23;
        // Rows of zeros stay so with any finite factor; of those out of range nobody multiplies the pairs.
        static_assert(kLeastExponent >= kPairBits, "others have a factor");
        const float factor = __uint_as_float((254 + kPairBits - exponent) << 23);
        __syncwarp();                      // all of the row has been read
        unsigned int least = 0x7c007c00u;  // magnitudes, beginning with infinities
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int column = column_of(thread, chunk);
            Words first, second;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                pair_of(chunks[chunk].values[2 * i] * factor, chunks[chunk].values[2 * i + 1] * factor, first.words[i],
                        second.words[i]);
                // right either way: one by one is right for all, if slower
                if (column < num_features) least = smaller_magnitudes(least, first.words[i]);
            }
            words(row, column) = first;
            if constexpr (kProducts > 1) words(row, column, this->kSecond) = second;
        }
        const float low = float_from_half_bits(static_cast<unsigned short>(least));
        const float high = float_from_half_bits(static_cast<unsigned short>(least >> 16));
        // right either way: one by one is right for all, if slower
        const bool has_least = minimum(low, high) < kLeastScaled;
        // right either way: tiny ones may be looked for in vain
        return {__uint_as_float(exponent << 23), has_least ? kHasZero | tiny_ones(chunks, factor) : 0};
    }

    struct alignas(8) Words {
        unsigned int words[2];
    };
    __device__ __forceinline__ Words& words(int row, int column, int offset = 0) {
        return *reinterpret_cast<Words*>(this->firsts(row, column) + offset);
    }
};

}  // namespace cuflash
