// Steps of attention in single precision that warps and warpgroups have in common: what a row needs, which pairs are
// multiplied, and how logits become weights.
#pragma once

#include "precise/leading_keys.cuh"
#include "precise/one_by_one.cuh"
#include "precise/output.cuh"
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

template <typename SharedTiles>
__device__ __forceinline__ void look_up_rows(const AttentionParams& params, SharedTiles& shared) {
    for (int i = threadIdx.x; i < kBlockM; i += 32 * kNumWarps) {
        const Row row = row_at(params, shared.tile, i);
        shared.rows[i] = {visible_keys(params, shared.tile, row.query), query_row(params, shared.tile, i)};
        if constexpr (kHasRowTerms) shared.logits[i] = logit_row(params, shared.tile, i);
    }
}

constexpr unsigned int kAnyRow = 8;  // beside what is found in rows (precise/pairs.cuh)

// Kinds of rows of K that are not to be multiplied with Q by pairs, all kinds if rows of Q themselves are not. A tiny
// element, of which pairs lose digits, does no harm where no element of the other operand is tiny: there are larger
// products beside its own. `any` tells whether something holds for any thread that has rows of Q.
template <typename Any>
__device__ __forceinline__ unsigned int refused_kinds(unsigned int of_queries, Any any) {
    const bool tiny = any(of_queries & kHasTiny), zero = any(of_queries & kHasZero);
    // right either way: one by one is right for all, if slower
    return any(of_queries & kOutOfRange) ? ~0u : kOutOfRange | (tiny ? kHasZero : 0) | (zero ? kHasTiny : 0);
}

// Logits -> weights relative to the maxima of their rows. Returns whether a lane's weights in a row are those of a new
// maximum alone.
__device__ __forceinline__ bool weigh(Scores& scores, OnlineSoftmax<kRows>& softmax, Output& o) {
    float maxima[kRows];
    find_maxima(scores, maxima);
    const bool grown = follow_maxima(maxima, softmax, o);
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
        alone |= tile_sum == 1;  // right either way: leading keys may be looked for in vain
    }
    // right either way: leading keys may be looked for in vain
    return grown && __any_sync(0xffffffffu, alone);
}

}  // namespace cuflash
