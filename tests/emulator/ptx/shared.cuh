// cuda_src/ptx/shared.cuh on the CPU.
#pragma once

namespace cuflash {

using SharedAddress = char*;

inline SharedAddress shared_address(void* shared) { return static_cast<char*>(shared); }
inline int unknown(int value) { return value; }
inline const char* unknown(const char* value) { return value; }
inline const char* found(const char* address) { return address; }
inline int unknown_zero() { return 0; }
inline void stay_in_front_if(bool) {}
inline int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
inline unsigned int thread_index_again() { return threadIdx.x; }

}  // namespace cuflash
