// Addresses in shared memory as instructions take them.
#pragma once

namespace cuflash {

using SharedAddress = unsigned int;

__device__ __forceinline__ SharedAddress shared_address(const void* shared) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(shared));
}

// The same, but the compiler does not see how it came about: it stays in a register instead of being computed again
// wherever it is used.
__device__ __forceinline__ SharedAddress kept_shared_address(const void* shared) {
    SharedAddress address;
    asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(shared_address(shared)));
    return address;
}

}  // namespace cuflash
