// From the raw score q.k to the logit: scale, softcap, bias, ALiBi, then hidden keys, in the order of the contract.
#pragma once

#include "common/bias_mask.cuh"
#include "common/math.cuh"
#include "common/rows.cuh"

namespace cuflash {

constexpr bool kOnlyScale = !kHasRowTerms && !kHasSoftcap;              // logits are scores times the scale
constexpr bool kOnlySlopes = kHasAlibi && !kHasArrays && !kHasSoftcap;  // beside the scale

// What the logits of a row need beside its scores.
struct LogitRow {
    const char* bias;  // of key 0
    const char* mask;
    long long position;  // for ALiBi: that of the key nearest to the row
    Accumulator alibi_slope;
};

// Rows may stand far from all keys. Distances are counted from the nearest one, as those are as exact as their number
// allows; what this leaves out is the same for all keys of a row, and the end of the row takes it into account.
__device__ __forceinline__ long long nearest_key(const TileExtent& tile, long long position) {
    return min(max(position, 0LL), tile.seqlen_k - 1);
}

// A slope whose products with distances below `num_keys` do not overflow. Steeper ones single out the same key.
__device__ __forceinline__ Accumulator bounded_slope(long long num_keys, Accumulator slope) {
    return bounded(slope, largest_finite() / 2 / static_cast<Accumulator>(num_keys));
}

// What is to be taken off all logits of a row: ALiBi's share of its distance from the nearest key. The row must see a
// key, or at least be one of a sequence: others may have no slope.
__device__ __forceinline__ Accumulator logit_offset(const AttentionParams& params, const TileMap& tile,
                                                    const Row& row) {
    if constexpr (!kHasAlibi) return 0;
    const long long position = row.query + tile.query_offset;
    const long long distance = position - nearest_key(tile, position);
    const Accumulator offset =
        tile.per_head.slope(params, row.head) * static_cast<Accumulator>(distance < 0 ? -distance : distance);
    return bounded(offset, largest_finite() / 2);
}

// Rows behind the last one repeat it: their logits go nowhere.
__device__ __forceinline__ LogitRow logit_row(const AttentionParams& params, const TileMap& tile, int tile_row) {
    const Row row = row_at(params, tile, min(tile_row, tile.num_rows - 1));
    LogitRow result = {};
    result.position = nearest_key(tile, row.query + tile.query_offset);
    if constexpr (kBiasDtype != 0)
        result.bias = tile.bias + row.head * params.bias_strides.head + row.query * params.bias_strides.row;
    if constexpr (kHasMask)
        result.mask = tile.mask + row.head * params.mask_strides.head + row.query * params.mask_strides.row;
    if constexpr (kHasAlibi) result.alibi_slope = bounded_slope(tile.seqlen_k, tile.per_head.slope(params, row.head));
    return result;
}

// The same for one key tile. Columns count keys from the tile's first.
struct RowContext : BiasMaskRow {
    Accumulator alibi_slope;
    Accumulator distance;  // from column 0 to the position of the row
};

__device__ __forceinline__ RowContext row_context(const AttentionParams& params, const TileMap& tile,
                                                  const LogitRow& row, long long n_begin) {
    RowContext context = {};
    if constexpr (kBiasDtype != 0) context.bias = row.bias + n_begin * params.bias_strides.column;
    if constexpr (kHasMask) context.mask = row.mask + n_begin * params.mask_strides.column;
    if constexpr (kHasAlibi) {
        context.alibi_slope = row.alibi_slope;
        context.distance = static_cast<Accumulator>(row.position - n_begin);
    }
    // right either way: it only keeps the cast in range
    context.last_column = static_cast<int>(min(tile.seqlen_k - n_begin, static_cast<long long>(kBlockN))) - 1;
    return context;
}

// Scale and softcap, the part that needs no row.
struct ScoreScale {
    Accumulator scale;
    Accumulator softcap;
    Accumulator scale_by_softcap;
};

__device__ __forceinline__ ScoreScale score_scale(const AttentionParams& params) {
    ScoreScale result = {static_cast<Accumulator>(params.scale), 0, 0};
    if constexpr (kHasSoftcap) {
        result.softcap = static_cast<Accumulator>(params.softcap);
        // Beyond the range every score but 0 is capped.
        result.scale_by_softcap = bounded(static_cast<Accumulator>(params.scale_by_softcap), largest_finite());
    }
    return result;
}

__device__ __forceinline__ Accumulator scaled_score(const ScoreScale& by, Accumulator score) {
    const Accumulator scaled = score * by.scale;
    if constexpr (kHasSoftcap) {
        const Accumulator x = score * by.scale_by_softcap;                       // 0 for what is below the range
        constexpr Accumulator kLinear = sizeof(Accumulator) == 8 ? 1e-8 : 1e-4;  // up to here tanh(x) rounds to x
        // right either way: the tangent of so little rounds to it
        return absolute(x) < kLinear ? scaled : by.softcap * hyperbolic_tangent(x);
    }
    return scaled;
}

// Adds bias and ALiBi to scaled scores of kCount neighbouring columns, and hides what bias and mask hide. Without
// `kHideByBias` a key that the bias hides may be left with NaN, if its score is not finite.
template <bool kHideByBias, int kCount>
__device__ __forceinline__ void scores_to_row_logits(const RowContext& row, const RowColumns<kCount>& columns,
                                                     int column, Accumulator (&logits)[kCount]) {
    typename RowColumns<kCount>::Bias biases[kCount];
    unsigned char visible[kCount];
    if constexpr (kBiasDtype != 0) columns.biases.unpack(biases);
    if constexpr (kHasMask) columns.visible.unpack(visible);
    const Accumulator distance = row.distance - static_cast<Accumulator>(column);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
        bool hidden = false;
        if constexpr (kBiasDtype != 0) {
            const Accumulator bias = widen<kBiasDtype>(biases[e]);
            hidden = kHideByBias && bias == -infinity();
            logits[e] += bias;
        }
        if constexpr (kHasMask) hidden |= visible[e] == 0;
        if constexpr (kHasAlibi)
            logits[e] = multiply_add(-row.alibi_slope, absolute(distance - static_cast<Accumulator>(e)), logits[e]);
        if (hidden) logits[e] = -infinity();
    }
}

}  // namespace cuflash
