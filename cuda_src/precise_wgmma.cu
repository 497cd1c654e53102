// Attention forward in single precision on Hopper's tensor cores for float16: warpgroups multiply what other warps load
// (sm_90a).
//
// The arithmetic is that of precise_float32.cu: floats are multiplied as pairs of float16 (precise/pairs.cuh), those of
// K and V made by a launch before this one (prepare_pairs.cu), and tiles whose pairs would lose digits one by one.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, first to last, kBlockN at a time.
//
// Warps: two warpgroups own 64 rows each, from beginning to end, in whose registers scores, weights and output stay. Q,
// K and V are multiplied where they lie in shared memory. One more warpgroup loads K and V, kStages tiles ahead, and
// leaves most of its registers to the others. While one multiplies, the other computes weights.

#ifndef CUFLASH_DTYPE
#define CUFLASH_DTYPE CUFLASH_FLOAT32  // the only one
#endif
#ifndef CUFLASH_BLOCK_M
#define CUFLASH_BLOCK_M 128
#endif
#ifndef CUFLASH_BLOCK_N
#define CUFLASH_BLOCK_N 32
#endif
#ifndef CUFLASH_THREADS
#define CUFLASH_THREADS 384
#endif
#ifndef CUFLASH_STAGES
#define CUFLASH_STAGES 3
#endif
#ifndef CUFLASH_PREPARED
#define CUFLASH_PREPARED 1  // the only value
#endif
#ifndef CUFLASH_WARPGROUPS
#define CUFLASH_WARPGROUPS 1  // the only value
#endif

#include "common/schedule.cuh"
#include "precise/float32.cuh"
#include "precise/warpgroup_products.cuh"
#include "ptx/registers.cuh"
#include "wgmma/pipe.cuh"

namespace cuflash {

// What threads have of the registers with which a block begins, evenly: the loader what it needs, the others the rest.
constexpr int kAllRegisters = 65536 / kThreads / 8 * 8 * (kConsumers + 1), kLoaderRegisters = 48;
constexpr int kConsumerRegisters = (kAllRegisters - kLoaderRegisters) / kConsumers / 8 * 8;

// Whether S of the next tile is multiplied while weights of this one are computed, where there are registers for that.
constexpr bool kScoresAhead = kProducts == 1;

static_assert(kBlockM == 64 * kConsumers && kProducers == kGroupThreads && kConsumerRegisters <= 240);

struct SharedTiles {
    PairRows<kBlockM, kHeadDim> q;
    KeyRows<kBlockN, kHeadDim> k[kStages];
    KeyRows<kBlockN, kHeadDimV> v[kStages];
    TileRow rows[kBlockM];
    LogitRow logits[kBlockM];
    TileKeys keys;
    TileMap tile;
    ScoreScale scale;
    unsigned int refused;  // see refused_kinds
    Pipe<kStages> loaded_keys, loaded_values;
};

// Loads K and V, as buffers become free. Rows that no query of the tile sees become zeros: they may hold anything, and
// 0 x NaN is NaN.
__device__ __forceinline__ void load_all(const AttentionParams& params, SharedTiles& shared) {
    const int thread = thread_index_again() - kConsumers * kGroupThreads;
    const long long begin = shared.keys.any.begin, num_keys = shared.keys.any.end - begin;
    const char* k = prepared_from<kHeadDim>(params.prepared_k, shared.tile, begin);
    const char* v = prepared_from<kHeadDimV>(params.prepared_v, shared.tile, begin);
    int i = 0;
#pragma unroll 1
    for (long long left = num_keys; left > 0; left -= kBlockN, ++i) {
        // right either way: it only keeps the cast in range
        const int num_rows = static_cast<int>(min(left, static_cast<long long>(kBlockN)));
        shared.loaded_keys.wait_until_free(i);
        shared.k[i % kStages].load(k, thread, num_rows);
        shared.loaded_keys.arrive_with_copies(i);
        k += kBlockN * prepared_bytes(kHeadDim);
        if constexpr (kHasValues) {
            shared.loaded_values.wait_until_free(i);
            shared.v[i % kStages].load(v, thread, num_rows);
            shared.loaded_values.arrive_with_copies(i);
            v += kBlockN * prepared_bytes(kHeadDimV);
        }
    }
}

// Tiles of keys, by their numbers.
struct TileRange {
    int begin, end;
};

// The tile that a key is in, and how many there are up to the key in front of it.
__device__ __forceinline__ int tile_of(const TileKeys& keys, long long key) {
    return static_cast<int>((key - keys.any.begin) / kBlockN);
}
__device__ __forceinline__ int num_tiles_before(const TileKeys& keys, long long key) {
    return tile_of(keys, key + kBlockN - 1);
}

// Those in which a row of the warpgroup sees a key by its position: its first and its last row decide.
__device__ __forceinline__ TileRange tiles_seen(const SharedTiles& shared, int group) {
    // right either way: more tiles, of which they see nothing
    const int first = group * 64, last = min(64, shared.tile.num_rows - first) - 1;
    if (last < 0) return {0, 0};
    return {uniform(tile_of(shared.keys, shared.rows[first].visible.begin)),
            uniform(num_tiles_before(shared.keys, shared.rows[first + last].visible.end))};
}

// What a warp of a warpgroup has of its rows.
struct RowWarp {
    const AttentionParams& params;
    SharedTiles& shared;
    const Place& place;
    OnlineSoftmax<kRows>& softmax;
    Output& o;
    LeadingKeys& leading;
    OutputTotal& total;
    ValueScale& value_scale;

