// Which tile a block works on, and which split of its keys.
#pragma once

#include "common/mask.cuh"
#include "common/varlen.cuh"

namespace cuflash {

// A tile by the number of its head, counted over all batches or in its sequence, and its own number there.
struct PlaneTile {
    unsigned int plane;
    unsigned int m_block;
};

__device__ __forceinline__ unsigned int num_planes(const AttentionParams& params) {
    return static_cast<unsigned int>(params.num_batches * params.head_tiles);
}

// So many heads take turns, those of their tiles first that have the most keys, which are the last ones; where fewer
// are left, one follows the other. Like all of a place but what few calls need it is found without a branch: a block
// that begins waits for arguments and for instructions behind a jump, 60 to 250 clocks each, and not where they follow.
__device__ __forceinline__ PlaneTile plane_tile(const AttentionParams& params, unsigned int tile_idx) {
    const unsigned int at_once = static_cast<unsigned int>(params.planes_at_once);
    const Divided turn(tile_idx, params.tiles_at_once);
    const unsigned int first_plane = turn.quotient * at_once;
    const Divided in_turns(turn.rest, params.planes_at_once), in_a_row(turn.rest, params.num_m_blocks);
    // right either way: another order
    const bool take_turns = num_planes(params) - first_plane >= at_once;
    const unsigned int plane = take_turns ? in_turns.rest : in_a_row.quotient;
    const unsigned int from_last = take_turns ? in_turns.quotient : in_a_row.rest;
    return {first_plane + plane, static_cast<unsigned int>(params.num_m_blocks) - 1 - from_last};
}

// A tile of a packed sequence, given one of its segment and a head: all heads take turns, or so many of them.
__device__ __forceinline__ PlaneTile plane_tile(const AttentionParams& params, const Segment& segment,
                                                unsigned int plane) {
    const unsigned int num_tiles = segment.num_tiles, num_planes = static_cast<unsigned int>(params.head_tiles);
    const unsigned int at_once = static_cast<unsigned int>(params.planes_at_once);
    // right either way: another order
    if (at_once >= num_planes) return {plane, num_tiles - 1 - segment.tile};
    const unsigned int tile_idx = segment.tile * num_planes + plane;
    const unsigned int first_plane = tile_idx / (num_tiles * at_once) * at_once;
    const unsigned int planes = min(at_once, num_planes - first_plane), rest = tile_idx - first_plane * num_tiles;
    return {first_plane + rest % planes, num_tiles - 1 - rest / planes};
}

// Leaves a tile one split of the keys that it sees: one more bound on what its rows see, so that kernels need no other
// loop, and rows that see nothing of it give 0 and -inf. Keys that the tile sees are shared out in whole tiles from key
// 0, so that all splits but the last ones are equally long; where batches have lengths of their own, short ones by
// fewer splits. Or splits have a size, and are the same keys for all rows.
__device__ __forceinline__ void take_split(const AttentionParams& params, unsigned int split, TileExtent& tile,
                                           TileKeys& keys) {
    const long long first = keys.any.begin / kBlockN;
    const long long num_tiles = (keys.any.end + kBlockN - 1) / kBlockN - first;
    const auto shared_by = [&](const Divisor& num_splits) {
        const unsigned int enough = static_cast<unsigned int>(num_tiles + num_splits - 1);
        return static_cast<long long>(Divided(enough, num_splits).quotient) * kBlockN;
    };
    long long share = shared_by(params.num_splits);
    if constexpr (kHasLengths) {
        // right either way: other borders
        const long long largest = min(shared_by(params.even_splits), params.largest_split);
        share = max(share, largest);  // right either way: other borders
    }
    const bool are_equal = params.split_size == 0;
    // right either way: other borders, and other bits
    const long long num_keys = are_equal ? share : params.split_size, first_key = are_equal ? first * kBlockN : 0;
    tile.key_begin = first_key + split * num_keys;
    tile.key_end = min(keys.any.end, tile.key_begin + num_keys);
    keys.any = {max(keys.any.begin, tile.key_begin), tile.key_end};
    keys.all.end = min(keys.all.end, tile.key_end);  // all may begin in front of the split, where nobody looks
}

// Fills `tile` for a split of a tile. Called by all lanes of a warp, which have found what one of them needs: it then
// does not wait for their addresses. True for the first one, which has `keys` too.
__device__ __forceinline__ bool fill_tile(const AttentionParams& params, LaneArray& array, const TilePlace& place,
                                          TileExtent extent, bool is_sequence, unsigned int split, TileMap& tile,
                                          TileKeys& keys) {
    TileKeys keys_of_tile = tile_keys(params, extent);
    // right either way: one split is all keys
    if (params.num_splits > 1) take_split(params, split, extent, keys_of_tile);
    array.map(params, place, split, tile);
    __syncwarp();
    if (array.number != 0) return false;
    static_cast<TileExtent&>(tile) = extent;
    keys = keys_of_tile;
    // One more logit per row, not per split; rows that belong to no sequence have none.
    const bool knows_sink = kHasRowOffset || split == 0;
    if (!has_sink_per_head(params) || !knows_sink || !is_sequence) tile.per_head.leave_out_sink();
    tile.set_first_split(split == 0);
    if constexpr (kPrepared) {
        const unsigned int heads_before =
            kVarlen ? 0 : place.batch * static_cast<unsigned int>(params.head_tiles * params.packed_heads);
        const Divided head_kv(heads_before + place.head, params.group_size);
        tile.set_first_prepared(head_kv.quotient * params.seqlen_k + (kVarlen ? place.first_key : 0));
    }
    return true;
}

// Fills `tile` for a split of a tile of a dense call, as `fill_tile` does.
__device__ __forceinline__ bool map_dense_tile(const AttentionParams& params, PlaneTile at, unsigned int split,
                                               TileMap& tile, TileKeys& keys) {
    LaneArray array(params, thread_index_again() % 32);
    const Divided batch(at.plane, params.head_tiles);
    const TilePlace place = {batch.quotient,
                             static_cast<int>(batch.rest * static_cast<unsigned int>(params.packed_heads)), at.m_block};
    return fill_tile(params, array, place, dense_extent(params, place), true, split, tile, keys);
}

// The same for one of a packed sequence.
__device__ __forceinline__ bool map_packed_tile(const AttentionParams& params, const Segment& segment, PlaneTile at,
                                                unsigned int split, TileMap& tile, TileKeys& keys) {
    LaneArray array(params, thread_index_again() % 32);
    const PackedTile packed(params, segment, at.plane, at.m_block);
    return fill_tile(params, array, packed.place, packed.extent, packed.is_sequence, split, tile, keys);
}

// The block's tile and, of those that have the same one, its split.
__device__ __forceinline__ Divided tile_of_block(const AttentionParams& params) {
    return Divided(static_cast<unsigned int>(params.first_block) + blockIdx.x, params.num_splits);
}

// Fills `tile` for this block, visible to others after a barrier; tile.num_rows is 0 if it has nothing to do. Called by
// all threads of warp 0; true for one of them, which has `keys` too.
//
// The splits of a tile are neighbours in the grid, which leaves tiles in their order, longest first.
__device__ __forceinline__ bool map_block(const AttentionParams& params, TileMap& tile, TileKeys& keys) {
    const Divided block = tile_of_block(params);
    if constexpr (kVarlen) {
        if (threadIdx.x == 0) tile.num_rows = 0;
        const Divided number(block.quotient, params.head_tiles);
        Segment segment;
        if (!find_segment(params, number.quotient, segment)) return false;
        return map_packed_tile(params, segment, plane_tile(params, segment, number.rest), block.rest, tile, keys);
    } else {
        return map_dense_tile(params, plane_tile(params, block.quotient), block.rest, tile, keys);
    }
}

}  // namespace cuflash
