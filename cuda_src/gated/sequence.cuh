// Sequences that a block walks from the first token to the last, or segments of them, which several blocks walk.
#pragma once

#include "gated/params.cuh"

namespace cuflash {

// The tokens of a sequence or segment, inside the arrays whatever the boundaries are. Behind packed sequences, which
// have no segments, the tokens of none are one more sequence.
struct TokenRange {
    long long begin, end;
};

__device__ __forceinline__ long long boundary(const GatedParams& params, long long i) {
    const int size = static_cast<int>(params.cu_seqlens_size);
    const long long value = load_integer(params.cu_seqlens + i * params.cu_seqlens_stride, size);
    return min(max(value, 0LL), params.seqlen);
}

__device__ __forceinline__ TokenRange tokens_of(const GatedParams& params, const GatedBlock& block) {
    if constexpr (!kVarlen) {
        const long long first = block.segment * params.segment_tokens;
        return {first, min(first + params.segment_tokens, params.seqlen)};
    }
    const long long begin = boundary(params, block.index);
    return {begin, block.index < params.num_sequences ? boundary(params, block.index + 1) : params.seqlen};
}

}  // namespace cuflash
