// Attention forward on tensor cores through WMMA: float16 from sm_70 on, bfloat16 and (as tf32) float32 from sm_80 on.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, first to last, kBlockN at a time. K and V have a buffer each: V arrives while Q is
// multiplied by K, the next K while the weights are multiplied by V.
//
// Warps: each owns 16 or 32 rows, so that only the two buffers need barriers of the block. Nobody knows where a
// fragment keeps an element. Hence scores pass through shared memory, where two lanes share each row and turn it into
// weights; factors by row come back as a fragment whose columns are all the same. The output stays in registers.
//
// Tensor cores round toward zero while they accumulate, so a sum over all keys would drift. O starts again from zero
// every few thousand keys; what it was joins a total by multiply-adds, in memory, as that is so rare.

#include "common/epilogue.cuh"
#include "wmma/fragments.cuh"
#include "common/score.cuh"
#include "common/tile.cuh"

namespace cuflash {

constexpr int kNumWarps = kThreads / 32;
constexpr int kRowsPerWarp = kBlockM / kNumWarps, kRowFragments = kRowsPerWarp / 16;
constexpr int kKeyFragments = kBlockN / 16;
constexpr int kFeatureFragments = kHeadDimV / 16;
constexpr int kDepth = Tensor::kDepth;
constexpr int kStepsK = kHeadDim / kDepth, kStepsV = kBlockN / kDepth;
constexpr int kLanesPerRow = 2, kColumns = kBlockN / kLanesPerRow;
constexpr int kChunk = 4;                     // neighbouring scores of a lane; the next ones are its partner's
constexpr int kTilesPerSum = 4096 / kBlockN;  // until then the drift is a tenth of the rounding to 16 bits
constexpr int kChunksAtOnce = kBiasDtype == 0 && !kHasMask ? 1 : kHeadDimV <= 64 ? 4 : 2;  // so that loads overlap

// Rows are padded so that the eight rows of 16 bytes that one step of a load takes meet different banks.
constexpr int kPitchK = kHeadDim + 16 / static_cast<int>(sizeof(Element));
constexpr int kPitchV = kHeadDimV + 8;
constexpr int kPitchS = kBlockN + 8;

// Q stays in registers if there are enough beside O, the scores and operands on their way (found by compiling). If not,
// it is read a few steps at a time, in a loop that keeps the compiler from fetching it all.
constexpr int kWarpsPerScheduler = (kNumWarps * kMinBlocks + 3) / 4;
constexpr int kRegisters = 512 / kWarpsPerScheduler < 255 ? 512 / kWarpsPerScheduler : 255;
constexpr int kRegistersO = kRowFragments * kFeatureFragments * 8;
constexpr int kRegistersS = kRowFragments * kKeyFragments * 8;
constexpr int kRegistersQ = kRowFragments * kHeadDim * static_cast<int>(sizeof(Element)) / 8;
constexpr bool kKeepQ =
    kHeadDim * sizeof(Element) <= 256 && kRegistersO * 5 / 3 + kRegistersS + kRegistersQ + 36 <= kRegisters;
constexpr int kGroup = kKeepQ ? kStepsK : kStepsK % 4 == 0 ? 4 : kStepsK % 3 == 0 ? 3 : kStepsK % 2 == 0 ? 2 : kStepsK;

static_assert(kDtype != CUFLASH_FLOAT64, "WMMA multiplies float16, bfloat16 and tf32");
static_assert(kRowFragments * 16 * kNumWarps == kBlockM, "whole warps own whole fragments of 16 rows");
static_assert(kBlockN % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "fragments are 16 wide");

// 16 rows of one warp, which reads all its scores before it writes the first weight over them.
union alignas(32) RowTile {
    float scores[16][kPitchS];
    Element weights[16][kPitchS];
};

struct SharedTiles {
    alignas(32) Element q[kBlockM][kPitchK];
    alignas(32) Element k[kBlockN][kPitchK];
    alignas(32) Element v[kBlockN][kPitchV];
    RowTile rows[kNumWarps][kRowFragments];
    alignas(32) float factors[kNumWarps][kRowFragments][16];
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

// rows = Q[rows of the warp] K^T
__device__ __forceinline__ void multiply_qk(RowTile (&rows)[kRowFragments], const Element (*q)[kPitchK],
                                            const Element (*k)[kPitchK], const KeptQ& kept_q) {
    WmmaC scores[kRowFragments][kKeyFragments] = {};
#pragma unroll 1
    for (int first = 0; first < kStepsK; first += kGroup) {
#pragma unroll
        for (int step = 0; step < kGroup; ++step) {
            const int feature = (first + step) * kDepth;
            Tensor::A queries[kRowFragments];
            if constexpr (!kKeepQ) load_operands<16 * kPitchK>(queries, &q[0][feature], kPitchK);
            Tensor::BTransposed keys[kKeyFragments];
            load_operands<16 * kPitchK>(keys, &k[0][feature], kPitchK);
#pragma unroll
            for (int j = 0; j < kKeyFragments; ++j) {
#pragma unroll
                for (int i = 0; i < kRowFragments; ++i)
                    Tensor::multiply_add(scores[i][j], kKeepQ ? kept_q[i][step] : queries[i], keys[j]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) store_scores<kPitchS>(rows[i].scores[0], scores[i]);
    __syncwarp();
}

// Replaces one lane's scores of a row by logits.
template <bool kVectors>
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
        columns.template load<kVectors>(params, row, column);
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

// Leaves the weights of scores, or of logits, in `rows`, and in `factors` what earlier results of each row shrink by.
// Differences times `multiplier` are in units of log2(e).
__device__ __forceinline__ void scores_to_weights(RowTile (&rows)[kRowFragments], float (&factors)[kRowFragments][16],
                                                  float multiplier, RowStates& states, int row, int first_column) {
    float values[kRowFragments][kColumns];
    float subtract[kRowFragments];
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; j += kChunk) {
            const Vector16 chunk =
                *reinterpret_cast<const Vector16*>(&rows[i].scores[row][j * kLanesPerRow + first_column]);
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
        if (first_column == 0) factors[i][row] = factor;
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
            *reinterpret_cast<FourWeights*>(&rows[i].weights[row][j * kLanesPerRow + first_column]) =
                round_weights(weights);
        }
        states.row_sum[i] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
}

// o = o * factors + P V
__device__ __forceinline__ void multiply_pv(WmmaC (&o)[kRowFragments][kFeatureFragments],
                                            const RowTile (&rows)[kRowFragments], const Element (*v)[kPitchV],
                                            const float (&factors)[kRowFragments][16]) {
    Tensor::A weights[kRowFragments][kStepsV];
    WmmaC factor[kRowFragments];
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
        wmma_load_column(factor[i], factors[i]);
        load_operands<kDepth>(weights[i], rows[i].weights[0], kPitchS);
    }
#pragma unroll
    for (int f = 0; f < kFeatureFragments; ++f) {
        if (f % kRowFragments == 0) wmma_fence();
        Tensor::B values[kStepsV];
        load_operands<kDepth * kPitchV>(values, &v[0][f * 16], kPitchV);
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
__device__ __forceinline__ void store_rows(const AttentionParams& params, const TileMap& tile, const RowStates& states,
                                           float logit_factor, WmmaC (&o)[kRowFragments][kFeatureFragments],
                                           RowTile (&rows)[kRowFragments], float (&factors)[kRowFragments][16],
                                           int first_row, int lane) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
        const float row_sum = states.row_sum[i] + __shfl_xor_sync(0xffffffffu, states.row_sum[i], 1);
        const Row row = row_at(params, tile, first_row + i * 16 + lane / kLanesPerRow);
        float factor = 0;
        if (row.valid) {
            const FinishedRow finished =
                finish_row(params, tile, row, states.row_max[i] * logit_factor, row_sum * kWeightUnit);
            factor = finished.multiplier / finished.divisor * kWeightUnit;
            if (lane % kLanesPerRow == 0) store_lse(params, tile, row, finished);
        }
        if (lane % kLanesPerRow == 0) factors[i][lane / kLanesPerRow] = factor;
    }
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
            store_shared_rows<16>(params, tile, first_row + i * 16, begin * 16, count * 16, rows[i].scores, lane);
            __syncwarp();
        }
    }
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    const TileMap& tile = shared.tile;
    const TileKeys& keys = shared.keys;
    if (threadIdx.x < 32) {
        map_block(params, shared.tile, shared.keys);
        if (threadIdx.x == 0) {
            const float multiplier = static_cast<float>(params.scale * 1.4426950408889634);
            // A multiplier below the normal range counts as 0, and 0 x -inf is no hidden score.
            const bool only_scale = kBiasDtype == 0 && !kHasMask && !kHasSoftcap && !kHasAlibi &&
                                    multiplier >= 1.17549435e-38f && multiplier < infinity();
            shared.only_scale = only_scale;
            shared.logit_factor = only_scale ? static_cast<float>(params.scale) : 1;
            shared.multiplier = only_scale ? multiplier : 1.4426950408889634f;
            shared.score_scale = score_scale(params);
        }
    }
    __syncthreads();
    if (tile.num_rows == 0) return;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row = warp * kRowsPerWarp;
    const int first_column = lane % kLanesPerRow * kChunk;
    constexpr long long kStride = kBlockN;

