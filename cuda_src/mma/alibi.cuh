// ALiBi alone, for mma.sync: what the products of a tile are added to, and what joins the reference of a row.
#pragma once

#include "mma/rows.cuh"

namespace cuflash {

// A row of the warp for ALiBi, and its distance to the first of the warp's keys.
struct AlibiRow {
    float slope;
    float distance;

    // Whether all keys lie on one side of its position: what is added is linear in the column then.
    __device__ __forceinline__ bool is_beside() const { return distance >= kWarpKeys - 1 || distance <= 0; }
    __device__ __forceinline__ float gradient() const { return distance > 0 ? slope : -slope; }
    // What all keys of the lane share.
    __device__ __forceinline__ float shift(int lane) const {
        return gradient() * (static_cast<float>(column_of(0, lane)) - distance);
    }
};

__device__ __forceinline__ AlibiRow alibi_row(const TileRow* rows, int r, long long n_begin, int lane) {
    const LogitRow& row = rows[row_of(r, lane)].logit;
    return {row.alibi_slope, static_cast<float>(row.position - n_begin)};
}

// The shifts of all rows; none of them where one lies across the position of its row.
__device__ __forceinline__ void find_shifts(const TileRow* rows, long long n_begin, int lane, RowValues& shift) {
    bool beside = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) beside &= alibi_row(rows, r, n_begin, lane).is_beside();
    if (!__all_sync(0xffffffffu, beside)) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) shift.of[r] = alibi_row(rows, r, n_begin, lane).shift(lane);
}

}  // namespace cuflash
