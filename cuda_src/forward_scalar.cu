// Attention forward on the ordinary arithmetic units: any GPU, every dtype, every feature. The readable definition of
// what the faster kernels compute, and the row of the kernel table that takes everything.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, first to last, kBlockN at a time. Feature axes pass through shared memory in slices, so
// that one pair of buffers serves every head_dim: while one slice is multiplied, the next one is on its way.
//
// Threads: two groups of 16 lanes per warp, each with kRows rows. In S = Q K^T a lane holds every 16th key of its rows,
// in O = P V a few features of them; the weights P cross between the two layouts through shared memory that only the
// same warp touches. The groups interleave, lane by lane and row by row: neighbouring lanes then read the same keys and
// adjacent rows, which shared memory serves in half as many wavefronts as two halves of a warp would take.
//
// The weighted values of one key tile are summed from zero and joined to O by one multiply-add: a running sum over all
// keys would lose digits as it grows.

#include "common/epilogue.cuh"
#include "common/load.cuh"
#include "common/mask.cuh"
#include "common/schedule.cuh"
#include "common/score.cuh"
#include "common/softmax.cuh"

namespace cuflash {

constexpr int kLanesPerRow = 16;
constexpr int kGroupsPerWarp = 32 / kLanesPerRow;
constexpr int kRows = kBlockM * kLanesPerRow / kThreads;
constexpr int kColumns = kBlockN / kLanesPerRow;
constexpr int kVector = 16 / sizeof(Accumulator);  // features that one shared-memory instruction loads

__host__ __device__ constexpr int slice_width(int head_dim) {
    return head_dim <= 64 ? head_dim : head_dim % 64 == 0 ? 64 : 32;
}
constexpr int kSliceK = slice_width(kHeadDim);
constexpr int kSliceV = slice_width(kHeadDimV);
constexpr int kNumSlicesK = kHeadDim / kSliceK;
constexpr int kNumSlicesV = kHeadDimV / kSliceV;
constexpr int kFeatures = kSliceV / kLanesPerRow;                  // of a slice of V, per lane
constexpr int kGroup = kFeatures < kVector ? kFeatures : kVector;  // neighbouring ones
constexpr int kSlice = kSliceK > kSliceV ? kSliceK : kSliceV;

static_assert(kRows >= 1 && kRows * kThreads == kBlockM * kLanesPerRow,
              "the block's lanes must divide its rows evenly");
static_assert(kColumns * kLanesPerRow == kBlockN, "16 lanes must divide the key tile evenly");
static_assert(kSliceK * kNumSlicesK == kHeadDim && kSliceK % 16 == 0,
              "head_dim buckets are multiples of their slice, slices of 16");
static_assert(kSliceV * kNumSlicesV == kHeadDimV && kSliceV % 16 == 0, "head_dim_v buckets likewise");
static_assert(kThreads % 32 == 0, "whole warps: shuffles name all 32 lanes");

// Rows are padded by one vector, so that lanes reading 16 bytes from consecutive rows meet different banks.
struct SharedTiles {
    Accumulator q[kBlockM][kHeadDim + kVector];
    Accumulator slices[2][kBlockN][kSlice + kVector];
    Accumulator weights[kHasValues ? kBlockM : 1][kBlockN + kVector];
    TileMap tile;
    TileKeys keys;
};

using Scores = Accumulator[kRows][kColumns];
using Values = Accumulator[kRows][kFeatures];
using Output = Values[kNumSlicesV];

// A lane's place in its block. Its rows are every kGroupsPerWarp-th one from `first_row` on.
struct Place {
    int lane;  // of those that share the rows
    int first_row;

    __device__ __forceinline__ explicit Place(unsigned int thread)
        : lane(thread % 32 / kGroupsPerWarp),
          first_row(thread / 32 * kGroupsPerWarp * kRows + thread % kGroupsPerWarp) {}
};

struct LaneMaximum {
    __device__ __forceinline__ Accumulator operator()(Accumulator value) const {
#pragma unroll
        for (int distance = 16; distance >= kGroupsPerWarp; distance /= 2) {
            value = maximum(value, __shfl_xor_sync(0xffffffffu, value, distance));
        }
        return value;
    }
};

// Slices of the features of K and V on their way: one is multiplied while the next one arrives in the other buffer.
struct Slices {
    const AttentionParams& params;
    SharedTiles& shared;
    TileKeys keys;
    int stage;  // the buffer of the slice that is multiplied

