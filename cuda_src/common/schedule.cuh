// Which tile a block works on, and which split of its keys.
#pragma once

#include "common/dense.cuh"
#include "common/mask.cuh"
#include "common/varlen.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// A tile by the number of its head, counted over all batches, and its own number there.
struct PlaneTile {
    unsigned int plane;
    unsigned int m_block;
};

__device__ __forceinline__ unsigned int num_planes(const AttentionParams& params) {
    return static_cast<unsigned int>(params.num_batches * params.head_tiles);
}

// Tiles follow each other head by head, from the first row on; or else so many heads take turns, those of their tiles
// first that have the most keys, which are the last ones.
__device__ __forceinline__ PlaneTile plane_tile(const AttentionParams& params, unsigned int tile_idx) {
    if (params.planes_at_once == 0) {  // right either way: another order
        const Divided place(tile_idx, params.num_m_blocks);
        return {place.quotient, place.rest};
    }
    const Divided turn(tile_idx, params.tiles_at_once);
    const unsigned int first_plane = turn.quotient * static_cast<unsigned int>(params.planes_at_once);
    const unsigned int planes = num_planes(params) - first_plane;
    Divided place(turn.rest, params.planes_at_once);
    if (planes < params.planes_at_once) place.quotient = turn.rest / planes, place.rest = turn.rest % planes;
    const unsigned int last = static_cast<unsigned int>(params.num_m_blocks) - 1;
    return {first_plane + place.rest, last - place.quotient};
}

__device__ __forceinline__ DensePlace dense_place(const AttentionParams& params, PlaneTile tile) {
    const Divided batch(tile.plane, params.head_tiles);
    return {batch.quotient, static_cast<int>(batch.rest * static_cast<unsigned int>(params.packed_heads)),
            tile.m_block};
}

// Leaves a tile one split of the keys that it sees: one more bound on what its rows see, so that kernels need no other
// loop, and rows that see nothing of it give 0 and -inf. Borders are multiples of kBlockN from key 0, for kernels that
// walk whole tiles from there; all splits but the last ones are equally long. With a size of their own they are the
// same keys for all rows.
__device__ __forceinline__ void take_split(const AttentionParams& params, unsigned int split, TileExtent& tile,
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
}

// Fills `tile` for a split of a tile of a dense call. Called by all threads of a warp; true for the first of them,
// which has `keys` too.
__device__ __forceinline__ bool map_dense_tile(const AttentionParams& params, PlaneTile plane_tile, unsigned int split,
                                               TileMap& tile, TileKeys& keys) {
    const int lane = thread_index_again() % 32;
    LaneArray array(params, lane);
    const DensePlace place = dense_place(params, plane_tile);
    // All lanes find what one of them needs: it then does not wait for their addresses.
    TileExtent extent = dense_extent(params, place);
    TileKeys keys_of_tile = tile_keys(params, extent);
    // right either way: one split is all keys
    if (params.num_splits > 1) take_split(params, split, extent, keys_of_tile);
    array.map(params, place, split, tile);
    __syncwarp();
    if (lane != 0) return false;
    static_cast<TileExtent&>(tile) = extent;
    keys = keys_of_tile;
    if (split != 0) tile.per_head.leave_out_sink();  // one more logit per row, not per split
    return true;
}

// The block's tile and, of those that have the same one, its split.
__device__ __forceinline__ Divided tile_of_block(const AttentionParams& params) {
    return Divided(static_cast<unsigned int>(params.first_block) + blockIdx.x, params.num_splits);
}

// Fills `tile` for this block, visible to others after a barrier; tile.num_rows is 0 if it has nothing to do. Called by
// all threads of warp 0; true for one of them, which has `keys` too.
//
// The splits of a tile are neighbours in the grid, which leaves tiles in their order, longest first. Other orders would
// not help L2: grids with splits are resident as a whole, or nearly.
__device__ __forceinline__ bool map_block(const AttentionParams& params, TileMap& tile, TileKeys& keys) {
    const Divided block = tile_of_block(params);
    if constexpr (kVarlen) {
        if (threadIdx.x == 0) tile.num_rows = 0;
        __syncwarp();
        TileMap mapped;
        if (!map_packed_tile(params, block.quotient, mapped)) return false;
        TileKeys keys_of_tile = tile_keys(params, mapped);
        if (params.num_splits > 1) {  // right either way: one split is all keys
            take_split(params, block.rest, mapped, keys_of_tile);
            mapped.out += block.rest * params.out_split_stride;
            mapped.lse += block.rest * params.lse_split_stride;
            if (block.rest != 0) mapped.per_head.leave_out_sink();  // one more logit per row, not per split
        }
        keys = keys_of_tile;
        tile = mapped;
        return true;
    } else {
        return map_dense_tile(params, plane_tile(params, block.quotient), block.rest, tile, keys);
    }
}

}  // namespace cuflash
