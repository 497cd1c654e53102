// The tiles of keys that a block walks through, last to first.
#pragma once

#include "common/mask.cuh"
#include "mma/budget.cuh"

namespace cuflash {

// Tiles of keys are counted from the last; only that one may be shorter. Those from inner_begin to inner_end are seen
// by all rows.
struct KeyWalk {
    long long begin;  // first key
    int num_tiles;
    int last_keys;
    int inner_begin, inner_end;

    // The same walk, whose tiles are numbered from `first` on.
    __device__ __forceinline__ KeyWalk numbered_from(int first) const {
        return {begin, num_tiles + first, last_keys, inner_begin + first, inner_end + first};
    }
    __device__ __forceinline__ long long first_key(int index) const {
        return begin + static_cast<long long>(num_tiles - 1 - index) * kBlockN;
    }
    // Number of the first tile whose keys all lie in front of one, or of the one behind the last.
    __device__ __forceinline__ int behind(long long key) const {
        const long long in_front = max(key - begin, 0LL) / kBlockN;
        // right either way: it only keeps the cast in range
        return num_tiles - static_cast<int>(min(in_front, static_cast<long long>(num_tiles)));
    }
    // Whether some row may not see all keys of a tile.
    // right either way: what is seen is not hidden
    __device__ __forceinline__ bool at_edge(int index) const { return (index < inner_begin) | (index >= inner_end); }
};

__device__ __forceinline__ KeyWalk key_walk(const TileKeys& keys) {
    KeyWalk walk;
    walk.begin = keys.any.begin;
    const long long num_keys = max(keys.any.end - walk.begin, 0LL);
    walk.num_tiles = static_cast<int>((num_keys + kBlockN - 1) / kBlockN);
    walk.last_keys = static_cast<int>(num_keys - static_cast<long long>(max(walk.num_tiles - 1, 0)) * kBlockN);
    // right either way: it only keeps the cast in range
    walk.inner_begin = walk.num_tiles - static_cast<int>(max(keys.all.end - walk.begin, 0LL) / kBlockN);
    // right either way: it only keeps the cast in range
    walk.inner_end = walk.num_tiles - static_cast<int>(min((keys.all.begin - walk.begin + kBlockN - 1) / kBlockN,
                                                           static_cast<long long>(walk.num_tiles)));
    return walk;
}

// A walk that a thread keeps in registers, or else reads where the block has it.
template <bool kInRegisters>
struct WalkKeeper {
    using Type = KeyWalk;

    // With its tiles numbered from `first` on, which is 0 where it is read.
    static __device__ __forceinline__ KeyWalk keep(const KeyWalk& walk, int first) { return walk.numbered_from(first); }
};
template <>
struct WalkKeeper<false> {
    using Type = const KeyWalk&;

    static __device__ __forceinline__ const KeyWalk& keep(const KeyWalk& walk, int) { return walk; }
};
using KeptWalk = WalkKeeper<kKeepWalk>::Type;

}  // namespace cuflash
