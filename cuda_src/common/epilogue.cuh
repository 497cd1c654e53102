// The end of a row: sink, normalisation, log-sum-exp, conversion and store.
#pragma once

#include "common/sequence.cuh"
#include "common/softmax.cuh"
#include "common/store.cuh"

namespace cuflash {

struct FinishedRow {
    Accumulator multiplier;  // for the unnormalised output, before the division
    Accumulator divisor;     // 1 for a row that sees no key, whose output is 0 already
    Accumulator lse;
};

// `row_sum` is the sum over all keys, relative to `row_max`.
__device__ __forceinline__ FinishedRow finish_row(const AttentionParams& params, const TileMap& tile, const Row& row,
                                                  Accumulator row_max, Accumulator row_sum) {
    Accumulator multiplier = 1;
    if (tile.sinks) {
        const Accumulator sink = load_float(tile.sinks + row.head * params.sink_strides.head, params.sink_dtype);
        const Accumulator new_max = sink > row_max || sink != sink ? sink : row_max;
        const Accumulator subtract = finite_maximum(new_max);
        multiplier = exponential(row_max - subtract);
        row_sum = multiply_add(row_sum, multiplier, exponential(sink - subtract));
        row_max = new_max;
    }
    const bool sees_nothing = row_sum == 0;
    return {multiplier, sees_nothing ? Accumulator(1) : row_sum,
            sees_nothing ? -infinity() : row_max + logarithm(row_sum)};
}

__device__ __forceinline__ char* output_row(const AttentionParams& params, const TileMap& tile, const Row& row) {
    return tile.out + row.head * params.out_strides.head + row.query * params.out_strides.row;
}

// Stores the lse if the caller wants it. Called by one lane per row.
__device__ __forceinline__ void store_lse(const AttentionParams& params, const TileMap& tile, const Row& row,
                                          Accumulator lse) {
    if (tile.lse) store_bits(tile.lse + row.head * params.lse_strides.head + row.query * params.lse_strides.row, lse);
}

// Stores kCount neighbouring features from `column` on.
template <int kCount>
__device__ __forceinline__ void store_output(const AttentionParams& params, char* row, int column,
                                             const Accumulator (&values)[kCount]) {
    store_features(row, column, params.head_dim_v, params.out_strides.column, values);
}

// Two neighbouring features of a 16-bit output.
__device__ __forceinline__ unsigned int output_pair(const float (&values)[2]) {
    if constexpr (kOutDtype == CUFLASH_FLOAT16) return half2_bits_from_floats(values[0], values[1]);
    else return bfloat162_bits_from_floats(values[0], values[1]);
}

// Stores eight features of a 16-bit output from `column` on; `row` may be null.
__device__ __forceinline__ void store_elements(const AttentionParams& params, char* row, int column,
                                               const Elements16& elements) {
    if constexpr (kVectorLoads) {
        if (row && column < params.head_dim_v) *reinterpret_cast<Elements16*>(row + column * 2) = elements;
    } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            if (row && column + e < params.head_dim_v)
                store_bits(row + (column + e) * params.out_strides.column, elements.values[e]);
        }
    }
}

// Stores kNumRows rows of the tile, `num_columns` features each, that lie in shared memory. Called by the 32 lanes of a
// warp.
template <int kNumRows, int kPitch>
__device__ __forceinline__ void store_shared_rows(const AttentionParams& params, const TileMap& tile, int first_row,
                                                  int first_column, int num_columns,
                                                  const Accumulator (&rows)[kNumRows][kPitch], int lane) {
    constexpr int kOutputs = 16 / sizeof(OutElement);
    const int vectors = num_columns / kOutputs;
#pragma unroll 1
    for (int vector = lane; vector < kNumRows * vectors; vector += 32) {
        const Row row = row_at(params, tile, first_row + vector / vectors);
        if (!row.valid) continue;
        const int column = vector % vectors * kOutputs;
        Accumulator values[kOutputs];
#pragma unroll
        for (int e = 0; e < kOutputs; ++e) values[e] = rows[vector / vectors][column + e];
        store_output(params, output_row(params, tile, row), first_column + column, values);
    }
}

}  // namespace cuflash
