// Sequences that a block walks from the first token to the last.
#pragma once

#include "gated/params.cuh"

namespace cuflash {

// The tokens of a sequence, inside the arrays whatever the boundaries are. Behind packed sequences the tokens of none
// are one more.
struct TokenRange {
    long long begin, end;
};

__device__ __forceinline__ long long boundary(const GatedParams& params, long long i) {
    const int size = static_cast<int>(params.cu_seqlens_size);
    const long long value = load_integer(params.cu_seqlens + i * params.cu_seqlens_stride, size);
    return min(max(value, 0LL), params.seqlen);
}

__device__ __forceinline__ TokenRange tokens_of(const GatedParams& params, long long sequence) {
    if constexpr (!kVarlen) return {0, params.seqlen};
    const long long begin = boundary(params, sequence);
    return {begin, sequence < params.num_sequences ? boundary(params, sequence + 1) : params.seqlen};
}

}  // namespace cuflash
