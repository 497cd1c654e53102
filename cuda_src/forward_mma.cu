// Attention forward on tensor cores through mma.sync: float16 and bfloat16 from sm_80 on.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, last to first, kBlockN at a time. K and V have two buffers each: the next tile arrives
// while this one is multiplied, and a tile costs one barrier.
//
// Warps: each owns 16 or 32 rows from beginning to end. Scores, weights and output stay in registers, where mma.sync
// leaves them. With 32 rows a warp reads K and V from shared memory half as often as with 16, which else is the limit.
// Warps are few, so latency counts: addresses are kept, copies issued between products, weights computed beside them.
//
// Tensor cores round toward zero while they accumulate, so a sum over all keys would drift. O starts again from zero
// every few thousand keys; what it was joins a total by multiply-adds, in memory, as that is so rare.

#include "common/schedule.cuh"
#include "mma/copy_keys.cuh"
#include "mma/logits.cuh"
#include "mma/maxima.cuh"
#include "mma/output.cuh"
#include "mma/products.cuh"
#include "mma/softmax.cuh"

namespace cuflash {

struct SharedTiles {
    alignas(16) Element q[kBlockM][kPitchQ];
    KeyTiles stages[kStages];
    alignas(16) Element p[kWarpsPerRow > 1 ? kBlockM : 1][kPitchP];
    alignas(16) TileRow rows[kBlockM];
    RowMaxima maxima;
    Exchange exchange;
    TileMap tile;
    KeyWalk walk;
    LogitUnit unit;
};

using CopyK = TileCopy<kHeadDim, kPitchK>;
using CopyV = TileCopy<kHeadDimV, kPitchV, kHasValues>;

__device__ __forceinline__ int stage_of(int i) { return i & (kStages - 1); }

// What a thread needs from tile to tile, and the steps that all walks are made of. Arrays are variables of their own:
// a struct that has them is not in registers before all loops are unrolled, and addresses beside them come out worse.
struct Worker {
    const AttentionParams& params;
    SharedTiles& shared;
    RowStates& states;
    Output& o;
    OutputTotal& total;
    KeptQueries& kept;
    KeptWalk walk;
    float multiplier;  // makes bits of logits

    __device__ __forceinline__ CopyK copy_k(int i, const Warp& warp) const {
        return CopyK(params, shared.tile, shared.tile.k, params.k_strides, walk.first_key(i), shared.stages[0].k[0],
                     params.head_dim, warp.thread);
    }
    __device__ __forceinline__ CopyV copy_v(int i, const Warp& warp) const {
        return CopyV(params, shared.tile, shared.tile.v, params.v_strides, walk.first_key(i), shared.stages[0].v[0],
                     params.head_dim_v, warp.thread);
    }

    // Where a lane reads operands.
    __device__ __forceinline__ SharedAddress lane_q(const Warp& warp) const {
        return shared_address(&shared.q[warp.first_row + warp.lane % 16][warp.lane / 16 * 8]);
    }
    __device__ __forceinline__ SharedAddress lane_k(const Warp& warp, int stage) const {
        const int row = warp.lane / 16 * 8 + warp.lane % 8;
        return shared_address(&shared.stages[stage].k[warp.share * kWarpKeys + row][warp.lane / 8 % 2 * 8]);
    }
    __device__ __forceinline__ SharedAddress lane_p(const Warp& warp) const {
        return shared_address(&shared.p[kWarpsPerRow > 1 ? warp.first_row + warp.lane % 16 : 0][warp.lane / 16 * 8]);
    }
    __device__ __forceinline__ SharedAddress lane_v(const Warp& warp, int stage) const {
        const int column = warp.share * kWarpFeatures + warp.lane / 16 * 8;
        return shared_address(&shared.stages[stage].v[warp.lane % 16][column]);
    }

