// Chunks of sequences: which tokens are a block's own. A chunk has kBlockM tokens, the last one of a sequence may have
// fewer.
#pragma once

#include "common/math.cuh"
#include "gated/params.cuh"

namespace cuflash {

struct Chunk {
    long long index;  // over all sequences
    long long batch;  // 0 for packed sequences
    long long begin;  // first token
    int num_tokens;   // 0: there is no such chunk
    int sequence;     // -1: tokens of none, whose output is 0
};

// Finds the chunk of packed sequences with a number, by a running sum over all sequences and the tokens before and
// behind them. Boundaries that fall are raised to their predecessor, so that sequences are disjoint whatever the
// values. Called by the 32 lanes of one warp together.
__device__ __forceinline__ void find_packed_chunk(const GatedParams& params, long long index, Chunk& chunk) {
    constexpr unsigned int kAllLanes = 0xffffffffu;
    const int lane = threadIdx.x % 32, size = static_cast<int>(params.cu_seqlens_size);
    const int num_tokens = static_cast<int>(params.seqlen);
    int first_token = 0, chunks_before = 0;
    // right either way: one of the first has the chunk, if there is one
    for (long long first = 0; first < params.num_sequences + 2; first += 32) {
        const long long i = first + lane;
        int end = num_tokens;
        if (i <= params.num_sequences) {
            const long long value = load_integer(params.cu_seqlens + i * params.cu_seqlens_stride, size);
            end = static_cast<int>(min(max(value, 0LL), params.seqlen));
        }
        for (int distance = 1; distance < 32; distance *= 2) end = max(end, __shfl_up_sync(kAllLanes, end, distance));
        end = max(end, first_token);
        int begin = __shfl_up_sync(kAllLanes, end, 1);
        if (lane == 0) begin = first_token;
        const int own = (end - begin + kBlockM - 1) / kBlockM;
        int running = own;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(kAllLanes, running, distance);
            if (lane >= distance) running += other;
        }
        const unsigned int owners = __ballot_sync(kAllLanes, index < chunks_before + running);
        if (owners != 0) {
            if (lane == __ffs(owners) - 1) {
                const int at = begin + (static_cast<int>(index) - chunks_before - (running - own)) * kBlockM;
                const int left = min(end - at, kBlockM);  // right either way: nobody looks at more
                chunk = {index, 0, at, left, i > params.num_sequences ? -1 : static_cast<int>(i) - 1};
            }
            return;
        }
        first_token = __shfl_sync(kAllLanes, end, 31);
        chunks_before += __shfl_sync(kAllLanes, running, 31);
    }
    if (lane == 0) chunk = {index, 0, 0, 0, -1};
}

// Called by the 32 lanes of one warp together; the block waits for it.
__device__ __forceinline__ void find_chunk(const GatedParams& params, long long index, Chunk& chunk) {
    if constexpr (kVarlen) {
        find_packed_chunk(params, index, chunk);
    } else if (threadIdx.x == 0) {
        const long long chunks = (params.seqlen + kBlockM - 1) / kBlockM, batch = divide(index, chunks);
        const long long begin = (index - batch * chunks) * kBlockM;
        // right either way: nobody looks at more
        const auto left = static_cast<int>(min(params.seqlen - begin, static_cast<long long>(kBlockM)));
        chunk = {index, batch, begin, left, static_cast<int>(batch)};
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
    return array + token_offset(strides, chunk.batch, chunk.begin + token, head);
}

// exp(later - earlier), of logarithms that fall from token to token. Behind a gate of 0 they are all -inf.
__device__ __forceinline__ Accumulator decay_between(Accumulator later, Accumulator earlier) {
    return later == earlier ? 1 : exponential(later - earlier);
}

}  // namespace cuflash