    __device__ __forceinline__ long long first_key(int i) const {
        return shared.keys.any.begin + i * static_cast<long long>(kBlockN);
    }
    __device__ __forceinline__ RowsLookedUp rows() const { return {shared.rows, shared.logits}; }
    __device__ __forceinline__ int num_keys(int i) const { return shared.keys.count_from(first_key(i)); }

    // Issues S = Q K^T of tile i by pairs.
    __device__ __forceinline__ void issue_scores(int i, ScoreSums& sums) const {
        shared.loaded_keys.wait_until_ready(i);
        fence_async_proxy();
        issue_qk(shared.q, shared.k[i % kStages], group_of_thread(), sums);
    }
    // Waits for that. What pairs are not to multiply, or not of these queries, is multiplied again.
    __device__ __forceinline__ void finish_scores(int i, ScoreSums& sums, Scores& scores) {
        const KeyRows<kBlockN, kHeadDim>& k = shared.k[i % kStages];
        finish_qk(shared.q, k, place, sums, scores);
        const unsigned int found = k.found_by_lane(place.lane, kLeastExponent, kMostExponent) | kAnyRow;
        // right either way: one by one is right for all, if slower
        if (__any_sync(0xffffffffu, found & shared.refused))
            multiply_qk_one_by_one(params, shared.tile, rows(), first_key(i), num_keys(i), place, scores);
    }
    // O += P V of tile i, whose weights may be those of new maxima alone.
    __device__ __forceinline__ void add_values(int i, bool leads, Scores& weights) {
        shared.loaded_values.wait_until_ready(i);
        KeyRows<kBlockN, kHeadDimV>& v = shared.v[i % kStages];
        const unsigned int found = v.found_by_lane(place.lane, value_scale.least(), value_scale.exponent()) & ~kHasZero;
        // right either way: the scale may follow at any time
        if (__any_sync(0xffffffffu, found)) value_scale.follow(v, __any_sync(0xffffffffu, found & kHasTiny));
        // right either way: they may be looked for in vain
        if (kProducts > 1 && leads) leading.find(weights, first_key(i), value_scale.by_pairs(), place);
        fence_async_proxy();
        if (value_scale.by_pairs()) accumulate(v, place, value_scale, weights, o);
        else accumulate_one_by_one(params, shared.tile, first_key(i), num_keys(i), place, weights, softmax, total);
        shared.loaded_values.release_read(i);
    }
    // Tiles that nobody of the warpgroup sees.
    __device__ __forceinline__ void pass_over(int begin, int end) {
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
            shared.loaded_keys.wait_until_ready(i);
            shared.loaded_keys.release_read(i);
            if constexpr (!kHasValues) continue;
            shared.loaded_values.wait_until_ready(i);
            shared.loaded_values.release_read(i);
        }
    }
    __device__ __forceinline__ void walk(TileRange seen, TileRange whole) {
        Scores scores;
        const int last = seen.end - 1;
        if (kScoresAhead && seen.begin <= last) {
            ScoreSums sums = {};
            issue_scores(seen.begin, sums);
            finish_scores(seen.begin, sums, scores);
            shared.loaded_keys.release_read(seen.begin);
        }
#pragma unroll 1
        for (int i = seen.begin; i <= last; ++i) {
            ScoreSums sums = {};
            const int next = kScoresAhead ? min(i + 1, last) : i;  // the last one's are multiplied once more
            issue_scores(next, sums);
            if constexpr (!kScoresAhead) {
                finish_scores(i, sums, scores);
                shared.loaded_keys.release_read(i);
            }
            const bool at_edge = i < whole.begin || i >= whole.end;
            scores_to_logits(params, shared.tile, rows(), shared.scale, at_edge, first_key(i), place, scores);
            const bool leads = weigh(scores, softmax, o);
            if constexpr (kHasValues) {
                add_values(i, leads, scores);
                // right either way: sums may start again at any time
                if (i < last && (i + 1) % kTilesPerSum == 0) total.take(o, softmax);
            }
            if constexpr (kScoresAhead) finish_scores(next, sums, scores);
            // right either way: nobody loads into the last one's buffer
            if (kScoresAhead && next > i) shared.loaded_keys.release_read(next);
        }
    }
};

