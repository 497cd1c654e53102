// The output of a warp's rows: sums that start again, and the end of the rows.
#pragma once

#include "common/epilogue.cuh"
#include "common/total.cuh"
#include "precise/layout.cuh"

namespace cuflash {

// The sum over the four lanes that share a row, which call this together.
__device__ __forceinline__ Accumulator quad_sum(Accumulator value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// The largest logits of the rows, among the lanes that share them.
__device__ __forceinline__ void find_maxima(Scores& logits, Accumulator (&maxima)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        maxima[r] = at(logits, r, 0);
#pragma unroll
        for (int i = 1; i < kColumns; ++i) maxima[r] = larger(maxima[r], at(logits, r, i));
        maxima[r] = quad_maximum(maxima[r]);
    }
}

// Maxima of a tile become those of the rows so far, as they are to be subtracted from logits. O and the sums are
// rescaled where these have grown, which after the first tiles is rare. Returns whether one has.
__device__ __forceinline__ bool follow_maxima(Accumulator (&maxima)[kRows], OnlineSoftmax<kRows>& softmax, Output& o) {
    bool grown = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) grown |= maxima[r] > softmax.row_max[r];  // right either way: a factor of 1
    grown = __any_sync(0xffffffffu, grown);
    if (grown) {  // right either way: a factor of 1
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const Accumulator correction = softmax.follow(r, maxima[r]);
            softmax.row_sum[r] *= correction;
#pragma unroll
            for (int i = 0; i < 2 * kFeatureTiles; ++i) at(o, r, i) *= correction;
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) maxima[r] = finite_maximum(softmax.row_max[r]);
    return grown;
}

// Sums of earlier keys, in memory: output and sum of each row. Nobody touches it where there are few keys.
struct OutputTotal : Total<kRows, 2 * kFeatureTiles + 1> {
    static constexpr int kValues = 2 * kFeatureTiles;
    volatile bool is_used = false;

    __device__ __forceinline__ void begin() {
        if (is_used) return;
        is_used = true;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            row_max[r] = -infinity();
#pragma unroll
            for (int i = 0; i <= kValues; ++i) sums[r][i] = 0;
        }
    }
    // What makes the sums relative to the maximum so far, which they then are.
    __device__ __forceinline__ Accumulator follow(int r, const OnlineSoftmax<kRows>& softmax) {
        constexpr Accumulator kLog2e = sizeof(Accumulator) == 8 ? 1 : 1.4426950408889634;  // see Total::factor
        const Accumulator by = factor(r, softmax.row_max[r], kLog2e);
        row_max[r] = softmax.row_max[r];
        return by;
    }
    // Takes what has been summed since the last time, which is then 0.
    __device__ __forceinline__ void take(Output& o, OnlineSoftmax<kRows>& softmax) {
        constexpr int kAtOnce = 16;  // loads on their way
        begin();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const Accumulator by = follow(r, softmax);
#pragma unroll
            for (int first = 0; first <= kValues; first += kAtOnce) {
                Accumulator before[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
                    if (first + i <= kValues) before[i] = sums[r][first + i];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    if (first + i > kValues) continue;
                    Accumulator& value = first + i < kValues ? at(o, r, first + i) : softmax.row_sum[r];
                    sums[r][first + i] = multiply_add_subnormal(before[i], by, value);
                    value = 0;
                }
            }
        }
    }
    __device__ __forceinline__ void give_back(Output& o, OnlineSoftmax<kRows>& softmax) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kValues; ++i) at(o, r, i) = sums[r][i];
            softmax.row_sum[r] = sums[r][kValues];
        }
    }
    // The sums of all keys, whose last ones are in O.
    __device__ __forceinline__ void finish(Output& o, OnlineSoftmax<kRows>& softmax) {
        if (!is_used) return;
        take(o, softmax);
        give_back(o, softmax);
    }
};

// Division of many numbers by one, which is neither tiny nor huge: rounded once, unless the result is subnormal.
struct Quotients {
    Accumulator divisor, reciprocal;

    __device__ __forceinline__ explicit Quotients(Accumulator divisor) : divisor(divisor), reciprocal(1 / divisor) {}
    __device__ __forceinline__ Accumulator of(Accumulator value) const {
        const Accumulator near = multiply_subnormal(value, reciprocal);
        const Accumulator rest = multiply_add_subnormal(near, -divisor, value);  // -near would lose what is subnormal
        return absolute(near) <= largest_finite() ? multiply_add_subnormal(rest, reciprocal, near) : near;
    }
};

__device__ __forceinline__ void store_rows(const AttentionParams& params, const TileMap& tile,
                                           const OnlineSoftmax<kRows>& softmax, Output& o, const Place& place) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const Accumulator row_sum = quad_sum(softmax.row_sum[r]);
        const Row row = row_at(params, tile, place.tile_row(r));
        if (!row.valid) continue;
        const FinishedRow finished = finish_row(params, tile, row, softmax.row_max[r], row_sum);
        const Quotients quotients(finished.divisor);
        if (place.run == 0 && place.share == 0) store_lse(params, tile, row, finished);
        if constexpr (!kHasValues) continue;
        char* out = output_row(params, tile, row);
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
            Accumulator pair[2];
#pragma unroll
            for (int e = 0; e < 2; ++e)
                pair[e] = quotients.of(multiply_subnormal(at(o, r, 2 * f + e), finished.multiplier));
            store_output(params, out, place.feature(2 * f), pair);
        }
    }
}

}  // namespace cuflash
