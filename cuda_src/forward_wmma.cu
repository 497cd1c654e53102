// Attention forward on tensor cores through WMMA: float16 from sm_70 on, bfloat16 and (as tf32) float32 from sm_80 on.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, first to last, kBlockN at a time. K and V have a buffer each: V arrives while Q is
// multiplied by K, the next K while the weights are multiplied by V or, without values, while they are computed.
//
// Warps: each owns 16 or 32 rows, so that only the two buffers need barriers of the block. Nobody knows where a
// fragment keeps an element. Hence scores pass through shared memory, where two lanes share each row and turn it into
// weights; factors by row come back as a fragment whose columns are all the same. The output stays in registers.
// Every few thousand keys it starts again from zero, see total.cuh.

#include "common/epilogue.cuh"
#include "common/load.cuh"
#include "common/mask.cuh"
#include "common/schedule.cuh"
#include "common/score.cuh"
#include "common/weights.cuh"
#include "wmma/rows.cuh"
#include "wmma/tile.cuh"

namespace cuflash {

struct SharedTiles {
    alignas(32) Element q[kBlockM][kPitchK];
    alignas(32) Element k[kBlockN][kPitchK];
    alignas(32) Element v[kBlockN][kPitchV];
    RowTile rows[kNumWarps][kRowFragments];
    alignas(32) Factors factors[kNumWarps];
    TileMap tile;
    TileKeys keys;
    // Here and not in registers, of which O, the scores and operands on their way need all.
    bool only_scale;         // logits are scores times a factor, which becomes part of the exponential
    float logit_factor;      // that factor; 1 where logits are computed
    float multiplier;        // logit_factor * log2(e)
    ScoreScale score_scale;  // to compute logits
};

using KeptQ = Tensor::A[kRowFragments][kKeepQ ? kStepsK : 1];

using RowStates = OnlineSoftmax<kRowFragments>;  // a lane has one row in each row fragment
using Output = WmmaC[kRowFragments][kFeatureFragments];

// What becomes of scores, the same for all tiles of a call. Called by one thread.
__device__ __forceinline__ void choose_units(const AttentionParams& params, SharedTiles& shared) {
    const float multiplier = static_cast<float>(params.scale * 1.4426950408889634);
    // A multiplier below the normal range counts as 0, and 0 x -inf is no hidden score.
    const bool only_scale = kOnlyScale && multiplier >= 1.17549435e-38f;
    shared.only_scale = only_scale;
    shared.logit_factor = only_scale ? static_cast<float>(params.scale) : 1;
    shared.multiplier = only_scale ? multiplier : 1.4426950408889634f;
    shared.score_scale = score_scale(params);
}

// Tiles of keys, counted from the first, on their way into the buffers.
struct KeyTiles {
    static constexpr long long kStride = kBlockN;
    const AttentionParams& params;
    SharedTiles& shared;

