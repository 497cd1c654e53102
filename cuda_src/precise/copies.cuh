// Keys and values on their way into shared memory, for mma.sync in double precision.
#pragma once

#include "common/load.cuh"
#include "common/mask.cuh"
#include "precise/layout.cuh"
#include "precise/queries.cuh"

namespace cuflash {

struct SharedTiles {
    Queries q;
    alignas(16) double k[kBlockN][kPitch];
    alignas(16) double v[kBlockN][kPitchV];
    TileMap tile;
    TileKeys keys;
};

// What a block copies into its buffers.
struct Copies {
    const AttentionParams& params;
    SharedTiles& shared;
    const TileKeys& keys;

    // Rows that no query of the tile sees become zeros: they may hold anything, and 0 x NaN is NaN.
    template <int kWidth, int kPitch>
    __device__ __forceinline__ void load(double (*target)[kPitch], const char* array, const Strides& strides,
                                         int num_features, long long n_begin) const {
        const int num_keys = keys.count_from(n_begin);
        array += n_begin * strides.row;
        const int thread = thread_index_again();
        if constexpr (kVectorLoads) {
            constexpr int kCovering = power_of_two_above(kWidth / 2), kMost = kThreads < 64 ? kThreads : 64;
            constexpr int kLanes = kCovering < kMost ? kCovering : kMost, kStep = kThreads / kLanes;
            const int row = thread / kLanes, column = thread % kLanes * 2;
            const SharedAddress first = shared_address(target[0]) + (row * kPitch + column) * 8;
            array += row * strides.row + column * 8;
#pragma unroll
            for (int i = 0; i < kBlockN; i += kStep) {
#pragma unroll
                for (int c = 0; c < kWidth; c += kLanes * 2) {
                    if ((kBlockN % kStep != 0 && row + i >= kBlockN) ||
                        (kWidth / 2 % kLanes != 0 && column + c >= kWidth))
                        continue;
                    cp_async_16(first + (i * kPitch + c) * 8, array + c * 8,
                                row + i < num_keys && column + c < num_features);
                }
                array += kStep * strides.row;
            }
        } else {
            for (int element = thread; element < kBlockN * kWidth; element += kThreads) {
                const int row = element / kWidth, column = element % kWidth;
                const bool valid = row < num_keys && column < num_features;
                target[row][column] =
                    valid ? load_bits<double>(array + row * strides.row + column * strides.column) : 0;
            }
        }
    }
    __device__ __forceinline__ void load_k(long long n_begin) const {
        load<kHeadDim>(shared.k, shared.tile.k, params.k_strides, params.head_dim, n_begin);
    }
    __device__ __forceinline__ void load_v(long long n_begin) const {
        load<kHeadDimV>(shared.v, shared.tile.v, params.v_strides, params.head_dim_v, n_begin);
    }
    // Waits for what is on its way. Called by the whole block, which is then through with the other buffer.
    __device__ __forceinline__ void arrive() const {
        cp_async_wait();
        __syncthreads();
    }
    // The tile of keys behind the one at `n_begin`, which the block is through with.
    __device__ __forceinline__ void load_next_k(long long n_begin) const {
        arrive();
        if (n_begin + kBlockN < keys.any.end) load_k(n_begin + kBlockN);
    }
};

}  // namespace cuflash
