// Chunks of sequences: which tokens are a block's own. A chunk has kBlockM tokens, the last one of a sequence may have
// fewer.
#pragma once

#include "common/math.cuh"
#include "common/segments.cuh"
#include "gated/params.cuh"

namespace cuflash {

struct Chunk {
    long long index;  // over all sequences
    long long batch;  // 0 for packed sequences
    long long begin;  // first token
    int num_tokens;   // 0: there is no such chunk
    bool is_hidden;   // tokens of no sequence, whose output is 0
};

// Called by the 32 lanes of one warp together; the block waits for it.
__device__ __forceinline__ void find_chunk(const GatedParams& params, long long index, Chunk& chunk) {
    const auto count = [](long long tokens) {
        return static_cast<int>(min(max(tokens, 0LL), static_cast<long long>(kBlockM)));
    };
    if constexpr (kVarlen) {
        const PackedSequences packed = {params.cu_seqlens,
                                        params.cu_seqlens_stride,
                                        static_cast<int>(params.cu_seqlens_size),
                                        params.num_sequences,
                                        params.seqlen,
                                        1};
        if (threadIdx.x == 0) chunk = {index, 0, 0, 0, false};
        __syncwarp();
        Segment segment;
        if (!find_segment(packed, index, segment)) return;
        const long long begin = segment.begin + segment.tile * kBlockM;
        const bool is_sequence = segment.index >= 0 && segment.index < params.num_sequences;
        chunk = {index, 0, begin, count(segment.end - begin), !is_sequence};
    } else if (threadIdx.x == 0) {
        const long long batch = divide(index, (params.seqlen + kBlockM - 1) / kBlockM);
        const long long begin = index * kBlockM - batch * ((params.seqlen + kBlockM - 1) / kBlockM * kBlockM);
        chunk = {index, batch, begin, count(params.seqlen - begin), false};
    }
}

// Whether there is a state before a chunk: callers may have given too few.
__device__ __forceinline__ bool has_state(const GatedParams& params, long long chunk) {
    return chunk < params.num_chunks;
}

// Address of a row of a chunk's token.
template <typename Byte>
__device__ __forceinline__ Byte* chunk_row(Byte* array, const TokenStrides& strides, const Chunk& chunk,
                                           long long token, long long head) {
    return array + chunk.batch * strides.batch + (chunk.begin + token) * strides.token + head * strides.head;
}

// exp(later - earlier), of logarithms that fall from token to token. Behind a gate of 0 they are all -inf.
__device__ __forceinline__ Accumulator decay_between(Accumulator later, Accumulator earlier) {
    return later == earlier ? 1 : exponential(later - earlier);
}

}  // namespace cuflash
