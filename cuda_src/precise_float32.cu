// Attention forward in single precision on the tensor cores for float16 (sm_80 and newer).
//
// Floats are multiplied as pairs of float16 (precise/pairs.cuh): three products make one that is as exact as a float's
// own, the sum of the seconds' product being below its rounding. precision="tf32" has the first alone.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, first to last, kBlockN at a time. K arrives during O += P V, V during S = Q K^T; behind
// them what has arrived is turned into pairs where it lies.
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
#include "precise/prepared_rows.cuh"
#include "precise/scores.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

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
constexpr int kVotes = 15;           // number of the barrier that counts what threads have found

__device__ __forceinline__ bool any_thread(bool predicate) { return barrier_any(kVotes, kThreads, predicate); }

// Kinds of rows of K that are not to be multiplied with Q by pairs, all kinds if rows of Q themselves are not. A tiny
// element, of which pairs lose digits, does no harm where no element of the other operand is tiny: there are larger
// products beside its own. Called by the whole block.
__device__ __forceinline__ unsigned int refused_kinds(unsigned int of_queries) {
    const bool tiny = any_thread(of_queries & kHasTiny), zero = any_thread(of_queries & kHasZero);
    return any_thread(of_queries & kOutOfRange) ? ~0u : kOutOfRange | (tiny ? kHasZero : 0) | (zero ? kHasTiny : 0);
}

// Weights are multiplied by the scales of their rows of V, relative to one that is not below any of them.
struct ValueScale {
    static constexpr unsigned int kRange = 26;  // in bits: lower ones would cost weights their digits
    static constexpr unsigned int kReserve = 2;
    unsigned int exponent;  // 0: the rows of the tile are not to be multiplied by pairs

    __device__ __forceinline__ bool by_pairs() const { return exponent != 0; }
    __device__ __forceinline__ unsigned int least() const { return max(exponent, kLeastExponent + kRange) - kRange; }
    // Finds another one for a tile with rows out of range, or tiny elements. Called by the whole block.
    __device__ __forceinline__ void follow(const KeyRows<kBlockN, kHeadDimV>& v, unsigned int found) {
        unsigned int smallest = ~0u, largest = kLeastExponent;
#pragma unroll 1
        for (int row = 0; row < kBlockN; ++row) {
            const unsigned int of_row = __float_as_uint(v.scale(row)) >> 23;
            if (of_row != 0) smallest = min(smallest, of_row), largest = max(largest, of_row);
        }
        exponent = largest + kReserve;
        if (any_thread((found & kHasTiny) || smallest < least() || largest > kMostExponent)) exponent = 0;
    }
};

// Keys of the tile from `n_begin` on.
__device__ __forceinline__ int num_keys_of(const TileKeys& keys, long long n_begin) {
    // right either way: it only keeps the cast in range
    return static_cast<int>(min(keys.any.end - n_begin, static_cast<long long>(kBlockN)));
}

using Fragment = unsigned int[4];

// first += A B of the firsts of pairs, second += the two products of a first and a second. A has 16 rows, B 8 columns.
__device__ __forceinline__ void multiply_pairs(float (&first)[4], float (&second)[4], const Fragment (&a)[2],
                                               const unsigned int (&b_first)[2], const unsigned int (&b_second)[2]) {
    mma_m16n8k16<false>(first, a[0], b_first);
    if constexpr (kProducts > 1) {
        mma_m16n8k16<false>(second, a[0], b_second);
        mma_m16n8k16<false>(second, a[1], b_first);
    }
}

