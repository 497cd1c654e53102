// cuda_src/ptx/registers.cuh on the CPU, which has as many as it needs.
#pragma once

namespace cuflash {

template <int kCount>
inline void registers_release() {}

template <int kCount>
inline void registers_take() {}

}  // namespace cuflash
