// What the chunks of the gated delta rule can compute without the state, for 16-bit floats on sm_80 and newer: with A =
// strictly lower (beta_i exp(c_i - c_j) k_i.k_j), T diag(beta) where T = (I + A)^-1, the weights exp(c_i - c_j)
// q_i.k_j, and the decays of tokens. They are what gated_delta_mma.cu reads instead of gates and beta.
//
// Grid: one block per chunk of one head of v. A warp owns 16 tokens.
//
// T is computed in float: blocks of 16 x 16 on the diagonal by forward substitution, one for each warp, then those
// below it, T_ij = -T_ii (sum over j <= k < i of A_ik T_kj). It is left as the sum of two 16-bit matrices: where keys
// are nearly parallel its elements are large, and their errors would be, too.

#ifndef CUFLASH_THREADS
#define CUFLASH_THREADS 128  // two for each token of a chunk
#endif

#include "gated/load.cuh"
#include "gated/prepared.cuh"
#include "gated/steps.cuh"

namespace cuflash {

constexpr int kSize = 16, kPitch = kHeadDim + 8;

static_assert(kTokens <= 64 && kThreads == 2 * kTokens, "a lane has two gates, a warp 16 tokens");

struct SharedTiles {
    // Squares take the place of keys and queries, once those have been multiplied.
    union {
        alignas(16) Element k[kTokens][kPitch];
        alignas(16) float a[kTokens][kTokens + 4];
    };
    union {
        alignas(16) Element q[kTokens][kPitch];
        alignas(16) float inverse[kTokens][kTokens + 4];
    };
    alignas(16) float beta[kTokens];
    alignas(16) float log_decay[kTokens];
    Chunk chunk;
};

__device__ __forceinline__ void load(const GatedParams& params, SharedTiles& shared, int head) {
    const Chunk& chunk = shared.chunk;
    const int head_k = static_cast<int>(divide(head, params.group_size)), thread = threadIdx.x;
    load_rows<kTokens, kHeadDim>(shared.k, chunk_row(params.k, params.k_strides, chunk, 0, head_k),
                                 params.k_strides.token, params.k_strides.column, chunk.num_tokens, params.head_dim);
    load_rows<kTokens, kHeadDim>(shared.q, chunk_row(params.q, params.q_strides, chunk, 0, head_k),
                                 params.q_strides.token, params.q_strides.column, chunk.num_tokens, params.head_dim);
    if (thread < 32) {
        const char* const gates = chunk_row(params.log_g, params.log_g_strides, chunk, 0, head);
        const Gates sums = sum_gates(load_gates(params, gates, chunk.num_tokens));
        if (thread * 2 < kTokens) *reinterpret_cast<Gates*>(&shared.log_decay[thread * 2]) = sums;
    } else if (thread >= kTokens) {
        const int token = thread - kTokens;
        const char* const beta = chunk_row(params.beta, params.beta_strides, chunk, token, head);
        shared.beta[token] = token < chunk.num_tokens ? load_float(beta, params.beta_dtype) : 0;
    }
    cp_async_wait();
}

// A lane's pair of one of the 8 x 8 matrices: row lane / 4.
__device__ __forceinline__ void store_pair(Triangle& target, int row, int column, int lower, int right, int lane,
                                           unsigned int pair) {
    Element(&matrix)[8][8] = target.matrices[Triangle::at(row, column)][lower][right];
    *reinterpret_cast<unsigned int*>(&matrix[lane / 4][lane % 4 * 2]) = pair;
}

// Rows of A and of the weights of a warp, up to the block on the diagonal. A takes the place of k.
__device__ __forceinline__ void multiply_keys(SharedTiles& shared, int warp, int lane, Triangle& weights) {
    float products[kTokenSteps][2][4] = {}, scores[kTokenSteps][2][4] = {};
    const SharedAddress k = left_address(shared.k + warp * kSize, lane), right = right_address(shared.k, lane);
    const SharedAddress q = left_address(shared.q + warp * kSize, lane);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        Fragment keys, queries;
        ldmatrix_x4(keys, k + step * 32);
        ldmatrix_x4(queries, q + step * 32);
#pragma unroll
        for (int block = 0; block < kTokenSteps; ++block) {
            // right either way: nobody looks at what is above the diagonal
            if (block > warp) continue;
            Fragment columns;
            ldmatrix_x4(columns, right + block * kSize * kPitch * 2 + step * 32);
            multiply(products[block][0], products[block][1], keys, columns);
            multiply(scores[block][0], scores[block][1], queries, columns);
        }
    }
    __syncthreads();
#pragma unroll
    for (int block = 0; block < kTokenSteps; ++block) {
        if (block > warp) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = warp * kSize + lane / 4 + i % 2 * 8, column = block * kSize + i / 2 * 8 + lane % 4 * 2;
            float weight[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int at = i % 2 * 2 + e;
                const float decay = exp2_approximate(shared.log_decay[row] - shared.log_decay[column + e]);
                weight[e] = column + e <= row ? decay * scores[block][i / 2][at] : 0;
                const float product = shared.beta[row] * decay * products[block][i / 2][at];
                // right either way: nobody looks at the others
                shared.a[row][column + e] = column + e < row ? product : 0;
            }
            store_pair(weights, warp, block, i % 2, i / 2, lane, pack(weight[0], weight[1]));
        }
    }
}