    // Rows that no query of the tile sees become zeros: they may hold anything, and 0 x NaN is NaN. `array` is a
    // reference, as an address that is looked up before it is needed takes registers.
    template <int kWidth>
    __device__ __forceinline__ void load(const char* const& array, const Strides& strides, int num_features,
                                         long long n_begin, int slice, int target) {
        load_tile<kBlockN, kWidth>(
            shared.slices[target], 0, slice * kWidth, num_features, strides.column, [&](int key) -> const char* {
                const bool is_seen = n_begin + key < keys.any.end;
                return is_seen ? key_row(params, shared.tile, array, strides, n_begin + key) : nullptr;
            });
    }
    __device__ __forceinline__ void load_k(long long n_begin, int slice, int target) {
        load<kSliceK>(shared.tile.k, params.k_strides, params.head_dim, n_begin, slice, target);
    }
    __device__ __forceinline__ void load_v(long long n_begin, int slice, int target) {
        load<kSliceV>(shared.tile.v, params.v_strides, params.head_dim_v, n_begin, slice, target);
    }
    // The tile of keys behind the one that is multiplied.
    __device__ __forceinline__ void load_next_k(long long n_begin) {
        if (n_begin + kBlockN < keys.any.end) load_k(n_begin + kBlockN, 0, stage ^ 1);
    }
    __device__ __forceinline__ void load_q() {
        for (int slice = 0; slice < kNumSlicesK; ++slice)
            load_tile<kBlockM, kSliceK>(shared.q, slice * kSliceK, slice * kSliceK, params.head_dim,
                                        params.q_strides.column,
                                        [&](int tile_row) { return query_row(params, shared.tile, tile_row); });
    }
    // Waits for what is on its way. Called by the whole block, which is then through with the other buffer.
    __device__ __forceinline__ void arrive() {
        cp_async_wait();
        __syncthreads();
    }
};

// scores += Q[rows, slice] K[keys, slice]^T
__device__ __forceinline__ void multiply_qk(Scores& scores, const SharedTiles& shared, int slice, int stage,
                                            const Place& place) {
#pragma unroll 2
    for (int feature = 0; feature < kSliceK; feature += kVector) {
        Vector16 k[kColumns];
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
            k[j] = *reinterpret_cast<const Vector16*>(&shared.slices[stage][place.lane + j * kLanesPerRow][feature]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const Vector16 q = *reinterpret_cast<const Vector16*>(
                &shared.q[place.first_row + i * kGroupsPerWarp][slice * kSliceK + feature]);
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
#pragma unroll
                for (int e = 0; e < kVector; ++e)
                    scores[i][j] = multiply_add_subnormal(q.values[e], k[j].values[e], scores[i][j]);
            }
        }
    }
}

// Feature, inside a slice of V, of a lane's value number f.
__device__ __forceinline__ int feature_of(int f, int lane) {
    return f / kGroup * kGroup * kLanesPerRow + lane * kGroup + f % kGroup;
}

// values = P[rows, keys] V[keys, slice]
__device__ __forceinline__ void multiply_pv(Values& values, const SharedTiles& shared, int stage, const Place& place) {
    struct alignas(kGroup * sizeof(Accumulator)) Group {
        Accumulator values[kGroup];
    };
#pragma unroll 1
    for (int key = 0; key < kBlockN; key += kVector) {
        Vector16 weights[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            weights[i] = *reinterpret_cast<const Vector16*>(&shared.weights[place.first_row + i * kGroupsPerWarp][key]);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
#pragma unroll
            for (int f = 0; f < kFeatures; f += kGroup) {
                const Group v =
                    *reinterpret_cast<const Group*>(&shared.slices[stage][key + e][feature_of(f, place.lane)]);
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
#pragma unroll
                    for (int g = 0; g < kGroup; ++g)
                        values[i][f + g] = multiply_add_subnormal(weights[i].values[e], v.values[g], values[i][f + g]);
                }
            }
        }
    }
}

// scores += Q K^T
__device__ __forceinline__ void score(Slices& slices, long long n_begin, const Place& place, Scores& scores) {
#pragma unroll 1
    for (int slice = 0; slice < kNumSlicesK; ++slice, slices.stage ^= 1) {
        slices.arrive();
        if (slice + 1 < kNumSlicesK) slices.load_k(n_begin, slice + 1, slices.stage ^ 1);
        else if constexpr (kHasValues) slices.load_v(n_begin, 0, slices.stage ^ 1);
        else slices.load_next_k(n_begin);
        multiply_qk(scores, slices.shared, slice, slices.stage, place);
    }
}

