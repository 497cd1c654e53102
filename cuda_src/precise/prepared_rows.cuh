// Rows of K and V that an earlier launch has turned into pairs (prepare_pairs.cu): how they lie in memory, and how they
// get into shared memory.
//
// Each block that walks the keys would make the same pairs again. Prepared ones are as long as floats are; rows of all
// keys of a head of a batch follow one another, and all heads of all batches, with padding as shared memory has it.
#pragma once

#include "common/schedule.cuh"
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

// Where the prepared rows of a tile's keys and values begin.
struct PreparedKeys {
    const char* k;
    const char* v;
};

// Tokens in front of a packed sequence, as an array with strides tells: all are the same where it has none.
__device__ __forceinline__ long long tokens_before(const char* sequence, const char* array, const Strides& strides,
                                                   long long head) {
    return (sequence - array - head * strides.head) / strides.row;
}

__device__ __forceinline__ PreparedKeys prepared_keys(const AttentionParams& params, const TileMap& tile) {
    const unsigned int tile_idx = tile_of_block(params).quotient;
    long long row;
    if constexpr (kVarlen) {
        const long long head = divide(tile_idx % params.head_tiles * params.packed_heads, params.group_size);
        row = head * params.seqlen_k;
        if (params.k_strides.row != 0) row += tokens_before(tile.k, params.k, params.k_strides, head);
        else if (params.v_strides.row != 0) row += tokens_before(tile.v, params.v, params.v_strides, head);
    } else {
        const DensePlace place = dense_place(params, plane_tile(params, tile_idx));
        const long long num_heads = params.head_tiles * params.packed_heads;
        row = divide(place.batch * num_heads + place.head, params.group_size) * params.seqlen_k;
    }
    return {params.prepared_k + row * prepared_bytes(kHeadDim), params.prepared_v + row * prepared_bytes(kHeadDimV)};
}

}  // namespace cuflash
