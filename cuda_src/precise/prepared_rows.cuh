// Rows of K and V that an earlier launch has turned into pairs (prepare_pairs.cu): how they lie in memory, and how they
// get into shared memory.
//
// Each block that walks the keys would make the same pairs again. Prepared ones are as long as floats are; rows of all
// keys of a head of a batch follow one another, and all heads of all batches, with padding as shared memory has it.
#pragma once

#include "common/schedule.cuh"
#include "precise/pair_rows.cuh"

namespace cuflash {

// A row of `width` elements: the firsts of all of them, their seconds, and what has been found in it.
__host__ __device__ constexpr int prepared_second(int width) { return 2 * width; }
__host__ __device__ constexpr int prepared_found(int width) { return (kProducts > 1 ? 4 : 2) * width; }
__host__ __device__ constexpr int prepared_bytes(int width) { return prepared_found(width) + 16; }

// Rows of a tile in shared memory.
template <int kNumRows, int kWidth>
struct PreparedRows {
    static constexpr int kRowBytes = prepared_bytes(kWidth), kSecond = prepared_second(kWidth);
    static constexpr int kChunks = kNumRows * kRowBytes / 16;
    struct alignas(16) Found : FoundInRow {};
    alignas(16) char rows[kNumRows][kRowBytes];
    Found found[kNumRows];  // copied by those who look at it first

    static_assert(kNumRows <= kThreads);

    __device__ __forceinline__ float scale(int row) const { return found[row].scale; }
    // Rows from an address on, the first `num_rows` of them; others become zeros.
    __device__ __forceinline__ void load(const char* source, const Strides&, int, long long num_rows) {
        const int thread = thread_index_again();
        // right either way: it only keeps the cast in range
        const int rows_left = static_cast<int>(min(num_rows, static_cast<long long>(kNumRows)));
        const SharedAddress target = shared_address(rows[0]) + thread * 16;
        source += thread * 16;
        const int chunks_left = rows_left * (kRowBytes / 16) - thread;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; chunk += kThreads)
            // right either way: the other side asks what the compiler may not know
            if (chunk + kThreads <= kChunks || chunk + thread < kChunks)
                cp_async_16(target + chunk * 16, source + chunk * 16, chunk < chunks_left);
        if (thread < kNumRows)
            cp_async_16(shared_address(&found[thread]), source + thread * (kRowBytes - 16) + prepared_found(kWidth),
                        thread < rows_left);
    }
    // Waits for them, and returns what the thread has found; see PairRows.
    __device__ __forceinline__ unsigned int arrive(int, unsigned int least_exponent, unsigned int most_exponent) const {
        const int row = thread_index_again();
        cp_async_wait();
        if (row >= kNumRows) return 0;
        return found[row].kinds | out_of_range(found[row].scale, least_exponent, most_exponent);
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
    const long long tile_idx = tile_of_block(params);
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
