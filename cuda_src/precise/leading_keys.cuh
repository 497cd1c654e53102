// What pairs leave out of a value that is the whole result of a row.
#pragma once

#include "precise/output.cuh"
#include "precise/pairs.cuh"

namespace cuflash {

// The key with the largest logit of each row. Where all others together weigh nothing beside it, the result is its
// value, to the bit, of which a pair leaves out the last digit.
struct LeadingKeys {
    volatile long long keys[kRows];  // in memory, as it is rare that they are looked at

    __device__ __forceinline__ LeadingKeys() {
#pragma unroll
        for (int r = 0; r < kRows; ++r) keys[r] = -1;
    }
    // Looks for weights of 1 in a tile. Without pairs there is nothing to complete.
    __device__ __forceinline__ void find(Scores& weights, long long n_begin, bool by_pairs, const Place& place) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            int last = -1;
#pragma unroll
            for (int i = 0; i < kColumns; ++i)
                if (at(weights, r, i) == 1) last = place.column(i);
            last = max(last, __shfl_xor_sync(0xffffffffu, last, 1));
            last = max(last, __shfl_xor_sync(0xffffffffu, last, 2));
            if (last >= 0) keys[r] = by_pairs ? n_begin + last : -1;
        }
    }
    // The sums of all keys, whose last ones are in O, with what the pairs leave out of the values of leading ones.
    __device__ __forceinline__ void finish(const AttentionParams& params, const TileMap& tile, const Place& place,
                                           Output& o, OnlineSoftmax<kRows>& softmax, OutputTotal& total) const {
        bool any = false;
#pragma unroll
        for (int r = 0; r < kRows; ++r) any |= keys[r] >= 0;
        if (kProducts > 1 && __any_sync(0xffffffffu, any)) total.begin();  // they are completed in memory
        if (!total.is_used) return;
        total.take(o, softmax);
        if constexpr (kProducts > 1) complete(params, tile, place, total);
        total.give_back(o, softmax);
    }

  private:
    __device__ __forceinline__ void complete(const AttentionParams& params, const TileMap& tile, const Place& place,
                                             OutputTotal& total) const {
        constexpr int kAtOnce = 8;  // loads on their way
        static_assert(!kHasValues || OutputTotal::kValues % kAtOnce == 0, "there are so many left");
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const bool alone = quad_sum(total.sums[r][OutputTotal::kValues]) == 1;
            if (!alone || keys[r] < 0) continue;
            const char* value = tile.v + keys[r] * params.v_strides.row;
#pragma unroll 1
            for (int first = 0; first < OutputTotal::kValues; first += kAtOnce) {
                float values[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int column = place.feature(first + i);
                    const bool has = column < params.head_dim_v;
                    values[i] = has ? load_bits<float>(value + column * params.v_strides.column) : 0;
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
                    total.sums[r][first + i] = total.sums[r][first + i] + rest_of_pair(values[i]);
            }
        }
    }
};

}  // namespace cuflash
