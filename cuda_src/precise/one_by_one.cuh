// Both products for a warp's rows and one tile of keys, one multiplication at a time, from the arrays themselves: for
// rows whose elements lie so far apart that pairs of float16 lose digits. It is some ten times slower.
#pragma once

#include "common/mask.cuh"
#include "common/math.cuh"
#include "precise/output.cuh"

namespace cuflash {

constexpr int kAtOnce = 4;  // keys, for which a query is read once

// scores = Q K^T, of the features that the warp sums over. Keys from `num_keys` of the tile on repeat the last one.
// `rows.query(row)` is where a tile row begins in Q, null behind the last one.
template <typename Rows>
__device__ __forceinline__ void multiply_qk_one_by_one(const AttentionParams& params, const TileMap& tile,
                                                       const Rows& rows, long long n_begin, int num_keys,
                                                       const Place& place, Scores& scores) {
    const char* const queries[kRows] = {rows.query(place.tile_row(0)), rows.query(place.tile_row(1))};
    volatile float sums[kRows][kColumns];  // in memory, so that loops need not be unrolled
#pragma unroll 1
    for (int i = 0; i < kColumns; i += kAtOnce) {
        float products[kRows][kAtOnce] = {};
        const char* keys[kAtOnce];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e)
            keys[e] = tile.k + (n_begin + min(place.column(i + e), num_keys - 1)) * params.k_strides.row;
#pragma unroll 1
        for (int feature = place.share; feature < params.head_dim; feature += kWarpsPerRow) {
            float q[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                q[r] = queries[r] ? load_bits<float>(queries[r] + feature * params.q_strides.column) : 0;
#pragma unroll
            for (int e = 0; e < kAtOnce; ++e) {
                const float k = load_bits<float>(keys[e] + feature * params.k_strides.column);
#pragma unroll
                for (int r = 0; r < kRows; ++r) products[r][e] = multiply_add_subnormal(q[r], k, products[r][e]);
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int e = 0; e < kAtOnce; ++e) sums[r][i + e] = products[r][e];
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) at(scores, r, i) = sums[r][i];
    }
}

// total += P V, of the warp's features; keys from `num_keys` of the tile on are left out.
__device__ __forceinline__ void accumulate_one_by_one(const AttentionParams& params, const TileMap& tile,
                                                      long long n_begin, int num_keys, const Place& place,
                                                      Scores& weights, const OnlineSoftmax<kRows>& softmax,
                                                      OutputTotal& total) {
    volatile float own[kRows][kColumns];
    float factors[kRows];
    total.begin();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        factors[r] = total.follow(r, softmax);
        total.sums[r][OutputTotal::kValues] = total.sums[r][OutputTotal::kValues] * factors[r];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) own[r][i] = at(weights, r, i);
    }
#pragma unroll 1
    for (int f = 0; f < OutputTotal::kValues; ++f) {
        const int column = place.feature(f);
        const char* value = tile.v + n_begin * params.v_strides.row + column * params.v_strides.column;
        float products[kRows] = {};
#pragma unroll 1
        for (int key = 0; key < num_keys; ++key) {
            const int owner = place.lane / 4 * 4 + key % 8 / 2, i = key / 8 * 2 + key % 2;
            // right either way: nobody stores what is beyond the last feature
            const float v = column < params.head_dim_v ? load_bits<float>(value) : 0;
            value += params.v_strides.row;
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                products[r] = multiply_add_subnormal(__shfl_sync(0xffffffffu, own[r][i], owner), v, products[r]);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            total.sums[r][f] = multiply_add_subnormal(static_cast<float>(total.sums[r][f]), factors[r], products[r]);
    }
}

}  // namespace cuflash