    __device__ __forceinline__ long long first_key(int block) const { return shared.keys.any.begin + block * kStride; }
    __device__ __forceinline__ bool has(int block) const { return first_key(block) < shared.keys.any.end; }
    // Rows that no query of the tile sees become zeros: they may hold anything, and 0 x NaN is NaN.
    __device__ __forceinline__ int visible_rows(long long n_begin) const { return shared.keys.count_from(n_begin); }
    __device__ __forceinline__ void load_k(long long n_begin) const {
        load_rows<kBlockN, kHeadDim>(shared.k, shared.tile.k + n_begin * params.k_strides.row, params.k_strides.row,
                                     params.k_strides.column, visible_rows(n_begin), params.head_dim);
    }
    __device__ __forceinline__ void load_v(long long n_begin) const {
        load_rows<kBlockN, kHeadDimV>(shared.v, shared.tile.v + n_begin * params.v_strides.row, params.v_strides.row,
                                      params.v_strides.column, visible_rows(n_begin), params.head_dim_v);
    }
    // Waits for what is on its way. Called by the whole block, which is then through with the other buffer.
    __device__ __forceinline__ void arrive() const {
        cp_async_wait();
        __syncthreads();
    }
    // The tile of keys behind the one at `n_begin`, which the block is through with.
    __device__ __forceinline__ void load_next_k(long long n_begin) const {
        arrive();
        if (n_begin + kBlockN < shared.keys.any.end) load_k(n_begin + kBlockN);
    }
};

// The warp's rows of S = Q K^T, left in its row tiles.
__device__ __forceinline__ void score(SharedTiles& shared, const Place& place, const KeptQ& kept_q) {
    WmmaC scores[kRowFragments][kKeyFragments] = {};
#pragma unroll 1
    for (int first = 0; first < kStepsK; first += kGroup) {
#pragma unroll
        for (int step = 0; step < kGroup; ++step) {
            const int feature = (first + step) * kDepth;
            Tensor::A queries[kRowFragments];
            if constexpr (!kKeepQ) load_operands<16 * kPitchK>(queries, &shared.q[place.first_row][feature], kPitchK);
            Tensor::BTransposed keys[kKeyFragments];
            load_operands<16 * kPitchK>(keys, &shared.k[0][feature], kPitchK);
#pragma unroll
            for (int j = 0; j < kKeyFragments; ++j) {
#pragma unroll
                for (int i = 0; i < kRowFragments; ++i)
                    Tensor::multiply_add(scores[i][j], kKeepQ ? kept_q[i][step] : queries[i], keys[j]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) store_scores<kPitchS>(shared.rows[place.warp][i].scores[0], scores[i]);
    __syncwarp();
}

// Replaces one lane's scores of a row by logits.
template <Reads kReads>
__device__ __forceinline__ void scores_to_logits(const AttentionParams& params, const TileMap& tile,
                                                 const ScoreScale& scale, const RowContext& row, float* scores,
                                                 int first_column) {
#pragma unroll kChunksAtOnce
    for (int j = 0; j < kColumns; j += kChunk) {
        const int column = j * kLanesPerRow + first_column;
        Vector16& chunk = *reinterpret_cast<Vector16*>(scores + column);
        Vector16 logits = chunk;
#pragma unroll
        for (float& logit : logits.values) logit = scaled_score(scale, logit);
        RowColumns<kChunk> columns;
        columns.template load<kReads>(params, row, column);
        scores_to_row_logits<true>(row, columns, column, logits.values);
        chunk = logits;
    }
}

// Hides one lane's scores of a row that the row does not see by its position.
__device__ __forceinline__ void hide_scores(ColumnRange visible, float* scores, int first_column) {
#pragma unroll 4
    for (int i = 0; i < kColumns; ++i) {
        const int column = i / kChunk * kChunk * kLanesPerRow + first_column + i % kChunk;
        if (!visible.has(column)) scores[column] = -infinity();
    }
}

// Makes logits of the warp's scores where it takes more than a factor: keys that a row does not see are hidden in tiles
// at an edge only.
__device__ __forceinline__ void make_logits(const AttentionParams& params, SharedTiles& shared, const Place& place,
                                            long long n_begin) {
    const TileMap& tile = shared.tile;
    const TileKeys& keys = shared.keys;
    const bool at_edge = keys.at_edge(n_begin, kBlockN);
#pragma unroll 1
    for (int i = shared.only_scale && !at_edge ? kRowFragments : 0; i < kRowFragments; ++i) {
        const int tile_row = place.first_row + i * 16 + place.row;
        float* scores = shared.rows[place.warp][i].scores[place.row];
        if (!shared.only_scale) {
            const RowContext row = row_context(params, tile, logit_row(params, tile, tile_row), n_begin);
            if (has_vectors<kChunk>(params, row))
                scores_to_logits<Reads::kVectors>(params, tile, shared.score_scale, row, scores, place.first_column);
            else scores_to_logits<Reads::kElements>(params, tile, shared.score_scale, row, scores, place.first_column);
        }
        // right either way: all of it is visible
        if (at_edge) hide_scores(visible_columns(params, tile, tile_row, n_begin), scores, place.first_column);
    }
}

// Leaves the weights of scores, or of logits, in the row tiles, and in `factors` what earlier results of each row
// shrink by.
__device__ __forceinline__ void weigh(SharedTiles& shared, const Place& place, RowStates& states) {
    RowTile(&rows)[kRowFragments] = shared.rows[place.warp];
    const float multiplier = shared.multiplier;  // makes differences ones in units of log2(e)
    float values[kRowFragments][kColumns];
    float subtract[kRowFragments];
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; j += kChunk) {
            const Vector16 chunk =
                *reinterpret_cast<const Vector16*>(&rows[i].scores[place.row][j * kLanesPerRow + place.first_column]);
#pragma unroll
            for (int e = 0; e < kChunk; ++e) values[i][j + e] = chunk.values[e];
        }
        float largest[kChunk] = {values[i][0], values[i][1], values[i][2], values[i][3]};
#pragma unroll
        for (int j = kChunk; j < kColumns; ++j) largest[j % kChunk] = maximum(largest[j % kChunk], values[i][j]);
        float row_max = maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3]));
        row_max = maximum(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
        row_max = maximum(row_max, states.row_max[i]);
        subtract[i] = finite_maximum(row_max);
        const float factor = exp2_approximate((states.row_max[i] - subtract[i]) * multiplier);
        states.row_max[i] = row_max;
        states.row_sum[i] *= factor;
        if (place.first_column == 0) shared.factors[place.warp][i][place.row] = factor;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
        float sums[kChunk] = {};
#pragma unroll
        for (int j = 0; j < kColumns; j += kChunk) {
            float weights[kChunk];
#pragma unroll
            for (int e = 0; e < kChunk; ++e) {
                weights[e] = relative_weight(values[i][j + e] - subtract[i], multiplier);
                sums[e] += weights[e];
            }
            if constexpr (!kHasValues) continue;
            *reinterpret_cast<FourWeights*>(&rows[i].weights[place.row][j * kLanesPerRow + place.first_column]) =
                round_weights(weights);
        }
        states.row_sum[i] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
}

// o = o * factors + P V
__device__ __forceinline__ void accumulate(const SharedTiles& shared, const Place& place, Output& o) {
    Tensor::A weights[kRowFragments][kStepsV];
    WmmaC factor[kRowFragments];
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
        wmma_load_column(factor[i], shared.factors[place.warp][i]);
        load_operands<kDepth>(weights[i], shared.rows[place.warp][i].weights[0], kPitchS);
    }
#pragma unroll
    for (int f = 0; f < kFeatureFragments; ++f) {
        if (f % kRowFragments == 0) wmma_fence();  // right either way: a fence for the compiler
        Tensor::B values[kStepsV];
        load_operands<kDepth * kPitchV>(values, &shared.v[0][f * 16], kPitchV);
#pragma unroll
        for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
            for (int e = 0; e < 8; ++e) o[i][f].x[e] = multiply_subnormal(o[i][f].x[e], factor[i].x[e]);
        }
#pragma unroll
        for (int step = 0; step < kStepsV; ++step) {
#pragma unroll
            for (int i = 0; i < kRowFragments; ++i) Tensor::multiply_add(o[i][f], weights[i][step], values[step]);
        }
    }
}

