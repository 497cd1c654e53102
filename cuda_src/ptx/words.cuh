// Vectors of four 32-bit words, as they are loaded and stored, and the 16-bit halves of words.
#pragma once

namespace cuflash {

struct alignas(16) Words {
    unsigned int at[4];
};

// Loads what this kernel reads once and nobody writes meanwhile.
__device__ __forceinline__ Words load_once(const char* address) {
    Words loaded;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(loaded.at[0]), "=r"(loaded.at[1]), "=r"(loaded.at[2]), "=r"(loaded.at[3])
                 : "l"(address));
    return loaded;
}

// The same, or zeros. No branch: what is loaded next is sent for at once.
__device__ __forceinline__ Words load_once_if(bool is_there, const char* address) {
    Words loaded;
    asm volatile(
        "{\n"
        ".reg .pred is_there;\n"
        "setp.ne.b32 is_there, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@is_there ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "=&r"(loaded.at[0]), "=&r"(loaded.at[1]), "=&r"(loaded.at[2]), "=&r"(loaded.at[3])
        : "l"(address), "r"(static_cast<int>(is_there)));
    return loaded;
}

// Stores them if `wanted`, without a branch: behind one that lanes take apart, compilers take warps for apart.
__device__ __forceinline__ void store_if(bool wanted, char* address, const Words& words) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0; @wanted st.global.v4.u32 [%4], {%0, %1, %2, %3}; }" ::"r"(
            words.at[0]),
        "r"(words.at[1]), "r"(words.at[2]), "r"(words.at[3]), "l"(address), "r"(static_cast<int>(wanted))
        : "memory");
}

// The same for two floats, so many bytes behind an address.
template <int kBehind>
__device__ __forceinline__ void store_if(bool wanted, char* address, const float (&values)[2]) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %3, 0; @wanted st.global.v2.f32 [%2 + %4], {%0, %1}; }" ::"f"(
            values[0]),
        "f"(values[1]), "l"(address), "r"(static_cast<int>(wanted)), "n"(kBehind)
        : "memory");
}

// The lower halves of two words, or the upper ones, that of the first one below.
__device__ __forceinline__ unsigned int lower_halves(unsigned int first, unsigned int second) {
    unsigned int halves;
    asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(halves) : "r"(first), "r"(second));
    return halves;
}
__device__ __forceinline__ unsigned int upper_halves(unsigned int first, unsigned int second) {
    unsigned int halves;
    asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(halves) : "r"(first), "r"(second));
    return halves;
}

}  // namespace cuflash
