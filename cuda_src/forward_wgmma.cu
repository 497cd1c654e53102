// Attention forward on Hopper's tensor cores: warpgroups multiply what other warps load (sm_90a), float16 and bfloat16.
//
// Grid: one block per tile of kBlockM rows of one (batch, head), or of a group's heads that share keys, and for each of
// its splits; or as many as the GPU holds, which go from tile to tile. A row is one query of one head. Blocks walk the
// keys that any of a tile's rows sees, last to first, kBlockN at a time.
//
// Warps: one to three warpgroups own 64 rows each, from beginning to end. Scores, weights and output stay in their
// registers; Q, K and V are multiplied where they lie in shared memory, swizzled, V with its rows as they came. One
// more warpgroup loads K and V, kStages tiles ahead, and leaves most of its registers to the others. Or a warpgroup
// alone loads for itself: up to four such blocks share a multiprocessor.
//
// A warpgroup issues S = Q K^T of a tile and, behind it, O += P V of the one before, which runs beside the softmax of
// the new scores. Warpgroups take turns to issue, or drift apart, so that the tensor cores multiply for one while
// others compute weights. At 128 features 128 rows take 1024 clocks of tensor cores for each 128 keys, and exponentials
// as many.
//
// Tensor cores round toward zero while they accumulate, so a sum over all keys would drift. O starts again from zero
// every few thousand keys; what it was joins a total by multiply-adds, in memory, as that is so rare.

#ifndef CUFLASH_BLOCK_M
#define CUFLASH_BLOCK_M 128
#endif
#ifndef CUFLASH_THREADS
#define CUFLASH_THREADS 384  // 128 for each 64 rows, and 128 more unless these load
#endif
#ifndef CUFLASH_STAGES
#define CUFLASH_STAGES 2
#endif
#ifndef CUFLASH_WARPGROUPS
#define CUFLASH_WARPGROUPS 1  // the only value
#endif

#include "mma/logits.cuh"
#include "mma/maxima.cuh"
#include "mma/products.cuh"
#include "mma/softmax.cuh"
#include "ptx/overlap.cuh"
#include "ptx/registers.cuh"
#include "wgmma/key_source.cuh"
#include "wgmma/store.cuh"

namespace cuflash {

// Blocks of one warpgroup and loaders leave half of the registers to a launch behind them that merges their results.
constexpr bool kLeavesHalf = kConsumers == 1 && kProducers != 0 && kHeadDimV <= 128;
constexpr int kBlocksOfRegisters = kLeavesHalf ? 2 : kMinBlocks;
// What threads have of the registers with which a block begins, evenly: the loader what it needs, the others the rest.
constexpr int kAllRegisters = 65536 / kThreads / kBlocksOfRegisters / 8 * 8 * (kConsumers + 1);
// Loaders hold the most where they look up pages, find places in packed sequences, or copy rows of many features.
constexpr bool kLoadersHoldMuch = kPaged || (kWalksOn && kVarlen) || (!kHasRoles && kHeadDim > 192);
constexpr int kLoaderRegisters = kLoadersHoldMuch ? 56 : kWalksOn || !kHasRoles ? 40 : 32;
constexpr int kShare = (kAllRegisters - kLoaderRegisters) / kConsumers / 8 * 8;
constexpr int kConsumerRegisters = kShare < 240 ? kShare : 240;

static_assert(kVectorLoads && kHasValues);

// Rows are finished beside their last product; where blocks walk on, others multiply then, and loaders fall behind.
constexpr bool kFinishesEarly = !kWalksOn;

// What a warp of a warpgroup has of its rows.
struct RowWarp {
    const AttentionParams& params;
    SharedTiles& shared;
    const Place& place;
    RowStates& states;
    Output& o;
    KeySource source;
    KeptWalk walk;
    int number;  // of the tile of rows
    int before;  // number of the block's first tile of keys
    LogitUnit unit;
    float multiplier;  // makes bits of logits

    // A tile whose scores become weights. What need not wait for them is known before.
    struct ScoreTile {
        View view;
        bool at_edge;
        RowValues maxima;
        TileLogits logits;
        References references;
        Scores scores;
    };
    __device__ __forceinline__ View view_of(int i) const {
        return View(params, place.tile, unit, shared.rows, walk.first_key(i), place_of_warp());
    }

