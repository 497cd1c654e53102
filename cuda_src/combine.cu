// Joins partial results of attention over disjoint keys: those of a call whose keys were split over blocks, and those
// that callers give to merge_attention_states.
//
// Grid: one group of lanes per row, a row being the features of one query of one head. The lanes first share the parts
// among each other to sum up the exponentials of their lse, then walk all parts in index order, each lane with some of
// the features. A part with an lse of -inf has seen no key and does not count: its memory may hold anything.
//
// Every value is read once, so the time is that of memory. Of few rows it is latency: loads of the first parts begin
// before anything is summed up.

#include "common/merge.cuh"
#include "common/params.cuh"
#include "common/store.cuh"

namespace cuflash {

constexpr int kVector = 16 / sizeof(Element);
constexpr int kLanesPerRow = kHeadDimV < 32 * kVector ? kHeadDimV / kVector : 32;
constexpr int kVectors = kHeadDimV / (kLanesPerRow * kVector);  // of each lane
constexpr int kPartsAtOnce = kVectors < 8 ? 8 / kVectors : 1;

static_assert((kHeadDimV & (kHeadDimV - 1)) == 0 && kHeadDimV >= 16, "lanes of a row are a power of two");
static_assert(kThreads % 32 == 0, "whole warps: shuffles name all 32 lanes");

struct RowPlace {
    long long at[kRowAxes];

    __device__ __forceinline__ long long offset(const RowStrides& strides) const {
        long long bytes = 0;
#pragma unroll
        for (int axis = 0; axis < kRowAxes; ++axis) bytes += at[axis] * strides.axis[axis];
        return bytes;
    }
};

__device__ __forceinline__ RowPlace row_place(const CombineParams& params, long long row) {
    RowPlace place;
#pragma unroll
    for (int axis = kRowAxes - 1; axis >= 0; --axis) {
        const long long rest = row < params.shape[axis] ? 0 : divide(row, params.shape[axis]);
        place.at[axis] = row - rest * params.shape[axis];
        row = rest;
    }
    return place;
}

__device__ __forceinline__ Accumulator load_lse(const CombineParams& params, const RowPlace& place, long long part) {
    if constexpr (kStacked)
        return load_bits<Accumulator>(params.lses[0] + place.offset(params.lses_strides[0]) +
                                      part * params.lses_part_stride);
    else return load_bits<Accumulator>(params.lses[part] + place.offset(params.lses_strides[part]));
}

// kVector features of a part's row from `column` on; zeros behind the last.
__device__ __forceinline__ Elements16 load_features(const CombineParams& params, const RowPlace& place, long long part,
                                                    int column) {
    const int idx = kStacked ? 0 : static_cast<int>(part);
    const char* row = params.outs[idx] + place.offset(params.outs_strides[idx]);
    if constexpr (kStacked) row += part * params.outs_part_stride;
    Elements16 features = {};
    if constexpr (kVectorLoads) {
        if (column < params.head_dim_v)
            features = *reinterpret_cast<const Elements16*>(row + column * static_cast<int>(sizeof(Element)));
    } else {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
            if (column + e < params.head_dim_v)
                features.values[e] = load_bits<Element>(row + (column + e) * params.outs_column_stride[idx]);
        }
    }
    return features;
}

// What a lane reads of some parts: their lse, and its features from a column on.
struct Parts {
    Accumulator lses[kPartsAtOnce];
    Elements16 features[kPartsAtOnce][kVectors];
};

// Parts from `first` on; those behind the last one have seen no key.
__device__ __forceinline__ Parts load_parts(const CombineParams& params, const RowPlace& place, long long first,
                                            int first_column) {
    Parts parts = {};
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
        parts.lses[i] = -infinity();
        if (first + i < params.num_parts) {
            parts.lses[i] = load_lse(params, place, first + i);
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
                parts.features[i][v] =
                    load_features(params, place, first + i, first_column + v * kLanesPerRow * kVector);
        }
    }
    return parts;
}

// The sum over all parts of a row, shared out among its lanes.
__device__ __forceinline__ ExponentialSum sum_parts(const CombineParams& params, const RowPlace& place, int lane) {
    ExponentialSum total = empty_sum();
    for (long long part = lane; part < params.num_parts; part += kLanesPerRow)
        total = join(total, sum_of(load_lse(params, place, part)));
#pragma unroll
    for (int distance = kLanesPerRow / 2; distance > 0; distance /= 2) {
        total = join(total, {__shfl_xor_sync(0xffffffffu, total.largest, distance),
                             __shfl_xor_sync(0xffffffffu, total.sum, distance)});
    }
    return total;
}

__device__ __forceinline__ void combine(const CombineParams& params) {
    const int lane = threadIdx.x % kLanesPerRow;
    const long long row = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) / kLanesPerRow;
    // Lanes behind the last row stand at one of the first ones until the warp has shuffled for the last time.
    const RowPlace place = row_place(params, row);
    ExponentialSum total;
    int first_column = lane * kVector;
#pragma unroll 1
    do {
        Accumulator values[kVectors][kVector] = {};
#pragma unroll 1
        for (long long first = 0; first < params.num_parts; first += kPartsAtOnce) {
            const Parts parts = load_parts(params, place, first, first_column);
            if (first == 0 && first_column < kHeadDimV) total = sum_parts(params, place, lane);
            const PartWeight weight_of(total);
#pragma unroll
            for (int i = 0; i < kPartsAtOnce; ++i) {
                const Accumulator weight = weight_of(parts.lses[i]);
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                    for (int e = 0; e < kVector; ++e) {
                        const Accumulator feature = widen<kDtype>(parts.features[i][v].values[e]);
                        values[v][e] += parts.lses[i] == -infinity() ? 0 : weight * feature;
                    }
                }
            }
        }
        if (row >= params.num_rows) return;
        char* out = params.out + place.offset(params.out_strides);
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            store_features(out, first_column + v * kLanesPerRow * kVector, static_cast<int>(params.head_dim_v),
                           params.out_column_stride, values[v]);
        first_column += kHeadDimV;
    } while (first_column < params.head_dim_v);
    if (lane == 0 && params.lse) store_bits(params.lse + place.offset(params.lse_strides), log_of(total));
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_combine(const __grid_constant__ cuflash::CombineParams params) {
    cuflash::combine(params);
}
