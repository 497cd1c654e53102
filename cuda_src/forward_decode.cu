// Attention forward of few queries, decoding for one: float16 and bfloat16 from sm_80 on. Every key and value is read
// once, so the time is that of memory.
//
// Grid: one block per tile of kBlockM rows of one (batch, head) and split of its keys; a row is one query of one head.
//
// Warps: each takes kBlockN keys at a time, first to last, and the other ones of its rows take those between. There is
// no barrier and no shared memory on the way of a key: lanes load 16 bytes of a row each, and what they get is an
// operand of mma.sync as it is, since the order in which products are summed up is free. The next keys are on their way
// in registers while these are multiplied. In the end the warps merge what they have, always in the same order.
//
// What a row gets depends on no other row: weights are relative to its own maximum, which each step follows, and output
// joins by multiply-adds (tensor cores round toward zero while they accumulate).

#ifndef CUFLASH_BLOCK_M
#define CUFLASH_BLOCK_M 16  // the only number
#endif

#include "common/schedule.cuh"
#include "common/weights.cuh"
#include "decode/read.cuh"
#include "decode/rows.cuh"
#include "decode/team.cuh"
#include "ptx/mma.cuh"
#include "ptx/overlap.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

constexpr float kBitsPerUnit = 1.4426950408889634f;  // of logits

struct SharedTiles {
    SharedQueries q;
    TeamShares shares;
    PairScores pairs;
    RowInfo rows[kBlockM];
    TileMap tile;
    TileKeys keys;
};

// scores = Q K^T
__device__ __forceinline__ void score(const SharedQueries& queries, const Keys& k, const Place& place, Scores& scores) {
#pragma unroll
    for (int c = 0; c < kVectorsK; ++c) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Words q = queries[place.half * kVectorsK + c][half][place.lane];
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j)
                mma_m16n8k16<kBfloat16>(scores[j], q.at, {k[j][c].at[half * 2], k[j][c].at[half * 2 + 1]});
        }
    }
}

__device__ __forceinline__ void scores_to_logits(const AttentionParams& params, const SharedTiles& shared,
                                                 long long n_begin, const Place& place, Scores& scores) {
    const bool at_edge = shared.keys.at_edge(n_begin, kBlockN);
    const ScoreScale scale = score_scale(params);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const RowInfo& info = shared.rows[place.tile_row(r)];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) at(scores, r, i) = scaled_score(scale, at(scores, r, i));
        if constexpr (kHasRowTerms) {
            const RowContext row = row_context(params, shared.tile, info.logit, n_begin);
#pragma unroll
            for (int i = 0; i < kColumns; i += kRun) {
                float logits[kRun];
#pragma unroll
                for (int e = 0; e < kRun; ++e) logits[e] = at(scores, r, i + e);
                RowColumns<kRun> columns;
                columns.load<Reads::kElements>(params, row, place.key_v(i));
                scores_to_row_logits<true>(row, columns, place.key_v(i), logits);
#pragma unroll
                for (int e = 0; e < kRun; ++e) at(scores, r, i + e) = logits[e];
            }
        }
        if (at_edge) {  // right either way: all of it is visible
            const ColumnRange visible = columns_of(info.visible, n_begin);
#pragma unroll
            for (int i = 0; i < kColumns; ++i)
                if (!visible.has(place.key_v(i))) at(scores, r, i) = -infinity();
        }
    }
}

// Logits -> weights, and what earlier results must be multiplied by.
__device__ __forceinline__ void weigh(OnlineSoftmax<kRows>& softmax, Scores& scores, Weights& weights,
                                      RowValues& correction) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float largest = at(scores, r, 0);
#pragma unroll
        for (int i = 1; i < kColumns; ++i) largest = maximum(largest, at(scores, r, i));
        correction[r] = softmax.follow(r, quad_maximum(largest));
        const float subtract = finite_maximum(softmax.row_max[r]);
        float sum = 0;
#pragma unroll
        for (int s = 0; s < kKeySteps; ++s) {
            float of_step[kRun];
#pragma unroll
            for (int e = 0; e < kRun; ++e) {
                of_step[e] = relative_weight(at(scores, r, s * kRun + e) - subtract, kBitsPerUnit);
                sum += of_step[e];
            }
            const FourWeights rounded = round_weights(of_step);
            weights[s][r] = rounded.words[0];
            weights[s][r + 2] = rounded.words[1];
        }
        softmax.row_sum[r] = multiply_add(softmax.row_sum[r], correction[r], sum);
    }
}

