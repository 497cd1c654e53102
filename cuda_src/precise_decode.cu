// Attention forward of few queries in float32, decoding for one: every key and value is read once, so the time is that
// of memory.
//
// Grid: one block per tile of kBlockM rows of one (batch, head) and split of its keys; a row is one query of one head.
//
// Warps: each takes kBlockN keys at a time, first to last, and the other ones of its rows take those between. Lanes
// load 16 bytes of a row each, all of them one key, or a group of lanes one where rows are short. There is no barrier
// and no shared memory on the way of a key: the next ones are on their way in registers while these are multiplied. In
// the end the warps merge what they have, always in the same order.
//
// Lanes: each has its features of all rows' output. Products of queries and keys are summed over lanes so that in the
// end each lane has the scores of one row of every kChunk ones, at some keys (decode/sums.cuh).
//
// What a row gets depends on no other row. The weighted values of one step are summed from zero and joined to O by one
// multiply-add: a running sum over all keys would lose digits as it grows.

#ifndef CUFLASH_DTYPE
#define CUFLASH_DTYPE CUFLASH_FLOAT32  // the only one
#define CUFLASH_BLOCK_M 4
#define CUFLASH_BLOCK_N 16
#endif

#include "common/epilogue.cuh"
#include "common/schedule.cuh"
#include "decode/rows.cuh"
#include "decode/shares.cuh"
#include "decode/steps.cuh"
#include "decode/sums.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/overlap.cuh"
#include "ptx/shared.cuh"
#include "ptx/words.cuh"

namespace cuflash {

static_assert(kDtype == CUFLASH_FLOAT32 && kVectorLoads && kHasValues && !kPaged);

// Where a lane is among those of a warp that hold a key, or a value; and what it loads of a step.
template <int kFeatures>
struct Lanes {
    static constexpr int kLanes = kFeatures / kElements < 32 ? kFeatures / kElements : 32;  // of a key
    static constexpr int kSide = 32 / kLanes;                                               // keys side by side
    static constexpr int kLoads = kBlockN / kSide;                                          // keys of a lane
    static constexpr int kVectors = kFeatures / (kLanes * kElements);                       // of each
    static_assert(kLanes * kVectors * kElements == kFeatures && kLoads * kSide == kBlockN && kLoads > 0);

    Vector16 values[kLoads][kVectors];

    static __device__ __forceinline__ int place(int lane) { return lane % kLanes; }
    static __device__ __forceinline__ int side(int lane) { return lane / kLanes; }
    static __device__ __forceinline__ int feature(int lane, int vector) {
        return (vector * kLanes + place(lane)) * kElements;
    }
    // Keys that no row sees are read as the nearest one that some row sees; features behind the last are zeros.
    __device__ __forceinline__ void load(const char* array, const Strides& strides, int num_features, long long n_begin,
                                         const StepKeys& keys, int lane) {
        const char* const first = unknown(array + n_begin * strides.row);
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            const unsigned int key = keys.nearest(j * kSide + side(lane));
            const char* row = first + key * static_cast<size_t>(strides.row);
#pragma unroll
            for (int c = 0; c < kVectors; ++c) {
                const Words words = load_once_if(feature(lane, c) < num_features,
                                                 row + feature(lane, c) * static_cast<int>(sizeof(Element)));
                memcpy(&values[j][c], &words, sizeof(words));
            }
        }
    }
};
using Keys = Lanes<kHeadDim>;
using Values = Lanes<kHeadDimV>;

constexpr int kTeam = kThreads / 32;
constexpr int kChunk = kBlockM * Keys::kLoads <= 32 ? kBlockM : 32 / Keys::kLoads;  // rows that are summed up at a time
constexpr int kChunks = kBlockM / kChunk;
using Sums = LaneSums<kChunk, Keys::kLoads, Keys::kLanes>;
using Scores = Accumulator[kChunks][Sums::kKept];
using Output = Accumulator[kBlockM][Values::kVectors][kElements];

constexpr int kPaddedLoads = (Values::kLoads + kElements - 1) / kElements * kElements;

// What a warp has of the weights of a step, the keys of a lane's values one behind the other.
struct alignas(16) WarpWeights {
    Accumulator weights[kBlockM][Values::kSide][kPaddedLoads];
    Accumulator corrections[kBlockM];
};

struct SharedTiles {
    alignas(16) Accumulator q[kBlockM][kHeadDim];
    WarpWeights weights[kTeam];
    alignas(16) Accumulator o[kTeam][kBlockM][kHeadDimV];
    Accumulator row_max[kTeam][kBlockM];
    Accumulator row_sum[kTeam][kBlockM];
    RowInfo rows[kBlockM];
    TileMap tile;
    TileKeys keys;
};

struct Place {
    int lane, warp;

