// Operands of mma.sync of the gated delta rule: 16-bit matrices in shared memory, whose rows are padded by 16 bytes so
// that eight of them begin in different banks.
#pragma once

#include "common/numeric.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

namespace cuflash {

constexpr bool kBfloat16 = kDtype == CUFLASH_BFLOAT16;

static_assert(kDtype == CUFLASH_FLOAT16 || kDtype == CUFLASH_BFLOAT16, "mma.m16n8k16 multiplies 16-bit floats");

using Fragment = unsigned int[4];

__device__ __forceinline__ unsigned int pack(float low, float high) {
    return kBfloat16 ? bfloat162_bits_from_floats(low, high) : half2_bits_from_floats(low, high);
}

__device__ __forceinline__ float unpacked(unsigned int pair, int i) {
    const auto bits = static_cast<unsigned short>(pair >> 16 * i);
    return kBfloat16 ? float_from_bfloat16_bits(bits) : float_from_half_bits(bits);
}

// A lane's address for the 16 x 16 matrices whose rows are those of a left operand or, transposed, the terms of sums
// with a right operand.
template <int kPitch>
__device__ __forceinline__ SharedAddress left_address(Element (*rows)[kPitch], int lane) {
    return shared_address(&rows[lane % 16][lane / 16 * 8]);
}

// The same for a right operand whose rows are columns of the result, 16 of them or, transposed, for a left operand
// whose rows are the terms of sums.
template <int kPitch>
__device__ __forceinline__ SharedAddress right_address(Element (*rows)[kPitch], int lane) {
    return shared_address(&rows[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
}

// Two neighbouring 16 x 8 tiles of a result += a b.
__device__ __forceinline__ void multiply(float (&first)[4], float (&second)[4], const Fragment& a, const Fragment& b) {
    mma_m16n8k16<kBfloat16>(first, a, {b[0], b[1]});
    mma_m16n8k16<kBfloat16>(second, a, {b[2], b[3]});
}

}  // namespace cuflash
