// O as it starts again from zero, and the total that it joins.
#pragma once

#include "mma/softmax.cuh"

namespace cuflash {

// O of the keys before the last restart. Volatile, so that it stays in memory.
struct OutputTotal {
    volatile float sums[kRows][2 * kFeatureTiles];
    volatile float row_max[kRows];  // that their weights are relative to
};

// o += total
__device__ __forceinline__ void add_total(Output& o, const OutputTotal& total, const RowValues& maxima,
                                          float multiplier) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float factor = exp2_approximate((total.row_max[r] - finite_maximum(maxima.of[r])) * multiplier);
#pragma unroll
        for (int i = 0; i < 2 * kFeatureTiles; ++i) at(o, r, i) = multiply_add(total.sums[r][i], factor, at(o, r, i));
    }
}

// total = o, o = 0
__device__ __forceinline__ void restart(Output& o, OutputTotal& total, const RowValues& maxima) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        total.row_max[r] = maxima.of[r];
#pragma unroll
        for (int i = 0; i < 2 * kFeatureTiles; ++i) {
            total.sums[r][i] = at(o, r, i);
            at(o, r, i) = 0;
        }
    }
}

}  // namespace cuflash
