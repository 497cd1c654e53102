// Attention forward on tensor cores through mma.sync: float16 and bfloat16 from sm_80 on.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, last to first, kBlockN at a time. K and V have two buffers each: the next tile arrives
// while this one is multiplied, and a tile costs one barrier.
//
// Warps: each owns 16 or 32 rows from beginning to end. Scores, weights and output stay in registers, where mma.sync
// leaves them. With 32 rows a warp reads K and V from shared memory half as often as with 16, which else is the limit.
// There are so few warps that latency counts: addresses are kept, rows are looked up once, copies are issued between
// products, and weights are computed beside the products of those that are there already.
//
// Tensor cores round toward zero while they accumulate, so a sum over all keys would drift. O starts again from zero
// every few thousand keys; what it was joins a total by multiply-adds, in memory, as that is so rare.

#include "mma/key_loader.cuh"
#include "mma/key_walk.cuh"
#include "mma/logits.cuh"
#include "mma/products.cuh"
#include "mma/queries.cuh"
#include "mma/store.cuh"
#include "mma/total.cuh"

namespace cuflash {

constexpr int kTilesPerSum = 4096 / kBlockN;  // until then the drift is a tenth of the rounding to 16 bits

// Warps pass by tiles that none of their rows sees, where that does not cost the registers of others.
constexpr bool kSkipUnseen = kStages > 1 && kRowTiles*(kFeatureTiles + kKeyTiles) <= 40;

struct SharedTiles {
    alignas(16) Element q[kBlockM][kPitchQ];
    KeyTiles stages[kStages];
    alignas(16) Element p[kShare > 1 ? kBlockM : 1][kPitchP];
    alignas(16) TileRow rows[kBlockM];
    RowMaxima maxima;
    Exchange exchange;
    TileMap tile;
    KeyWalk walk;
    LogitUnit unit;
};

// Where registers are few, the walk stays in shared memory.
using KeptWalk = WalkKeeper<kShare == 1 && !kFewRegisters && kThreads * kMinBlocks <= 256>::Type;

// With one buffer for the next tile, copies are issued in the first steps of a product.
template <int kSteps>
constexpr int kEarlySteps = kSteps < 2 ? kSteps : 2;

using CopyK = TileCopy<kHeadDim, kPitchK>;
using CopyV = TileCopy<kHeadDimV, kPitchV>;

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    const TileMap& tile = shared.tile;
    TileKeys keys;
    if (threadIdx.x < 32 && map_block(params, shared.tile, keys)) shared.walk = key_walk(keys);
    if (threadIdx.x == kThreads - 32) shared.unit = logit_unit(params);
    __syncthreads();
    if (tile.num_rows == 0) return;
    KeptWalk walk = shared.walk;
    const Warp first_warp(threadIdx.x);
    const bool lags = first_warp.lags();
    // Of a staggered block one half copies K, the other V.
    const Strides strides_of_half = lags ? params.v_strides : params.k_strides;
    const Strides& k_strides = kStaggered ? strides_of_half : params.k_strides;
    const auto copy_k = [&](int i, const Warp& warp) {
        return CopyK(lags ? tile.v : tile.k, k_strides, walk.first_key(i),
                     lags ? shared.stages[0].v[0] : shared.stages[0].k[0], lags ? params.head_dim_v : params.head_dim,
                     warp.thread);
    };
    const auto copy_v = [&](int i, const Warp& warp) {
        return CopyV(tile.v, params.v_strides, walk.first_key(i), shared.stages[0].v[0], params.head_dim_v,
                     warp.thread);
    };
    // Where a lane reads operands.
    const auto lane_q = [&](const Warp& warp) {
        return shared_address(&shared.q[warp.first_row + warp.lane % 16][warp.lane / 16 * 8]);
    };
    const auto lane_k = [&](const Warp& warp, int stage) {
        const int row = warp.lane / 16 * 8 + warp.lane % 8;
        return shared_address(&shared.stages[stage].k[warp.share * kWarpKeys + row][warp.lane / 8 % 2 * 8]);
    };
    const auto lane_p = [&](const Warp& warp) {
        return shared_address(&shared.p[kShare > 1 ? warp.first_row + warp.lane % 16 : 0][warp.lane / 16 * 8]);
    };
    const auto lane_v = [&](const Warp& warp, int stage) {
        const int column = warp.share * kWarpFeatures + warp.lane / 16 * 8;
        return shared_address(&shared.stages[stage].v[warp.lane % 16][column]);
    };

