// Rows of K and V that an earlier launch has turned into pairs (prepare_pairs.cu): how they lie in memory, and how they
// get into shared memory.
//
// Each block that walks the keys would make the same pairs again. Prepared ones are as long as floats are; rows of all
// keys of a head of a batch follow one another, and all heads of all batches, with padding as shared memory has it.
#pragma once

#include "common/rows.cuh"
#include "precise/pair_rows.cuh"

namespace cuflash {

// Rows of a tile in shared memory.
template <int kNumRows, int kWidth>
struct PreparedRows : RowLayout<kNumRows, kWidth, (kProducts > 1)> {
    struct alignas(16) Found : FoundInRow {};
    Found found[kNumRows];  // copied by those who look at it first

    static_assert(kNumRows <= kThreads);

    __device__ __forceinline__ float scale(int row) const { return found[row].scale; }
    // The thread's part of rows from an address on, the first `num_rows` of them; others become zeros.
    __device__ __forceinline__ void load(const char* source, int thread, int num_rows) {
        this->copy(source, thread, num_rows);
        if (thread < kNumRows)
            cp_async_16(shared_address(&found[thread]),
                        source + thread * prepared_bytes(kWidth) + prepared_found(kWidth), thread < num_rows);
    }
    __device__ __forceinline__ void load(const char* source, const Strides&, int, long long num_rows) {
        // right either way: it only keeps the product in range
        load(source, thread_index_again(), static_cast<int>(min(num_rows, static_cast<long long>(kNumRows))));
    }
    // Waits for them, and returns what the thread has found; see PairRows.
    __device__ __forceinline__ unsigned int arrive(int, unsigned int least_exponent, unsigned int most_exponent) const {
        const int row = thread_index_again();
        cp_async_wait();
        if (row >= kNumRows) return 0;
        return found[row].kinds | out_of_range(found[row].scale, least_exponent, most_exponent);
    }
    // What a lane has found, when they are there: each has some rows of its warp's, which looks at all of them.
    __device__ __forceinline__ unsigned int found_by_lane(int lane, unsigned int least_exponent,
                                                          unsigned int most_exponent) const {
        unsigned int kinds = 0;
#pragma unroll
        for (int row = 0; row < kNumRows; row += 32) {
            const FoundInRow& in_row = found[row + lane];
            kinds |= in_row.kinds | out_of_range(in_row.scale, least_exponent, most_exponent);
        }
        return kinds;
    }
};

// Rows of keys or values of a tile, prepared or not.
template <int kNumRows, int kWidth, bool kArePrepared = kPrepared>
struct KeyRows : PairRows<kNumRows, kWidth> {};
template <int kNumRows, int kWidth>
struct KeyRows<kNumRows, kWidth, true> : PreparedRows<kNumRows, kWidth> {};

// Keys and values of a tile. Where blocks make pairs themselves, values take the place of keys when these have been
// multiplied: more blocks have room on a multiprocessor, and one waits for its copies while another multiplies.
constexpr bool kOneBuffer = !kPrepared;
template <bool kShared = kOneBuffer>
struct KeyBuffers {
    KeyRows<kBlockN, kHeadDim> k;
    KeyRows<kBlockN, kHeadDimV> v;
};
template <>
struct KeyBuffers<true> {
    union {
        KeyRows<kBlockN, kHeadDim> k;
        KeyRows<kBlockN, kHeadDimV> v;
    };
};

// Where prepared rows, of keys or of values, begin from one of the tile's keys on.
template <int kWidth>
__device__ __forceinline__ const char* prepared_from(const char* rows, const TileMap& tile, long long key) {
    return rows + (tile.first_prepared() + key) * prepared_bytes(kWidth);
}

}  // namespace cuflash