    // What a warp sees of tile i. Its place is known once for a turn and again behind the products, see mma/budget.cuh.
    __device__ __forceinline__ View view_of(int i, const Warp& warp) const {
        return View(params, shared.tile, shared.unit, shared.rows, walk.first_key(i), warp);
    }

    // Looks up the rows, and takes Q from shared memory, when all copies but the newest kPending have arrived.
    template <int kPending>
    __device__ __forceinline__ void begin_rows(const Warp& warp) {
        look_up_rows(params, shared.tile, shared.unit, walk.num_tiles > 0, shared.rows, warp);
        if constexpr (kKeepQ) {
            cp_async_wait_group<kPending>();
            warp.wait();
#pragma unroll
            for (int step = 0; step < kStepsK; ++step) load_queries(kept[step], lane_q(warp), step);
        }
    }

    // S = QK^T. `copy_part(part)` is called kStepsK times.
    template <typename CopyPart>
    __device__ __forceinline__ void score(int i, const View& view, Scores& scores, TileLogits& logits,
                                          CopyPart copy_part) {
        const SharedAddress q = lane_q(view.warp), k = lane_k(view.warp, stage_of(i));
        begin_scores(view, scores, logits);
        multiply_qk(scores, q, kept, k, copy_part);
    }

    // Logits, and weights relative to the rows' references, which O follows.
    __device__ __forceinline__ void weigh(int i, const View& view, bool at_edge, Scores& scores, TileLogits& logits,
                                          Weights& weights) {
        scores_to_logits(view, at_edge, scores, logits);
        RowValues maxima = states.maxima(view.warp);
        RowValues factors = {};  // else the compiler has registers for those of the last tile
        if (follow_maxima(maxima, view, at_edge, scores, logits, multiplier, states, factors, shared.exchange,
                          [&] { return view_of(i, place_of_warp()); }))
            rescale(o, factors);
        scores_to_weights(scores, logits, references_of(maxima, logits, multiplier), multiplier, states.row_sum);
        round_weights(weights, scores);
        if constexpr (kWarpsPerRow > 1) {
            store_weights(&shared.p[view.warp.first_row], view.warp.share * kWarpKeys, weights, view.lane);
            view.warp.wait();
        }
    }

    // O += PV. `copy_part(part)` is called kStepsV times.
    template <typename CopyPart>
    __device__ __forceinline__ void accumulate(int i, const Warp& warp, const Weights& own, CopyPart copy_part) {
        multiply_pv(o, own, lane_p(warp), lane_v(warp, stage_of(i)), copy_part);
    }

    // At the end of a sum, before tile i: the total of earlier ones joins O, which starts again from zero, if there are
    // more to come.
    __device__ __forceinline__ void end_sum(int i) {
        if (i > kTilesPerSum) add_total(o, total, states.maxima(place_of_warp()), multiplier);
        if (i < walk.num_tiles) restart(o, total, states.maxima(place_of_warp()));
    }

    __device__ __forceinline__ void finish_rows() {
        cp_async_wait();
        const Warp warp(thread_index_again());
        const FinishedLane finished = finish_lane(params, shared.tile, shared.unit, states, shared.exchange, warp);
        store_rows(params, o, finished, shared.q, warp);
    }
};

// All warps take the same steps between two barriers. With two buffers the next K and V are copied during S = QK^T,
// with one V of the same tile, and then the next K during O += PV.
struct InStep : Worker {
    CopyK next_k;
    CopyV next_v;

    // With one buffer for the next tile, copies are issued in the first steps of a product.
    template <int kSteps>
    static constexpr int kEarlySteps = kSteps < 2 ? kSteps : 2;

    __device__ __forceinline__ InStep(const Worker& worker, const Warp& warp)
        : Worker(worker), next_k(copy_k(0, warp)), next_v(copy_v(0, warp)) {
        copy_queries(params, shared.tile, shared.q, warp);
        cp_async_commit();
        next_k.load_first(params.k_strides, walk.last_keys);
        if constexpr (kStages == 1) cp_async_commit();  // the first keys are multiplied while the values arrive
        next_v.load_first(params.v_strides, walk.last_keys);
        cp_async_commit();
        begin_rows<kStages == 1 ? 2 : 1>(warp);
    }

