// What the chunks of the gated delta rule can compute without the state (the WY representation), for 16-bit floats on
// sm_80 and newer: with A = strictly lower (beta_i exp(c_i - c_j) k_i.k_j) and T = (I + A)^-1,
// w = T (beta exp(c) k) and u = T (beta v). They are what gated_delta_mma.cu reads instead of v and beta, and the
// decays of tokens instead of gates.
//
// Grid: one block per chunk of one head of v. Two warps own 16 tokens: one computes their w, the other one u.
//
// T is computed in float: blocks of 16 x 16 on the diagonal by forward substitution, one for each warp, then those
// below it, T_ij = -T_ii (sum over j <= k < i of A_ik T_kj). It is multiplied as the sum of two 16-bit matrices: where
// keys are nearly parallel its elements are large, and their errors would be, too.

#ifndef CUFLASH_THREADS
#define CUFLASH_THREADS 256  // the only number
#endif

#include "gated/load.cuh"
#include "gated/steps.cuh"
#include "gated/store.cuh"

namespace cuflash {

constexpr int kTokens = kBlockM, kSize = 16, kNumBlocks = kTokens / kSize;
constexpr int kPitch = kHeadDim + 8, kPitchV = kHeadDimV + 8;

static_assert(kTokens == 64 && kThreads == 256, "a lane has two gates, two warps 16 tokens");

struct SharedTiles {
    alignas(16) Element k[kTokens][kPitch];
    alignas(16) Element v[kTokens][kPitchV];
    alignas(16) float a[kTokens][kTokens + 4];
    alignas(16) float inverse[kTokens][kTokens + 4];
    alignas(16) float products[kNumBlocks][kSize][kSize + 4];
    float beta[kTokens], decayed_beta[kTokens];  // the second times exp(c)
    alignas(8) float log_decay[kTokens];
    Chunk chunk;
};

__device__ __forceinline__ void load(const GatedParams& params, SharedTiles& shared, int head) {
    const Chunk& chunk = shared.chunk;
    const int head_k = static_cast<int>(divide(head, params.group_size)), warp = threadIdx.x / 32;
    load_rows<kTokens, kHeadDim>(shared.k, chunk_row(params.k, params.k_strides, chunk, 0, head_k),
                                 params.k_strides.token, params.k_strides.column, chunk.num_tokens, params.head_dim);
    load_rows<kTokens, kHeadDimV>(shared.v, chunk_row(params.v, params.v_strides, chunk, 0, head),
                                  params.v_strides.token, params.v_strides.column, chunk.num_tokens, params.head_dim_v);
    if (warp == 0) {
        const char* const gates = chunk_row(params.log_g, params.log_g_strides, chunk, 0, head);
        const Gates sums = sum_gates(load_gates(params, gates, chunk.num_tokens));
        *reinterpret_cast<Gates*>(&shared.log_decay[threadIdx.x * 2]) = sums;
    } else if (warp < 3) {
        const int token = threadIdx.x - 32;
        const char* const beta = chunk_row(params.beta, params.beta_strides, chunk, token, head);
        shared.beta[token] = token < chunk.num_tokens ? load_float(beta, params.beta_dtype) : 0;
    }
    cp_async_wait();
}

// Rows of A of a group of two warps, up to the diagonal block: every other 16 columns for each warp.
__device__ __forceinline__ void fill_a(SharedTiles& shared, int group, int share, int lane) {
    float products[kNumBlocks / 2][2][4] = {};
    const SharedAddress left = left_address(shared.k + group * kSize, lane), right = right_address(shared.k, lane);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        Fragment rows;
        ldmatrix_x4(rows, left + step * 32);
#pragma unroll
        for (int i = 0; i < kNumBlocks / 2; ++i) {
            const int block = 2 * i + share;
            // right either way: A is what is below the diagonal
            if (block > group) continue;
            Fragment columns;
            ldmatrix_x4(columns, right + block * kSize * kPitch * 2 + step * 32);
            multiply(products[i][0], products[i][1], rows, columns);
        }
    }
#pragma unroll
    for (int i = 0; i < kNumBlocks / 2; ++i) {
        // right either way: A is what is below the diagonal
        if (2 * i + share > group) continue;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int row = group * kSize + lane / 4 + e / 2 % 2 * 8;
            const int column = (2 * i + share) * kSize + e / 4 * 8 + lane % 4 * 2 + e % 2;
            const float decay = exp2_approximate(shared.log_decay[row] - shared.log_decay[column]);
            // right either way: nobody looks at the others
            shared.a[row][column] = column < row ? shared.beta[row] * decay * products[i][e / 4][e % 4] : 0;
        }
    }
}

// The inverse of a block on the diagonal: a column in each lane, of the first half of them.
__device__ __forceinline__ void invert_diagonal(SharedTiles& shared, int group, int lane) {
    const int first = group * kSize;
    float column[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
        float sum = i == lane ? 1 : 0;
#pragma unroll
        // right either way: A is 0 on the diagonal
        for (int k = 0; k < i; ++k) sum = multiply_add(-shared.a[first + i][first + k], column[k], sum);
        column[i] = sum;
    }
    if (lane < kSize) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) shared.inverse[first + i][first + lane] = column[i];
    }
}

