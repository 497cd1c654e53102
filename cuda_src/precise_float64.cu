// Attention forward in double precision on tensor cores: where there are any, compute capability 8.0, 9.0 and 10.0.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, first to last, kBlockN at a time. K arrives while the tile before is multiplied by V, V
// during S = Q K^T. Without values the next K arrives while weights are computed.
//
// Warps: each owns 16 rows from beginning to end, in whose fragments scores, weights and output stay. Of heads whose
// output is too wide for that precise_wide.cu has more.
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

#include "common/schedule.cuh"
#include "precise/copies.cuh"
#include "precise/float64.cuh"
#include "precise/scores.cuh"
#include "ptx/mma_float64.cuh"

namespace cuflash {

// scores = Q K^T.
__device__ __forceinline__ void multiply_qk(const SharedTiles& shared, const Place& place, Scores& scores) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = 0;
    }
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
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

// O += P V.
__device__ __forceinline__ void accumulate(const SharedTiles& shared, const Place& place, Scores& weights, Output& o) {
    const double* first = &shared.v[place.run * 2][place.lane / 4];
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
    const Exponentials exponentials(place.lane);
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
        if (sees) multiply_qk(shared, place, scores);  // right either way: weights are 0 else
        if constexpr (!kHasValues) copies.load_next_k(n_begin);
        if (sees) {  // right either way: weights are 0 else
            scores_to_logits(params, tile, rows, score_scale(params), keys.at_edge(n_begin, kWarpKeys), n_begin, place,
                             scores);
            double maxima[kRows];
            find_maxima(scores, maxima);
            follow_maxima(maxima, softmax, o);
            weigh(exponentials, maxima, scores, softmax);
        }
        if constexpr (kHasValues) {
            copies.load_next_k(n_begin);
            if (sees) accumulate(shared, place, scores, o);
        }
        n_begin += kBlockN;
        if constexpr (!kHasValues) continue;
        // right either way: a sum may be shorter
        if (n_begin - first == kTilesPerSum * kBlockN && n_begin < keys.any.end) {
            total.take(o, softmax);
            first = n_begin;
        }
    }
    if constexpr (kHasValues) total.finish(o, softmax);
    store_rows(params, tile, softmax, o, place);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_precise_float64(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
