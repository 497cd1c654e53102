// Merges partial results of attention over disjoint keys: those of a call whose keys were split over blocks, and those
// that callers give to merge_attention_states.
//
// Grid: one group of lanes per row, a row being the features of one query of one head; of many parts, a team of such
// groups in as many warps, which take eight parts each by turns. The lanes first share the parts among each other to
// sum up the exponentials of their lse, then walk their warp's in index order, each lane with some of the features and,
// for all of them, with the weight of one part. A part with an lse of -inf has seen no key and does not count: its
// memory may hold anything, and if it is one of the last, a row has the same bits without it. Partial results of our
// own come with their sums, not an lse.
//
// It may begin before the launch that writes what it merges has ended, and waits for that.
//
// Every value is read once, so the time is that of memory. Of few rows it is latency: loads of the first parts begin
// before anything is summed up, and a team has all of a row's parts on their way at once.

#ifndef CUFLASH_PARTS
#define CUFLASH_PARTS 8  // that there may be, a power of two; with 8: any number
#endif

#include "common/params.cuh"
#include "common/store.cuh"
#include "ptx/overlap.cuh"

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
static_assert(kThreads % 32 == 0, "whole warps: shuffles name all 32 lanes");

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

// What the other warps of a team hand on to its first one.
struct TeamValues {
    Accumulator of[kVectors][kVector][kThreads];
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

__device__ __forceinline__ ExponentialSum load_sum(const MergeParams& params, const RowPlace& place, long long part) {
    const int idx = kStacked ? 0 : static_cast<int>(part);
    const char* address = params.lses[idx] + place.offset(params.lses_strides[idx]);
    if constexpr (kStacked) address += part * params.lses_part_stride;
    const Accumulator sum = load_bits<Accumulator>(address + params.lses_column_stride);
    return {load_bits<Accumulator>(address), params.lses_column_stride == 0 ? 1 : sum};
}

// kVector features of a part's row from `column` on; zeros behind the last.
__device__ __forceinline__ Elements16 load_features(const MergeParams& params, const RowPlace& place, long long part,
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

// A lane's features of some parts, from a column on.
struct Features {
    Elements16 of[kPartsAtOnce][kVectors];
};

// Parts from `first` on; zeros for those behind the last one.
__device__ __forceinline__ Features load_parts(const MergeParams& params, const RowPlace& place, long long first,
                                               int first_column) {
    Features features = {};
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
        if (first + i < params.num_parts) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
                features.of[i][v] = load_features(params, place, first + i, first_column + v * kLanesPerRow * kVector);
        }
    }
    return features;
}

// The sum over all parts of a row, shared out among its lanes.
__device__ __forceinline__ ExponentialSum sum_parts(const MergeParams& params, const RowPlace& place, int lane) {
    ExponentialSum total = empty_sum();
    for (long long part = lane; part < params.num_parts; part += kLanesPerRow)
        total = merge(total, load_sum(params, place, part));
#pragma unroll
    for (int distance = kLanesPerRow / 2; distance > 0; distance /= 2) {
        if (distance >= params.num_parts) continue;  // right either way: lanes from there on have no part
        total = merge(total, {__shfl_xor_sync(0xffffffffu, total.largest, distance),
                              __shfl_xor_sync(0xffffffffu, total.sum, distance)});
    }
    const int first_lane = threadIdx.x % 32 - lane;
    return {__shfl_sync(0xffffffffu, total.largest, first_lane), __shfl_sync(0xffffffffu, total.sum, first_lane)};
}

// What the output of a part that has seen keys is multiplied by.
__device__ __forceinline__ Accumulator share_of(ExponentialSum part, ExponentialSum total) {
    return part.sum * relative_exponential(part.largest, total.largest) / total.sum;
}

// A part's share of the total; below 0 for one that has seen no key, or is none.
__device__ __forceinline__ Accumulator weight_of(const MergeParams& params, const RowPlace& place, long long part,
                                                 ExponentialSum total) {
    if (part >= params.num_parts) return -1;
    const ExponentialSum sum = load_sum(params, place, part);
    return sum.largest == -infinity() ? -1 : share_of(sum, total);
}