// From the queries of a warpgroup's rows to their output.
__device__ __forceinline__ void attend(const AttentionParams& params, SharedTiles& shared) {
    const TileKeys& keys = shared.keys;
    const Place place(threadIdx.x);
    OnlineSoftmax<kRows> softmax;
    Output o = {};
    LeadingKeys leading;
    OutputTotal total;
    ValueScale value_scale = {};
    RowWarp own = {params, shared, place, softmax, o, leading, total, value_scale};
    if (keys.any.begin < keys.any.end) {
        look_up_rows(params, shared);
        barrier_wait(1, 32 * kNumWarps);
        shared.q.gather(params.head_dim, params.q_strides.column, [&](int row) { return shared.rows[row].query; });
        const unsigned int refused =
            refused_kinds(shared.q.arrive(params.head_dim, kLeastExponent, kMostExponent),
                          [](bool predicate) { return barrier_any(2, 32 * kNumWarps, predicate); });
        if (threadIdx.x == 0) shared.refused = refused;
        barrier_wait(1, 32 * kNumWarps);
        const int num_tiles = num_tiles_before(keys, keys.any.end);
        const TileRange seen = tiles_seen(shared, group_of_thread());
        own.pass_over(0, min(seen.begin, num_tiles));
        own.walk(seen, {num_tiles_before(keys, keys.all.begin), tile_of(keys, keys.all.end)});
        own.pass_over(max(seen.begin, seen.end), num_tiles);
    }
    if constexpr (kHasValues) leading.finish(params, shared.tile, place, o, softmax, total);
    store_rows(params, shared.tile, softmax, o, place);
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    if (threadIdx.x < 32) map_block(params, shared.tile, shared.keys);
    if (threadIdx.x == kThreads - 32) {
        shared.loaded_keys.init(kProducers / 32, kNumWarps);
        shared.loaded_values.init(kProducers / 32, kNumWarps);
        shared.scale = score_scale(params);
    }
    __syncthreads();
    if (shared.tile.num_rows == 0) return;
    if (group_of_thread() == kConsumers) {
        registers_release<kLoaderRegisters>();
        load_all(params, shared);
    } else {
        registers_take<kConsumerRegisters>();
        attend(params, shared);
    }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_precise_wgmma(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(1024) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