// A lane's 2 x 4 elements of products of blocks: sums += left right.
using Sums = float[2][4];
template <int kLeft, int kRight>
__device__ __forceinline__ void add_product(Sums& sums, const float (*left)[kLeft], const float (*right)[kRight],
                                            int left_column, int right_column, int lane) {
    const int row = lane / 4 * 2, column = lane % 4 * 4;
    const auto four = [](const float& first) { return *reinterpret_cast<const Vector16*>(&first); };
#pragma unroll
    for (int k = 0; k < kSize; k += 4) {
        const Vector16 factors[2] = {four(left[row][left_column + k]), four(left[row + 1][left_column + k])};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Vector16 columns = four(right[k + i][right_column + column]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    sums[r][c] = multiply_add(factors[r].values[i], columns.values[c], sums[r][c]);
            }
        }
    }
}

template <int kPitchOf>
__device__ __forceinline__ void store_sums(float (*rows)[kPitchOf], int first_column, int lane, float sign,
                                           const Sums& sums) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        Vector16 columns;
#pragma unroll
        for (int c = 0; c < 4; ++c) columns.values[c] = sign * sums[r][c];
        *reinterpret_cast<Vector16*>(&rows[lane / 4 * 2 + r][first_column + lane % 4 * 4]) = columns;
    }
}

// Blocks below the diagonal, those nearest to it first, as others are made of them. Ends with a barrier.
__device__ __forceinline__ void invert_below(SharedTiles& shared, int group, int share, int lane) {
#pragma unroll 1
    for (int distance = 1; distance < kNumBlocks; ++distance) {
        const int i = group * kSize, j = i - distance * kSize;
        if (share == 0 && j >= 0) {
            Sums sums = {};
#pragma unroll 1
            for (int k = j; k < i; k += kSize) add_product(sums, shared.a + i, shared.inverse + k, k, j, lane);
            store_sums(shared.products[group], 0, lane, 1, sums);
            __syncwarp();
            Sums block = {};
            add_product(block, shared.inverse + i, shared.products[group], i, 0, lane);
            store_sums(shared.inverse + i, j, lane, -1, block);
        }
        __syncthreads();
    }
}

// The warp's rows of T diag(factors), as the sum of two 16-bit matrices: a left operand.
__device__ __forceinline__ void split_inverse(SharedTiles& shared, int group, int lane, int step, bool decays,
                                              Fragment& high, Fragment& low) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = group * kSize + lane / 4 + i % 2 * 8, column = step * 16 + i / 2 * 8 + lane % 4 * 2;
        float values[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int at = column + e;
            const float factor = decays ? shared.decayed_beta[at] : shared.beta[at];
            // right either way: the inverse is 0 there
            values[e] = at <= row ? shared.inverse[row][at] * factor : 0;
        }
        high[i] = pack(values[0], values[1]);
        low[i] = pack(values[0] - unpacked(high[i], 0), values[1] - unpacked(high[i], 1));
    }
}

// T diag(factors) rows -> `target`, of the warp's tokens, kWidth features each.
template <int kWidth>
__device__ __forceinline__ void transform(const GatedParams& params, SharedTiles& shared, Element (*rows)[kWidth + 8],
                                          bool decays, int group, int lane, char* target) {
    Fragment high[kNumBlocks], low[kNumBlocks];
#pragma unroll
    for (int step = 0; step < kNumBlocks; ++step) {
        // right either way: others are not multiplied
        if (step <= group) split_inverse(shared, group, lane, step, decays, high[step], low[step]);
    }
    const SharedAddress right = left_address(rows, lane);
    const long long token_bytes = params.num_heads_v * kTransformedBytes;
#pragma unroll 2
    for (int f = 0; f < kWidth / 8; f += 2) {
        float sums[2][4] = {};
#pragma unroll
        for (int step = 0; step < kNumBlocks; ++step) {
            if (step > group) continue;
            Fragment values;
            ldmatrix_x4_transposed(values, right + step * 16 * (kWidth + 8) * 2 + f * 16);
            multiply(sums[0], sums[1], low[step], values);
            multiply(sums[0], sums[1], high[step], values);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = group * kSize + lane / 4 + r * 8;
            char* const row = token < shared.chunk.num_tokens ? target + token * token_bytes : nullptr;
            store_row<true>(row, f * 8, kWidth, 2, sums, r, 1, lane);
        }
    }
}

__device__ __forceinline__ void gated_wy(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 2, share = warp % 2;
    if (warp == 0) find_chunk(params, block.index, shared.chunk);
    __syncthreads();
    const Chunk& chunk = shared.chunk;
    // right either way: nothing would be stored, or nobody would look at it
    if (chunk.num_tokens == 0 || chunk.is_hidden) return;
    load(params, shared, block.head);
    __syncthreads();
    if (threadIdx.x < kTokens)
        shared.decayed_beta[threadIdx.x] = shared.beta[threadIdx.x] * exp2_approximate(shared.log_decay[threadIdx.x]);
    fill_a(shared, group, share, lane);
    __syncthreads();
    if (share == 0) invert_diagonal(shared, group, lane);
    __syncthreads();
    invert_below(shared, group, share, lane);
    char* const target =
        params.transformed + transformed_row(params, chunk.batch * params.seqlen + chunk.begin, block.head);
    if (static_cast<int>(threadIdx.x) < chunk.num_tokens) {
        const float log = shared.log_decay[threadIdx.x], last = shared.log_decay[kTokens - 1];
        const TokenDecays decays = {log, exp2_approximate(log), exp2_approximate(last - log), exp2_approximate(last)};
        char* const row = target + threadIdx.x * params.num_heads_v * kTransformedBytes;
        *reinterpret_cast<TokenDecays*>(row + 2 * (kHeadDim + kHeadDimV)) = decays;
    }
    if (share == 0) transform<kHeadDim>(params, shared, shared.k, true, group, lane, target);
    else transform<kHeadDimV>(params, shared, shared.v, false, group, lane, target + 2 * kHeadDim);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_wy(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::gated_wy(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