    const auto tile_begin = [&](int block) { return keys.any.begin + block * kStride; };
    // Rows that no query of the tile sees become zeros: they may hold anything, and 0 x NaN is NaN.
    const auto visible_rows = [&](long long n_begin) { return static_cast<int>(min(keys.any.end - n_begin, kStride)); };
    const auto load_k = [&](long long n_begin) {
        load_rows<kBlockN, kHeadDim>(shared.k, tile.k + n_begin * params.k_strides.row, params.k_strides.row,
                                     params.k_strides.column, visible_rows(n_begin), params.head_dim);
    };
    const auto load_v = [&](long long n_begin) {
        load_rows<kBlockN, kHeadDimV>(shared.v, tile.v + n_begin * params.v_strides.row, params.v_strides.row,
                                      params.v_strides.column, visible_rows(n_begin), params.head_dim_v);
    };
    const auto next_buffer_ready = [&] {
        cp_async_wait();
        __syncthreads();
    };

    RowStates states;
    Total<kRowFragments, kFeatureFragments> total;
    WmmaC o[kRowFragments][kFeatureFragments] = {};
    KeptQ kept_q;
    if (keys.any.begin < keys.any.end) {
        load_tile<kBlockM, kHeadDim>(
            shared.q, 0, 0, params.head_dim, params.q_strides.column, [&](int tile_row) -> const char* {
                const Row row = row_at(params, tile, tile_row);
                return row.valid ? tile.q + row.head * params.q_strides.head + row.query * params.q_strides.row
                                 : nullptr;
            });
        load_k(keys.any.begin);
        if constexpr (kKeepQ) {
            next_buffer_ready();
#pragma unroll
            for (int i = 0; i < kRowFragments; ++i)
                load_operands<kDepth>(kept_q[i], shared.q[first_row + i * 16], kPitchK);
        }
    }
#pragma unroll 1
    for (int first = 0; tile_begin(first) < keys.any.end; first += kTilesPerSum) {
#pragma unroll 1
        for (int block = first; block < first + kTilesPerSum && tile_begin(block) < keys.any.end; ++block) {
            const long long n_begin = tile_begin(block);
            next_buffer_ready();
            load_v(n_begin);
            multiply_qk(shared.rows[warp], &shared.q[first_row], shared.k, kept_q);

            const bool at_edge = n_begin < keys.all.begin || n_begin + kBlockN > keys.all.end;
#pragma unroll 1
            for (int i = shared.only_scale && !at_edge ? kRowFragments : 0; i < kRowFragments; ++i) {
                const int tile_row = first_row + i * 16 + lane / kLanesPerRow;
                float* scores = shared.rows[warp][i].scores[lane / kLanesPerRow];
                if (!shared.only_scale) {
                    const RowContext row = row_context(params, tile, logit_row(params, tile, tile_row), n_begin);
                    if (has_vectors<kChunk>(params, row))
                        scores_to_logits<true>(params, tile, shared.score_scale, row, scores, first_column);
                    else scores_to_logits<false>(params, tile, shared.score_scale, row, scores, first_column);
                }
                if (at_edge) hide_scores(visible_columns(params, tile, tile_row, n_begin), scores, first_column);
            }
            scores_to_weights(shared.rows[warp], shared.factors[warp], shared.multiplier, states, lane / kLanesPerRow,
                              first_column);

            next_buffer_ready();
            if (n_begin + kBlockN < keys.any.end) load_k(n_begin + kBlockN);
            multiply_pv(o, shared.rows[warp], shared.v, shared.factors[warp]);
        }
        if (first != 0)
            add_total(o, total, shared.factors[warp], shared.multiplier, states, lane / kLanesPerRow, first_column);
        if (tile_begin(first + kTilesPerSum) < keys.any.end) restart(o, total, states);
    }
    store_rows(params, tile, states, shared.logit_factor, o, shared.rows[warp], shared.factors[warp], first_row, lane);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_forward_wmma(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(32) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
