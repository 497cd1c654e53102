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

// Stores a lane's features of a row of float32, two of every eight, so many of which are left from the first ones on.
// One register holds the address, and beside each store there is one instruction.
template <int kFirst = 0, typename Value>
__device__ __forceinline__ void store_pairs(char* address, int num_left, const Value& value) {
    if constexpr (kFirst < kFeatureTiles) {
        const float values[2] = {value(2 * kFirst), value(2 * kFirst + 1)};
        store_if<kFirst * 32>(num_left > kFirst * 8, address, values);
        store_pairs<kFirst + 1>(address, num_left, value);
    }
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
        const int columns = warp.share * kWarpFeatures;
        const auto value = [&](int i) { return multiply_subnormal(at(o, r, i), row_factor); };
        if constexpr (kVectorLoads && sizeof(OutElement) == 4) {
            const int first_column = columns + lane % 4 * 2;
            store_pairs(row_address + first_column * 4, row_address ? params.head_dim_v - first_column : 0, value);
            continue;
        }
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
            const int column = columns + f * 8 + lane % 4 * 2;
            const float values[2] = {value(2 * f), value(2 * f + 1)};
            if constexpr (sizeof(OutElement) == 2)
                *reinterpret_cast<unsigned int*>(&staging[row_of(r, lane)][column]) = output_pair(values);
            else if (row_address) store_output(params, row_address, column, values);
        }
    }
    if constexpr (sizeof(OutElement) == 2) {
        if (lane < kRowsPerWarp) address_behind(staging[lane], warp) = finished.address;
        store_staged_rows(params, staging, warp);
    }
}

}  // namespace cuflash
