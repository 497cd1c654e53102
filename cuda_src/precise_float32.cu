// Attention forward in single precision on the tensor cores for float16 (sm_80 and newer).
//
// Floats are multiplied as pairs of float16 (precise/pairs.cuh): three products make one that is as exact as a float's
// own, the sum of the seconds' product being below its rounding. precision="tf32" has the first alone.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, first to last, kBlockN at a time. Where prepare_pairs.cu has made pairs for all blocks,
// K arrives during O += P V, V during S = Q K^T. Else both come to one buffer, V when K has been multiplied, and are
// turned into pairs where they lie: other blocks of the multiprocessor multiply meanwhile.
//
// Warps: each owns 16 rows from beginning to end, in whose fragments scores, weights and output stay. Where the output
// is too wide for a thread's registers, kWarpsPerRow warps share their rows: each multiplies some of the features, and
// what all of them have of the scores is added up through shared memory. All of them compute the weights.
//
// Tensor cores round toward zero while they accumulate. A tile's products are sums of their own, which join O by
// multiply-adds, and O starts again from zero every few thousand keys (common/total.cuh).

#ifndef CUFLASH_DTYPE
#define CUFLASH_DTYPE CUFLASH_FLOAT32  // the only one
#endif

#include "common/schedule.cuh"
#include "precise/float32.cuh"
#include "precise/products.cuh"

namespace cuflash {

struct SharedTiles : KeyBuffers<> {
    PairRows<kBlockM, kHeadDim> q;
    PartialScores partial[kWarpsPerRow > 1 ? kNumWarps : 1];
    TileRow rows[kBlockM];
    LogitRow logits[kBlockM];
    TileKeys keys;
    TileMap tile;
};

// What a block has on its way into shared memory.
struct Copies {
    const AttentionParams& params;
    SharedTiles& shared;

    // Rows that no query of the tile sees become zeros: they may hold anything, and 0 x NaN is NaN.
    __device__ __forceinline__ void load_k(long long n_begin) const {
        const char* rows = kPrepared ? prepared_from<kHeadDim>(params.prepared_k, shared.tile, n_begin)
                                     : shared.tile.k + n_begin * params.k_strides.row;
        shared.k.load(rows, params.k_strides, params.head_dim, shared.keys.any.end - n_begin);
    }
    __device__ __forceinline__ void load_v(long long n_begin) const {
        const char* rows = kPrepared ? prepared_from<kHeadDimV>(params.prepared_v, shared.tile, n_begin)
                                     : shared.tile.v + n_begin * params.v_strides.row;
        shared.v.load(rows, params.v_strides, params.head_dim_v, shared.keys.any.end - n_begin);
    }
    // Called behind a barrier behind look_up_rows.
    __device__ __forceinline__ void load_q() const {
        shared.q.gather(params.head_dim, params.q_strides.column, [&](int row) { return shared.rows[row].query; });
    }
};

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    if (threadIdx.x < 32) map_block(params, shared.tile, shared.keys);
    __syncthreads();
    const TileMap& tile = shared.tile;
    if (tile.num_rows == 0) return;

    const TileKeys& keys = shared.keys;
    const Copies copies = {params, shared};
    OnlineSoftmax<kRows> softmax;
    LeadingKeys leading;
    Output o = {};
    OutputTotal total;
    volatile unsigned int found = 0, refused = 0;  // in memory, as registers are scarce
    ValueScale value_scale = {};
    const RowsLookedUp rows = {shared.rows, shared.logits};
    if (keys.any.begin < keys.any.end) {
        copies.load_k(keys.any.begin);
        look_up_rows(params, shared);
        __syncthreads();
        copies.load_q();
        refused = refused_kinds(shared.q.arrive(params.head_dim, kLeastExponent, kMostExponent), any_thread);
        found = shared.k.arrive(params.head_dim, kLeastExponent, kMostExponent);
    }
#pragma unroll 1
    for (long long n_begin = keys.any.begin; n_begin < keys.any.end; n_begin += kBlockN) {
        // Worked out again for each step, as registers are scarce.
        const auto place = [] { return Place(thread_index_again()); };
        const bool sees = any_row_sees(rows, keys, n_begin, place());
        bool leads = false;
        Scores scores;
        // Pairs of K are there, and V has been multiplied.
        const bool by_pairs = !any_thread((found | kAnyRow) & refused);
        const long long n_next = n_begin + kBlockN;
        const auto load_next_k = [&] {
            if (n_next < keys.any.end) copies.load_k(n_next);
        };
        if constexpr (kHasValues && !kOneBuffer) copies.load_v(n_begin);
        if (sees) {  // right either way: weights are 0 else
            if (by_pairs) multiply_qk(shared.q, shared.k, place(), scores);
            else multiply_qk_one_by_one(params, tile, rows, n_begin, keys.count_from(n_begin), place(), scores);
            sum_scores(shared.partial, place(), scores);
        }
        if constexpr (!kHasValues || kOneBuffer) {
            __syncthreads();  // K has been multiplied
            if constexpr (kHasValues) copies.load_v(n_begin);
            else load_next_k();
        }
        if (sees) {  // right either way: weights are 0 else
            scores_to_logits(params, tile, rows, score_scale(params), keys.at_edge(n_begin, kWarpKeys), n_begin,
                             place(), scores);
            leads = weigh(scores, softmax, o);
        }
        if constexpr (kHasValues) {
            found = shared.v.arrive(params.head_dim_v, value_scale.least(), value_scale.exponent()) & ~kHasZero;
            // Pairs of V are there, and K has been multiplied.
            // right either way: the scale may follow at any time
            if (any_thread(found)) value_scale.follow(shared.v, any_thread(found & kHasTiny));
            if (kProducts > 1 && leads) leading.find(scores, n_begin, value_scale.by_pairs(), place());
            if constexpr (!kOneBuffer) load_next_k();
            // fence: pairs of weights are not made earlier, from which only a branch keeps compilers if output is wide
            if (!kWideOutput || n_next < keys.any.end) __syncwarp();
            if (sees && value_scale.by_pairs()) accumulate(shared.v, place(), value_scale, scores, o);
            else if (sees)
                accumulate_one_by_one(params, tile, n_begin, keys.count_from(n_begin), place(), scores, softmax, total);
            if constexpr (kOneBuffer) {
                __syncthreads();  // V has been multiplied
                load_next_k();
            }
            // right either way: sums may start again at any time
            if (n_next < keys.any.end && static_cast<int>(n_next - keys.any.begin) % (kTilesPerSum * kBlockN) == 0)
                total.take(o, softmax);
        }
        // right either way: nobody looks at the last rows again
        if (n_next < keys.any.end) found = shared.k.arrive(params.head_dim, kLeastExponent, kMostExponent);
    }
    const Place place(thread_index_again());
    if constexpr (kHasValues) leading.finish(params, tile, place, o, softmax, total);
    store_rows(params, tile, softmax, o, place);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_precise_float32(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
