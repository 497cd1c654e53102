// cuda_src/ptx/words.cuh on the CPU.
#pragma once

namespace cuflash {

struct alignas(16) Words {
    unsigned int at[4];
};

inline Words load_once(const char* address) { return *reinterpret_cast<const Words*>(address); }
inline Words load_once_if(bool is_there, const char* address) { return is_there ? load_once(address) : Words{}; }
inline void store_if(bool wanted, char* address, const Words& words) {
    if (wanted) *reinterpret_cast<Words*>(address) = words;
}
template <int kBehind>
inline void store_if(bool wanted, char* address, const float (&values)[2]) {
    if (!wanted) return;
    reinterpret_cast<float*>(address + kBehind)[0] = values[0];
    reinterpret_cast<float*>(address + kBehind)[1] = values[1];
}

inline unsigned int lower_halves(unsigned int first, unsigned int second) { return (first & 0xffffu) | second << 16; }
inline unsigned int upper_halves(unsigned int first, unsigned int second) {
    return first >> 16 | (second & 0xffff0000u);
}

}  // namespace cuflash