    __device__ __forceinline__ explicit Place(unsigned int thread) : lane(thread % 32), warp(thread / 32) {}
    // The row of a chunk whose scores the lane has, and the first of their keys, counted from that of the step.
    __device__ __forceinline__ int tile_row(int chunk) const {
        return chunk * kChunk + Sums::first(Keys::place(lane)) / Keys::kLoads;
    }
    __device__ __forceinline__ bool has_first_key() const { return key(0) == 0 && is_alone(); }
    // Of those that have the same scores.
    __device__ __forceinline__ bool is_alone() const { return Keys::place(lane) % Sums::kCopies == 0; }
    __device__ __forceinline__ int key(int i) const {
        return (Sums::first(Keys::place(lane)) % Keys::kLoads + i) * Keys::kSide + Keys::side(lane);
    }
};

// The largest among the lanes that have scores of the same row.
struct RowMaximum {
    __device__ __forceinline__ Accumulator operator()(Accumulator value) const {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            if (distance < Keys::kLanes / kChunk || distance >= Keys::kLanes)
                value = maximum(value, __shfl_xor_sync(0xffffffffu, value, distance));
        }
        return value;
    }
};

__device__ __forceinline__ void load_queries(const AttentionParams& params, SharedTiles& shared) {
    constexpr int kVectors = kHeadDim / kElements;
    for (int i = threadIdx.x; i < kBlockM * kVectors; i += kThreads) {
        const int feature = i % kVectors * kElements;
        const char* const row = query_row(params, shared.tile, i / kVectors);
        cp_async_16(&shared.q[i / kVectors][feature], row + feature * static_cast<int>(sizeof(Element)),
                    row != nullptr && feature < params.head_dim);
    }
}

// scores = Q K^T
__device__ __forceinline__ void score(const SharedTiles& shared, const Keys& k, const Place& place, Scores& scores) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        Accumulator products[kChunk * Keys::kLoads] = {};
#pragma unroll
        for (int r = 0; r < kChunk; ++r) {
#pragma unroll
            for (int c = 0; c < Keys::kVectors; ++c) {
                const Vector16 q =
                    *reinterpret_cast<const Vector16*>(&shared.q[chunk * kChunk + r][Keys::feature(place.lane, c)]);
#pragma unroll
                for (int j = 0; j < Keys::kLoads; ++j) {
                    Accumulator& product = products[r * Keys::kLoads + j];
#pragma unroll
                    for (int e = 0; e < kElements; ++e)
                        product = multiply_add_subnormal(q.values[e], k.values[j][c].values[e], product);
                }
            }
        }
        Sums::sum(products, Keys::place(place.lane), scores[chunk]);
    }
}

__device__ __forceinline__ void scores_to_logits(const AttentionParams& params, const SharedTiles& shared,
                                                 long long n_begin, const Place& place, Scores& scores) {
    const bool at_edge = shared.keys.at_edge(n_begin, kBlockN);
    const ScoreScale scale = score_scale(params);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        const RowInfo& info = shared.rows[place.tile_row(chunk)];
#pragma unroll
        for (int i = 0; i < Sums::kKept; ++i) {
            Accumulator logit[1] = {scaled_score(scale, scores[chunk][i])};
            if constexpr (kHasRowTerms) {
                const RowContext row = row_context(params, shared.tile, info.logit, n_begin);
                RowColumns<1> columns;
                columns.load<Reads::kElements>(params, row, place.key(i));
                scores_to_row_logits<true>(row, columns, place.key(i), logit);
            }
            // right either way: all of it is visible
            if (at_edge && !columns_of(info.visible, n_begin).has(place.key(i))) logit[0] = -infinity();
            scores[chunk][i] = logit[0];
        }
    }
}

// Logits -> weights, which all lanes of the warp will read, and what earlier results must be multiplied by.
__device__ __forceinline__ void weigh(WarpWeights& target, OnlineSoftmax<kChunks>& softmax, const Place& place,
                                      Scores& scores) {
    Accumulator corrections[kChunks];
    softmax.update(scores, corrections, RowMaximum());
    __syncwarp();  // all have read those of the last step
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int row = place.tile_row(chunk);
        if (place.has_first_key()) target.corrections[row] = corrections[chunk];
        if (!place.is_alone()) continue;
#pragma unroll
        for (int i = 0; i < Sums::kKept; ++i) {
            const int key = place.key(i);
            target.weights[row][key % Values::kSide][key / Values::kSide] = scores[chunk][i];
        }
    }
    __syncwarp();
}

// o = o * correction + P V
__device__ __forceinline__ void accumulate(const WarpWeights& shared, const Values& v, const Place& place, Output& o) {
#pragma unroll
    for (int r = 0; r < kBlockM; ++r) {
        Accumulator weights[Values::kLoads];
        memcpy(weights, shared.weights[r][Values::side(place.lane)], sizeof(weights));
        const Accumulator correction = shared.corrections[r];
#pragma unroll
        for (int c = 0; c < Values::kVectors; ++c) {
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                Accumulator sum = 0;
#pragma unroll
                for (int j = 0; j < Values::kLoads; ++j)
                    sum = multiply_add_subnormal(weights[j], v.values[j][c].values[e], sum);
                o[r][c][e] = multiply_add_subnormal(o[r][c][e], correction, sum);
            }
        }
    }
}

