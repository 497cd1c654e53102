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

#include "common/store.cuh"
#include "merge/loads.cuh"
#include "ptx/maximum.cuh"

namespace cuflash {

// Of a multiprocessor, where that many have registers.
constexpr int kBlocksAtOnce = kVectorLoads && kVectors < 4 && sizeof(Accumulator) == 4 ? 2 : 1;

static_assert(kThreads % 32 == 0, "whole warps: shuffles name all 32 lanes");

// A lane's vector of features, as the computation has them.
struct alignas(16) Values {
    Accumulator of[kVector];
};

// What the other warps of a team hand on to its first one.
struct TeamValues {
    Values of[kVectors][kThreads];
};

// The largest value of the lanes of a row.
__device__ __forceinline__ Accumulator largest_of_lanes(Accumulator value) {
    if constexpr (kLanesPerRow == 32 && sizeof(Accumulator) == 4) return largest_of_warp(value);
#pragma unroll
    for (int distance = kLanesPerRow / 2; distance > 0; distance /= 2)
        value = maximum(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}

// The sum over all parts of a row, `first_sums` being those of the lane's first ones. Each counts by the same
// exponential as its output does later, so that what these are off by is off in both.
__device__ __forceinline__ ExponentialSum sum_parts(const RowParts& parts, const LaneSums& first_sums, int lane) {
    constexpr int kStep = LaneSums::kStep;
    Accumulator largest = first_sums.largest();
#pragma unroll 1
    for (int part = kStep + lane; part - lane < parts.num_parts; part += kStep)  // right either way: others are empty
        largest = maximum(largest, LaneSums(parts, {parts, part}, part).largest());
    largest = largest_of_lanes(largest);
    Accumulator sum = first_sums.relative_to(parts, largest);
#pragma unroll 1
    for (int part = kStep + lane; part - lane < parts.num_parts; part += kStep)  // right either way: others are empty
        sum += LaneSums(parts, {parts, part}, part).relative_to(parts, largest);
#pragma unroll
    for (int distance = kLanesPerRow / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return {largest, sum};
}

// What the output of a part is multiplied by; below 0 for one that has seen no key, or is none.
__device__ __forceinline__ Accumulator weight_of(ExponentialSum part, ExponentialSum total) {
    const Accumulator weight = part.sum * relative_exponential(part.largest, total.largest) / total.sum;
    return part.largest == -infinity() ? -1 : weight;
}

// values += those of a warp's parts, weighted, the first of which are `begin` and at `turn`; and the sum over all parts
// of the row.
__device__ __forceinline__ ExponentialSum add_parts(const RowParts& parts, const LaneSums::Addresses& sums, Turn turn,
                                                    int begin, int first_column,
                                                    Accumulator (&values)[kVectors][kVector]) {
    const int lane = threadIdx.x % kLanesPerRow, first_lane = threadIdx.x % 32 - lane, own_part = lane % kWeights;
    const LaneSums first_sums(parts, sums, lane);
    ExponentialSum own = parts.load_sum(turn.sum, begin + own_part);
    Features features(parts, turn, begin, first_column);
    const ExponentialSum total = sum_parts(parts, first_sums, lane);
    int first = begin;
    Accumulator weight;  // of the lane's own part
#pragma unroll 1
    while (true) {
        const int of_turn = kWeights == kPartsAtOnce ? 0 : first % kWeights;
        // right either way: the weight stays the same
        if (of_turn == 0) weight = weight_of(parts.of_loaded(own), total);
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) {
            const Accumulator of_part = __shfl_sync(0xffffffffu, weight, first_lane + of_turn + i);
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
        if (first >= parts.num_parts) return total;  // right either way: parts behind the last count nothing
        turn = Turn(parts, first, first_column);
        // right either way: it is looked at then alone
        if (first % kWeights == 0) own = parts.load_sum(turn.sum, first + own_part);
        features = Features(parts, turn, first, first_column);
    }
}

// Adds the values of a team's other warps to those of its first one, in their order: of one, the next two, the next
// four, as many as there are. Called by the whole block.
__device__ __forceinline__ void merge_team(TeamValues& shared, int member, int warps_per_row,
                                           Accumulator (&values)[kVectors][kVector]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) memcpy(&shared.of[v][threadIdx.x], values[v], sizeof(values[v]));
    __syncthreads();
    if (member != 0) return;
#pragma unroll
    for (int first = 1; first < kThreads / 32; first *= 2) {
        if (first >= warps_per_row) return;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            Values others[kThreads / 64];  // read before any is added
#pragma unroll
            for (int i = 0; i < first; ++i) others[i] = shared.of[v][threadIdx.x + (first + i) * 32];
#pragma unroll
            for (int i = 0; i < first; ++i) {
#pragma unroll
                for (int e = 0; e < kVector; ++e)
                    values[v][e] = multiply_add_subnormal(Accumulator(1), others[i].of[e], values[v][e]);
            }
        }
    }
}

__device__ __forceinline__ void merge_rows(const MergeParams& params, TeamValues& shared) {
    const int lane = threadIdx.x % kLanesPerRow, warp = threadIdx.x / 32;
    const int warps_per_row = static_cast<int>(params.warps_per_row), member = warp % warps_per_row;
    const int teams_per_block = static_cast<int>(blockDim.x) / 32 / warps_per_row;
    const long long team = static_cast<long long>(blockIdx.x) * teams_per_block + warp / warps_per_row;
    const long long row = team * (32 / kLanesPerRow) + threadIdx.x % 32 / kLanesPerRow;
    // Lanes behind the last row stand at one of the first ones, as all of a warp shuffle.
    const RowPlace place = row_place(params, row);
    const bool stores = member == 0 && row < params.num_rows;
    const RowParts parts(params, place);
    char* const out = params.out + place.offset(params.out_strides);
    // Addresses of what is loaded first are found before it is there: each instruction behind the wait is waited for.
    // That one lane sends for them keeps the assembler from moving them there.
    const int begin = member * kPartsPerTurn;
    const LaneSums::Addresses sums(parts, lane);
    Turn turn(parts, begin, lane * kVector);
    if (lane == 0) {  // right either way: addresses are found later
        sums.prefetch_all(), turn.prefetch_all();
        prefetch(out);
    }
    wait_for_launch_before();
    ExponentialSum total;
    int column = 0;  // the first one of all lanes
#pragma unroll 1
    while (true) {
        const int first_column = column + lane * kVector;
        Accumulator values[kVectors][kVector] = {};
        total = add_parts(parts, sums, turn, begin, first_column, values);
        // right either way: there are no others
        if (warps_per_row > 1) merge_team(shared, member, warps_per_row, values);
        if (stores) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
                store_features(out, first_column + v * kLanesPerRow * kVector, static_cast<int>(params.head_dim_v),
                               params.out_column_stride, values[v]);
        }
        column += kHeadDimV;
        if (column >= params.head_dim_v) break;  // right either way: nothing is stored behind the last feature
        turn = Turn(parts, begin, column + lane * kVector);
        __syncthreads();  // nobody reads what others have left any more
    }
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
