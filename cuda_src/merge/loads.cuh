// What a lane loads of partial results. Addresses are found apart from loads: in front of the wait for who writes them.
#pragma once

#include "merge/parts.cuh"
#include "ptx/overlap.cuh"

namespace cuflash {

// Sums of some of a lane's parts, which are every kLanesPerRow-th one.
struct LaneSums {
    static constexpr int kAtOnce = kStacked && sizeof(Accumulator) == 4 ? 4 : 1;
    static constexpr int kStep = kAtOnce * kLanesPerRow;

    struct Addresses {
        const char* of[kAtOnce];

        __device__ __forceinline__ Addresses(const RowParts& parts, int first) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) of[i] = found(parts.lse(first + i * kLanesPerRow));
        }
        __device__ __forceinline__ void prefetch_all() const {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) prefetch(of[i]);
        }
    };

    ExponentialSum of[kAtOnce];

    __device__ __forceinline__ LaneSums(const RowParts& parts, const Addresses& addresses, int first) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) of[i] = empty_sum();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i > 0 && i * kLanesPerRow >= parts.num_parts) break;  // right either way: there are none
            of[i] = parts.load_sum(addresses.of[i], first + i * kLanesPerRow);
        }
    }
    __device__ __forceinline__ Accumulator largest() const {
        Accumulator largest = of[0].largest;
#pragma unroll
        for (int i = 1; i < kAtOnce; ++i) largest = maximum(largest, of[i].largest);
        return largest;
    }
    __device__ __forceinline__ Accumulator relative_to(const RowParts& parts, Accumulator largest) const {
        Accumulator sum = 0;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i > 0 && i * kLanesPerRow >= parts.num_parts) break;  // right either way: the others are empty
            sum += parts.of_loaded(of[i]).sum * relative_exponential(of[i].largest, largest);
        }
        return sum;
    }
};

// What a lane loads at once: its features of some parts, and the sum of the part whose number among kWeights is the
// lane's.
struct Turn {
    const char* features[kPartsAtOnce];
    const char* sum;

    __device__ __forceinline__ Turn(const RowParts& parts, int first, int first_column) {
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) features[i] = found(parts.feature(first + i, first_column));
        sum = found(parts.lse(first + threadIdx.x % kWeights));
    }
    __device__ __forceinline__ void prefetch_all() const {
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) prefetch(features[i]);
        prefetch(sum);
    }
};

// A lane's features of the parts of a turn.
struct Features {
    Elements16 of[kPartsAtOnce][kVectors];

    __device__ __forceinline__ Features(const RowParts& parts, const Turn& turn, int first, int first_column) {
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const int columns = v * kLanesPerRow * kVector;
                of[i][v] = parts.load_features(turn.features[i] + columns * parts.column_stride(first + i), first + i,
                                               first_column + columns);
            }
        }
    }
};

}  // namespace cuflash
