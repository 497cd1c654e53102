// Attention forward on Hopper's tensor cores: warpgroups multiply what other warps load (sm_90a), float16 and bfloat16.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, last to first, kBlockN at a time.
//
// Warps: two or three warpgroups own 64 rows each, from beginning to end. Scores, weights and output stay in their
// registers; Q, K and V are multiplied where they lie in shared memory, swizzled, V with its rows as they came. One
// more warpgroup loads K and V, kStages tiles ahead, and leaves most of its registers to the others.
//
// A warpgroup issues S = Q K^T of a tile and, behind it, O += P V of the one before, which runs beside the softmax of
// the new scores. Warpgroups take turns to issue, so that the tensor cores multiply for one while others compute
// weights. At 128 features 128 rows take 1024 clocks of tensor cores for each 128 keys, and exponentials as many.
//
// Tensor cores round toward zero while they accumulate, so a sum over all keys would drift. O starts again from zero
// every few thousand keys; what it was joins a total by multiply-adds, in memory, as that is so rare.

#ifndef CUFLASH_BLOCK_M
#define CUFLASH_BLOCK_M 128
#endif
#ifndef CUFLASH_THREADS
#define CUFLASH_THREADS 384  // 128 for each 64 rows, and 128 more
#endif
#ifndef CUFLASH_STAGES
#define CUFLASH_STAGES 2
#endif
#ifndef CUFLASH_PRODUCERS
#define CUFLASH_PRODUCERS 128  // the only number
#endif

#include "common/schedule.cuh"
#include "mma/output.cuh"
#include "mma/products.cuh"
#include "ptx/overlap.cuh"
#include "ptx/registers.cuh"
#include "wgmma/panels.cuh"
#include "wgmma/pipe.cuh"

namespace cuflash {

using QueryRows = Panels<64, kHeadDim>;  // of a warpgroup

// What threads have of the registers with which the blocks of a multiprocessor begin, evenly: the loader what it needs,
// the others the rest.
constexpr int kResident = kConsumers == 1 && kMinBlocks == 1 ? 2 : kMinBlocks;
constexpr int kAllRegisters = 65536 / (kResident * kThreads) / 8 * 8 * (kConsumers + 1);
constexpr int kLoaderRegisters = kConsumers < 3 && kMinBlocks < 3 ? 40 : 32;
constexpr int kConsumerRegisters = (kAllRegisters - kLoaderRegisters) / kConsumers / 8 * 8;

static_assert(kProducers == 128 && kThreads == (kConsumers + 1) * kGroupThreads && kBlockM == 64 * kConsumers);
static_assert(kVectorLoads && kHasValues && !kHasArrays);
static_assert(sizeof(QueryRows) <= 64 * kRowBytesQ && 64 * kRowBytesQ % 1024 == 0);

struct SharedTiles {
    alignas(1024) Element q[kBlockM][kPitchQ];  // a warpgroup's queries lie where its output passes through in the end
    Panels<kBlockN, kHeadDim> k[kStages];
    Panels<kBlockN, kHeadDimV> v[kStages];
    alignas(16) TileRow rows[kBlockM];
    RowMaxima maxima;
    Exchange exchange;
    TileMap tile;
    KeyWalk walk;
    LogitUnit unit;
    Pipe keys, values;
    Turns turns;

    __device__ __forceinline__ QueryRows& queries(int group) {
        return *reinterpret_cast<QueryRows*>(&q[64 * group][0]);
    }
};

// Loads K and V as buffers become free, the last keys first.
struct KeyLoader {
    SharedTiles& shared;
    const char *k, *v;
    PanelCopy<kHeadDim> copy_k;
    PanelCopy<kHeadDimV> copy_v;

    __device__ __forceinline__ KeyLoader(const AttentionParams& params, SharedTiles& shared, int thread)
        : shared(shared),
          k(shared.tile.k + shared.walk.first_key(0) * params.k_strides.row),
          v(shared.tile.v + shared.walk.first_key(0) * params.v_strides.row),
          copy_k(params.k_strides.row, params.head_dim, thread),
          copy_v(params.v_strides.row, params.head_dim_v, thread) {}

