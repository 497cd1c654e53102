// Which tile a block works on, and which split of its keys.
#pragma once

#include "common/dense.cuh"
#include "common/mask.cuh"
#include "common/varlen.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// A tile by the number of its head, counted over all batches, and its own number there.
struct PlaneTile {
    long long plane;
    long long m_block;
};

__device__ __forceinline__ long long num_planes(const AttentionParams& params) {
    return params.num_batches * params.head_tiles;
}

// Tiles follow each other head by head, from the first row on; or else so many heads take turns, those of their tiles
// first that have the most keys, which are the last ones.
__device__ __forceinline__ PlaneTile plane_tile(const AttentionParams& params, long long tile_idx) {
    long long plane, m_block;
    if (params.planes_at_once != 0) {
        // right either way: the division gives 0 too
        const long long turn = tile_idx < params.tiles_at_once ? 0 : divide(tile_idx, params.tiles_at_once);
        const long long first_plane = turn * params.planes_at_once;
        const long long planes = num_planes(params) - first_plane, rest = tile_idx - turn * params.tiles_at_once;
        const bool is_whole = planes >= params.planes_at_once;
        m_block = is_whole ? divide(rest, params.planes_at_once) : divide(rest, planes);
        plane = first_plane + rest - m_block * (is_whole ? params.planes_at_once : planes);
        m_block = params.num_m_blocks - 1 - m_block;
    } else {
        plane = divide(tile_idx, params.num_m_blocks);
        m_block = tile_idx - plane * params.num_m_blocks;
    }
    return {plane, m_block};
}

__device__ __forceinline__ DensePlace dense_place(const AttentionParams& params, PlaneTile tile) {
    // right either way: batch and head then come from divisions
    const bool counts_on = params.num_batches == 1 || params.heads_continue;
    // right either way: the other side divides
    const long long batch = counts_on ? 0 : divide(tile.plane, params.head_tiles);
    return {batch, static_cast<int>((tile.plane - batch * params.head_tiles) * params.packed_heads), tile.m_block};
}

// Leaves the block one split of the keys that its tile sees: one more bound on what its rows see, so that kernels need
// no other loop, and rows that see nothing of it give 0 and -inf. Borders are multiples of kBlockN from key 0, for
// kernels that walk whole tiles from there; all splits but the last ones are equally long. With a size of their own
// they are the same keys for all rows.
__device__ __forceinline__ void take_split(const AttentionParams& params, long long split, TileMap& tile,
                                           TileKeys& keys) {
    long long first_key = 0, num_keys = params.split_size;
    if (num_keys == 0) {
        const long long first = keys.any.begin / kBlockN;
        const long long num_tiles = (keys.any.end + kBlockN - 1) / kBlockN - first;
        num_keys = divide(num_tiles + params.num_splits - 1, params.num_splits) * kBlockN;
        first_key = first * kBlockN;
    }
    tile.key_begin = first_key + split * num_keys;
    tile.key_end = min(keys.any.end, tile.key_begin + num_keys);
    keys.any = {max(keys.any.begin, tile.key_begin), tile.key_end};
    keys.all.end = min(keys.all.end, tile.key_end);  // all may begin in front of the split, where nobody looks
    tile.out += split * params.out_split_stride;
    tile.lse += split * params.lse_split_stride;
    if (split != 0) tile.per_head.leave_out_sink();  // one more logit per row, not per split
}

// Fills `tile` for a tile of a dense call. Called by all threads of a warp; true for the first of them, which has
// `keys` too.
__device__ __forceinline__ bool map_dense_tile(const AttentionParams& params, PlaneTile plane_tile, TileMap& tile,
                                               TileKeys& keys) {
    const int lane = thread_index_again() % 32;
    LaneArray array(params, lane);
    const DensePlace place = dense_place(params, plane_tile);
    array.map(params, place, tile);
    __syncwarp();
    if (lane != 0) return false;
    const TileExtent extent = dense_extent(params, place);
    static_cast<TileExtent&>(tile) = extent;
    keys = tile_keys(params, extent);
    return true;
}

// Number of the block's tile; its splits have the same.
__device__ __forceinline__ long long tile_of_block(const AttentionParams& params) {
    const long long block = params.first_block + blockIdx.x;
    // right either way: a division by 1
    return params.num_splits > 1 ? divide(block, params.num_splits) : block;
}

// Fills `tile` for this block, visible to others after a barrier; tile.num_rows is 0 if it has nothing to do. Called by
// all threads of warp 0; true for one of them, which has `keys` too.
//
// The splits of a tile are neighbours in the grid, which leaves tiles in their order, longest first. Other orders would
// not help L2: grids with splits are resident as a whole, or nearly.
__device__ __forceinline__ bool map_block(const AttentionParams& params, TileMap& tile, TileKeys& keys) {
    const long long tile_idx = tile_of_block(params);
    if constexpr (kVarlen) {
        if (threadIdx.x == 0) tile.num_rows = 0;
        __syncwarp();
        TileMap mapped;
        if (!map_packed_tile(params, tile_idx, mapped)) return false;
        keys = tile_keys(params, mapped);
        tile = mapped;
    } else {
        if (!map_dense_tile(params, plane_tile(params, tile_idx), tile, keys)) return false;
    }
    // right either way: one split is all keys
    if (params.num_splits > 1)
        take_split(params, params.first_block + blockIdx.x - tile_idx * params.num_splits, tile, keys);
    return true;
}

}  // namespace cuflash
