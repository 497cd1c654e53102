// Tiles of K and V on their way into shared memory, for mma.sync: last tile first, rows in the order of
// mma/layout.cuh.
#pragma once

#include "common/load.cuh"
#include "common/cache.cuh"
#include "mma/layout.cuh"

namespace cuflash {

struct alignas(16) KeyTiles {
    Element k[kBlockN][kPitchK];
    Element v[kBlockN][kPitchV];
};
constexpr int kStageBytes = sizeof(KeyTiles);

// Lanes side by side that copy a row. As many as divide it into equal parts leave none without work; where these would
// be short or more than five, lanes cover the row in one pass or take parts twice as wide.
__host__ __device__ constexpr int lanes_of_row(int num_vectors) {
    const int dividing = num_vectors & -num_vectors, covering = power_of_two_above(num_vectors);
    if (dividing < 4 && 3 * num_vectors >= 2 * covering) return covering;
    return num_vectors > 5 * dividing ? 2 * dividing : dividing;
}

// What a thread copies of a tile of K or V, into one of the stages' buffers; nothing if there are none.
template <int kWidth, int kPitch, bool kIsThere = true>
struct TileCopy {
    static constexpr int kLoaders = kPingPong ? kThreads / 2 : kThreads;
    static constexpr int kVectors = kWidth / 8;
    static constexpr int kLanes = lanes_of_row(kVectors);
    static constexpr int kStep = kLoaders / kLanes;
    static constexpr int kColumnSteps = (kVectors + kLanes - 1) / kLanes;
    static constexpr int kNumPasses = (kBlockN + kStep - 1) / kStep * kColumnSteps;
    static constexpr bool kAllWork = kVectors % kLanes == 0 && kStep <= kBlockN;
    static constexpr bool kBufferInUse = kPingPong || kStages == 1;  // by others, when there is nothing to copy into it
    const char* source;
    SharedAddress target;
    int row, column;  // of the first vector
    Element* tile;
    int thread;
    int num_features;
    // Of pages, whose keys are looked up one by one: the call, the sequence, and the key of the first vector.
    const AttentionParams* call;
    const TileMap* map;
    long long first_key;

    // `array` begins with key 0, the tile with key `n_begin`; `buffer` is that of stage 0.
    __device__ __forceinline__ TileCopy(const AttentionParams& params, const TileMap& sequence, const char* array,
                                        const Strides& strides, long long n_begin, Element* buffer, int features,
                                        unsigned int thread_idx)
        : source(kPaged ? array : array + n_begin * strides.row),
          tile(buffer),
          thread(thread_idx % kLoaders),
          num_features(features),
          call(&params),
          map(&sequence),
          first_key(n_begin) {
        if constexpr (kVectorLoads) {
            row = thread / kLanes;
            column = thread % kLanes * 8;
            target = shared_address(tile) + (row * kPitch + column) * 2;
            source += (kPaged ? 0 : key_of(row) * strides.row) + column * 2;
            first_key += key_of(row);
        }
    }

    __device__ __forceinline__ void previous_tile(const Strides& strides) {
        if constexpr (kPaged) first_key -= kBlockN;
        else source -= kBlockN * strides.row;
    }

    // Copies the first tile, into stage 0: the one that may have fewer keys than others.
    __device__ __forceinline__ void load_first(const Strides& strides, int num_keys) const {
        load<false, 1>(strides, 0, 0, true, num_keys);
    }
    // Copies one of kParts parts of a whole tile, if it is wanted. Else a buffer that nobody uses may get zeros, which
    // takes no predicate.
    template <int kParts>
    __device__ __forceinline__ void load_part(const Strides& strides, int stage, bool wanted, int part) const {
        load<true, kParts>(strides, stage, part, !kBufferInUse || wanted, wanted ? kBlockN : 0);
    }

  private:
    // Where a key is, `shift` behind the first one. Keys that are not read have no entry in a table of pages.
    __device__ __forceinline__ const char* address(const Strides& strides, int shift, bool is_read) const {
        if constexpr (!kPaged) return source + shift * strides.row;
        else return is_read ? key_row(*call, *map, source, strides, first_key + shift) : source;
    }
    // Keys from `num_keys` on become zeros: they may hold anything, and 0 x NaN is NaN. `kWhole`: all or none do.
    template <bool kWhole, int kParts>
    __device__ __forceinline__ void load(const Strides& strides, int stage, int part, bool issued, int num_keys) const {
        if constexpr (!kIsThere) return;
        if constexpr (kVectorLoads) {
#pragma unroll
            for (int pass = 0; pass < kNumPasses; ++pass) {
                if (pass * kParts / kNumPasses != part) continue;
                const int first_row = pass / kColumnSteps * kStep, shift = key_of(first_row);
                const int first_column = pass % kColumnSteps * kLanes * 8;
                const bool is_key = kWhole ? kBufferInUse || num_keys > 0 : key_of(row) + shift < num_keys;
                const bool has_work = kAllWork || (row < kBlockN && column + first_column < kWidth);
                cp_async_16_if(issued && has_work,
                               target + stage * kStageBytes + first_row * 2 * kPitch + first_column * 2,
                               address(strides, shift, kWhole ? num_keys > 0 : is_key) + first_column * 2,
                               column + first_column < num_features && is_key);
            }
        } else if (part == 0 &&  // right either way: the same elements once more
                   issued) {
#pragma unroll 4
            for (int element = thread; element < kBlockN * kWidth; element += kLoaders) {
                const int idx = element / kWidth, feature = element % kWidth, key = key_of(idx);
                const bool valid = key < num_keys && feature < num_features;
                const char* place = address(strides, key, valid) + feature * strides.column;
                tile[stage * (kStageBytes / 2) + idx * kPitch + feature] =
                    valid ? load_bits<Element>(place) : Element(0);
            }
        }
    }
};

}  // namespace cuflash
