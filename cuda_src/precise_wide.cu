// Attention forward in double precision on tensor cores, for wide heads: a block's registers hold the output of few
// rows, so all of its warps share them.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, first to last, kBlockN at a time.
//
// Warps: each has the scores of 16 keys of a tile that are its own, of all rows and features, and computes their
// weights; and some features of the output, for which it multiplies the weights of all keys. So nothing has to be added
// up between warps: they exchange the maxima of the rows, and the weights.
//
// Copies: each warp copies what it alone multiplies, piece by piece (precise/pieces.cuh), and waits for nobody else's.
// Without values warps have nothing to do with each other until the end.

#ifndef CUFLASH_DTYPE
#define CUFLASH_DTYPE CUFLASH_FLOAT64  // the only one
#endif
#ifndef CUFLASH_WARPS_PER_ROW
#define CUFLASH_WARPS_PER_ROW 4  // all of a block's
#define CUFLASH_KEY_SHARES 4
#endif

#include "common/schedule.cuh"
#include "precise/float64.cuh"
#include "precise/pieces.cuh"
#include "precise/queries.cuh"
#include "precise/scores.cuh"
#include "ptx/mma_float64.cuh"

namespace cuflash {

static_assert(kWarpsPerRow == kNumWarps && kWarpKeys == Piece::kKeys && kBlockN == kWarpKeys * kNumWarps);

// Of 16 keys and all rows, as mma takes them from the lanes, 16 rows at a time: pairs of a key of both of a lane's
// rows.
using Weights = Vector16[kRowTiles][4][32];

struct SharedTiles {
    Queries q;
    Piece pieces[kNumWarps][kPiecesAhead];
    Weights weights[kHasValues ? kNumWarps : 1];
    double rows[kNumWarps][kBlockM];  // maxima, or sums
    TileMap tile;
    TileKeys keys;
};

// scores += Q K^T, of 16 features of the warp's keys.
__device__ __forceinline__ void multiply_step(const Queries& q, const Piece& k, int step, const Place& place,
                                              Scores& scores) {
    double of_k[kKeyTiles][4], of_q[kRowTiles][8];
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
        const Vector16 pair = k.pair(i / 2 * 8 + place.lane / 4, place.run * 2 + i % 2);
        of_k[i / 2][i % 2 * 2] = pair.values[0], of_k[i / 2][i % 2 * 2 + 1] = pair.values[1];
    }
#pragma unroll
    for (int i = 0; i < 4 * kRowTiles; ++i) {
        const Vector16 both = q[i / 4][step][i % 4][place.lane];
        of_q[i / 4][i % 4 * 2] = both.values[0], of_q[i / 4][i % 4 * 2 + 1] = both.values[1];
    }
    __syncwarp();  // the piece has been read
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) mma_m16n8k16(scores[m * kKeyTiles + n], of_q[m], of_k[n]);
    }
}

// Scores of half of the features; in memory, where the output may leave no registers for them.
template <bool kInMemory>
struct HalfScores {
    double values[kRows][kColumns];
};
template <>
struct HalfScores<true> {
    volatile double values[kRows][kColumns];
};

// scores = Q K^T, of the warp's keys. The sum over many features is one of two halves: it would lose digits as it grew.
__device__ __forceinline__ void multiply_qk(const Queries& q, Feed& feed, const Place& place, Scores& scores) {
    constexpr int kHalf = kSteps > 8 ? kSteps / 2 : 0;  // 128 features are not many
    HalfScores<kHasValues && kPiecesV == 4 && kHalf != 0> half;
#pragma unroll
    for (int i = 0; i < kRows * kColumns; ++i) at(scores, i / kColumns, i % kColumns) = 0;
#pragma unroll 1
    for (int step = 0; step < kHalf; ++step) {
        multiply_step(q, feed.arrive(), step, place, scores);
        feed.replace_by_k(step + kPiecesAhead, false);
    }
#pragma unroll
    for (int i = 0; i < kRows * kColumns; ++i) {
        double& score = at(scores, i / kColumns, i % kColumns);
        half.values[i / kColumns][i % kColumns] = score;
        score = 0;
    }
#pragma unroll 1
    for (int step = kHalf; step < kSteps - kPiecesAhead; ++step) {
        multiply_step(q, feed.arrive(), step, place, scores);
        feed.replace_by_k(step + kPiecesAhead, false);
    }
#pragma unroll 1
    for (int i = 0; i < kPiecesAhead; ++i) {
        multiply_step(q, feed.arrive(), kSteps - kPiecesAhead + i, place, scores);
        feed.replace_behind_k(i);
    }
#pragma unroll
    for (int i = 0; i < kRows * kColumns; ++i)
        at(scores, i / kColumns, i % kColumns) += half.values[i / kColumns][i % kColumns];
}