    // Finds what is copied next.
    __device__ __forceinline__ void aim_copies(int i, const Warp& warp) {
        if constexpr (kFewRegisters) {
            next_k = copy_k(i + 1, warp);
            next_v = copy_v(kStages > 1 ? i + 1 : i, warp);
        } else {
            next_k.previous_tile(params.k_strides);
            next_v.previous_tile(params.v_strides);
        }
    }
    __device__ __forceinline__ void copy_beside_scores(int i, bool has_next, int part) const {
        if constexpr (kStages == 1) {
            next_v.template load_part<kEarlySteps<kStepsK>>(params.v_strides, 0, i != 0, part);
        } else {
            next_k.template load_part<kStepsK>(params.k_strides, stage_of(i + 1), has_next, part);
            next_v.template load_part<kStepsK>(params.v_strides, stage_of(i + 1), has_next, part);
        }
    }
    __device__ __forceinline__ void copy_beside_output(bool has_next, int part) const {
        if constexpr (kStages == 1)
            next_k.template load_part<kEarlySteps<kStepsV>>(params.k_strides, 0, has_next, part);
    }

    __device__ __forceinline__ void arrive(int i) const {
        if (kStages == 1 && i == 0) cp_async_wait_group<1>();
        else cp_async_wait();
        __syncthreads();
    }

    // Tile i. Always true: nothing is left to do behind the last one.
    __device__ __forceinline__ bool turn(int i) {
        const Warp warp = place_of_warp();  // in front of the barrier, which hides what addresses cost
        const bool has_next = i + 1 < walk.num_tiles;
        aim_copies(i, warp);
        arrive(i);
        const bool at_edge = walk.at_edge(i);
        const View before = view_of(i, warp);
        if (kSkipUnseen && at_edge &&  // right either way: some row sees a tile that is not at the edge
            !before.any_row_sees()) {
#pragma unroll
            for (int part = 0; part < kStepsK; ++part) copy_beside_scores(i, has_next, part);
            return true;
        }
        Scores scores;
        TileLogits logits;
        Weights weights;
        score(i, before, scores, logits, [&](int part) { copy_beside_scores(i, has_next, part); });
        if constexpr (kStages == 1) {
            cp_async_wait();
            __syncthreads();
        }
        const View behind = view_of(i, place_of_warp());
        weigh(i, behind, at_edge, scores, logits, weights);
        accumulate(i, behind.warp, weights, [&](int part) { copy_beside_output(has_next, part); });
        return true;
    }
};

// Half of the warps lag: they multiply by V a tile later than the others, before the barrier that these multiply
// behind. Each half copies what it is through with first: that which lags V, the other one K.
struct PingPong : Worker {
    bool lags;
    const Strides& strides;
    CopyK next;

    __device__ __forceinline__ PingPong(const Worker& worker, const Warp& warp)
        : Worker(worker), lags(warp.lags()), strides(lags ? params.v_strides : params.k_strides), next(copy(0, warp)) {
        copy_queries(params, shared.tile, shared.q, warp);
        cp_async_commit();
        // right either way: the half that lags copies once more
        if (!lags) next.load_first(strides, walk.last_keys);
        cp_async_commit();
        begin_rows<1>(warp);
    }

    // K, or V in the half that lags.
    __device__ __forceinline__ CopyK copy(int i, const Warp& warp) const {
        const TileMap& tile = shared.tile;
        return CopyK(params, tile, lags ? tile.v : tile.k, strides, walk.first_key(i),
                     lags ? shared.stages[0].v[0] : shared.stages[0].k[0], lags ? params.head_dim_v : params.head_dim,
                     warp.thread);
    }
    __device__ __forceinline__ void aim_copies(int i, const Warp& warp) {
        if constexpr (kFewRegisters) next = copy(i + 1, warp);
        else next.previous_tile(strides);
    }
    __device__ __forceinline__ void copy_part(int i, bool has_next, int part) const {
        next.template load_part<kStepsK>(strides, stage_of(i + 1), has_next, part);
    }

