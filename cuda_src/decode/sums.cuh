// Many sums over lanes at a time: each lane has its share of all of them before, and a few of them wholly afterwards.
#pragma once

#include "common/numeric.cuh"

namespace cuflash {

constexpr int kElements = 4;  // that a lane loads at a time

// Of kRows x kColumns sums over kLanes neighbouring lanes. Where there are less than lanes, some lanes have the same.
template <int kRows, int kColumns, int kLanes>
struct LaneSums {
    static constexpr int kCount = kRows * kColumns;
    static constexpr int kKept = kCount > kLanes ? kCount / kLanes : 1;    // by a lane
    static constexpr int kCopies = kCount < kLanes ? kLanes / kCount : 1;  // of each sum

    static_assert((kCount & (kCount - 1)) == 0 && kKept <= kColumns, "the sums of a lane are those of one row");

    // Number of the first sum that a lane keeps.
    static __device__ __forceinline__ int first(int lane) { return lane / kCopies * kKept; }

    // At each step a lane passes on half of what it has, and takes the other half of its neighbour's.
    static __device__ __forceinline__ void sum(Accumulator (&shares)[kCount], int lane, Accumulator (&kept)[kKept]) {
        sum_over<kLanes / 2, kCount>(shares, lane);
#pragma unroll
        for (int i = 0; i < kKept; ++i) kept[i] = shares[i];
    }

  private:
    template <int kDistance, int kLeft>
    static __device__ __forceinline__ void sum_over(Accumulator (&shares)[kCount], int lane) {
        if constexpr (kDistance > 0) {
            constexpr int kHalf = kLeft > 1 ? kLeft / 2 : 1;
#pragma unroll
            for (int i = 0; i < kHalf; ++i) {
                const Accumulator own = shares[i];
                if constexpr (kLeft > 1) {
                    const Accumulator other = shares[i + kHalf];
                    const bool takes_upper = lane & kDistance;
                    shares[i] = (takes_upper ? other : own) +
                                __shfl_xor_sync(0xffffffffu, takes_upper ? own : other, kDistance);
                } else {
                    shares[i] = own + __shfl_xor_sync(0xffffffffu, own, kDistance);
                }
            }
            sum_over<kDistance / 2, kHalf>(shares, lane);
        }
    }
};

}  // namespace cuflash
