// Sums of a thread's rows over very many keys, and of lanes that share their rows.
#pragma once

#include "common/total.cuh"
#include "points/rows.cuh"

namespace cuflash {

using RowsTotal = Total<kQueries, kSums>;

// sums += total
__device__ __forceinline__ void add_total(Rows& rows, const RowsTotal& total) {
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
        const Accumulator factor = rows.references[r].factor(total.row_max[r]);
        total.add_to(r, [&](int i) -> Accumulator& { return rows.sums[r][i]; }, [&](int) { return factor; });
    }
}

// total = sums, sums = 0
__device__ __forceinline__ void restart(Rows& rows, RowsTotal& total) {
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
        total.row_max[r] = rows.references[r].row_max;
#pragma unroll
        for (int i = 0; i < kSums; ++i) total.sums[r][i] = rows.sums[r][i], rows.sums[r][i] = 0;
    }
}

// Sums join a total of up to kPerTotal of them, and these another one: none has many terms. In the end both join what
// the rows have. `count` is how many sums there have been.
__device__ __forceinline__ void join_totals(Rows& rows, RowsTotal (&totals)[2], int count, bool is_end) {
    const bool is_full = count % kPerTotal == kPerTotal - 1;
    if (count % kPerTotal > 0) add_total(rows, totals[0]);
    if (count >= kPerTotal && (is_full || is_end)) add_total(rows, totals[1]);
    if (!is_end) restart(rows, totals[is_full]);
}

// What the lanes that share a row have of it. Called by all 32 lanes.
__device__ __forceinline__ void merge_lanes(Rows& rows) {
#pragma unroll
    for (int r = 0; r < kQueries && kLanes > 1; ++r) {
        Reference& reference = rows.references[r];
        const Accumulator earlier = reference.row_max;
#pragma unroll
        for (int distance = kLanes / 2; distance > 0; distance /= 2)
            reference.row_max = maximum(reference.row_max, __shfl_xor_sync(0xffffffffu, reference.row_max, distance));
        const Accumulator factor = reference.factor(earlier);
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            Accumulator& sum = rows.sums[r][i];
            sum = multiply_subnormal(sum, factor);
#pragma unroll
            for (int distance = kLanes / 2; distance > 0; distance /= 2)
                sum = multiply_add_subnormal(__shfl_xor_sync(0xffffffffu, sum, distance), Accumulator(1), sum);
        }
    }
}

}  // namespace cuflash