// o = o * correction + P V
__device__ __forceinline__ void accumulate(const Values& v, const Weights& weights, const RowValues& correction,
                                           Output& o) {
#pragma unroll
    for (int c = 0; c < kVectorsV; ++c) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            unsigned int operand[kKeySteps][2];
#pragma unroll
            for (int i = 0; i < kColumns; i += 2) {
                const unsigned int first = v[i][c].at[j / 2], second = v[i + 1][c].at[j / 2];
                operand[i / kRun][i / 2 % 2] = j % 2 == 0 ? lower_halves(first, second) : upper_halves(first, second);
            }
            float values[4] = {};
#pragma unroll
            for (int s = 0; s < kKeySteps; ++s) mma_m16n8k16<kBfloat16>(values, weights[s], operand[s]);
#pragma unroll
            for (int e = 0; e < 4; ++e) o[c][j][e] = multiply_add_subnormal(o[c][j][e], correction[e / 2], values[e]);
        }
    }
}

// Called by all lanes of a warp.
__device__ __forceinline__ void store_row(const AttentionParams& params, const TileMap& tile, const TeamRow& found) {
    if (threadIdx.x % 32 == 0) store_lse(params, tile, found.row, found.finished);
    char* const out = output_row(params, tile, found.row);
#pragma unroll
    for (int c = 0; c < TeamRow::kVectors; ++c) store_output(params, out, TeamRow::column(c), found.values[c]);
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    if (threadIdx.x < 32 && map_block(params, shared.tile, shared.keys)) begin_in_front(shared.keys);
    __syncthreads();
    const TileMap& tile = shared.tile;
    if (tile.num_rows == 0) return;
    let_next_launch_begin();

    const Place place(threadIdx.x);
    const KeyRange& seen = shared.keys.any;
    const Reader reader = {params, tile, seen, place};
    send_for_queries(params, tile, place, shared.q);
    Keys k;
    Values v;
    OnlineSoftmax<kRows> softmax;
    Output o = {};
    const Steps<kTeam> steps(seen, place.share);
    long long n_begin = steps.begin;
    int left = steps.count, first = steps.first;
    PagedKey looked_up = {};  // of the next step
    Places places = {};       // of this step
    if (left > 0) {
        const StepKeys keys = {first, steps.last(left)};
        looked_up = reader.look_up(n_begin);
        places = reader.find(looked_up);
        looked_up = reader.look_up(n_begin + Steps<kTeam>::kApart);
        reader.load_keys(k, n_begin, keys, places);
        if constexpr (kBothAhead) reader.load_values(v, n_begin, keys, places);
    }
    look_up_row(params, tile, seen, shared.rows);
    cp_async_wait();
    __syncthreads();
    // It ends where keys do, not where they are sent for: they would stay in their registers meanwhile.
#pragma unroll 1
    while (left > 0) {
        const Places next_places = reader.find(looked_up);
        looked_up = reader.look_up(n_begin + 2 * Steps<kTeam>::kApart);
        Scores scores = {};
        RowValues correction;
        Weights weights;
        score(shared.q, k, place, scores);
        // Behind the last step one of its keys once more: a condition would keep them all in their registers.
        if constexpr (kBothAhead)
            reader.load_keys(k, n_begin + (left > 1 ? Steps<kTeam>::kApart : 0), {0, steps.last(left - 1)},
                             next_places);
        if constexpr (kPair > 1) add_other_half(shared.pairs, left % 2, place, scores);
        if constexpr (!kBothAhead) reader.load_values(v, n_begin, {first, steps.last(left)}, places);
        scores_to_logits(params, shared, n_begin, place, scores);
        weigh(softmax, scores, weights, correction);
        accumulate(v, weights, correction, o);
        if (--left == 0) break;
        n_begin += Steps<kTeam>::kApart, first = 0, places = next_places;
        const StepKeys keys = {0, steps.last(left)};
        if constexpr (kBothAhead) reader.load_values(v, n_begin, keys, places);
        else reader.load_keys(k, n_begin, keys, places);
    }
    const int num_rows = tile.num_rows;
    shared.shares.store(place, num_rows, softmax, o);
    __syncthreads();
#pragma unroll 1
    for (int tile_row = threadIdx.x / 32; tile_row < num_rows; tile_row += kThreads / 32)
        store_row(params, tile, TeamRow(params, tile, shared.shares, tile_row));
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_forward_decode(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
