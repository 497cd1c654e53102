// Tiles of K and V on their way into shared memory, for mma.sync: last tile first, rows in the order of mma_tile.cuh.
#pragma once

#include "common/mma_tile.cuh"
#include "common/params.cuh"

namespace cuflash {

struct alignas(16) KeyTiles {
    Element k[kBlockN][kPitchK];
    Element v[kBlockN][kPitchV];
};
constexpr int kStageBytes = sizeof(KeyTiles);

// What a thread copies of a tile of K or V, into one of the stages' buffers.
template <int kWidth, int kPitch>
struct TileCopy {
    static constexpr int kLoaders = kStaggered ? kThreads / 2 : kThreads;
    static constexpr int kVectors = kWidth / 8;
    static constexpr int kLanes = power_of_two_above(kVectors);
    static constexpr int kStep = kLoaders / kLanes;
    static constexpr bool kAllWork = kLanes == kVectors && kStep <= kBlockN;
    const char* source;
    SharedAddress target;
    int row, column;  // of the first vector
    Element* tile;
    int thread;
    int num_features;

    // `array` begins with key 0, the tile with key `n_begin`; `buffer` is that of stage 0.
    __device__ __forceinline__ TileCopy(const char* array, const Strides& strides, long long n_begin, Element* buffer,
                                        int features, unsigned int thread_idx)
        : source(array + n_begin * strides.row), tile(buffer), thread(thread_idx % kLoaders), num_features(features) {
        if constexpr (kVectorLoads) {
            row = thread / kLanes;
            column = thread % kLanes * 8;
            target = shared_address(tile) + (row * kPitch + column) * 2;
            source += key_of(row) * strides.row + column * 2;
        }
    }

    __device__ __forceinline__ void previous_tile(const Strides& strides) { source -= kBlockN * strides.row; }

    // Copies one of kParts parts. Keys from `num_keys` on become zeros: they may hold anything, and 0 x NaN is NaN.
    // `kWhole`: there are none such, or no others, and then staggered blocks write nothing.
    template <bool kWhole, int kParts>
    __device__ __forceinline__ void load(const Strides& strides, int stage, int num_keys, int part) const {
        const bool wanted = !kWhole || !kStaggered || num_keys > 0;
        if constexpr (kVectorLoads) {
#pragma unroll
            for (int pass = 0; pass < kBlockN; pass += kStep) {
                const int shift = key_of(pass);
                const bool valid = kWhole ? kStaggered || num_keys > 0 : key_of(row) + shift < num_keys;
                if (pass * kParts / kBlockN == part && (kAllWork || (row < kBlockN && column < kWidth)))
                    cp_async_16_if(wanted, target + stage * kStageBytes + pass * 2 * kPitch,
                                   source + shift * strides.row, column < num_features && valid);
            }
        } else if (part == 0 && wanted) {
#pragma unroll 4
            for (int element = thread; element < kBlockN * kWidth; element += kLoaders) {
                const int idx = element / kWidth, feature = element % kWidth, shift = key_of(idx);
                const bool valid = shift < num_keys && feature < num_features;
                const char* address = source + shift * strides.row + feature * strides.column;
                tile[stage * (kStageBytes / 2) + idx * kPitch + feature] =
                    valid ? load_bits<Element>(address) : Element(0);
            }
        }
    }
};

}  // namespace cuflash
