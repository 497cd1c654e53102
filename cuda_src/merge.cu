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

// Of a multiprocessor, where that many have registers.
constexpr int kBlocksAtOnce = kVectorLoads && kVectors < 4 && sizeof(Accumulator) == 4 ? 2 : 1;

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

    __device__ __forceinline__ const char* out(int part) const {
        if constexpr (kStacked) return first_out + part * params.outs_part_stride;
        else return params.outs[part] + place.offset(params.outs_strides[part]);
    }
    __device__ __forceinline__ const char* lse(int part) const {
        if constexpr (kStacked) return first_lse + part * params.lses_part_stride;
        else return params.lses[part] + place.offset(params.lses_strides[part]);
    }
    // What lies there for a part's sum, whatever it is; empty behind the last part.
    __device__ __forceinline__ ExponentialSum sum(int part) const {
        if (part >= num_parts) return empty_sum();
        const char* const address = lse(part);
        return {load_bits<Accumulator>(address), load_bits<Accumulator>(address + params.lses_column_stride)};
    }
    // What is known of it when it is there: a logarithm alone stands for itself, once. Unknown: else the compiler would
    // ask for it in front of a loop, and wait there.
    __device__ __forceinline__ ExponentialSum of_loaded(ExponentialSum sum) const {
        return {sum.largest, unknown(params.lses_column_stride == 0) ? 1 : sum.sum};
    }
    // kVector features of a part, whose row is given, from `column` on; zeros behind the last.
    __device__ __forceinline__ Elements16 features(const char* row, int part, int column) const {
        Elements16 features = {};
        if constexpr (kVectorLoads) {
            if (column < params.head_dim_v)
                features = *reinterpret_cast<const Elements16*>(row + column * static_cast<int>(sizeof(Element)));
        } else {
            const long long stride = params.outs_column_stride[kStacked ? 0 : part];
#pragma unroll
            for (int e = 0; e < kVector; ++e) {
                if (column + e < params.head_dim_v)
                    features.values[e] = load_bits<Element>(row + (column + e) * stride);
            }
        }
        return features;
    }
};

// A lane's features of some parts, from a column on.
struct Features {
    Elements16 of[kPartsAtOnce][kVectors];

    // Of parts from `first` on; behind the last one, those of the last.
    __device__ __forceinline__ Features(const RowParts& parts, int first, int first_column) {
        const int last = parts.num_parts - 1;
        first = min(first, last);
        const char* const first_row = parts.out(first);
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) {
            const int part = min(first + i, last);
            const char* row = first_row + static_cast<unsigned int>(part - first) * parts.params.outs_part_stride;
            if constexpr (!kStacked) row = parts.out(part);
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
                of[i][v] = parts.features(row, part, first_column + v * kLanesPerRow * kVector);
        }
    }
};

// Sums of some of a lane's parts, which are every kLanesPerRow-th one.
struct LaneSums {
    static constexpr int kAtOnce = kStacked && sizeof(Accumulator) == 4 ? 2 : 1;
    ExponentialSum of[kAtOnce];

    __device__ __forceinline__ LaneSums(const RowParts& parts, int first) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) of[i] = parts.sum(first + i * kLanesPerRow);
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
        for (int i = 0; i < kAtOnce; ++i)
            sum += parts.of_loaded(of[i]).sum * relative_exponential(of[i].largest, largest);
        return sum;
    }
};