// Leaves what the warp has of all rows to the others.
__device__ __forceinline__ void share(SharedTiles& shared, const OnlineSoftmax<kChunks>& softmax, const Place& place,
                                      Output& o) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        Accumulator sum = softmax.row_sum[chunk];
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            if (distance < Keys::kLanes / kChunk || distance >= Keys::kLanes)
                sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        if (!place.has_first_key()) continue;
        shared.row_max[place.warp][place.tile_row(chunk)] = softmax.row_max[chunk];
        shared.row_sum[place.warp][place.tile_row(chunk)] = sum / Sums::kCopies;
    }
#pragma unroll
    for (int r = 0; r < kBlockM; ++r) {
#pragma unroll
        for (int c = 0; c < Values::kVectors; ++c) {
            Vector16 vector;
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                vector.values[e] = o[r][c][e];
#pragma unroll
                for (int distance = Values::kLanes; distance < 32; distance *= 2) {
                    const Accumulator other = __shfl_xor_sync(0xffffffffu, vector.values[e], distance);
                    vector.values[e] = multiply_add_subnormal(other, 1, vector.values[e]);
                }
            }
            if (Values::side(place.lane) == 0)
                *reinterpret_cast<Vector16*>(&shared.o[place.warp][r][Values::feature(place.lane, c)]) = vector;
        }
    }
}

// Adds the warps' shares of a row in their order, and stores it. Called by all lanes of a warp.
__device__ __forceinline__ void store_row(const AttentionParams& params, const SharedTiles& shared, int tile_row,
                                          int lane) {
    const TileMap& tile = shared.tile;
    const Row row = row_at(params, tile, tile_row);
    const ShareWeights<kTeam> merged(shared.row_max, shared.row_sum, tile_row);
    const FinishedRow finished = finish_row(params, tile, row, merged.row_max, merged.row_sum);
    if (lane == 0) store_lse(params, tile, row, finished);
    char* const out = output_row(params, tile, row);
#pragma unroll
    for (int column = lane * kElements; column < kHeadDimV; column += 32 * kElements) {
        Accumulator values[kElements] = {};
#pragma unroll
        for (int i = 0; i < kTeam; ++i) {
            const Vector16 share = *reinterpret_cast<const Vector16*>(&shared.o[i][tile_row][column]);
#pragma unroll
            for (int e = 0; e < kElements; ++e)
                values[e] = multiply_add_subnormal(share.values[e], merged.weights[i], values[e]);
        }
#pragma unroll
        for (int e = 0; e < kElements; ++e)
            values[e] = divide_subnormal(multiply_subnormal(values[e], finished.multiplier), finished.divisor);
        store_output(params, out, column, values);
    }
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    if (threadIdx.x < 32 && map_block(params, shared.tile, shared.keys)) begin_in_front(shared.keys);
    __syncthreads();
    const TileMap& tile = shared.tile;
    if (tile.num_rows == 0) return;
    let_next_launch_begin();

    const Place place(threadIdx.x);
    const KeyRange& seen = shared.keys.any;
    load_queries(params, shared);
    Keys k;
    Values v;
    OnlineSoftmax<kChunks> softmax;
    Output o = {};
    const Steps<kTeam> steps(seen, place.warp);
    long long n_begin = steps.begin;
    int left = steps.count, first = steps.first;
    if (left > 0) {
        const StepKeys keys = {first, steps.last(left)};
        k.load(tile.k, params.k_strides, params.head_dim, n_begin, keys, place.lane);
        v.load(tile.v, params.v_strides, params.head_dim_v, n_begin, keys, place.lane);
    }
    look_up_row(params, tile, seen, shared.rows);
    cp_async_wait();
    __syncthreads();
#pragma unroll 1
    while (left > 0) {
        Scores scores;
        score(shared, k, place, scores);
        // Behind the last step one of its keys once more: a condition would keep them all in their registers.
        const StepKeys next = {0, steps.last(left - 1)};
        const long long next_begin = n_begin + (left > 1 ? Steps<kTeam>::kApart : 0);
        k.load(tile.k, params.k_strides, params.head_dim, next_begin, next, place.lane);
        scores_to_logits(params, shared, n_begin, place, scores);
        weigh(shared.weights[place.warp], softmax, place, scores);
        accumulate(shared.weights[place.warp], v, place, o);
        if (--left == 0) break;  // right either way: what is sent for behind the last step goes nowhere
        n_begin = next_begin;
        v.load(tile.v, params.v_strides, params.head_dim_v, n_begin, next, place.lane);
    }
    share(shared, softmax, place, o);
    __syncthreads();
#pragma unroll 1
    for (int tile_row = place.warp; tile_row < tile.num_rows; tile_row += kTeam)
        store_row(params, shared, tile_row, place.lane);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_precise_decode(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
