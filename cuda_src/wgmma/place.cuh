// Which tiles of rows a block works on: one, or, where there are many for each multiprocessor, one after another. The
// next one's place is found, and its queries and keys are loaded, while the last one's rows are finished.
#pragma once

#include "common/schedule.cuh"
#include "mma/key_walk.cuh"
#include "wgmma/pipe.cuh"

namespace cuflash {

constexpr bool kWalksOn = CUFLASH_WALKS_ON;

constexpr int kPlaces = kWalksOn ? 2 : 1;  // of the block's tile, and the next one

// Blocks that walk on go from pair to pair of tiles, all alike where later rows see more keys: a tile of a head, from
// the last one on, and one of the head behind it, from the first one on. Half 2 i is the first tile of the block's i-th
// pair.
__device__ __forceinline__ bool map_half(const AttentionParams& params, int half, TileMap& tile, TileKeys& keys,
                                         int& next) {
    const unsigned int number = half / 2 * gridDim.x + blockIdx.x;
    const Divided pair(number, params.num_m_blocks);
    const unsigned int plane = 2 * pair.quotient, last = static_cast<unsigned int>(params.num_m_blocks) - 1;
    if (half % 2 == 0 && plane + 1 < num_planes(params)) next = half + 1;
    else if (number + static_cast<long long>(gridDim.x) < params.num_pairs) next = half / 2 * 2 + 2;
    const PlaneTile first = {plane, last - pair.rest}, second = {plane + 1, pair.rest};
    return map_dense_tile(params, half % 2 == 0 ? first : second, 0, tile, keys);
}

// Tiles of packed sequences, whose number nobody knows before they are looked for, are taken by turns, as they follow
// each other. Each turn begins with another block, 0.62 of them farther on, as sequences and turns may be equally long:
// so shares are nearly alike.
__device__ __forceinline__ bool map_turn(const AttentionParams& params, int turn, TileMap& tile, TileKeys& keys,
                                         int& next) {
    unsigned int place = blockIdx.x + (turn * 159u % 256 * gridDim.x >> 8);
    if (place >= gridDim.x) place -= gridDim.x;
    const unsigned int first = turn * gridDim.x;
    // right either way: one that finds nothing
    if (first + static_cast<long long>(gridDim.x) < params.num_pairs) next = turn + 1;
    TileMap mapped;
    if (!map_packed_tile(params, first + place, mapped)) return false;
    keys = tile_keys(params, mapped);
    tile = mapped;
    return true;
}

// Where a tile of rows lies, and the keys that they see.
struct Place {
    TileMap tile;
    KeyWalk walk;
    int next;         // half of a pair, or turn, that the block goes on with; 0: none
    int keys_before;  // tiles that it has walked through

    // Whether there was no tile left.
    __device__ __forceinline__ bool is_empty() const { return kVarlen && tile.num_rows == 0; }
    __device__ __forceinline__ int begin() const { return kWalksOn ? keys_before : 0; }
    // Called by all threads of a warp.
    __device__ __forceinline__ void find(const AttentionParams& params, int half, int new_keys_before) {
        TileKeys keys;
        int next_half = 0;
        if constexpr (kWalksOn && kVarlen) {
            if (thread_index_again() % 32 == 0) tile.num_rows = 0, next = 0;
            __syncwarp();
            if (!map_turn(params, half, tile, keys, next_half)) return;
        } else if constexpr (kWalksOn) {
            if (!map_half(params, half, tile, keys, next_half)) return;
        } else {
            if (!map_block(params, tile, keys)) return;
        }
        walk = key_walk(keys);
        next = next_half, keys_before = new_keys_before;
    }
};

}  // namespace cuflash