// O += P V, of the warp's features.
__device__ __forceinline__ void accumulate(const Weights* weights, Feed& feed, const Place& place, Output& o) {
    const int num_groups = feed.num_groups();
#pragma unroll 1
    for (int group = 0; group < num_groups; ++group) {
        double p[kRowTiles][8];
#pragma unroll
        for (int i = 0; i < 4 * kRowTiles; ++i) {
            const Vector16 both = weights[group][i / 4][i % 4][place.lane];
            p[i / 4][i % 4 * 2] = both.values[0], p[i / 4][i % 4 * 2 + 1] = both.values[1];
        }
#pragma unroll
        for (int piece = 0; piece < kPiecesV; ++piece) {
            const Piece& values = feed.arrive();
            // right either way: nobody stores what is beyond the last feature
            if (feed.has_values(piece)) {
                double v[2][4];
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    v[i / 4][i % 4] = values.value(place.column(i % 4), i / 4 * 8 + place.lane / 4);
                __syncwarp();  // the piece has been read
#pragma unroll
                for (int f = 0; f < 2; ++f) {
#pragma unroll
                    for (int m = 0; m < kRowTiles; ++m) mma_m16n8k16(o[m * kFeatureTiles + piece * 2 + f], p[m], v[f]);
                }
            }
            const int behind = piece + kPiecesAhead - (num_groups - group) * kPiecesV;
            if (behind < 0)
                feed.replace_by_v(group + (piece + kPiecesAhead) / kPiecesV, (piece + kPiecesAhead) % kPiecesV);
            else feed.replace_by_k(behind, true);
        }
    }
}

// Maxima of the warp's keys become those of all keys. Called by the whole block.
__device__ __forceinline__ void share_maxima(SharedTiles& shared, const Place& place, double (&maxima)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
        if (place.run == 0) shared.rows[place.share][place.tile_row(r)] = maxima[r];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int warp = 0; warp < kNumWarps; warp += 4)
            maxima[r] = larger(maxima[r], shared.rows[warp + place.run][place.tile_row(r)]);
        maxima[r] = quad_maximum(maxima[r]);
    }
}

// The same for sums, of which one lane of a row then has all. Called behind a barrier.
__device__ __forceinline__ void share_sums(SharedTiles& shared, const Place& place, OnlineSoftmax<kRows>& softmax) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const double sum = quad_sum(softmax.row_sum[r]);
        if (place.run == 0) shared.rows[place.share][place.tile_row(r)] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        softmax.row_sum[r] = 0;
        if (place.run != 0) continue;
#pragma unroll
        for (int warp = 0; warp < kNumWarps; ++warp) softmax.row_sum[r] += shared.rows[warp][place.tile_row(r)];
    }
}

// Logits of the warp's keys; those of keys that the tile has not are -inf.
__device__ __forceinline__ void compute_logits(const AttentionParams& params, SharedTiles& shared, long long n_begin,
                                               Feed& feed, const Place& place, Scores& scores) {
    if (feed.has_keys()) {
        multiply_qk(shared.q, feed, place, scores);
        n_begin += place.share * kWarpKeys;
        scores_to_logits(params, shared.tile, RowsWorkedOut{params, shared.tile}, score_scale(params),
                         shared.keys.at_edge(n_begin, kWarpKeys), n_begin, place, scores);
    } else {
#pragma unroll 1
        for (int i = 0; i < kPiecesAhead; ++i) feed.replace_behind_k(i);
#pragma unroll
        for (int i = 0; i < kRows * kColumns; ++i) at(scores, i / kColumns, i % kColumns) = -infinity();
    }
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    if (threadIdx.x < 32) map_block(params, shared.tile, shared.keys);
    __syncthreads();
    const TileMap& tile = shared.tile;
    if (tile.num_rows == 0) return;

    const Place place(threadIdx.x);
    const KeyRange keys = shared.keys.any;
    Feed feed(params, tile, keys, shared.pieces, place);
    const Exponentials exponentials(place.lane);
    OnlineSoftmax<kRows> softmax;
    Output o = {};
    OutputTotal total;
    double maxima[kRows];
#pragma unroll 1
    for (int i = 0; i < kPiecesAhead; ++i) feed.replace_by_k(i, false);
    load_queries(params, tile, shared.q);
    __syncthreads();
    // right either way: behind the last key nothing is computed
#pragma unroll 1
    for (long long n_begin = keys.begin, first = n_begin; n_begin < keys.end; feed.next_tile()) {
        Scores scores;
        compute_logits(params, shared, n_begin, feed, place, scores);
        find_maxima(scores, maxima);
        if constexpr (kHasValues) share_maxima(shared, place, maxima);
        follow_maxima(maxima, softmax, o);
        weigh(exponentials, maxima, scores, softmax);
        n_begin += kBlockN;
        if constexpr (!kHasValues) continue;
#pragma unroll
        for (int i = 0; i < 4 * kRowTiles; ++i)
            shared.weights[place.share][i / 4][i % 4][place.lane] = {at(scores, i / 4 * 2, i % 4),
                                                                     at(scores, i / 4 * 2 + 1, i % 4)};
        __syncthreads();
        accumulate(shared.weights, feed, place, o);
        // right either way: a sum may be shorter
        if (n_begin - first == kTilesPerSum * kBlockN && n_begin < keys.end) {
            total.take(o, softmax);
            first = n_begin;
        }
    }
    if constexpr (kHasValues) {
        total.finish(o, softmax);
    } else {
#pragma unroll
        for (int r = 0; r < kRows; ++r) maxima[r] = softmax.row_max[r];
        share_maxima(shared, place, maxima);
        follow_maxima(maxima, softmax, o);
    }
    __syncthreads();
    share_sums(shared, place, softmax);
    store_rows(params, tile, softmax, o, place);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_precise_wide(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(128) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
