// cuda_src/ptx/cp_async.cuh on the CPU: the bytes arrive at the wait and not before.
#pragma once

#include "ptx/shared.cuh"

namespace cuflash {

inline void cp_async_4(void* shared_target, const void* source, bool valid) {
    cpu_cuda_copy_async(shared_target, source, 4, valid);
}

inline void cp_async_16(void* shared_target, const void* source, bool valid) {
    cpu_cuda_copy_async(shared_target, source, 16, valid);
}

inline void cp_async_bytes(void* shared_target, const void* source, int num_bytes) {
    cp_async_16(shared_target, source, num_bytes != 0);
}

inline void cp_async_16_if(bool wanted, void* shared_target, const void* source, bool valid) {
    if (wanted) cp_async_16(shared_target, source, valid);
}

inline void cp_async_commit() { cpu_cuda_copy_commit(); }

template <int kPending>
inline void cp_async_wait_group() {
    cpu_cuda_copy_wait(kPending);
}

inline void cp_async_wait() {
    cpu_cuda_copy_commit();
    cpu_cuda_copy_wait(0);
}

}  // namespace cuflash
