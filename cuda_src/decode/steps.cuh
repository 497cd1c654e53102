// Which keys a warp of a block takes, where all have the same rows and each takes other keys.
#pragma once

#include "common/mask.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// Warps begin in front of the first key, and end nowhere if there is none. What is known here costs no turn.
__device__ __forceinline__ void begin_in_front(TileKeys& keys) {
    keys.all.begin = max(keys.any.begin, keys.all.begin);
    if (keys.any.begin >= keys.any.end) keys.any.end = 0;
}

// The keys of a step that some row sees, by their numbers there. A step in front of them has the first one behind it.
struct StepKeys {
    int first, last;

    __device__ __forceinline__ int nearest(int key) const { return max(min(key, last), first); }
};

// The steps of one of kShares warps, or pairs of warps, each kBlockN keys, so many keys apart. Which one has a key
// depends on the key alone, so that a row is summed up alike wherever its block begins.
template <int kShares>
struct Steps {
    static constexpr int kApart = kShares * kBlockN;
    long long begin;  // key of the first one
    int count;        // all lanes know that it is the same in each
    int first;        // the first key that some row sees, counted from there
    int last_seen;    // the last one, counted from the last step

    __device__ __forceinline__ Steps(const KeyRange& seen, int share)
        : begin((seen.begin / kApart * kShares + share) * kBlockN) {
        const unsigned long long rest = seen.end - 1 - begin;
        count = uniform(begin < seen.end ? static_cast<int>(rest / kApart) + 1 : 0);
        first = static_cast<int>(seen.begin - begin);
        last_seen = static_cast<int>(rest % kApart);
    }
    // The last key that some row sees, where so many steps are left; behind the last step the first one.
    __device__ __forceinline__ int last(int left) const {
        if (left > 1) return kBlockN - 1;
        return left == 1 ? last_seen : 0;  // right either way: others are there, too
    }
};

}  // namespace cuflash