// Stores lse and output of the warp's rows, the output through the row tiles, a piece at a time.
__device__ __forceinline__ void store_rows(const AttentionParams& params, SharedTiles& shared, const Place& place,
                                           const RowStates& states, Output& o) {
    const TileMap& tile = shared.tile;
    RowTile(&rows)[kRowFragments] = shared.rows[place.warp];
    Factors& factors = shared.factors[place.warp];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
        const float row_sum = states.row_sum[i] + __shfl_xor_sync(0xffffffffu, states.row_sum[i], 1);
        const Row row = row_at(params, tile, place.first_row + i * 16 + place.row);
        float factor = 0;
        if (row.valid) {
            const FinishedRow finished =
                finish_row(params, tile, row, states.row_max[i] * shared.logit_factor, row_sum * kWeightUnit);
            factor = finished.multiplier / finished.divisor * kWeightUnit;
            if (place.first_column == 0) store_lse(params, tile, row, finished);
        }
        if (place.first_column == 0) factors[i][place.row] = factor;
    }
    if constexpr (!kHasValues) return;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
        WmmaC factor;
        wmma_load_column(factor, factors[i]);
#pragma unroll
        for (int begin = 0; begin < kFeatureFragments; begin += kKeyFragments) {
            const int count = min(kKeyFragments, kFeatureFragments - begin);
#pragma unroll
            for (int f = begin; f < begin + count; ++f) {
#pragma unroll
                for (int e = 0; e < 8; ++e) o[i][f].x[e] = multiply_subnormal(o[i][f].x[e], factor.x[e]);
                wmma_store<0>(&rows[i].scores[0][(f - begin) * 16], o[i][f], kPitchS);
            }
            __syncwarp();
            store_shared_rows<16>(params, tile, place.first_row + i * 16, begin * 16, count * 16, rows[i].scores,
                                  place.lane);
            __syncwarp();
        }
    }
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    const TileMap& tile = shared.tile;
    if (threadIdx.x < 32) {
        map_block(params, shared.tile, shared.keys);
        if (threadIdx.x == 0) choose_units(params, shared);
    }
    __syncthreads();
    if (tile.num_rows == 0) return;

    const Place place(threadIdx.x);
    const KeyTiles tiles = {params, shared};
    RowStates states;
    OutputTotal<kRowFragments, kFeatureFragments> total;
    Output o = {};
    KeptQ kept_q;
    if (tiles.has(0)) {
        load_tile<kBlockM, kHeadDim>(shared.q, 0, 0, params.head_dim, params.q_strides.column,
                                     [&](int tile_row) { return query_row(params, tile, tile_row); });
        tiles.load_k(tiles.first_key(0));
        if constexpr (kKeepQ) {
            tiles.arrive();
#pragma unroll
            for (int i = 0; i < kRowFragments; ++i)
                load_operands<kDepth>(kept_q[i], shared.q[place.first_row + i * 16], kPitchK);
        }
    }
#pragma unroll 1
    for (int first = 0; tiles.has(first); first += kTilesPerSum) {
#pragma unroll 1
        for (int block = first; block < first + kTilesPerSum && tiles.has(block); ++block) {
            const long long n_begin = tiles.first_key(block);
            tiles.arrive();
            if constexpr (kHasValues) tiles.load_v(n_begin);
            score(shared, place, kept_q);
            if constexpr (!kHasValues) tiles.load_next_k(n_begin);
            make_logits(params, shared, place, n_begin);
            weigh(shared, place, states);
            if constexpr (kHasValues) {
                tiles.load_next_k(n_begin);
                accumulate(shared, place, o);
            }
        }
        if constexpr (!kHasValues) continue;
        if (first != 0)
            add_total(o, total, shared.factors[place.warp], shared.multiplier, states, place.row, place.first_column);
        if (tiles.has(first + kTilesPerSum)) restart(o, total, states);
    }
    store_rows(params, shared, place, states, o);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_forward_wmma(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(32) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
