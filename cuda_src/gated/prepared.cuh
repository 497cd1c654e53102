// What gated_prepare.cu leaves to gated_delta_mma.cu, of each head of v of each chunk.
#pragma once

#include "gated/fragments.cuh"
#include "gated/params.cuh"

namespace cuflash {

constexpr int kTokens = kBlockM, kTokenSteps = kTokens / 16;

// What every lane of a warp holds of a 16 x 16 matrix.
struct alignas(16) LaneFragment {
    unsigned int registers[4];
};
using WarpFragment = LaneFragment[32];

constexpr int kNumMatrices = kTokenSteps * (kTokenSteps + 1) / 2;

// Where the matrix of some rows and columns is of those on and below the diagonal, row by row.
__device__ __forceinline__ constexpr int matrix_at(int row, int column) { return row * (row + 1) / 2 + column; }

// T diag(beta), as the sum of two matrices of 16 bits: of each 16 x 16 of it the transpose as a right operand.
struct Inverse {
    WarpFragment high[kNumMatrices];
    WarpFragment low[kNumMatrices];
};

// exp(c_i - c_j) (q_i.k_j), for tokens j up to i: left operands.
struct Weights {
    WarpFragment matrices[kNumMatrices];
};

// Of tokens in their chunk; behind its last token c stays as it is.
struct alignas(16) TokenDecays {
    float log[kTokens];         // c, to base 2
    float from_begin[kTokens];  // exp(c)
    float to_end[kTokens];      // exp(c_last - c)
};

struct Prepared {
    Inverse inverse;
    Weights weights;
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
