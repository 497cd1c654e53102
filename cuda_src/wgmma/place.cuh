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
// pair. Pairs of a packed sequence follow each other; nobody knows how many there are in all before they are looked
// for. Each of their rounds begins with another block, 0.62 of them farther on, as sequences and rounds may be equally
// long: so shares are nearly alike.
__device__ __forceinline__ bool map_half(const AttentionParams& params, int half, Segment& of_pair, TileMap& tile,
                                         TileKeys& keys, int& next) {
    const unsigned int round = half / 2, is_second = half % 2, first = round * gridDim.x;
    unsigned int plane, rest, last, planes;
    Segment segment = {};
    if constexpr (kVarlen) {
        unsigned int turned = blockIdx.x + (round * 159u % 256 * gridDim.x >> 8);
        if (turned >= gridDim.x) turned -= gridDim.x;
        planes = static_cast<unsigned int>(params.head_tiles);
        const unsigned int number = first + turned, plane_pairs = (planes + 1) / 2;
        if (is_second) {
            segment = of_pair;
        } else {
            if (!find_segment(params, number / plane_pairs, segment)) return false;
            if (thread_index_again() % 32 == 0) of_pair = segment;
        }
        const unsigned int index = segment.tile * plane_pairs + number % plane_pairs;
        plane = index / segment.num_tiles * 2, rest = index % segment.num_tiles, last = segment.num_tiles - 1;
    } else {
        const Divided pair(first + blockIdx.x, params.num_m_blocks);
        planes = num_planes(params);
        plane = 2 * pair.quotient, rest = pair.rest, last = static_cast<unsigned int>(params.num_m_blocks) - 1;
    }
    if (!is_second && plane + 1 < planes) next = half + 1;
    // right either way: a packed one that finds nothing
    else if (first + static_cast<long long>(gridDim.x) + (kVarlen ? 0 : blockIdx.x) < params.num_pairs)
        next = half - is_second + 2;
    const PlaneTile tiles[2] = {{plane, last - rest}, {plane + 1, rest}}, at = is_second ? tiles[1] : tiles[0];
    if constexpr (kVarlen) return map_packed_tile(params, segment, at, 0, tile, keys);
    else return map_dense_tile(params, at, 0, tile, keys);
}

// Where a tile of rows lies, and the keys that they see.
struct Place {
    TileMap tile;
    KeyWalk walk;
    int next;         // half of a pair that the block goes on with; 0: none
    int keys_before;  // tiles that it has walked through

    // Whether there was no tile left.
    __device__ __forceinline__ bool is_empty() const { return kVarlen && tile.num_rows == 0; }
    __device__ __forceinline__ int begin() const { return kWalksOn ? keys_before : 0; }
    // Called by all threads of a warp.
    __device__ __forceinline__ void find(const AttentionParams& params, int half, int new_keys_before,
                                         Segment& of_pair) {
        TileKeys keys;
        int next_half = 0;
        if (kWalksOn && kVarlen && thread_index_again() % 32 == 0) tile.num_rows = 0, next = 0;
        if constexpr (kWalksOn) {
            if (!map_half(params, half, of_pair, tile, keys, next_half)) return;
        } else {
            if (!map_block(params, tile, keys)) return;
        }
        walk = key_walk(keys);
        next = next_half, keys_before = new_keys_before;
    }
};

}  // namespace cuflash
