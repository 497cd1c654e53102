// From the raw score q.k to the logit: scale, softcap, bias, ALiBi, then hidden keys, in the order of the contract.
#pragma once

#include "common/mask.cuh"

namespace cuflash {

// What the logits of one row need beside their scores.
struct RowContext {
    const char* bias;
    const char* mask;
    Accumulator alibi_slope;
    long long position;
    KeyRange visible;
};

__device__ __forceinline__ RowContext row_context(const AttentionParams& params, const TileMap& tile, int tile_row) {
    // Rows behind the last one repeat it: their logits go nowhere, but bias and mask must be read inside the arrays.
    const int last_row = static_cast<int>(min(tile.num_rows - tile.row_begin, static_cast<long long>(kBlockM))) - 1;
    const Row row = row_at(params, tile, min(tile_row, last_row));
    RowContext context;
    if constexpr (kBiasDtype != 0) {
        context.bias = tile.bias + row.head * params.bias_strides.head + row.query * params.bias_strides.row;
    }
    if constexpr (kHasMask) {
        context.mask = tile.mask + row.head * params.mask_strides.head + row.query * params.mask_strides.row;
    }
    context.alibi_slope = 0;
    if (tile.alibi_slopes) {
        context.alibi_slope = load_float(tile.alibi_slopes + row.head * params.alibi_strides.head, params.alibi_dtype);
    }
    context.position = row.query + tile.query_offset;
    context.visible = visible_keys(params, tile, row.query);
    return context;
}

// Scale and softcap, the part that needs no row.
__device__ __forceinline__ Accumulator scaled_score(const AttentionParams& params, Accumulator score) {
    const Accumulator scaled = score * static_cast<Accumulator>(params.scale);
    if constexpr (kHasSoftcap) {
        const Accumulator softcap = static_cast<Accumulator>(params.softcap);
        return softcap * hyperbolic_tangent(scaled / softcap);
    }
    return scaled;
}

// Bias, ALiBi, mask array and visible range. `key` may lie outside the visible range; nothing is read for it then.
__device__ __forceinline__ Accumulator row_logit(const AttentionParams& params, const RowContext& row,
                                                 Accumulator scaled, long long key) {
    if (key < row.visible.begin || key >= row.visible.end) return -infinity();
    Accumulator logit = scaled;
    bool hidden = false;
    if constexpr (kBiasDtype != 0) {
        const Accumulator bias = load_as<kBiasDtype>(row.bias + key * params.bias_strides.column);
        hidden = bias == -infinity();
        logit += bias;
    }
    if (row.alibi_slope != 0) {
        const long long distance = row.position - key;
        logit -= row.alibi_slope * static_cast<Accumulator>(distance < 0 ? -distance : distance);
    }
    if constexpr (kHasMask) hidden |= row.mask[key * params.mask_strides.column] == 0;
    return hidden ? -infinity() : logit;
}

}  // namespace cuflash
