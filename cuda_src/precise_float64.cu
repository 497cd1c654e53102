// Attention forward in double precision on tensor cores: where there are any, compute capability 8.0, 9.0 and 10.0.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, first to last, kBlockN at a time. K arrives while the tile before is multiplied by V, V
// during S = Q K^T.
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

#include "common/epilogue.cuh"
#include "common/exponential.cuh"
#include "common/schedule.cuh"
#include "common/total.cuh"
#include "precise/copies.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mma_float64.cuh"

namespace cuflash {

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

// Adds up what the warps that share their rows have of the scores, in their order.
__device__ __forceinline__ void sum_scores(SharedTiles& shared, const Place& place, Scores& scores) {
    if constexpr (kWarpsPerRow > 1) {
        const int first_warp = place.group * kWarpsPerRow;
#pragma unroll
        for (int i = 0; i < kRows * kColumns; ++i)
            shared.partial[first_warp + place.share][i][place.lane] = scores[i / 4][i % 4];
        barrier_wait(1 + place.group, 32 * kWarpsPerRow);
#pragma unroll
        for (int i = 0; i < kRows * kColumns; ++i) {
            double sum = shared.partial[first_warp][i][place.lane];
#pragma unroll
            for (int warp = 1; warp < kWarpsPerRow; ++warp) sum += shared.partial[first_warp + warp][i][place.lane];
            scores[i / 4][i % 4] = sum;
        }
    }
}

// Whether a row of the warp sees a key of the tile by its position.
__device__ __forceinline__ bool any_row_sees(const AttentionParams& params, const TileMap& tile, const TileKeys& keys,
                                             long long n_begin, const Place& place) {
    // right either way: tiles may be looked at in vain
    if (n_begin >= keys.all.begin && n_begin + kBlockN <= keys.all.end) return true;
    const ColumnRange visible =
        visible_columns(params, tile, place.group * kRowsPerWarp + place.lane % kRowsPerWarp, n_begin);
    // right either way: tiles may be looked at in vain
    return __any_sync(0xffffffffu, visible.begin < visible.end);
}

__device__ __forceinline__ void scores_to_logits(const AttentionParams& params, const TileMap& tile,
                                                 const TileKeys& keys, long long n_begin, const Place& place,
                                                 Scores& scores) {
    const bool at_edge = n_begin < keys.all.begin || n_begin + kBlockN > keys.all.end;
    const ScoreScale scale = score_scale(params);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) at(scores, r, i) = scaled_score(scale, at(scores, r, i));
        if constexpr (kHasRowTerms) {
            const RowContext row = row_context(params, tile, logit_row(params, tile, place.tile_row(r)), n_begin);
#pragma unroll
            for (int i = 0; i < kColumns; i += 2) {
                double logits[2] = {at(scores, r, i), at(scores, r, i + 1)};
                RowColumns<2> columns;
                columns.load<false>(params, row, place.column(i));
                scores_to_row_logits<true>(row, columns, place.column(i), logits);
                at(scores, r, i) = logits[0], at(scores, r, i + 1) = logits[1];
            }
        }
        if (at_edge) {  // right either way: all of it is visible
            const ColumnRange visible = visible_columns(params, tile, place.tile_row(r), n_begin);
#pragma unroll
            for (int i = 0; i < kColumns; ++i)
                if (!visible.has(place.column(i))) at(scores, r, i) = -infinity();
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

// Logits -> weights relative to the maxima of their rows; O and the sums are rescaled where these have grown.
__device__ __forceinline__ void weigh(SharedTiles& shared, const Place& place, Scores& scores,
                                      OnlineSoftmax<kRows>& softmax, Output& o) {
    double subtract[kRows];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        subtract[r] = at(scores, r, 0);
#pragma unroll
        for (int i = 1; i < kColumns; ++i) subtract[r] = maximum(subtract[r], at(scores, r, i));
        subtract[r] = quad_maximum(subtract[r]);
        grown |= subtract[r] > softmax.row_max[r];  // right either way: a factor of 1
    }
    if (__any_sync(0xffffffffu, grown)) {  // right either way: a factor of 1
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const double correction = softmax.follow(r, subtract[r]);
            softmax.row_sum[r] *= correction;
#pragma unroll
            for (int i = 0; i < 2 * kFeatureTiles; ++i) at(o, r, i) *= correction;
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) subtract[r] = finite_maximum(softmax.row_max[r]);
    exponentials(shared, place, scores, subtract);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        double tile_sum = 0;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) tile_sum += at(scores, r, i);
        softmax.row_sum[r] += tile_sum;
    }
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

