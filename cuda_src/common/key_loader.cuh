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

// What a thread copies of every tile of K or V, of which the last comes first.
template <int kWidth, int kPitch>
struct TileLoader {
    static constexpr int kLoaders = kStaggered ? kThreads / 2 : kThreads;
    static constexpr int kVectors = kWidth / 8;
    static constexpr int kLanes = power_of_two_above(kVectors);
    static constexpr int kStep = kLoaders / kLanes;
    static constexpr bool kAllWork = kLanes == kVectors && kStep <= kBlockN;
    static constexpr int kIdle = -2 * kBlockN;
    const char* source;
    SharedAddress target;
    int key;
    // For arrays that are no vectors.
    Element* tile;
    int num_features;

    // `array` begins with key 0; `n_begin` is the first key of the last tile.
    __device__ __forceinline__ TileLoader(const char* array, const Strides& strides, long long n_begin, Element* buffer,
                                          int features)
        : source(array + n_begin * strides.row), tile(buffer), num_features(features) {
        if constexpr (kVectorLoads) {
            const unsigned int thread = kStaggered ? threadIdx.x % kLoaders : threadIdx.x;
            const int row = thread / kLanes, column = thread % kLanes * 8;
            target = kept_shared_address(tile + row * kPitch + column);
            key = row >= kBlockN || column >= kWidth ? kIdle : column < num_features ? key_of(row) : kBlockN;
            source += key_of(row) * strides.row + column * 2;
        }
    }

    // Loads one of kParts parts of a tile. Keys from `num_keys` on become zeros: they may hold anything, and 0 x NaN is
    // NaN. `kWhole`: there are none such, or no others.
    template <bool kWhole, int kParts>
    __device__ __forceinline__ void load(const Strides& strides, int stage, int num_keys, int part) const {
        if constexpr (kVectorLoads) {
#pragma unroll
            for (int row = 0; row < kBlockN; row += kStep) {
                const int shift = key_of(row);
                if (row * kParts / kBlockN == part && (kAllWork || key != kIdle))
                    cp_async_16(target + stage * kStageBytes + row * 2 * kPitch, source + shift * strides.row,
                                key < num_keys - (kWhole ? 0 : shift));
            }
        } else if (part == 0) {
#pragma unroll 4
            for (int element = threadIdx.x % kLoaders; element < kBlockN * kWidth; element += kLoaders) {
                const int row = element / kWidth, column = element % kWidth, shift = key_of(row);
                const bool valid = shift < num_keys && column < num_features;
                const char* address = source + shift * strides.row + column * strides.column;
                tile[stage * (kStageBytes / 2) + row * kPitch + column] =
                    valid ? load_bits<Element>(address) : Element(0);
            }
        }
    }

    // Makes this loader another one.
    template <typename Other>
    __device__ __forceinline__ void become(const Other& other) {
        source = other.source;
        target = other.target;
        key = other.key;
        tile = other.tile;
        num_features = other.num_features;
    }

    __device__ __forceinline__ void previous_tile(const Strides& strides) { source -= kBlockN * strides.row; }
};

}  // namespace cuflash
