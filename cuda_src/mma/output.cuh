// O as it starts again from zero, for mma.sync, and its rows at the end: normalised, converted and stored.
#pragma once

#include "common/total.cuh"
#include "mma/finish.cuh"
#include "ptx/words.cuh"

namespace cuflash {

using OutputTotal = Total<kRows, 2 * kFeatureTiles>;

// o += total
__device__ __forceinline__ void add_total(Output& o, const OutputTotal& total, const RowValues& maxima,
                                          float multiplier) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float factor = total.factor(r, maxima[r], multiplier);
        total.add_to(r, [&](int i) -> float& { return at(o, r, i); }, [&](int) { return factor; });
    }
}

// total = o, o = 0
__device__ __forceinline__ void restart(Output& o, OutputTotal& total, const RowValues& maxima) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        total.row_max[r] = maxima[r];
#pragma unroll
        for (int i = 0; i < 2 * kFeatureTiles; ++i) {
            total.sums[r][i] = at(o, r, i);
            at(o, r, i) = 0;
        }
    }
}

// Where the rows of 16-bit output go: each has its address behind its features, for either of the warps that share it.
// Shuffles would do, but for those in loops the compiler gives up what it knows to be the same for all lanes.
__device__ __forceinline__ char*& address_behind(Element (&row)[kPitchQ], const Warp& warp) {
    return reinterpret_cast<char**>(&row[kPitchQ - 8])[warp.share];
}

// Stores the warp's features of 16-bit output, which lie in its rows of `staging` with their addresses.
__device__ __forceinline__ void store_staged_rows(const AttentionParams& params, Element (*staging)[kPitchQ],
                                                  const Warp& warp) {
    constexpr int kVectors = kWarpFeatures / 8, kLanes = power_of_two_above(kVectors), kAtOnce = 32 / kLanes;
    constexpr int kPasses = kRowsPerWarp / kAtOnce;
    const int lane = warp.lane, own_row = lane / kLanes;
    const int column = warp.share * kWarpFeatures + lane % kLanes * 8;
    const auto row_of_pass = [&](int pass) -> Element(&)[kPitchQ] { return staging[pass * kAtOnce + own_row]; };
    const auto vector_of = [&](int pass) -> const Elements16& {
        return *reinterpret_cast<const Elements16*>(&row_of_pass(pass)[column]);
    };
    __syncwarp();
    if (kLanes != kVectors && lane % kLanes >= kVectors) return;
    if constexpr (kWarpFeatures > 128) {
#pragma unroll(kWarpFeatures == 192 ? 8 : 2)  // what compilers have registers for
        for (int pass = 0; pass < kPasses; ++pass)
            store_elements(params, address_behind(row_of_pass(pass), warp), column, vector_of(pass));
    } else {
        // Several are read before any is stored: a store might change what is read behind it.
        constexpr int kTogether = kPasses < 4 ? kPasses : 4;
#pragma unroll 1
        for (int first = 0; first < kPasses; first += kTogether) {
            char* addresses[kTogether];
            Elements16 vectors[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                addresses[i] = address_behind(row_of_pass(first + i), warp);
                vectors[i] = vector_of(first + i);
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i) store_elements(params, addresses[i], column, vectors[i]);
        }
    }
}

// Stores two neighbouring features of an output of float32 or float64; `row` may be null.
__device__ __forceinline__ void store_pair(const AttentionParams& params, char* row, int column,
                                           const float (&values)[2]) {
    if constexpr (kVectorLoads && sizeof(OutElement) == 4)
        store_if(row && column < params.head_dim_v, row + column * 4, values);
    else if (row) store_output(params, row, column, values);
}

// Stores the features of rows that are finished, `rows` being those of Q: 16-bit output passes through them, so that
// neighbouring lanes store neighbouring vectors.
__device__ __forceinline__ void store_rows(const AttentionParams& params, Output& o, const FinishedLane& finished,
                                           Element (*rows)[kPitchQ], const Warp& warp) {
    if constexpr (!kHasValues) return;
    const int lane = warp.lane;
    __syncwarp();  // right either way: shuffles and the exchange come before
    Element(*const staging)[kPitchQ] = &rows[warp.first_row];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float row_factor = __shfl_sync(0xffffffffu, finished.factor, row_of(r, lane));
        char* const row_address = address_of_lane(finished.address, row_of(r, lane));
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
            const int column = warp.share * kWarpFeatures + f * 8 + lane % 4 * 2;
            const float values[2] = {multiply_subnormal(at(o, r, 2 * f), row_factor),
                                     multiply_subnormal(at(o, r, 2 * f + 1), row_factor)};
            if constexpr (sizeof(OutElement) == 2)
                *reinterpret_cast<unsigned int*>(&staging[row_of(r, lane)][column]) = output_pair(values);
            else store_pair(params, row_address, column, values);
        }
    }
    if constexpr (sizeof(OutElement) == 2) {
        if (lane < kRowsPerWarp) address_behind(staging[lane], warp) = finished.address;
        store_staged_rows(params, staging, warp);
    }
}

}  // namespace cuflash