    template <bool kWhole>
    __device__ __forceinline__ void load(int i, int num_keys) {
        shared.keys.wait_until_free(i);
        copy_k.load<kWhole>(shared.k[i % kStages], k, num_keys);
        shared.keys.arrive_with_copies(i);
        shared.values.wait_until_free(i);
        copy_v.load<kWhole>(shared.v[i % kStages], v, num_keys);
        shared.values.arrive_with_copies(i);
        k -= kBlockN * copy_k.stride, v -= kBlockN * copy_v.stride;
    }
};
__device__ __forceinline__ void load_keys(const AttentionParams& params, SharedTiles& shared, int thread) {
    const int num_tiles = shared.walk.num_tiles;
    if (num_tiles == 0) return;  // right either way: zeros that nobody reads
    KeyLoader loader(params, shared, thread);
    loader.load<false>(0, shared.walk.last_keys);
#pragma unroll 1
    for (int i = 1; i < num_tiles; ++i) loader.load<true>(i, kBlockN);
}

// Loads the warp's own rows of Q.
__device__ __forceinline__ void load_queries(const AttentionParams& params, SharedTiles& shared, const Warp& warp,
                                             int group) {
    QueryRows& target = shared.queries(group);
    const int lane_row = warp.lane / 8, piece = warp.lane % 8, first_row = warp.first_row + lane_row;
    const char* source = query_row(params, shared.tile, first_row);
    const int num_rows = rows_left(shared.tile, shared.tile.row_begin + first_row);
#pragma unroll 1
    for (int i = 0; i < kRowsPerWarp; i += 4) {
        const int row = first_row % 64 + i;
        const SharedAddress first = shared_address(&target.rows[0][row][0]) + (piece ^ row % 8) * 16;
        // right either way: a division by 1
        if (params.packed_heads != 1) source = query_row(params, shared.tile, first_row + i);
#pragma unroll
        for (int panel = 0; panel < target.kCount; ++panel)
            cp_async_16(first + panel * target.kPanelBytes, source + panel * 128 + piece * 16,
                        i < num_rows && panel * 64 + piece * 8 < params.head_dim);
        source += 4 * params.q_strides.row;
    }
}

// Number of the warpgroup, found again: known to be the same for all lanes, as products in a branch that might be taken
// by some would wait for each other.
__device__ __forceinline__ int group_of_thread() {
    return __shfl_sync(0xffffffffu, thread_index_again() / kGroupThreads, 0);
}

// What a warp of a warpgroup has of its rows.
struct RowWarp {
    const AttentionParams& params;
    SharedTiles& shared;
    RowStates& states;
    Output& o;
    int group;
    KeyWalk walk;
    LogitUnit unit;
    float multiplier;  // makes bits of logits

    // A tile whose scores become weights. What need not wait for them is known before.
    struct Tile {
        View view;
        bool at_edge;
        RowValues maxima;
        TileLogits logits;
        References references;
        Scores scores;
    };
    __device__ __forceinline__ View view_of(int i) const {
        return View(params, shared.tile, unit, shared.rows, walk.first_key(i), place_of_warp());
    }

    __device__ __forceinline__ int own_group() const { return kFewRegisters ? group_of_thread() : group; }

