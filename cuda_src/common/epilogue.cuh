// The end of a row: sink, normalisation, log-sum-exp, conversion and store.
#pragma once

#include "common/score.cuh"
#include "common/softmax.cuh"
#include "common/store.cuh"

namespace cuflash {

struct FinishedRow {
    Accumulator multiplier;  // for the unnormalised output, before the division
    Accumulator divisor;     // 1 for a row that sees no key, whose output is 0 already
    ExponentialSum total;    // of all logits, whose logarithm is the lse
    Accumulator offset;      // that the lse is lower by, see store_sum
};

// What sink and logits of a row, whose offset is given, are higher by while they are added up: that, or what makes the
// sink 0, as neither of them keeps its digits beside more.
__device__ __forceinline__ Accumulator common_offset(const AttentionParams& params, const TileMap& tile, const Row& row,
                                                     Accumulator offset) {
    if (!kHasRowOffset || !tile.per_head.has_sink()) return offset;
    return minimum(offset, bounded(-tile.per_head.sink(params, row.head), largest_finite()));
}

// `row_sum` is the sum over all keys, relative to `row_max`, which may be anything for a row that sees no key.
__device__ __forceinline__ FinishedRow finish_row(const AttentionParams& params, const TileMap& tile, const Row& row,
                                                  Accumulator row_max, Accumulator row_sum) {
    const bool sees_keys = row_sum != 0;
    const bool is_partial = params.lse_strides.column != 0;
    // The offset is that of all splits, also of those whose keys the row does not see.
    Accumulator offset = 0, kept = 0;
    if (sees_keys || is_partial) offset = logit_offset(params, tile, row);
    if (is_partial || tile.per_head.has_sink()) kept = common_offset(params, tile, row, offset), offset -= kept;
    ExponentialSum keys = empty_sum();
    if (sees_keys) keys = {bounded(row_max - offset, largest_finite()), row_sum};
    FinishedRow finished = {1, row_sum, keys, kept};
    if (tile.per_head.has_sink() && tile.is_first_split()) {
        const Accumulator sink = tile.per_head.sink(params, row.head);
        finished.total = merge(keys, {sink + kept, 1});
        finished.multiplier = relative_exponential(keys.largest, finished.total.largest);
        finished.divisor = finished.total.sum;
    }
    if (!sees_keys) finished.multiplier = 0, finished.divisor = 1;
    return finished;
}

__device__ __forceinline__ char* output_row(const AttentionParams& params, const TileMap& tile, const Row& row) {
    return tile.out + row.head * params.out_strides.head + row.query * params.out_strides.row;
}

// Stores the lse if the caller wants it, or the sum itself if the row is a partial result. Called by one lane per row.
__device__ __forceinline__ void store_lse(const AttentionParams& params, const TileMap& tile, const Row& row,
                                          const FinishedRow& finished) {
    if (!tile.lse) return;
    store_sum(tile.lse + row.head * params.lse_strides.head + row.query * params.lse_strides.row,
              params.lse_strides.column, finished.total, finished.offset);
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

}  // namespace cuflash