// scores = Q K^T, of the features that the warp sums over; so many keys at a time as there are registers for.
__device__ __forceinline__ void multiply_qk(PairRows<kBlockM, kHeadDim>& q_rows, KeyRows<kBlockN, kHeadDim>& k_rows,
                                            const Place& place, Scores& scores) {
    constexpr int kNumSteps = (kSteps + kWarpsPerRow - 1) / kWarpsPerRow;
    const SharedAddress q =
        shared_address(q_rows.rows[place.group * kRowsPerWarp + place.lane % 16]) + place.lane / 16 * 16;
    const SharedAddress k = shared_address(k_rows.rows[place.lane / 16 * 8 + place.lane % 8]) + place.lane / 8 % 2 * 16;
    constexpr int kAtOnce = kPrepared || kKeyTiles < 4 ? kKeyTiles : 4;
#pragma unroll
    for (int first = 0; first < kKeyTiles; first += kAtOnce) {
        float sums[2][kAtOnce][4] = {};
#pragma unroll(kNumSteps <= 8 ? kNumSteps : 4)
        for (int i = 0; i < kNumSteps; ++i) {
            const int step = i * kWarpsPerRow + place.share;
            // fence: nothing is fetched further ahead
            if constexpr (!kPrepared || kProducts > 1)
                __syncwarp();  // the compiler would fetch more than it has registers for
            if (kSteps % kWarpsPerRow != 0 && step >= kSteps) continue;
            Fragment queries[2];
            ldmatrix_x4(queries[0], q + step * 32);
            if constexpr (kProducts > 1) ldmatrix_x4(queries[1], q + q_rows.kSecond + step * 32);
#pragma unroll
            for (int n = 0; n < kAtOnce; n += 2) {
                const SharedAddress keys = k + (first + n) * 8 * k_rows.kRowBytes + step * 32;
                Fragment firsts, seconds = {};
                ldmatrix_x4(firsts, keys);
                if constexpr (kProducts > 1) ldmatrix_x4(seconds, keys + k_rows.kSecond);
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    multiply_pairs(sums[0][n + e], sums[1][n + e], queries, {firsts[2 * e], firsts[2 * e + 1]},
                                   {seconds[2 * e], seconds[2 * e + 1]});
            }
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[first + n][i] = sums[0][n][i];
                if constexpr (kProducts > 1)
                    scores[first + n][i] = multiply_add(sums[1][n][i], 1 / kPairStep, sums[0][n][i]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float scale = q_rows.scale(place.tile_row(r));
#pragma unroll
        for (int i = 0; i < kColumns; ++i) at(scores, r, i) *= scale * (k_rows.scale(place.column(i)) * kUnscaled);
    }
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
        alone |= tile_sum == 1;
    }
    return grown && __any_sync(0xffffffffu, alone);
}

// O += P V, of the warp's features.
__device__ __forceinline__ void accumulate(KeyRows<kBlockN, kHeadDimV>& v_rows, const Place& place,
                                           const ValueScale& scale, Scores& weights, Output& o) {
    constexpr int kStepsV = kBlockN / 16, kAtOnce = kPrepared && kProducts == 1 ? 4 : 2;
    Fragment p[kStepsV][2];
    const float relative = __uint_as_float((254 + kPairBits - scale.exponent) << 23);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
        float scales[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) scales[e] = v_rows.scale(place.column(2 * n + e)) * relative;
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            pair_of(at(weights, r, 2 * n) * scales[0], at(weights, r, 2 * n + 1) * scales[1],
                    p[n / 2][0][n % 2 * 2 + r], p[n / 2][1][n % 2 * 2 + r]);
    }
    const SharedAddress v =
        shared_address(v_rows.rows[place.lane % 16]) + (place.share * kWarpFeaturesV + place.lane / 16 * 8) * 2;
    const float unit = __uint_as_float(scale.exponent << 23) * kUnscaled, second_unit = unit / kPairStep;
#pragma unroll
    for (int f = 0; f < kFeatureTiles; f += kAtOnce) {
        float sums[2][kAtOnce][4] = {};
#pragma unroll
        for (int step = 0; step < kStepsV; ++step) {
            // fence: nothing is fetched further ahead
            if constexpr (!kPrepared || kProducts > 1)
                __syncwarp();  // the compiler would fetch more than it has registers for
#pragma unroll
            for (int g = 0; g < kAtOnce; g += 2) {
                const SharedAddress values = v + step * 16 * v_rows.kRowBytes + (f + g) * 16;
                Fragment firsts, seconds = {};
                ldmatrix_x4_transposed(firsts, values);
                if constexpr (kProducts > 1) ldmatrix_x4_transposed(seconds, values + v_rows.kSecond);
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    multiply_pairs(sums[0][g + i], sums[1][g + i], p[step], {firsts[2 * i], firsts[2 * i + 1]},
                                   {seconds[2 * i], seconds[2 * i + 1]});
            }
        }
#pragma unroll
        for (int g = 0; g < kAtOnce; ++g) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& value = o[f + g][i];
                if constexpr (kProducts > 1) value = multiply_add(sums[1][g][i], second_unit, value);
                value = multiply_add(sums[0][g][i], unit, value);
            }
        }
    }
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
    unsigned int found = 0;
    unsigned int refused = 0;
    ValueScale value_scale = {0};
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
    for (int i = 0; keys.any.begin + static_cast<long long>(i) * kBlockN < keys.any.end; ++i) {
        const long long n_begin = keys.any.begin + static_cast<long long>(i) * kBlockN;
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
            found = shared.v.arrive(params.head_dim_v, value_scale.least(), value_scale.exponent) & ~kHasZero;
            // Pairs of V are there, and K has been multiplied.
            if (any_thread(found)) value_scale.follow(shared.v, found);
            if (kProducts > 1 && leads) leading.find(scores, n_begin, value_scale.by_pairs(), place());
            load_next_k();
            // fence: pairs of weights are not made earlier
            if constexpr (kPrepared) __syncwarp();
            if (sees && value_scale.by_pairs()) accumulate(shared.v, place(), value_scale, scores, o);
            else if (sees)
                accumulate_one_by_one(params, tile, n_begin, num_keys_of(keys, n_begin), place(), scores, softmax,
                                      total);
            if ((i + 1) % kTilesPerSum == 0) total.take(o, softmax);
        }
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
