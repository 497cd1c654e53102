// Tiles of K and V that one warp asks for, the last keys first: they come as wgmma reads them, by one instruction each.
#pragma once

#include "ptx/tensor_copy.cuh"
#include "wgmma/panels.cuh"
#include "wgmma/place.cuh"

namespace cuflash {

struct KeyMaps {
    TensorMap k, v;
};

// The tiles of one array. Called by all lanes of a warp, of which the first one copies.
template <int kWidth>
struct PanelTiles {
    const TensorMap& map;
    const char* next;
    long long stride;

    __device__ __forceinline__ PanelTiles(const TensorMap& map, const char* rows, long long stride, long long first_row)
        : map(map), next(rows + first_row * stride), stride(stride) {}
    // The next one, whose rows from `num_rows` on become zeros.
    __device__ __forceinline__ void copy(Panels<kBlockN, kWidth>& target, Mbarrier& ready, int num_rows) {
        if (thread_index_again() % 32 == 0) {
            const int hidden = kBlockN - num_rows;
            mbarrier_expect(ready, sizeof(target));
#pragma unroll
            for (int panel = 0; panel < target.kCount; ++panel)
                tensor_copy(target.rows[panel], map, next - hidden * stride, panel * 64, hidden, ready);
        }
        next -= kBlockN * stride;
        mbarrier_arrive_with_tiles(ready);
    }
};

}  // namespace cuflash
