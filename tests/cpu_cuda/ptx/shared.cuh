// cuda_src/ptx/shared.cuh on the CPU.
#pragma once

namespace cuflash {

using SharedAddress = char*;

inline SharedAddress kept_shared_address(void* shared) { return static_cast<char*>(shared); }

}  // namespace cuflash
