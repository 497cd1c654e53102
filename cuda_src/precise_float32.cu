// Attention forward in single precision on the tensor cores for float16 (sm_80 and newer).
//
// Floats are multiplied as pairs of float16 (precise/pairs.cuh): three products make one that is as exact as a float's
// own, the sum of the seconds' product being below its rounding. precision="tf32" has the first alone.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, first to last, kBlockN at a time. K arrives during O += P V, V during S = Q K^T; behind
// them what has arrived is turned into pairs where it lies, unless prepare_pairs.cu has done so for all blocks.
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
#include "precise/leading_keys.cuh"
#include "precise/one_by_one.cuh"
#include "precise/output.cuh"
#include "precise/products.cuh"
#include "precise/scores.cuh"

namespace cuflash {

static_assert(kDtype == CUFLASH_FLOAT32);

// What a tile row needs for every tile of keys, looked up once: calls between the products would cost registers.
struct TileRow {
    KeyRange visible;
    const char* query;  // null behind the last row
};

struct RowsLookedUp {
    const TileRow (&rows)[kBlockM];
    const LogitRow* logits;

    __device__ __forceinline__ KeyRange visible(int row) const { return rows[row].visible; }
    __device__ __forceinline__ LogitRow logit(int row) const { return logits[row]; }
    __device__ __forceinline__ const char* query(int row) const { return rows[row].query; }
};

struct SharedTiles {
    PairRows<kBlockM, kHeadDim> q;
    KeyRows<kBlockN, kHeadDim> k;
    KeyRows<kBlockN, kHeadDimV> v;
    PartialScores partial[kWarpsPerRow > 1 ? kNumWarps : 1];
    TileRow rows[kBlockM];
    LogitRow logits[kBlockM];
    TileMap tile;
    PreparedKeys prepared;
    TileKeys keys;
};

constexpr unsigned int kAnyRow = 8;  // beside what is found in rows (precise/pairs.cuh)

// Kinds of rows of K that are not to be multiplied with Q by pairs, all kinds if rows of Q themselves are not. A tiny
// element, of which pairs lose digits, does no harm where no element of the other operand is tiny: there are larger
// products beside its own. Called by the whole block.
__device__ __forceinline__ unsigned int refused_kinds(unsigned int of_queries) {
    const bool tiny = any_thread(of_queries & kHasTiny), zero = any_thread(of_queries & kHasZero);
    // right either way: the slow way is right, too
    return any_thread(of_queries & kOutOfRange) ? ~0u : kOutOfRange | (tiny ? kHasZero : 0) | (zero ? kHasTiny : 0);
}

// Keys of the tile from `n_begin` on.
__device__ __forceinline__ int num_keys_of(const TileKeys& keys, long long n_begin) {
    // right either way: it only keeps the cast in range
    return static_cast<int>(min(keys.any.end - n_begin, static_cast<long long>(kBlockN)));
}

// Logits -> weights relative to the maxima of their rows. Returns whether a lane's weights in a row are those of a new
// maximum alone.
__device__ __forceinline__ bool weigh(Scores& scores, OnlineSoftmax<kRows>& softmax, Output& o) {
    float maxima[kRows];
    const bool grown = follow_maxima(scores, softmax, o, maxima);
    bool alone = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float tile_sum = 0;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            float& score = at(scores, r, i);
            score = exp2_approximate((score - maxima[r]) * 1.4426950408889634f);
            tile_sum += score;
        }
        softmax.row_sum[r] += tile_sum;
        // right either way: a key that leads may be looked for in vain
        alone |= tile_sum == 1;
    }
    // right either way: the same
    return grown && __any_sync(0xffffffffu, alone);
}

// What a block has on its way into shared memory.
struct Copies {
    const AttentionParams& params;
    SharedTiles& shared;

