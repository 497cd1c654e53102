// Copies of whole tiles into shared memory that one thread begins (TMA, sm_90 and newer).
#pragma once

#include "ptx/mbarrier.cuh"

namespace cuflash {

// Describes tiles, made by the driver (cuflash/gpu/tensor_maps.py): how many elements of a row there are, how far rows
// are apart, and how many rows a tile has. Behind these two axes it has units of 16 bytes and of 4 GiB, from address 0
// on: so it knows no array, and serves all of them.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// The phase under way is not over before so many bytes are there, too. Called by one thread.
__device__ __forceinline__ void mbarrier_expect(Mbarrier& barrier, int num_bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
                 "r"(num_bytes)
                 : "memory");
}

// Copies a map's tile from `first` on, a 16-byte boundary, and from the element `column` of its rows on, swizzled by
// 128 bytes. Its first rows are those from row `hidden` on of as many as it has; behind them, and behind the elements
// of a row, it has zeros. Who waits for the barrier sees it, and products do. Called by one thread.
__device__ __forceinline__ void tensor_copy(void* target, const TensorMap& map, const char* first, int column,
                                            int hidden, Mbarrier& barrier) {
    const unsigned long long address = reinterpret_cast<unsigned long long>(first);
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(target)),
        "l"(&map), "r"(column), "r"(hidden), "r"(static_cast<unsigned int>(address) >> 4),
        "r"(static_cast<unsigned int>(address >> 32)), "r"(shared_address(&barrier))
        : "memory");
}

// Arrives for all lanes of a warp, whose first one has begun copies.
__device__ __forceinline__ void mbarrier_arrive_with_tiles(Mbarrier& barrier) { mbarrier_release(barrier); }

}  // namespace cuflash
