// The few rows of a block.
#pragma once

#include "common/mask.cuh"
#include "common/score.cuh"

namespace cuflash {

// What is looked up once for a row.
struct RowInfo {
    KeyRange visible;
    LogitRow logit;
};

// Called by all threads of a block.
__device__ __forceinline__ void look_up_row(const AttentionParams& params, const TileMap& tile, const KeyRange& seen,
                                            RowInfo (&rows)[kBlockM]) {
    // right either way: but rows of no sequence may have no slope
    if (threadIdx.x >= kBlockM || seen.begin >= seen.end) return;
    RowInfo& info = rows[threadIdx.x];
    info.visible = visible_keys(params, tile, find_row(params, tile, threadIdx.x).query);
    if constexpr (kHasRowTerms) info.logit = logit_row(params, tile, threadIdx.x);
}

}  // namespace cuflash
