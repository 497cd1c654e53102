// What gated_prepare.cu leaves to gated_delta_mma.cu, of each head of v of each chunk.
#pragma once

#include "gated/fragments.cuh"
#include "gated/params.cuh"

namespace cuflash {

constexpr int kTokens = kBlockM, kTokenSteps = kTokens / 16;

// The 16 x 16 matrices on and below the diagonal of one of tokens and tokens: column by column, from the last row
// upwards, so that of each column a part of the first one's rows is there. Each is four of 8 x 8, row by row, so that
// eight rows of one are in different banks.
struct alignas(16) Triangle {
    Element matrices[kTokenSteps * (kTokenSteps + 1) / 2][2][2][8][8];

    static __device__ __forceinline__ constexpr int at(int row, int column) {
        return column * kTokenSteps - column * (column - 1) / 2 + kTokenSteps - 1 - row;
    }
};

// Of tokens in their chunk; behind its last token c stays as it is.
struct alignas(16) TokenDecays {
    float log[kTokens];         // c, to base 2
    float from_begin[kTokens];  // exp(c)
    float to_end[kTokens];      // exp(c_last - c)
};

struct Prepared {
    Triangle inverse[2];  // T diag(beta), as the sum of two matrices of 16 bits, the larger one first
    Triangle weights;     // exp(c_i - c_j) (q_i.k_j) for tokens j up to i
    TokenDecays decays;
};

// Address of a head's in the chunk that begins at a token of a sequence. The next chunk's is num_heads_v further on; no
// two chunks have the same.
__device__ __forceinline__ char* prepared_address(const GatedParams& params, long long sequence, long long token,
                                                  int head) {
    const long long chunks = kVarlen ? 1 : (params.seqlen + kTokens - 1) / kTokens;
    const long long index = sequence * chunks + token / kTokens;
    return params.prepared + (index * params.num_heads_v + head) * static_cast<long long>(sizeof(Prepared));
}

}  // namespace cuflash