    // Rows that no query of the tile sees become zeros: they may hold anything, and 0 x NaN is NaN.
    __device__ __forceinline__ void load_k(long long n_begin) const {
        const char* rows = kPrepared ? shared.prepared.k + n_begin * shared.k.kRowBytes
                                     : shared.tile.k + n_begin * params.k_strides.row;
        shared.k.load(rows, params.k_strides, params.head_dim, shared.keys.any.end - n_begin);
    }
    __device__ __forceinline__ void load_v(long long n_begin) const {
        const char* rows = kPrepared ? shared.prepared.v + n_begin * shared.v.kRowBytes
                                     : shared.tile.v + n_begin * params.v_strides.row;
        shared.v.load(rows, params.v_strides, params.head_dim_v, shared.keys.any.end - n_begin);
    }
    // Called behind a barrier behind look_up_rows.
    __device__ __forceinline__ void load_q() const {
        shared.q.gather(params.head_dim, params.q_strides.column, [&](int row) { return shared.rows[row].query; });
    }
};

__device__ __forceinline__ void look_up_rows(const AttentionParams& params, SharedTiles& shared) {
    for (int i = threadIdx.x; i < kBlockM; i += kThreads) {
        const Row row = row_at(params, shared.tile, i);
        shared.rows[i] = {visible_keys(params, shared.tile, row.query), query_row(params, shared.tile, i)};
        if constexpr (kHasRowTerms) shared.logits[i] = logit_row(params, shared.tile, i);
    }
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    if (threadIdx.x < 32 && map_block(params, shared.tile, shared.keys)) {
        if constexpr (kPrepared) shared.prepared = prepared_keys(params, shared.tile);
    }
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
        refused = refused_kinds(shared.q.arrive(params.head_dim, kLeastExponent, kMostExponent));
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
        if constexpr (kHasValues) copies.load_v(n_begin);
        if (sees) {  // right either way: weights are 0 else
            if (by_pairs) multiply_qk(shared.q, shared.k, place(), scores);
            else multiply_qk_one_by_one(params, tile, rows, n_begin, num_keys_of(keys, n_begin), place(), scores);
            sum_scores(shared.partial, place(), scores);
        }
        if constexpr (!kHasValues) {
            __syncthreads();  // K has been multiplied
            load_next_k();
        }
        if (sees) {  // right either way: weights are 0 else
            scores_to_logits(params, tile, rows, keys, n_begin, place(), scores);
            leads = weigh(scores, softmax, o);
        }
        if constexpr (kHasValues) {
            found = shared.v.arrive(params.head_dim_v, value_scale.least(), value_scale.exponent()) & ~kHasZero;
            // Pairs of V are there, and K has been multiplied.
            // right either way: one that is found again
            if (any_thread(found)) value_scale.follow(shared.v, found);
            // right either way: it may be looked for in vain
            if (kProducts > 1 && leads) leading.find(scores, n_begin, value_scale.by_pairs(), place());
            load_next_k();
            // fence: pairs of weights are not made earlier
            if constexpr (kPrepared) __syncwarp();
            if (sees && value_scale.by_pairs()) accumulate(shared.v, place(), value_scale, scores, o);
            else if (sees)
                accumulate_one_by_one(params, tile, n_begin, num_keys_of(keys, n_begin), place(), scores, softmax,
                                      total);
            // right either way: a sum may be shorter
            if (static_cast<int>(n_next - keys.any.begin) % (kTilesPerSum * kBlockN) == 0) total.take(o, softmax);
        }
        // right either way: nobody multiplies what is behind the last key
        if (n_next < keys.any.end) found = shared.k.arrive(params.head_dim, kLeastExponent, kMostExponent);
    }
    const Place place(thread_index_again());
    if constexpr (kHasValues) {
        total.take(o, softmax);
        if constexpr (kProducts > 1) leading.complete(params, tile, place, total);
        total.give_back(o, softmax);
    }
    store_rows(params, tile, softmax, o, place);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_precise_float32(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