    // Issues S = Q K^T of tile i.
    __device__ __forceinline__ void issue_scores(int i, Scores& scores) {
        QueryRows& q = shared.queries(number, source.own_group());
        Panels<kBlockN, kHeadDim>& k = shared.k[i % kStages];
        wgmma<kBfloat16, false, false>(scores[0], q.features(0), k.features(0));
#pragma unroll
        for (int step = 1; step < kStepsK; ++step)
            wgmma<kBfloat16, false, true>(scores[0], q.features(step), k.features(step));
        wgmma_commit();
    }
    // Issues O += P V of tile i.
    __device__ __forceinline__ void issue_output(int i, const Weights& weights) {
        Panels<kBlockN, kHeadDimV>& v = shared.v[i % kStages];
#pragma unroll
        for (int step = 0; step < kStepsV; ++step) wgmma<kBfloat16, true, true>(o[0], weights[0][step], v.tokens(step));
        wgmma_commit();
    }

    // What is known of tile i before its scores.
    __device__ __forceinline__ ScoreTile prepare(int i) {
        ScoreTile tile = {view_of(i), walk.at_edge(i), states.maxima(place_of_warp())};
        tile.references = references_of(tile.maxima, tile.logits, multiplier);

        return tile;
    }
    // Scores become logits, whose maxima the references follow. True if O has to follow these, by `factors`.
    __device__ __forceinline__ bool find_logits(int i, ScoreTile& tile, RowValues& factors) {
        scores_to_logits(tile.view, tile.at_edge, tile.scores, tile.logits);
        const bool outgrown = follow_maxima(tile.maxima, tile.view, tile.at_edge, tile.scores, tile.logits, multiplier,
                                            states, factors, shared.exchange, [&] { return view_of(i); });
        // right either way: they are what they were
        if (outgrown) tile.references = references_of(tile.maxima, tile.logits, multiplier);
        begin_weights(tile.scores, tile.logits, tile.references, multiplier);
        return outgrown;
    }
    // Logits of the lane's row r become weights relative to its reference.
    __device__ __forceinline__ void weigh(ScoreTile& tile, int r) {
        states.row_sum[r] += row_to_weights(tile.scores, tile.logits, tile.references, multiplier, r);
    }

