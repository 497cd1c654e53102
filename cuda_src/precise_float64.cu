// Attention forward in double precision on tensor cores: where there are any, compute capability 8.0, 9.0 and 10.0.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, first to last, kBlockN at a time. K arrives while the tile before is multiplied by V, V
// during S = Q K^T. Without values the next K arrives while weights are computed.
//
// Warps: each owns 16 rows from beginning to end, in whose fragments scores, weights and output stay. Where the output
// is too wide for a thread's registers, kWarpsPerRow warps share their rows: each multiplies some of the features, and
// what all of them have of the scores is added up through shared memory. Each computes some of the weights.
//
// Lanes: mma's rows of A and columns of B are l / 4, what they are summed over is l % 4. Which feature or key that
// stands for is free, as long as both operands agree. So a lane reads K in runs of four features, and the keys of its
// scores are those that it multiplies V by (ptx/mma_float64.cuh).
//
// O starts again from zero every few hundred keys; what it was joins a total, in memory, as a running sum over all keys
// would lose digits as it grows (common/total.cuh).

#ifndef CUFLASH_DTYPE
#define CUFLASH_DTYPE CUFLASH_FLOAT64  // the only one
#endif

#include "common/exponential.cuh"
#include "common/schedule.cuh"
#include "precise/copies.cuh"
#include "precise/output.cuh"
#include "ptx/mma_float64.cuh"

namespace cuflash {

static_assert(kDtype == CUFLASH_FLOAT64);

// scores = Q K^T, of the features that the warp sums over.
__device__ __forceinline__ void multiply_qk(const SharedTiles& shared, const Place& place, Scores& scores) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = 0;
    }
#pragma unroll 1
    for (int step = place.share; step < kSteps; step += kWarpsPerRow) {
        double q[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Vector16 both = shared.q[place.group][step][i][place.lane];
            q[2 * i] = both.values[0], q[2 * i + 1] = both.values[1];
        }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
            const double* key = &shared.k[n * 8 + place.lane / 4][step * 16 + place.run * 4];
            const Vector16 low = *reinterpret_cast<const Vector16*>(key);
            const Vector16 high = *reinterpret_cast<const Vector16*>(key + 2);
            const double k[4] = {low.values[0], low.values[1], high.values[0], high.values[1]};
            mma_m16n8k16(scores[n], q, k);
        }
    }
}

// The exponentials of all values of a lane, less those of its rows' maxima. Warps that share their rows compute every
// kWarpsPerRow-th column each.
__device__ __forceinline__ void exponentials(SharedTiles& shared, const Place& place, Scores& scores,
                                             const double (&maxima)[kRows]) {
    // Columns at a time: all together would take more registers than there are.
    constexpr int kAtOnce = kWarpsPerRow > 1 ? kColumns : 2;
    const int zero = unknown_zero();
#pragma unroll
    for (int i = 0; i < kColumns; i += kWarpsPerRow) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            double value = at(scores, r, i);
#pragma unroll
            for (int share = 1; share < kWarpsPerRow; ++share)
                if (place.share == share) value = at(scores, r, i + share);
            value -= maxima[r];
            if (i >= kAtOnce) value = behind(at(scores, r, i - kAtOnce), value, zero);
            value = exponential_of_negative(value);
            if constexpr (kWarpsPerRow == 1) at(scores, r, i) = value;
            else shared.weights[place.group][r * kColumns + i + place.share][place.lane] = value;
        }
    }
    if constexpr (kWarpsPerRow > 1) {
        barrier_wait(1 + place.group, 32 * kWarpsPerRow);
#pragma unroll
        for (int i = 0; i < kRows * kColumns; ++i)
            at(scores, i / kColumns, i % kColumns) = shared.weights[place.group][i][place.lane];
    }
}

__device__ __forceinline__ void add_to_sums(Scores& weights, OnlineSoftmax<kRows>& softmax) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        Accumulator tile_sum = 0;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) tile_sum += at(weights, r, i);
        softmax.row_sum[r] += tile_sum;
    }
}

// Logits -> weights relative to the maxima of their rows.
__device__ __forceinline__ void weigh(SharedTiles& shared, const Place& place, Scores& scores,
                                      OnlineSoftmax<kRows>& softmax, Output& o) {
    double maxima[kRows];
    follow_maxima(scores, softmax, o, maxima);
    exponentials(shared, place, scores, maxima);
    add_to_sums(scores, softmax);
}

// O += P V, of the warp's features.
__device__ __forceinline__ void accumulate(const SharedTiles& shared, const Place& place, Scores& weights, Output& o) {
    const double* first = &shared.v[place.run * 2][place.share * kWarpFeaturesV + place.lane / 4];
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
        double p[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) p[i] = at(weights, i % 2, 2 * n + i / 2);
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
            double v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = first[((n + i / 2) * 8 + i % 2) * kPitchV + f * 8];
            mma_m16n8k16(o[f], p, v);
        }
    }
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    if (threadIdx.x < 32) map_block(params, shared.tile, shared.keys);
    __syncthreads();
    const TileMap& tile = shared.tile;
    if (tile.num_rows == 0) return;

    const Place place(threadIdx.x);
    const Copies copies = {params, shared, shared.keys};
    const TileKeys& keys = copies.keys;
    const RowsWorkedOut rows = {params, tile};
    OnlineSoftmax<kRows> softmax;
    Output o = {};
    if (keys.any.begin < keys.any.end) {
        copies.load_k(keys.any.begin);
        load_queries(params, shared.tile, shared.q);
    }
    OutputTotal total;
    // right either way: no row sees what is behind the last key
#pragma unroll 1
    for (long long n_begin = keys.any.begin, first = n_begin; n_begin < keys.any.end;) {
        Scores scores;
        copies.arrive();
        if constexpr (kHasValues) copies.load_v(n_begin);
        const bool sees = any_row_sees(rows, keys, n_begin, place);
        if (sees) {  // right either way: weights are 0 else
            multiply_qk(shared, place, scores);
            sum_scores(shared.partial, place, scores);
        }
        if constexpr (!kHasValues) copies.load_next_k(n_begin);
        if (sees) {  // right either way: weights are 0 else
            scores_to_logits(params, tile, rows, score_scale(params), is_at_edge(keys, n_begin), n_begin, place,
                             scores);
            weigh(shared, place, scores, softmax, o);
        }
        if constexpr (kHasValues) {
            copies.load_next_k(n_begin);
            if (sees) accumulate(shared, place, scores, o);
        }
        n_begin += kBlockN;
        if constexpr (!kHasValues) continue;
        // right either way: a sum may be shorter
        if (n_begin - first == kTilesPerSum * kBlockN) {
            total.take(o, softmax);
            first = n_begin;
        }
    }
    if constexpr (kHasValues) {
        total.take(o, softmax);
        total.give_back(o, softmax);
    }
    store_rows(params, tile, softmax, o, place);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_precise_float64(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