// The inverse of a block on the diagonal: a column in each lane, of the first half of them.
__device__ __forceinline__ void invert_diagonal(SharedTiles& shared, int warp, int lane) {
    const int first = warp * kSize;
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

// Blocks below the diagonal, those nearest to it first, as others are made of them. Begins with a barrier.
__device__ __forceinline__ void invert_below(SharedTiles& shared, int warp, int lane) {
#pragma unroll 1
    for (int distance = 1; distance < kTokenSteps; ++distance) {
        __syncthreads();
        const int i = warp * kSize, j = i - distance * kSize;
        if (j < 0) continue;
        Sums sums = {}, block = {};
#pragma unroll 1
        for (int k = j; k < i; k += kSize) add_product(sums, shared.a + i, shared.inverse + k, k, j, lane);
        store_sums(shared.inverse + i, j, lane, 1, sums);
        __syncwarp();
        add_product(block, shared.inverse + i, shared.inverse + i, i, j, lane);
        __syncwarp();
        store_sums(shared.inverse + i, j, lane, -1, block);
    }
}

// Rows of T diag(beta) of a warp.
__device__ __forceinline__ void store_inverse(const SharedTiles& shared, int warp, int lane, Triangle (&target)[2]) {
    for (int block = 0; block <= warp; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = warp * kSize + i / 2 * 8 + lane / 4, column = block * kSize + i % 2 * 8 + lane % 4 * 2;
            float values[2];
#pragma unroll
            for (int e = 0; e < 2; ++e)
                // right either way: the inverse is 0 there
                values[e] = column + e <= row ? shared.inverse[row][column + e] * shared.beta[column + e] : 0;
            const unsigned int high = pack(values[0], values[1]);
            const unsigned int low = pack(values[0] - unpacked(high, 0), values[1] - unpacked(high, 1));
            store_pair(target[0], warp, block, i / 2, i % 2, lane, high);
            store_pair(target[1], warp, block, i / 2, i % 2, lane, low);
        }
    }
}

__device__ __forceinline__ void gated_prepare(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (warp == 0) find_chunk(params, block.index, shared.chunk);
    __syncthreads();
    const Chunk& chunk = shared.chunk;
    // right either way: nothing would be stored, or nobody would look at it
    if (chunk.num_tokens == 0 || chunk.sequence < 0) return;
    load(params, shared, block.head);
    __syncthreads();
    auto& prepared = *reinterpret_cast<Prepared*>(prepared_address(params, chunk.sequence, chunk.begin, block.head));
    if (thread < kTokens) {
        const float log = shared.log_decay[thread];
        prepared.decays.log[thread] = log;
        prepared.decays.from_begin[thread] = exp2_approximate(log);
        prepared.decays.to_end[thread] = exp2_approximate(shared.log_decay[kTokens - 1] - log);
    }
    multiply_keys(shared, warp, lane, prepared.weights);
    __syncwarp();
    invert_diagonal(shared, warp, lane);
    invert_below(shared, warp, lane);
    __syncwarp();
    store_inverse(shared, warp, lane, prepared.inverse);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_prepare(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::gated_prepare(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
