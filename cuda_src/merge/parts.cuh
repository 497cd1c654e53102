// Partial results that are merged: where those of a row lie, and what a lane loads of them. Addresses are found apart
// from loads: in front of the wait for who writes them.
#pragma once

#include "common/params.cuh"
#include "common/softmax.cuh"
#include "ptx/overlap.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

constexpr int kVector = 16 / sizeof(Element);
constexpr int kPartsPerTurn = 8;

__host__ __device__ constexpr int less_of(int a, int b) { return a < b ? a : b; }

// So many lanes that each has eight loads under way, of parts and vectors, and that parts have a lane each.
__host__ __device__ constexpr int lanes_of(int vectors) {
    const int busy = vectors * CUFLASH_PARTS / kPartsPerTurn, least = less_of(CUFLASH_PARTS, vectors);
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

// Sums of some of a lane's parts, which are every kLanesPerRow-th one.
struct LaneSums {
    static constexpr int kAtOnce = kStacked && sizeof(Accumulator) == 4 ? 4 : 1;
    static constexpr int kStep = kAtOnce * kLanesPerRow;

    struct Addresses {
        const char* of[kAtOnce];

        __device__ __forceinline__ Addresses(const RowParts& parts, int first) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) of[i] = found(parts.lse(first + i * kLanesPerRow));
        }
        __device__ __forceinline__ void prefetch_all() const {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) prefetch(of[i]);
        }
    };

    ExponentialSum of[kAtOnce];

    __device__ __forceinline__ LaneSums(const RowParts& parts, const Addresses& addresses, int first) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) of[i] = empty_sum();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i > 0 && i * kLanesPerRow >= parts.num_parts) break;  // right either way: there are none
            of[i] = parts.load_sum(addresses.of[i], first + i * kLanesPerRow);
        }
    }
    __device__ __forceinline__ Accumulator largest() const {
        Accumulator largest = of[0].largest;
#pragma unroll
        for (int i = 1; i < kAtOnce; ++i) largest = maximum(largest, of[i].largest);
        return largest;
    }
    __device__ __forceinline__ Accumulator relative_to(const RowParts& parts, Accumulator largest) const {
        Accumulator sum = 0;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i > 0 && i * kLanesPerRow >= parts.num_parts) break;  // right either way: the others are empty
            sum += parts.of_loaded(of[i]).sum * relative_exponential(of[i].largest, largest);
        }
        return sum;
    }
};

// What a lane loads at once: its features of some parts, and the sum of the part whose number among kWeights is the
// lane's.
struct Turn {
    const char* features[kPartsAtOnce];
    const char* sum;

    __device__ __forceinline__ Turn(const RowParts& parts, int first, int first_column) {
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) features[i] = found(parts.feature(first + i, first_column));
        sum = found(parts.lse(first + threadIdx.x % kWeights));
    }
    __device__ __forceinline__ void prefetch_all() const {
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) prefetch(features[i]);
        prefetch(sum);
    }
};

// A lane's features of the parts of a turn.
struct Features {
    Elements16 of[kPartsAtOnce][kVectors];

    __device__ __forceinline__ Features(const RowParts& parts, const Turn& turn, int first, int first_column) {
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const int columns = v * kLanesPerRow * kVector;
                of[i][v] = parts.load_features(turn.features[i] + columns * parts.column_stride(first + i), first + i,
                                               first_column + columns);
            }
        }
    }
};

}  // namespace cuflash
