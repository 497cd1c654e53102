// The queries of a tile on their way into shared memory, for mma.sync.
#pragma once

#include "common/load.cuh"
#include "common/rows.cuh"
#include "mma/layout.cuh"

namespace cuflash {

// The warp's part of the rows of Q: loaded by it, and looked up, one per lane.
struct OwnRows {
    static constexpr int kCount = kRowsPerWarp / kWarpsPerRow;
    int first;  // of the tile

    __device__ __forceinline__ explicit OwnRows(const Warp& warp) : first(warp.first_row + warp.share * kCount) {}
};

// Copies the queries of the warp's own rows into `rows` of the tile.
__device__ __forceinline__ void copy_queries(const AttentionParams& params, const TileMap& tile,
                                             Element (*rows)[kPitchQ], const Warp& warp) {
    const OwnRows own(warp);
    if constexpr (kVectorLoads) {
        constexpr int kVectors = kHeadDim / 8;
        constexpr int kLanes = kVectors < 32 ? power_of_two_above(kVectors) : 32;
        constexpr int kAtOnce = 32 / kLanes;
        const int own_row = warp.lane / kLanes, own_column = warp.lane % kLanes * 8;
        if (kAtOnce > OwnRows::kCount && own_row >= OwnRows::kCount) return;
        const SharedAddress target = shared_address(rows[own.first]) + own_row * kRowBytesQ + own_column * 2;
        const auto copy = [&](int pass, const char* source, bool valid) {
#pragma unroll
            for (int column = 0; column < kHeadDim; column += kLanes * 8) {
                if (own_column + column < kHeadDim)
                    cp_async_16(target + pass * kRowBytesQ + column * 2, source + (own_column + column) * 2,
                                valid && own_column + column < params.head_dim);
            }
        };
        if (params.packed_heads == 1) {
            const int first = own.first + own_row, num_rows = tile.num_rows - first;
            const char* source = tile.q + (tile.first_query + first) * params.q_strides.row;
#pragma unroll
            for (int pass = 0; pass < OwnRows::kCount; pass += kAtOnce) {
                copy(pass, source, pass < num_rows);
                source += kAtOnce * params.q_strides.row;
            }
        } else {
#pragma unroll 1
            for (int pass = 0; pass < OwnRows::kCount; pass += kAtOnce) {
                const char* source = query_row(params, tile, own.first + own_row + pass);
                copy(pass, source, source != nullptr);
            }
        }
    } else {
#pragma unroll 4
        for (int element = warp.lane; element < OwnRows::kCount * kHeadDim; element += 32) {
            const int row = element / kHeadDim, column = element % kHeadDim;
            const char* source = query_row(params, tile, own.first + row);
            const bool valid = source != nullptr && column < params.head_dim;
            rows[own.first + row][column] =
                valid ? load_bits<Element>(source + column * params.q_strides.column) : Element(0);
        }
    }
}

}  // namespace cuflash
