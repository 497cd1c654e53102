// Which tiles of rows a block works on: one, or, where there are many for each multiprocessor, one after another, as
// persistent blocks do. The next one's place is found, and its queries and keys are loaded, while the last one's rows
// are finished.
#pragma once

#include "common/schedule.cuh"
#include "mma/key_walk.cuh"
#include "wgmma/pipe.cuh"

namespace cuflash {

constexpr int kPlaces = kWalksOn ? 2 : 1;  // of the block's tile, and the next one

// Blocks that walk on go from stop to stop: a tile each, or a pair of tiles, all alike where later rows see more keys:
// a tile of a head, from the last one on, and one of the head behind it, from the first one on. Half 2 i is the first
// tile of the block's i-th stop. Those of a packed sequence follow each other; nobody knows how many there are in all
// before they are looked for. Each of their rounds begins 0.62 of the grid farther on (the golden ratio), so that no
// block has all long tiles where sequences and rounds are equally long.
__device__ __forceinline__ bool map_half(const AttentionParams& params, int half, Segment& of_pair, TileMap& tile,
                                         TileKeys& keys, int& next) {
    const unsigned int round = half / 2, is_second = half % 2, first = round * gridDim.x;
    const unsigned int planes_of_stop = params.in_pairs ? 2 : 1;
    unsigned int plane, rest, last, planes;
    Segment segment = {};
    if constexpr (kVarlen) {
        unsigned int turned = blockIdx.x + (round * 159u % 256 * gridDim.x >> 8);
        if (turned >= gridDim.x) turned -= gridDim.x;
        planes = static_cast<unsigned int>(params.head_tiles);
        const unsigned int number = first + turned, plane_stops = params.in_pairs ? (planes + 1) / 2 : planes;
        if (is_second) {
            segment = of_pair;
        } else {
            if (!find_segment(params, number / plane_stops, segment)) return false;
            if (thread_index_again() % 32 == 0) of_pair = segment;
        }
        const unsigned int index = segment.tile * plane_stops + number % plane_stops;
        plane = index / segment.num_tiles * planes_of_stop, rest = index % segment.num_tiles,
        last = segment.num_tiles - 1;
    } else {
        const Divided stop(first + blockIdx.x, params.num_m_blocks);
        planes = num_planes(params);
        plane = stop.quotient * planes_of_stop, rest = stop.rest,
        last = static_cast<unsigned int>(params.num_m_blocks) - 1;
    }
    if (params.in_pairs && !is_second && plane + 1 < planes) next = half + 1;
    // right either way: a packed one that finds nothing
    else if (first + static_cast<long long>(gridDim.x) + (kVarlen ? 0 : blockIdx.x) < params.num_stops)
        next = half - is_second + 2;
    const PlaneTile tiles[2] = {{plane, last - rest}, {plane + 1, rest}}, at = is_second ? tiles[1] : tiles[0];
    if constexpr (kVarlen) return map_packed_tile(params, segment, at, 0, tile, keys);
    else return map_dense_tile(params, at, 0, tile, keys);
}

// Of three warpgroups each passes by tiles of keys that none of its rows sees. Of two it does not: one that multiplies
// alone is faster than other blocks, which then read the same keys from memory once more. At 64 features it costs more
// than it saves.
constexpr bool kPassesBy = kWalksOn && kConsumers == 3 && kHeadDim > 64;

__device__ __forceinline__ bool passes_by(const AttentionParams& params) {
    // right either way: keys that nobody sees are hidden
    return kPassesBy && (params.window_left < kOpenWindow || params.window_right < kOpenWindow);
}

// Of the tiles of keys that a block walks through, those that the rows of each warpgroup see.
template <bool kAreThere>
struct GroupWalks {
    __device__ __forceinline__ void find_parts(const AttentionParams&, const TileExtent&, const KeyWalk&) {}
    __device__ __forceinline__ void narrow(int, KeptWalk&, int&, int&) const {}
};
template <>
struct GroupWalks<true> {
    struct Part {
        int begin, end;
        int inner_begin, inner_end;  // those that all of its rows see
    };
    Part parts[kConsumers];

    // Called by all lanes of a warp, of which the first one has found what the block walks through.
    __device__ __forceinline__ void find_parts(const AttentionParams& params, const TileExtent& tile,
                                               const KeyWalk& walk) {
        __syncwarp();
        const int group = thread_index_again() % 32;
        if (group >= kConsumers) return;
        // right either way: rows behind the last are nobody's
        const int first_row = 64 * group, last_row = min(first_row + 63, tile.num_rows - 1);
        parts[group] = {};
        // right either way: rows behind the last are nobody's
        if (first_row > last_row) return;
        const KeyRange first = visible_keys(params, tile, find_row(params, tile, first_row).query);
        const KeyRange last = visible_keys(params, tile, find_row(params, tile, last_row).query);
        parts[group] = {walk.behind(last.end + kBlockN - 1), walk.behind(first.begin), walk.behind(first.end),
                        walk.behind(last.begin + kBlockN - 1)};
    }
    // Leaves a warpgroup's part of a walk, whose tiles are numbered from `begin` to `end`.
    __device__ __forceinline__ void narrow(int group, KeyWalk& walk, int& begin, int& end) const {
        const Part& part = parts[group];
        walk.inner_begin = begin + part.inner_begin, walk.inner_end = begin + part.inner_end;
        const int own_end = begin + uniform(part.end);
        walk.begin += static_cast<long long>(end - own_end) * kBlockN;
        walk.num_tiles = end = own_end;
        begin += uniform(part.begin);
    }
};

// Where a tile of rows lies, and the keys that they see.
struct Place : GroupWalks<kPassesBy> {
    TileMap tile;
    KeyWalk walk;
    int next;         // half of a stop that the block goes on with; 0: none
    int keys_before;  // tiles that it has walked through

    // Whether there was no tile left.
    __device__ __forceinline__ bool is_empty() const { return kVarlen && tile.num_rows == 0; }
    // Numbers of the tiles of keys, counted through all tiles of rows.
    __device__ __forceinline__ int begin() const { return kWalksOn ? keys_before : 0; }
    __device__ __forceinline__ int end() const { return begin() + walk.num_tiles; }
    // Called by all threads of a warp.
    __device__ __forceinline__ void find(const AttentionParams& params, int half, int new_keys_before,
                                         Segment& of_pair) {
        TileKeys keys;
        int next_half = 0;
        if (kWalksOn && kVarlen && thread_index_again() % 32 == 0) tile.num_rows = 0, next = 0;
        bool found;
        if constexpr (kWalksOn) found = map_half(params, half, of_pair, tile, keys, next_half);
        else found = map_block(params, tile, keys);
        if (found) walk = key_walk(keys), next = next_half, keys_before = new_keys_before;
        // right either way: nobody asks for them
        if (passes_by(params)) find_parts(params, tile, walk);
    }
};

}  // namespace cuflash