// values += those of a warp's parts, weighted; and the sum over all parts of the row. `member`: the warp's number in
// its team.
__device__ __forceinline__ ExponentialSum add_parts(const MergeParams& params, const RowPlace& place, int member,
                                                    int first_column, Accumulator (&values)[kVectors][kVector]) {
    const int lane = threadIdx.x % kLanesPerRow, first_lane = threadIdx.x % 32 - lane;
    const long long begin = member * kPartsPerTurn;
    long long first = begin;
    ExponentialSum total;
    Accumulator weight = 0;  // of the part whose number among kWeights parts is the lane's
#pragma unroll 1
    do {
        const Features features = load_parts(params, place, first, first_column);
        if (first == begin) total = sum_parts(params, place, lane);  // right either way: the sum stays the same
        const int part = static_cast<int>(first % kWeights);
        if (part == 0) weight = weight_of(params, place, first + lane % kWeights, total);
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) {
            if (first + i >= params.num_parts) break;  // right either way: parts behind the last count nothing
            const Accumulator of_part = __shfl_sync(0xffffffffu, weight, first_lane + part + i);
            const bool counts = !(of_part < 0);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int e = 0; e < kVector; ++e) {
                    const Accumulator feature = widen<kDtype>(features.of[i][v].values[e]);
                    const Accumulator merged = multiply_add_subnormal(of_part, feature, values[v][e]);
                    values[v][e] = counts ? merged : values[v][e];
                }
            }
        }
        first += kPartsAtOnce;
        if (first % kPartsPerTurn == 0) first += (params.warps_per_row - 1) * kPartsPerTurn;
    } while (first < params.num_parts);  // right either way: parts behind the last count nothing
    return total;
}

// Adds the values of a team's other warps to those of its first one, in their order. Called by the whole block.
__device__ __forceinline__ void merge_team(const MergeParams& params, TeamValues& shared, int member,
                                           Accumulator (&values)[kVectors][kVector]) {
    __syncthreads();  // nobody reads the last ones any more
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) shared.of[v][e][threadIdx.x] = values[v][e];
    }
    __syncthreads();
    if (member != 0) return;
#pragma unroll 1
    for (int other = 1; other < params.warps_per_row; ++other) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int e = 0; e < kVector; ++e)
                values[v][e] =
                    multiply_add_subnormal(Accumulator(1), shared.of[v][e][threadIdx.x + other * 32], values[v][e]);
        }
    }
}

__device__ __forceinline__ void merge_rows(const MergeParams& params, TeamValues& shared) {
    const int lane = threadIdx.x % kLanesPerRow, warp = threadIdx.x / 32;
    const int warps_per_row = static_cast<int>(params.warps_per_row), member = warp % warps_per_row;
    const int teams_per_block = kThreads / 32 / warps_per_row;
    const long long team = static_cast<long long>(blockIdx.x) * teams_per_block + warp / warps_per_row;
    const long long row = team * (32 / kLanesPerRow) + threadIdx.x % 32 / kLanesPerRow;
    // Lanes behind the last row stand at one of the first ones, as all of a warp shuffle.
    const RowPlace place = row_place(params, row);
    const bool stores = member == 0 && row < params.num_rows;
    wait_for_launch_before();
    ExponentialSum total;
    int column = 0;  // the first one of all lanes
#pragma unroll 1
    do {
        const int first_column = column + lane * kVector;
        Accumulator values[kVectors][kVector] = {};
        total = add_parts(params, place, member, first_column, values);
        // right either way: there are no others
        if (warps_per_row > 1) merge_team(params, shared, member, values);
        if (stores) {
            char* out = params.out + place.offset(params.out_strides);
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
                store_features(out, first_column + v * kLanesPerRow * kVector, static_cast<int>(params.head_dim_v),
                               params.out_column_stride, values[v]);
        }
        column += kHeadDimV;
    } while (column < params.head_dim_v);  // right either way: nothing is stored behind the last feature
    if (stores && lane == 0 && params.lse) {
        const char* first = params.lses[0] + place.offset(params.lses_strides[0]);
        const Accumulator offset =
            params.lses_column_stride == 0 ? 0 : load_bits<Accumulator>(first + 2 * params.lses_column_stride);
        store_sum(params.lse + place.offset(params.lse_strides), params.lse_column_stride, total, offset);
    }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_merge(const __grid_constant__ cuflash::MergeParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::merge_rows(params, *reinterpret_cast<cuflash::TeamValues*>(shared_memory));
}