// Scores of one key tile -> logits. Tiles that every row sees whole need only the scale where rows add no terms.
__device__ __forceinline__ void scores_to_logits(const AttentionParams& params, const TileMap& tile,
                                                 const TileKeys& keys, long long n_begin, const Place& place,
                                                 Scores& scores) {
    const bool at_edge = keys.at_edge(n_begin, kBlockN);
    const ScoreScale scale = score_scale(params);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int tile_row = place.first_row + i * kGroupsPerWarp;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) scores[i][j] = scaled_score(scale, scores[i][j]);
        if constexpr (kHasRowTerms) {
            const RowContext row = row_context(params, tile, logit_row(params, tile, tile_row), n_begin);
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
                const int column = place.lane + j * kLanesPerRow;
                Accumulator logit[1] = {scores[i][j]};
                RowColumns<1> columns;
                columns.load<Reads::kElements>(params, row, column);
                scores_to_row_logits<true>(row, columns, column, logit);
                scores[i][j] = logit[0];
            }
        }
        if (at_edge) {  // right either way: all of it is visible
            const ColumnRange visible = visible_columns(params, tile, tile_row, n_begin);
#pragma unroll
            for (int j = 0; j < kColumns; ++j)
                if (!visible.has(place.lane + j * kLanesPerRow)) scores[i][j] = -infinity();
        }
    }
}

// Logits -> weights, which the other lanes of the warp will read, and what earlier results must be multiplied by.
__device__ __forceinline__ void weigh(SharedTiles& shared, OnlineSoftmax<kRows>& softmax, const Place& place,
                                      Scores& scores, Accumulator (&correction)[kRows]) {
    softmax.update(scores, correction, LaneMaximum());
    if constexpr (!kHasValues) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
            shared.weights[place.first_row + i * kGroupsPerWarp][place.lane + j * kLanesPerRow] = scores[i][j];
    }
}

// o = o * correction + P V
__device__ __forceinline__ void accumulate(Slices& slices, long long n_begin, const Place& place,
                                           const Accumulator (&correction)[kRows], Output& o) {
#pragma unroll
    for (int slice = 0; slice < kNumSlicesV; ++slice, slices.stage ^= 1) {
        slices.arrive();
        if (slice + 1 < kNumSlicesV) slices.load_v(n_begin, slice + 1, slices.stage ^ 1);
        else slices.load_next_k(n_begin);
        Values values = {};
        multiply_pv(values, slices.shared, slices.stage, place);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int f = 0; f < kFeatures; ++f)
                o[slice][i][f] = multiply_add_subnormal(o[slice][i][f], correction[i], values[i][f]);
        }
    }
}

__device__ __forceinline__ void store_rows(const AttentionParams& params, const TileMap& tile,
                                           const OnlineSoftmax<kRows>& softmax, const Output& o, const Place& place) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        Accumulator row_sum = softmax.row_sum[i];
#pragma unroll
        for (int distance = 16; distance >= kGroupsPerWarp; distance /= 2)
            row_sum += __shfl_xor_sync(0xffffffffu, row_sum, distance);
        const Row row = row_at(params, tile, place.first_row + i * kGroupsPerWarp);
        if (!row.valid) continue;
        const FinishedRow finished = finish_row(params, tile, row, softmax.row_max[i], row_sum);
        if (place.lane == 0) store_lse(params, tile, row, finished);
        if constexpr (!kHasValues) continue;
        char* out = output_row(params, tile, row);
#pragma unroll
        for (int slice = 0; slice < kNumSlicesV; ++slice) {
#pragma unroll
            for (int f = 0; f < kFeatures; f += kGroup) {
                Accumulator values[kGroup];
#pragma unroll
                for (int g = 0; g < kGroup; ++g)
                    values[g] =
                        divide_subnormal(multiply_subnormal(o[slice][i][f + g], finished.multiplier), finished.divisor);
                store_output(params, out, slice * kSliceV + feature_of(f, place.lane), values);
            }
        }
    }
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    if (threadIdx.x < 32) map_block(params, shared.tile, shared.keys);
    __syncthreads();
    const TileMap& tile = shared.tile;
    if (tile.num_rows == 0) return;

    const Place place(threadIdx.x);
    Slices slices = {params, shared, shared.keys, 0};
    const TileKeys& keys = slices.keys;
    OnlineSoftmax<kRows> softmax;
    Output o = {};
    if (keys.any.begin < keys.any.end) {
        slices.load_q();
        slices.load_k(keys.any.begin, 0, slices.stage);
    }
#pragma unroll 1
    for (long long n_begin = keys.any.begin; n_begin < keys.any.end; n_begin += kBlockN) {
        Scores scores = {};
        score(slices, n_begin, place, scores);
        scores_to_logits(params, tile, keys, n_begin, place, scores);
        Accumulator correction[kRows];
        weigh(shared, softmax, place, scores, correction);
        if constexpr (kHasValues) accumulate(slices, n_begin, place, correction, o);
    }
    store_rows(params, tile, softmax, o, place);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_forward_scalar(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