    // Issues S = Q K^T of tile i.
    __device__ __forceinline__ void issue_scores(int i, Scores& scores) {
        QueryRows& q = shared.queries(own_group());
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
    __device__ __forceinline__ Tile begin(int i) {
        Tile tile = {view_of(i), walk.at_edge(i), states.maxima(place_of_warp())};
        tile.references = references_of(tile.maxima, tile.logits, multiplier);
        return tile;
    }
    // Scores become logits, whose maxima the references follow. True if O has to follow these, by `factors`.
    __device__ __forceinline__ bool find_logits(Tile& tile, RowValues& factors) {
        scores_to_logits(tile.view, tile.scores, tile.logits);
        // right either way: all of it is visible
        if (tile.at_edge) hide_scores(tile.view, tile.logits, tile.scores);
        RowValues largest = tile.logits.largest;
        if (!kPolynomialLogits || !tile.logits.is_polynomial) largest = largest_scores<false>(tile.scores);
        const bool outgrown = follow_maxima(tile.maxima, largest, tile.logits, multiplier, states, factors,
                                            shared.exchange, tile.view.warp);
        // right either way: they are what they were
        if (outgrown) tile.references = references_of(tile.maxima, tile.logits, multiplier);
        begin_weights(tile.scores, tile.logits, tile.references, multiplier);
        return outgrown;
    }
    // Logits of the lane's row r become weights relative to its reference.
    __device__ __forceinline__ void weigh(Tile& tile, int r) {
        states.row_sum[r] += row_to_weights(tile.scores, tile.logits, tile.references, multiplier, r);
    }

    // The first tile: its weights.
    __device__ __forceinline__ void first(Weights& weights) {
        Tile tile = begin(0);
        RowValues factors;
        shared.keys.wait_until_ready(0);
        fence_async_proxy();
        shared.turns.wait(own_group(), 0);
        wgmma_fence();
        issue_scores(0, tile.scores);
        shared.turns.pass(own_group());
        wgmma_wait<0>(tile.scores[0]);
        shared.keys.release(0);
        find_logits(tile, factors);  // there is no output to follow them
        weigh(tile, 0), weigh(tile, 1);
        round_weights(weights, tile.scores);
    }
    // From the weights of the tile before tile i to those of tile i.
    __device__ __forceinline__ void turn(int i, Weights& weights, OutputTotal& total) {
        Tile tile = begin(i);
        RowValues factors;
        shared.keys.wait_until_ready(i);
        shared.values.wait_until_ready(i - 1);
        fence_async_proxy();
        shared.turns.wait(own_group(), i);
        wgmma_fence();
        issue_scores(i, tile.scores);
        issue_output(i - 1, weights);
        shared.turns.pass(own_group());
        wgmma_wait<1>(tile.scores[0]);
        shared.keys.release(i);
        const bool outgrown = find_logits(tile, factors);
        weigh(tile, 0);
        if (outgrown) {  // a branch: the compiler would move the wait in front of the exponentials
            wgmma_wait<0>(o[0]);
            rescale(o, factors);
        }
        wgmma_wait<0>(o[0]);
        shared.values.release(i - 1);
        if (i % kTilesPerSum == 0) {
            if (i > kTilesPerSum) add_total(o, total, tile.maxima, multiplier);
            restart(o, total, tile.maxima);
        }
        weigh(tile, 1);
        round_weights(weights, tile.scores);
    }
    // O += P V of the last tile.
    __device__ __forceinline__ void last(int i, const Weights& weights, OutputTotal& total) {
        shared.values.wait_until_ready(i);
        fence_async_proxy();
        wgmma_fence();
        issue_output(i, weights);
        wgmma_wait<0>(o[0]);
        if (i >= kTilesPerSum) add_total(o, total, states.maxima(place_of_warp()), multiplier);
    }
};

// From the queries of a warpgroup's rows to their output.
__device__ __forceinline__ void attend(const AttentionParams& params, SharedTiles& shared, int group) {
    const Warp warp(threadIdx.x);
    const int num_tiles = shared.walk.num_tiles;
    RowStates states(shared.maxima, warp);
    Output o = {};
    load_queries(params, shared, warp, group);
    look_up_rows(params, shared.tile, shared.unit, num_tiles > 0, shared.rows, warp);
    cp_async_wait();
    fence_async_proxy();
    barrier_wait(1 + group, kGroupThreads);
    if (num_tiles > 0) {
        RowWarp own = {params, shared, states, o, group, shared.walk, shared.unit, shared.unit.multiplier};
        OutputTotal total;
        Weights weights;
        own.first(weights);
        int i = 1;
#pragma unroll 1
        for (; i < num_tiles; ++i) own.turn(i, weights, total);
        own.last(i - 1, weights, total);
        barrier_wait(1 + group_of_thread(), kGroupThreads);  // nobody multiplies by queries any more
    }
    store_rows(params, shared.tile, shared.unit, states, o, shared.exchange, shared.q, Warp(thread_index_again()));
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    TileKeys keys;
    if (threadIdx.x < 32 && map_block(params, shared.tile, keys)) shared.walk = key_walk(keys);
    if (threadIdx.x == kThreads - 32) shared.unit = logit_unit(params);
    if (threadIdx.x == kThreads - 64) shared.keys.init(), shared.values.init(), shared.turns.init();
    __syncthreads();
    if (shared.tile.num_rows == 0) return;
    let_next_launch_begin();
    const int group = group_of_thread();
    if (group == kConsumers) {
        registers_release<kLoaderRegisters>();
        load_keys(params, shared, threadIdx.x - kConsumers * kGroupThreads);
    } else {
        registers_take<kConsumerRegisters>();
        attend(params, shared, group);
    }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_forward_wgmma(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(1024) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