// The sum over all parts of a row, `first_sums` being those of the lane's first ones. Each counts by the same
// exponential as its output does later, so that what these are off by is off in both.
__device__ __forceinline__ ExponentialSum sum_parts(const RowParts& parts, const LaneSums& first_sums, int lane) {
    constexpr int kStep = LaneSums::kAtOnce * kLanesPerRow;
    Accumulator largest = first_sums.largest();
#pragma unroll 1
    for (int first = kStep; first < parts.num_parts; first += kStep)  // right either way: the others are empty
        largest = maximum(largest, LaneSums(parts, first + lane).largest());
#pragma unroll
    for (int distance = kLanesPerRow / 2; distance > 0; distance /= 2)
        largest = maximum(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    Accumulator sum = first_sums.relative_to(parts, largest);
#pragma unroll 1
    for (int first = kStep; first < parts.num_parts; first += kStep)  // right either way: the others are empty
        sum += LaneSums(parts, first + lane).relative_to(parts, largest);
#pragma unroll
    for (int distance = kLanesPerRow / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return {largest, sum};
}

// What the output of a part is multiplied by; below 0 for one that has seen no key, or is none.
__device__ __forceinline__ Accumulator weight_of(ExponentialSum part, ExponentialSum total) {
    if (part.largest == -infinity()) return -1;
    return part.sum * relative_exponential(part.largest, total.largest) / total.sum;
}

// values += those of a warp's parts, weighted; and the sum over all parts of the row. `member`: the warp's number in
// its team.
__device__ __forceinline__ ExponentialSum add_parts(const RowParts& parts, int member, int first_column,
                                                    Accumulator (&values)[kVectors][kVector]) {
    const int lane = threadIdx.x % kLanesPerRow, first_lane = threadIdx.x % 32 - lane;
    const int begin = member * kPartsPerTurn;
    int first = begin;
    const LaneSums first_sums(parts, lane);
    ExponentialSum total, own;  // of the part whose number among kWeights parts is the lane's
    Accumulator weight = 0;     // of the same
#pragma unroll 1
    do {
        const int part = first % kWeights;
        if (part == 0) own = parts.sum(first + lane % kWeights);  // right either way: it is looked at then alone
        const Features features(parts, first, first_column);
        // right either way: the sum stays the same
        if (first == begin) total = sum_parts(parts, first_sums, lane);
        if (part == 0) weight = weight_of(parts.of_loaded(own), total);  // right either way: the weight stays the same
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) {
            if (first + i >= parts.num_parts) break;  // right either way: parts behind the last count nothing
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
        if (first % kPartsPerTurn == 0) first += (parts.warps_per_row - 1) * kPartsPerTurn;
    } while (first < parts.num_parts);  // right either way: parts behind the last count nothing
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
    const RowParts parts(params, place);
    char* const out = params.out + place.offset(params.out_strides);
    // right either way: addresses are found later
    if (member * kPartsPerTurn < parts.num_parts)
        prefetch(parts.out(member * kPartsPerTurn) + lane * kVector * sizeof(Element));
    if (lane < parts.num_parts) prefetch(parts.lse(lane));  // right either way: the address is found later
    prefetch(out);
    wait_for_launch_before();
    ExponentialSum total;
    int column = 0;  // the first one of all lanes
#pragma unroll 1
    do {
        const int first_column = column + lane * kVector;
        Accumulator values[kVectors][kVector] = {};
        total = add_parts(parts, member, first_column, values);
        // right either way: there are no others
        if (warps_per_row > 1) merge_team(params, shared, member, values);
        if (stores) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
                store_features(out, first_column + v * kLanesPerRow * kVector, static_cast<int>(params.head_dim_v),
                               params.out_column_stride, values[v]);
        }
        column += kHeadDimV;
    } while (column < params.head_dim_v);  // right either way: nothing is stored behind the last feature
    if (stores && lane == 0 && params.lse) {
        const long long stride = params.lses_column_stride;
        const Accumulator offset = stride == 0 ? 0 : load_bits<Accumulator>(parts.first_lse + 2 * stride);
        store_sum(params.lse + place.offset(params.lse_strides), params.lse_column_stride, total, offset);
    }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kBlocksAtOnce)
    cuflash_merge(const __grid_constant__ cuflash::MergeParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::merge_rows(params, *reinterpret_cast<cuflash::TeamValues*>(shared_memory));
}