    RowStates states(shared.maxima, first_warp);
    OutputTotal total;
    Output o = {};
    bool pending = false;  // weights of the last tile are to be multiplied by V
    KeptQueries kept;
    const float multiplier = shared.unit.multiplier;  // makes bits of logits
    CopyK next_k = copy_k(0, first_warp);
    CopyV next_v = copy_v(0, first_warp);
    copy_queries(params, tile, shared.q, first_warp);
    cp_async_commit();
    if (!lags) next_k.template load<false, 1>(k_strides, 0, walk.last_keys, 0);
    if constexpr (kStages > 1 && !kStaggered) next_v.template load<false, 1>(params.v_strides, 0, walk.last_keys, 0);
    cp_async_commit();
    if constexpr (kStages == 1) {  // the first keys are multiplied while these arrive
        next_v.template load<false, 1>(params.v_strides, 0, walk.last_keys, 0);
        cp_async_commit();
    }
    look_up_rows(params, tile, shared.unit, walk.num_tiles > 0, shared.rows, first_warp);
    // Staggered blocks are alone on a multiprocessor: they multiply the first keys while the first values arrive.
    const auto first_values_arrive = [](int i) {
        if (!kStaggered || i != 0) return;
        cp_async_wait_group<0>();
        __syncthreads();
    };
    if constexpr (kKeepQ) {
        cp_async_wait_group<kStages == 1 ? 2 : 1>();
        first_warp.wait();
#pragma unroll
        for (int step = 0; step < kStepsK; ++step) load_queries(kept[step], lane_q(first_warp), step);
    }
    int i = 0;
#pragma unroll 1
    while (i < walk.num_tiles) {
#pragma unroll 1
        do {
            const Warp warp = warp_of_tile();
            const TileRow* rows = &shared.rows[warp.first_row];
            const int stage = i & (kStages - 1), next_stage = (i + 1) & (kStages - 1);
            const int next_keys = i + 1 < walk.num_tiles ? kBlockN : 0;
            if constexpr (kFewRegisters) {
                next_k = copy_k(i + 1, warp);
                next_v = copy_v(kStages > 1 ? i + 1 : i, warp);
            } else {
                next_k.previous_tile(k_strides);
                next_v.previous_tile(params.v_strides);
            }
            const SharedAddress q = lane_q(warp), k = lane_k(warp, stage);
            const auto tile_arrives = [&] {
                if (kStages == 1 && i == 0) cp_async_wait_group<1>();
                else cp_async_wait();
                __syncthreads();
            };
            if constexpr (kStaggered) {
                // Both halves multiply by the V of the last tile here, before or after the next one has arrived.
                const bool is_over = i == walk.num_tiles;
                if (lags && !is_over) tile_arrives();
                if (pending) multiply_pv(o, {}, lane_p(warp), lane_v(warp, next_stage), [](int) {});
                if (is_over) break;
                if (!lags) {
                    tile_arrives();
                } else {
                    if (i == 0) {
                        copy_k(0, warp).template load<false, 1>(k_strides, 0, walk.last_keys, 0);
                        cp_async_commit();
                    }
                    barrier_wait(15, kThreads / 2);
                }
            } else {
                tile_arrives();
            }
            const auto copy_part = [&](int part) {
                if constexpr (kStages == 1) {
                    next_v.template load<true, kEarlySteps<kStepsK>>(params.v_strides, 0, i == 0 ? 0 : kBlockN, part);
                } else {
                    next_k.template load<true, kStepsK>(k_strides, next_stage, next_keys, part);
                    if constexpr (!kStaggered)
                        next_v.template load<true, kStepsK>(params.v_strides, next_stage, next_keys, part);
                }
            };
            const bool at_edge = i < walk.inner_begin || i >= walk.inner_end;
            if (kSkipUnseen && at_edge && !any_row_sees(rows, walk.first_key(i), warp.lane)) {
#pragma unroll
                for (int part = 0; part < kStepsK; ++part) copy_part(part);
                first_values_arrive(i);
                pending = false;
                continue;
            }
            Scores scores;
            TileLogits logits;
            const long long n_begin = walk.first_key(i) + warp.share * kWarpKeys;
            begin_scores(params, tile, shared.unit, rows, n_begin, warp.lane, scores, logits);
            multiply_qk(scores, q, kept, k, copy_part);
            if constexpr (kStages == 1) {
                cp_async_wait();
                __syncthreads();
            }

            const Warp same = warp_of_tile();
            const SharedAddress p = lane_p(same), v = lane_v(same, stage);
            const TileRow* same_rows = &shared.rows[same.first_row];
            const long long same_begin = walk.first_key(i) + same.share * kWarpKeys;
            scores_to_logits(params, tile, shared.unit, same_rows, same_begin, same.lane, scores, logits);
            if (at_edge) hide_scores(same_rows, same_begin, same.lane, logits, scores);
            const auto hide_nan = [&] {
                const Warp again = warp_of_tile();
                hide_by_bias(params, tile, &shared.rows[again.first_row], walk.first_key(i) + again.share * kWarpKeys,
                             again.lane, scores);
            };
            scores_to_weights(scores, multiplier, logits, states, o, shared.exchange, same, hide_nan);
            Weights weights;
            round_scores(weights, scores);
            if constexpr (kShare > 1) {
                store_weights(&shared.p[same.first_row], same.share * kWarpKeys, weights, same.lane);
                same.wait();
            }
            first_values_arrive(i);
            pending = true;
            const auto copy_k_part = [&](int part) {
                if constexpr (kStages == 1)
                    next_k.template load<true, kEarlySteps<kStepsV>>(k_strides, 0, next_keys, part);
            };
            if constexpr (!kStaggered) multiply_pv(o, weights, p, v, copy_k_part);
        } while (((++i & (kTilesPerSum - 1)) != 0 && i < walk.num_tiles) || (kStaggered && i == walk.num_tiles));
        // Else it would be known from where this loop began, for which a register would be taken throughout.
        if constexpr (kFewRegisters && kPerRow) i = unknown(i);
        if (i > kTilesPerSum) add_total(o, total, states.maxima(warp_of_tile()), multiplier);
        if (i < walk.num_tiles) restart(o, total, states.maxima(warp_of_tile()));
    }
    cp_async_wait();
    store_rows(params, tile, shared.unit, states, o, shared.exchange, shared.q, Warp(thread_index_again()));
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_forward_mma(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
