// Addresses in shared memory as instructions take them.
#pragma once

namespace cuflash {

using SharedAddress = unsigned int;

__device__ __forceinline__ SharedAddress shared_address(const void* shared) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(shared));
}

// The value itself, of which the compiler knows nothing any more.
__device__ __forceinline__ int unknown(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

__device__ __forceinline__ const char* unknown(const char* value) {
    asm volatile("" : "+l"(value));
    return value;
}

// An address in global memory, computed here and not where it is needed, as far as the first of two compilers knows.
__device__ __forceinline__ const char* found(const char* address) {
    size_t in_global = __cvta_generic_to_global(address);
    asm volatile("" : "+l"(in_global));
    return static_cast<const char*>(__cvta_global_to_generic(in_global));
}

// An instruction without effect, where `rarely` holds: the compiler moves no other one across it.
__device__ __forceinline__ void stay_in_front_if(bool rarely) {
    if (rarely) asm volatile("pmevent 0;" ::: "memory");
}

// 0, which the compiler does not know: what is computed with it seems to depend on what it is combined with.
__device__ __forceinline__ int unknown_zero() {
    int zero;
    asm("mov.u32 %0, %%tid.y;" : "=r"(zero));
    return zero;
}

// The value, known to be the same for all lanes: it needs no register of each, and who branches on it stays together.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// threadIdx.x, read again: what is computed from it then needs no register in the meantime.
__device__ __forceinline__ unsigned int thread_index_again() {
    unsigned int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

}  // namespace cuflash
