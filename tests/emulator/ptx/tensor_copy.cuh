// cuda_src/ptx/tensor_copy.cuh on the CPU: a map is the row stride, the elements of a row and the rows of a tile.
#pragma once

#include "ptx/mbarrier.cuh"

namespace cuflash {

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

inline void mbarrier_expect(Mbarrier& barrier, int num_bytes) { cpu_cuda_mbarrier_expect(&barrier, num_bytes); }

inline void tensor_copy(void* target, const TensorMap& map, const char* first, int column, int hidden,
                        Mbarrier& barrier) {
    const auto stride = static_cast<long long>(map.words[0]);
    const int num_columns = static_cast<int>(map.words[1]), num_rows = static_cast<int>(map.words[2]);
    if (reinterpret_cast<unsigned long long>(target) % 1024 != 0)
        cpu_cuda_fail("tensor_copy: a swizzled tile on no 1024-byte boundary");
    if (hidden < 0 || hidden >= num_rows) cpu_cuda_fail("tensor_copy: more rows are hidden than there are");
    cpu_cuda_mbarrier_expect(&barrier, -128 * num_rows);
    for (int row = 0; row < num_rows; ++row) {
        for (int piece = 0; piece < 8; ++piece) {
            const bool is_there = hidden + row < num_rows && column + piece * 8 < num_columns;
            cpu_cuda_copy_async(static_cast<char*>(target) + row * 128 + (piece ^ row % 8) * 16,
                                first + (hidden + row) * stride + column * 2 + piece * 16, 16, is_there);
        }
    }
}

inline void mbarrier_arrive_with_tiles(Mbarrier& barrier) { mbarrier_arrive_with_copies(barrier); }

}  // namespace cuflash