    // The first tile: its weights.
    __device__ __forceinline__ void first(int i, Weights& weights) {
        ScoreTile tile = prepare(i);
        RowValues factors;
        source.wait_for_keys(i);
        source.see();
        if constexpr (kHasArrays) tile.logits.arrays.begin(tile.view);
        source.begin_products(i);
        wgmma_fence();
        issue_scores(i, tile.scores);
        source.end_products<true>(i);
        wgmma_wait<0>(tile.scores[0]);
        source.release_keys(i);
        source.let_next_begin(number);
        find_logits(i, tile, factors);  // there is no output to follow them
        weigh(tile, 0), weigh(tile, 1);
        round_weights(weights, tile.scores);
    }
    // How many tiles O is of when tile i begins.
    __device__ __forceinline__ int summed(int i) const { return i - 1 - before; }
    // Every few thousand keys O joins its total, while no scores are there that would have to be spilled.
    __device__ __forceinline__ void restart_sums(int i, OutputTotal& total) {
        if (summed(i) % kTilesPerSum != 0) return;
        // right either way: it is 0
        if (summed(i) == 0) return;
        const RowValues maxima = states.maxima(place_of_warp());
        if (summed(i) > kTilesPerSum) add_total(o, total, maxima, multiplier);
        restart(o, total, maxima);
    }
    // From the weights of the tile before tile i to those of tile i.
    __device__ __forceinline__ void turn(int i, Weights& weights, OutputTotal& total) {
        restart_sums(i, total);
        ScoreTile tile = prepare(i);
        RowValues factors;
        source.wait_for_keys(i);
        source.wait_for_values(i - 1);
        source.see();
        if constexpr (kHasArrays) tile.logits.arrays.begin(tile.view);
        source.begin_products(i);
        wgmma_fence();
        issue_scores(i, tile.scores);
        issue_output(i - 1, weights);
        source.end_products<false>(i);
        wgmma_wait<1>(tile.scores[0]);
        source.release_keys(i);
        const bool outgrown = find_logits(i, tile, factors);
        weigh(tile, 0);
        // Else the compiler would move the wait in front of the exponentials. Three warpgroups, and output of float32,
        // lack the registers.
        if (kConsumers < 3 && !kExactReference) stay_in_front_if(outgrown);
        wgmma_wait<0>(o[0]);  // not in a branch: all warps of a warpgroup wait together
        if (outgrown) rescale(o, factors);
        source.release_values(i - 1);
        weigh(tile, 1);
        round_weights(weights, tile.scores);
    }
    // O += P V of the last tile, and what is done meanwhile.
    template <typename Meanwhile>
    __device__ __forceinline__ void last(int i, const Weights& weights, OutputTotal& total, Meanwhile meanwhile) {
        source.wait_for_values(i);
        source.see();
        wgmma_fence();
        issue_output(i, weights);
        meanwhile();
        wgmma_wait<0>(o[0]);
        source.release_values(i);
        if (summed(i) >= kTilesPerSum) add_total(o, total, states.maxima(place_of_warp()), multiplier);
    }
};

// Tiles of keys that none of a warpgroup's rows sees: others multiply by them.
__device__ __forceinline__ void pass_by(KeySource& source, int i, int end) {
#pragma unroll 1
    for (; i < end; ++i) {
        source.wait_for_keys(i);
        source.begin_products(i);
        source.end_products<false>(i);
        source.release_keys(i);
        source.wait_for_values(i);
        source.release_values(i);
    }
}

// From the queries of a warpgroup's rows to their output.
__device__ __forceinline__ void attend(const AttentionParams& params, SharedTiles& shared, int number, int group) {
    const Place& place = shared.places[number % kPlaces];
    const Warp warp(threadIdx.x);
    const int num_tiles = place.walk.num_tiles;
    RowStates states(shared.maxima, warp);
    Output o = {};
    if constexpr (!kWalksOn) load_queries<kGroupThreads>(params, place.tile, shared.queries(number, group), group);
    KeySource source(params, shared, place, group);
    source.wait_to_begin(number);
    look_up_rows(params, place.tile, shared.unit, num_tiles > 0, shared.rows, warp);
    source.wait_for_queries(number);
    const int before = kPlaces > 1 ? uniform(place.keys_before) : 0;
    int i = before, end = before + num_tiles;
    KeptWalk walk = WalkKeeper<kKeepWalk>::keep(place.walk, before);
    if (passes_by(params)) {
        place.narrow(group, walk, i, end);
        pass_by(source, before, i);
    }
    FinishedLane finished;
    const auto finish = [&] {
        finished = finish_lane(params, place.tile, shared.unit, states, shared.exchange, Warp(thread_index_again()));
    };
    const bool any_tiles = i < end;
    if (any_tiles) {
        RowWarp own = {
            params, shared, place, states, o, source, walk, number, before, shared.unit, shared.unit.multiplier};
        OutputTotal total;
        Weights weights;
        own.first(i, weights);
#pragma unroll 1
        for (++i; i < end; ++i) own.turn(i, weights, total);
        source.release_queries(number);
        own.last(i - 1, weights, total, [&] {
            if constexpr (kFinishesEarly) finish();
        });
        // Nobody multiplies by queries any more, through which output passes.
        if (kWalksOn || sizeof(OutElement) == 2) barrier_wait(1 + group_of_thread(), kGroupThreads);
    } else {
        source.let_next_begin(number);
        source.release_queries(number);
    }
    // right either way: there are none left
    if (passes_by(params)) pass_by(source, i, uniform(place.end()));
    if (!kFinishesEarly || !any_tiles) finish();
    const Warp again(thread_index_again());
    if constexpr (sizeof(OutElement) == 2) store_rows(params, o, finished, shared.output_rows(number, again), again);
    else store_rows(params, o, finished, shared.q[number % kQueryBuffers], again);
}

// All of the block's tiles of rows, while others load.
__device__ __forceinline__ void attend_all(const AttentionParams& params, SharedTiles& shared, int group) {
#pragma unroll 1
    for (int number = 0;; ++number) {
        attend(params, shared, number, group);
        if (!kWalksOn || uniform(shared.places[number % kPlaces].next) == 0) return;
        shared.placed.release_read(number);
        shared.placed.wait_until_ready(number + 1);
        if (uniform(shared.places[(number + 1) % kPlaces].is_empty())) return;
        barrier_wait(1 + group, kGroupThreads);  // fence: else the compiler thinks that the warps have diverged
    }
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, const KeyMaps& maps,
                                                  SharedTiles& shared) {
    if (threadIdx.x < 32) shared.places[0].find(params, 0, 0, shared.of_pair);
    if (threadIdx.x == kThreads - 32) shared.unit = logit_unit(params);
    if (kProducers != 0 && threadIdx.x == kThreads - 64) shared.init();
    __syncthreads();
    if (shared.places[0].tile.num_rows == 0) return;
    let_next_launch_begin();
    if constexpr (kProducers == 0) {
        int again = 0;  // as it stays, but in a loop the compiler has registers for all of it
        do {
            attend(params, shared, 0, 0);
            if constexpr (kFewRegisters) again = unknown(0);
        } while (again);
    } else {
        const int group = group_of_thread();
        if (group == kConsumers) {
            registers_release<kLoaderRegisters>();
            load_all(params, maps, shared);
        } else {
            registers_take<kConsumerRegisters>();
            attend_all(params, shared, group);
        }
    }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kBlocksOfRegisters)
    cuflash_forward_wgmma(const __grid_constant__ cuflash::AttentionParams params,
                          const __grid_constant__ cuflash::KeyMaps maps) {
    extern __shared__ __align__(1024) char shared_memory[];
    cuflash::attention_forward(params, maps, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