using OutputTotal = Total<kRows, 2 * kFeatureTiles>;

// o += total
__device__ __forceinline__ void add_total(Output& o, const OutputTotal& total, const OnlineSoftmax<kRows>& softmax) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const double factor = total.factor(r, softmax.row_max[r], 1);
        total.add_to(r, [&](int i) -> double& { return at(o, r, i); }, [&](int) { return factor; });
    }
}

// total = o, o = 0
__device__ __forceinline__ void restart(Output& o, OutputTotal& total, const OnlineSoftmax<kRows>& softmax) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        total.row_max[r] = softmax.row_max[r];
#pragma unroll
        for (int i = 0; i < 2 * kFeatureTiles; ++i) total.sums[r][i] = at(o, r, i), at(o, r, i) = 0;
    }
}

// Division of many numbers by one, which is neither tiny nor huge: rounded once, unless the result is subnormal.
struct Quotients {
    double divisor, reciprocal;

    __device__ __forceinline__ explicit Quotients(double divisor) : divisor(divisor), reciprocal(1 / divisor) {}
    __device__ __forceinline__ double of(double value) const {
        const double near = value * reciprocal;
        const double rest = multiply_add(-near, divisor, value);
        return absolute(near) <= largest_finite() ? multiply_add(rest, reciprocal, near) : near;
    }
};

__device__ __forceinline__ void store_rows(const AttentionParams& params, const TileMap& tile,
                                           const OnlineSoftmax<kRows>& softmax, const Output& o, const Place& place) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        double row_sum = softmax.row_sum[r];
        row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 1);
        row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);
        const Row row = row_at(params, tile, place.tile_row(r));
        if (!row.valid) continue;
        const FinishedRow finished = finish_row(params, tile, row, softmax.row_max[r], row_sum);
        const Quotients quotients(finished.divisor);
        if (place.run == 0 && place.share == 0) store_lse(params, tile, row, finished);
        char* out = output_row(params, tile, row);
        const int first = place.share * kWarpFeaturesV + place.run * 2;
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
            double pair[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) pair[e] = quotients.of(o[f][2 * r + e] * finished.multiplier);
            store_output(params, out, first + f * 8, pair);
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
    OnlineSoftmax<kRows> softmax;
    Output o = {};
    if (keys.any.begin < keys.any.end) {
        copies.load_k(keys.any.begin);
        copies.load_q();
    }
    OutputTotal total;
#pragma unroll 1
    for (long long n_begin = keys.any.begin, first = n_begin; n_begin < keys.any.end;) {
        Scores scores;
        copies.arrive();
        copies.load_v(n_begin);
        const bool sees = any_row_sees(params, tile, keys, n_begin, place);
        if (sees) {  // right either way: weights are 0 else
            multiply_qk(shared, place, scores);
            sum_scores(shared, place, scores);
            scores_to_logits(params, tile, keys, n_begin, place, scores);
            weigh(shared, place, scores, softmax, o);
        }
        copies.arrive();
        n_begin += kBlockN;
        if (n_begin < keys.any.end) copies.load_k(n_begin);
        if (sees) accumulate(shared, place, scores, o);
        if (n_begin - first == kTilesPerSum * kBlockN || n_begin >= keys.any.end) {
            if (first != keys.any.begin) add_total(o, total, softmax);
            if (n_begin < keys.any.end) restart(o, total, softmax);
            first = n_begin;
        }
    }
    store_rows(params, tile, softmax, o, place);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_precise_float64(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
