// Partial results that are merged, who shares them, and where those of a row lie.
#pragma once

#include "common/params.cuh"
#include "common/softmax.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

constexpr int kVector = 16 / sizeof(Element);
constexpr int kPartsPerTurn = 8;

__host__ __device__ constexpr int less_of(int a, int b) { return a < b ? a : b; }

// So many lanes that each has eight loads under way, of parts and vectors, and that parts have a lane each.
__host__ __device__ constexpr int lanes_of(int vectors) {
    const int busy = vectors * kParts / kPartsPerTurn, least = less_of(kParts, vectors);
    return busy < least ? least : less_of(busy, 32);
}

constexpr int kLanesPerRow = lanes_of(kHeadDimV / kVector);
constexpr int kVectors = kHeadDimV / (kLanesPerRow * kVector);  // of each lane
constexpr int kWeights = less_of(kLanesPerRow, kPartsPerTurn);  // of parts, one to a lane
constexpr int kPartsAtOnce = kVectors >= kPartsPerTurn ? 1 : less_of(kPartsPerTurn / kVectors, kWeights);

static_assert((kHeadDimV & (kHeadDimV - 1)) == 0 && kHeadDimV >= 16, "lanes of a row are a power of two");

constexpr int kRowAxes = kBatchAxes + 2;
constexpr int kMaxParts = kStacked ? 1 : 16;

// Bytes from element to element along the axes of the rows: those of a result but its features.
struct RowStrides {
    long long axis[kRowAxes];
};

// Partial results over disjoint keys, to be merged row by row.
struct MergeParams {
    const char* outs[kMaxParts];  // stacked: the first part
    const char* lses[kMaxParts];
    char* out;
    char* lse;  // null: not wanted

    RowStrides outs_strides[kMaxParts];
    RowStrides lses_strides[kMaxParts];
    RowStrides out_strides;
    RowStrides lse_strides;
    long long outs_column_stride[kMaxParts];
    long long out_column_stride;
    long long outs_part_stride;  // stacked: from part to part
    long long lses_part_stride;
    // Bytes from column to column where `lses` or `lse` are sums, see store_sum; 0 where they are logarithms.
    long long lses_column_stride;
    long long lse_column_stride;
    Divisor shape[kRowAxes];
    long long num_rows;  // product of shape
    long long num_parts;
    long long warps_per_row;  // a power of two, at most the warps of a block
    long long head_dim_v;
};

struct RowPlace {
    long long at[kRowAxes];

    __device__ __forceinline__ long long offset(const RowStrides& strides) const {
        long long bytes = 0;
#pragma unroll
        for (int axis = 0; axis < kRowAxes; ++axis) bytes += at[axis] * strides.axis[axis];
        return bytes;
    }
};

__device__ __forceinline__ RowPlace row_place(const MergeParams& params, long long row) {
    RowPlace place;
#pragma unroll
    for (int axis = kRowAxes - 1; axis >= 0; --axis) {
        // right either way: the division gives 0 too
        const long long rest = row < params.shape[axis] ? 0 : divide(row, params.shape[axis]);
        place.at[axis] = row - rest * params.shape[axis];
        row = rest;
    }
    return place;
}

// Where the parts of a row are. Of stacked ones it is known before they are there.
struct RowParts {
    const MergeParams& params;
    const RowPlace& place;
    const char *first_out, *first_lse;
    int num_parts, warps_per_row;

    __device__ __forceinline__ RowParts(const MergeParams& params, const RowPlace& place)
        : params(params),
          place(place),
          first_out(params.outs[0] + place.offset(params.outs_strides[0])),
          first_lse(params.lses[0] + place.offset(params.lses_strides[0])),
          num_parts(static_cast<int>(params.num_parts)),
          warps_per_row(static_cast<int>(params.warps_per_row)) {}

    // Addresses; behind the last part, those of the last.
    __device__ __forceinline__ const char* lse(int part) const {
        part = min(part, num_parts - 1);
        if constexpr (kStacked) return first_lse + static_cast<unsigned int>(part) * params.lses_part_stride;
        else return params.lses[part] + place.offset(params.lses_strides[part]);
    }
    __device__ __forceinline__ const char* feature(int part, int column) const {
        part = min(part, num_parts - 1);
        const char* row;
        if constexpr (kStacked) row = first_out + static_cast<unsigned int>(part) * params.outs_part_stride;
        else row = params.outs[part] + place.offset(params.outs_strides[part]);
        return row + column * column_stride(part);
    }
    __device__ __forceinline__ long long column_stride(int part) const {
        if constexpr (kVectorLoads) return sizeof(Element);
        else return params.outs_column_stride[kStacked ? 0 : part];
    }
    // What lies at an address for a part's sum, whatever it is; empty behind the last part.
    __device__ __forceinline__ ExponentialSum load_sum(const char* address, int part) const {
        if (part >= num_parts) return empty_sum();
        return {load_bits<Accumulator>(address), load_bits<Accumulator>(address + params.lses_column_stride)};
    }
    // What is known of it when it is there: a logarithm alone stands for itself, once. Unknown: else the compiler would
    // ask for it in front of a loop, and wait there.
    __device__ __forceinline__ ExponentialSum of_loaded(ExponentialSum sum) const {
        return {sum.largest, unknown(params.lses_column_stride == 0) ? 1 : sum.sum};
    }
    // kVector features of a part from an address on, the first one being `column`; zeros behind the last.
    __device__ __forceinline__ Elements16 load_features(const char* address, int part, int column) const {
        Elements16 features = {};
        if constexpr (kVectorLoads) {
            if (column < params.head_dim_v) features = *reinterpret_cast<const Elements16*>(address);
        } else {
#pragma unroll
            for (int e = 0; e < kVector; ++e) {
                if (column + e < params.head_dim_v)
                    features.values[e] = load_bits<Element>(address + e * column_stride(part));
            }
        }
        return features;
    }
};

}  // namespace cuflash
