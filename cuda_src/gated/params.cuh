// The run-time arguments of the kernels of the gated delta rule, one struct passed by value. cuflash/gpu/gated.py packs
// each field by its name.
#pragma once

#include "common/divide.cuh"
#include "common/numeric.cuh"

namespace cuflash {

// Bytes from element to element of what has tokens: (batch, token, head, feature). Packed sequences are one batch.
struct TokenStrides {
    long long batch, token, head, column;
};

__device__ __forceinline__ long long token_offset(const TokenStrides& strides, long long batch, long long token,
                                                  long long head) {
    return batch * strides.batch + token * strides.token + head * strides.head;
}

// The same of states: (sequence or chunk, head, feature of k, feature of v).
struct StateStrides {
    long long index, head, row, column;
};

struct GatedParams {
    const char* q;
    const char* k;
    const char* v;
    const char* log_g;  // of steps, or cumulated in their chunks
    char* out;
    const char* beta;
    const char* states;         // before each chunk; gated_chain.cu: what segments carry
    const char* initial_state;  // null: zeros
    char* final_state;          // null: not wanted
    const char* cu_seqlens;     // null: all sequences have `seqlen` tokens
    char* prepared;             // Prepared of gated/prepared.cuh, of each head of each chunk

    TokenStrides q_strides;
    TokenStrides k_strides;
    TokenStrides v_strides;
    TokenStrides log_g_strides;
    TokenStrides out_strides;
    TokenStrides beta_strides;
    StateStrides states_strides;
    StateStrides initial_state_strides;
    StateStrides final_state_strides;
    long long cu_seqlens_stride;
    long long cu_seqlens_size;  // bytes of a boundary, negative when signed
    long long seqlen;           // packed sequences: tokens in all
    long long num_sequences;
    long long num_chunks;       // rows of states
    long long first_block;      // index of this launch's first block in the whole grid
    long long heads_per_block;  // of v, one after the other
    Divisor num_heads_v;
    Divisor group_size;    // heads of v per head of q and k
    Divisor num_parts;     // blocks that share heads of a sequence or chunk
    Divisor num_segments;  // of a sequence
    long long segment_tokens;
    long long identity_column;  // of what segments carry
    double scale;
    int head_dim;
    int head_dim_v;
    int gate_dtype;  // CUFLASH_FLOAT16 ...
    int beta_dtype;
};

// Which part of which heads of a sequence or chunk is a block's own.
struct GatedBlock {
    long long index;  // of the sequence or chunk
    int segment;      // of the sequence
    int head;         // the first one
    int part;
};

__device__ __forceinline__ GatedBlock gated_block(const GatedParams& params) {
    const long long block = params.first_block + blockIdx.x;
    const long long heads = divide(block, params.num_parts), head = heads * params.heads_per_block;
    const long long walk = divide(head, params.num_heads_v), index = divide(walk, params.num_segments);
    return {index, static_cast<int>(walk - index * params.num_segments),
            static_cast<int>(head - walk * params.num_heads_v), static_cast<int>(block - heads * params.num_parts)};
}

}  // namespace cuflash