    // One half comes in front of a product, the other one behind it: each waits at a barrier of its own, where the
    // other one arrives. That which lags goes on when all of the other one have, else it might come again before they
    // have waited.
    __device__ __forceinline__ void wait_for_other_half() const {
        if (lags) barrier_arrive(13, kThreads);
        barrier_wait(lags ? 14 : 13, kThreads);
        if (!lags) barrier_arrive(14, kThreads);
    }
    __device__ __forceinline__ void arrive() const {
        cp_async_wait();
        wait_for_other_half();
    }
    // Keeps the half that lags together. The first values are sent for only here: the block is alone on a
    // multiprocessor, and multiplies the first keys meanwhile.
    __device__ __forceinline__ void wait_for_half(int i, const Warp& warp) const {
        if (i == 0) {
            copy(0, warp).load_first(strides, walk.last_keys);
            cp_async_commit();
        }
        barrier_wait(15, kThreads / 2);
    }
    __device__ __forceinline__ void wait_for_first_values(int i) const {
        if (i != 0) return;  // right either way: nothing else is on its way
        cp_async_wait_group<0>();
        __syncthreads();
    }

    // Scores and weights of tile i, after O += PV of the one before it. False when there was no other left.
    __device__ __forceinline__ bool turn(int i) {
        const Warp warp = place_of_warp();
        const bool has_next = i + 1 < walk.num_tiles;
        aim_copies(i, warp);
        const bool is_over = i == walk.num_tiles;
        if (lags && !is_over) arrive();
        if (i > 0) accumulate(i - 1, warp, {}, [](int) {});
        if (is_over) return false;
        if (!lags) arrive();
        else wait_for_half(i, warp);
        const bool at_edge = walk.at_edge(i);
        const View before = view_of(i, warp);
        Scores scores;
        TileLogits logits;
        Weights weights;
        score(i, before, scores, logits, [&](int part) { copy_part(i, has_next, part); });
        weigh(i, view_of(i, place_of_warp()), at_edge, scores, logits, weights);
        wait_for_first_values(i);
        return true;
    }
};

// Walks through the keys, in sums of kTilesPerSum tiles, and stores the rows.
template <typename Walker>
__device__ __forceinline__ void walk_keys(const AttentionParams& params, SharedTiles& shared) {
    const Warp warp(threadIdx.x);
    RowStates states(shared.maxima, warp);
    Output o = {};
    OutputTotal total;
    KeptQueries kept;
    Walker walker({params, shared, states, o, total, kept, shared.walk, shared.unit.multiplier}, warp);
    const KeptWalk& walk = walker.walk;
    int i = 0;
#pragma unroll 1
    while (i < walk.num_tiles) {
#pragma unroll 1
        do {
            if (!walker.turn(i)) break;
        } while ((++i % kTilesPerSum != 0 && i < walk.num_tiles) || (kPingPong && i == walk.num_tiles));
        // Else it would be known from where this loop began, for which a register would be taken throughout.
        if constexpr (kFewRegisters && kHasRowTerms) i = unknown(i);
        if constexpr (kHasValues) walker.end_sum(i);
    }
    walker.finish_rows();
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    TileKeys keys;
    if (threadIdx.x < 32 && map_block(params, shared.tile, keys)) shared.walk = key_walk(keys);
    if (threadIdx.x == kThreads - 32) shared.unit = logit_unit(params);
    __syncthreads();
    if (shared.tile.num_rows == 0) return;
    if constexpr (kPingPong) walk_keys<PingPong>(params, shared);
    else walk_keys<InStep>(params, shared);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_forward_mma(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
