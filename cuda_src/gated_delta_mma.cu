// The gated delta rule, chunk by chunk, on the tensor cores for 16-bit floats (sm_80 and newer): with T and weights of
// gated_prepare.cu, c the sum of the gates' logarithms from the chunk's first token on and S the state before it,
//     v' = T diag(beta) (v - diag(exp(c)) k S);  S = exp(c_last) S + sum of exp(c_last - c_j) k_j v'_j^T;
//     o_i = scale (exp(c_i) q_i S + sum over j <= i of weights_ij v'_j).
//
// Grid: one block per kBlockN features of one head of v of one sequence, or of each of its segments; packed sequences
// have one more, of the tokens behind the last, whose output is 0. The state stays in registers from the first chunk to
// the last, so that it never travels through memory.
//
// Warps have one of three tasks, and meet once per chunk. One of kStateWarps owns 16 features of v of the state. It
// computes transposes, in which a result has the layout of the next product's left operand, so that a chunk takes it
// three products and no exchange. One of kOutputWarps has 16 tokens of the chunk before, and multiplies what the state
// warps left of it: the transposes of their operands are right operands as they are. Two load the chunks to come.

#ifndef CUFLASH_BLOCK_N
#define CUFLASH_BLOCK_N 32
#endif
#ifndef CUFLASH_STAGES
#define CUFLASH_STAGES 2
#endif
#ifndef CUFLASH_THREADS
#define CUFLASH_THREADS 256  // 16 features of v, or 16 tokens, for each warp, and two more
#endif

#include "gated/load.cuh"
#include "gated/operands.cuh"
#include "gated/sequence.cuh"
#include "gated/state.cuh"
#include "gated/store.cuh"
#include "ptx/mbarrier.cuh"

namespace cuflash {

constexpr int kPitch = kHeadDim + 8, kPitchV = kBlockN + 8;
constexpr int kSteps = kHeadDim / 16;
constexpr int kStateWarps = kBlockN / 16, kOutputWarps = kTokenSteps, kLoaders = 64;
// Loading is little work beside states: the first of the four units of a multiprocessor have both.
constexpr int kFirstLoader = kStateWarps + kOutputWarps < 4 ? kStateWarps + kOutputWarps : 4;

static_assert(kThreads == 32 * (kStateWarps + kOutputWarps) + kLoaders && kHeadDim % 16 == 0 && kBlockN % 16 == 0);

// The state before a chunk and its v', as right operands of 16 features of v.
struct Operands {
    WarpFragment state[kSteps];
    WarpFragment values[kTokenSteps];
};

// Of the chunk whose state is computed, those to come, and the one before, as far as it is still needed.
struct SharedTiles {
    alignas(16) Element q[kStages + 1][kTokens][kPitch];
    alignas(16) Element k[kStages + 2][kTokens][kPitch];
    alignas(16) Element v[kStages + 1][kTokens][kPitchV];
    Triangle inverses[kStages + 1][2];
    Triangle weights[kStages + 1];
    TokenDecays decays[kStages + 2];
    Operands operands[2][kStateWarps];
    Mbarrier meeting;  // of all warps, once per chunk
};

// What a state warp does to a chunk, in pieces of 16 tokens and in an order that has products of one piece under way
// while another one is scaled and rounded. Its second half of tokens enters the state when the first has been added.
struct StateWarp {
    State state = {};
    Columns updates;                // v'^T
    Fragment changes[kTokenSteps];  // (exp(c_last - c) v')^T
    int lane;

    // Adds keys of 16 tokens.
    __device__ __forceinline__ void add(SharedAddress keys, int block) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            Fragment rows;
            ldmatrix_x4_transposed(rows, keys + (block * 16 * kPitch + step * 16) * 2);
            multiply(state[2 * step], state[2 * step + 1], changes[block], rows);
        }
    }
    // Leaves v' of 16 tokens to the output warps.
    __device__ __forceinline__ void finish(int block, const TokenDecays& decays, Operands& operands) {
        Fragment plain;
        as_operand(plain, updates[2 * block], updates[2 * block + 1]);
        if constexpr (!kCarry) hand_over(operands.values[block][lane], plain);
        decay_to_end(changes[block], updates[2 * block], updates[2 * block + 1], block, decays, lane);
    }
    // S = exp(c_last) S + k^T (exp(c_last - c) v').
    __device__ __forceinline__ void enter(SharedAddress keys, const TokenDecays& decays, Operands& operands) {
        const float decay = decays.from_begin[kTokens - 1];
#pragma unroll
        for (int i = 0; i < 8 * kSteps; ++i) state[i / 4][i % 4] *= decay;
#pragma unroll
        for (int block = 0; block < kTokenSteps / 2; ++block) add(keys, block);
#pragma unroll
        for (int block = kTokenSteps / 2; block < kTokenSteps; ++block) finish(block, decays, operands);
#pragma unroll
        for (int block = kTokenSteps / 2; block < kTokenSteps; ++block) add(keys, block);
    }
    // Adds what one matrix of T diag(beta) makes of it.
    __device__ __forceinline__ void solve(const Fragment (&rest)[2], int row, int column, Triangle (&inverse)[2]) {
#pragma unroll
        for (int part = 1; part >= 0; --part) {
            Fragment factors;
            ldmatrix_x4(factors, right_address(inverse[part], row, column, lane));
            // right either way: the smaller parts' product is small
            if (part == 0) multiply(updates[2 * row], updates[2 * row + 1], rest[1], factors);
            multiply(updates[2 * row], updates[2 * row + 1], rest[0], factors);
        }
    }
    // v', of which the second half is still to be finished, and the state before it for the output warps.
    __device__ __forceinline__ void update(SharedAddress keys, SharedAddress values, Triangle (&inverse)[2],
                                           const TokenDecays& decays, Operands& operands) {
        constexpr int kHalf = kTokenSteps / 2, kNumLeft = kHalf * kTokenSteps - kHalf * (kHalf - 1) / 2;
        Columns products = {};
        Fragment rest[kTokenSteps][2];
        const auto subtract_values = [&](int block) {
            Fragment own;
            ldmatrix_x4_transposed(own, values + block * 16 * kPitchV * 2);
            subtract(rest[block][0], rest[block][1], block, products, own, decays, lane);
        };
        const auto multiply_keys = [&](int step, int first) {
            Fragment rows;
            as_operand(rows, state[2 * step], state[2 * step + 1]);
            // right either way: it is the same again
            if (!kCarry && first == 0) hand_over(operands.state[step][lane], rows);
#pragma unroll
            for (int block = first; block < first + kHalf; ++block) {
                Fragment columns;
                ldmatrix_x4(columns, keys + (block * 16 * kPitch + step * 16) * 2);
                multiply(products[2 * block], products[2 * block + 1], rows, columns);
            }
        };
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) updates[i / 4][i % 4] = 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) multiply_keys(step, 0);
#pragma unroll
        for (int block = 0; block < kHalf; ++block) subtract_values(block);
        // While the second half is multiplied, matrices of the first one's columns.
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            multiply_keys(step, kHalf);
#pragma unroll
            for (int column = 0; column < kHalf; ++column) {
#pragma unroll
                for (int row = column; row < kTokenSteps; ++row) {
                    const int number = column * kTokenSteps - column * (column - 1) / 2 + row - column;
                    if (number * kSteps / kNumLeft == step) solve(rest[column], row, column, inverse);
                }
            }
        }
#pragma unroll
        for (int block = kHalf; block < kTokenSteps; ++block) subtract_values(block);
#pragma unroll
        for (int column = kHalf; column < kTokenSteps; ++column) {
#pragma unroll
            for (int row = column; row < kTokenSteps; ++row) solve(rest[column], row, column, inverse);
        }
#pragma unroll
        for (int block = 0; block < kHalf; ++block) finish(block, decays, operands);
    }
};

// From the initial state to the final one.
__device__ __forceinline__ void walk_states(const GatedParams& params, const GatedBlock& block, SharedTiles& shared,
                                            int num_chunks, int warp, int lane) {
    StateWarp own;
    own.lane = lane;
    load_state(params, block, warp, lane, own.state);
#pragma unroll 1
    for (int chunk = 0; num_chunks > 0; ++chunk) {
        if (chunk > 0) {
            const int last = chunk - 1;
            own.enter(left_address(shared.k[last % (kStages + 2)], lane), shared.decays[last % (kStages + 2)],
                      shared.operands[last % 2][warp]);
        }
        meet(shared.meeting, chunk);  // it is there
        if (chunk == num_chunks) break;
        Element(*const v)[kPitchV] = shared.v[chunk % (kStages + 1)];
        own.update(right_address(shared.k[chunk % (kStages + 2)], lane), right_address(v, lane) + warp * 32,
                   shared.inverses[chunk % (kStages + 1)], shared.decays[chunk % (kStages + 2)],
                   shared.operands[chunk % 2][warp]);
    }
    store_state(params, block, warp, lane, own.state);
}

using Output = float[2 * kStateWarps][4];

// The output of 16 tokens of a chunk.
__device__ __forceinline__ void compute_output(SharedTiles& shared, int chunk, int tokens, int lane, Output& o) {
    const Operands(&operands)[kStateWarps] = shared.operands[chunk % 2];
    const float* const from_begin = shared.decays[chunk % (kStages + 2)].from_begin + tokens * 16 + lane / 4;
    const SharedAddress q = left_address(shared.q[chunk % (kStages + 1)] + tokens * 16, lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        Fragment queries;
        ldmatrix_x4(queries, q + step * 32);
#pragma unroll
        for (int warp = 0; warp < kStateWarps; ++warp) {
            Fragment columns;
            transpose(columns, operands[warp].state[step][lane]);
            multiply(o[2 * warp], o[2 * warp + 1], queries, columns);
        }
    }
    const float decays[2] = {from_begin[0], from_begin[8]};
#pragma unroll
    for (int i = 0; i < 8 * kStateWarps; ++i) o[i / 4][i % 4] *= decays[i / 2 % 2];
#pragma unroll
    for (int block = 0; block < kTokenSteps; ++block) {
        if (block > tokens) break;
        Fragment weights;
        ldmatrix_x4(weights, left_address(shared.weights[chunk % (kStages + 1)], tokens, block, lane));
#pragma unroll
        for (int warp = 0; warp < kStateWarps; ++warp) {
            Fragment columns;
            transpose(columns, operands[warp].values[block][lane]);
            multiply(o[2 * warp], o[2 * warp + 1], weights, columns);
        }
    }
}

// Stores 16 rows, `num_tokens` of which are there, of the block's features; `out` is where the first begins.
__device__ __forceinline__ void store(const GatedParams& params, char* out, long long num_tokens, int column, int lane,
                                      const Output& o) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int token = lane / 4 + r * 8;
        store_row<kVectorLoads>(token < num_tokens ? out + token * params.out_strides.token : nullptr, column,
                                params.head_dim_v, params.out_strides.column, o, r, static_cast<float>(params.scale),
                                lane);
    }
}

// The output of 16 tokens of each chunk, one chunk behind the states.
__device__ __forceinline__ void walk_outputs(const GatedParams& params, const GatedBlock& block, SharedTiles& shared,
                                             const TokenRange& tokens, int num_chunks, int warp, int lane) {
    const int first = warp * 16;
    const long long batch = kVarlen ? 0 : block.index;
    char* out = params.out + token_offset(params.out_strides, batch, tokens.begin + first, block.head);
    long long left = tokens.end - tokens.begin - first;
    const bool has_state = block.index < params.num_sequences;
    if (has_state && num_chunks > 0) meet(shared.meeting, 0);
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
        Output o = {};
        if (has_state) {
            meet(shared.meeting, chunk + 1);
            if constexpr (kCarry) continue;
            compute_output(shared, chunk, warp, lane, o);
        }
        store(params, out, left, block.part * kBlockN, lane, o);
        out += kTokens * params.out_strides.token, left -= kTokens;
    }
}

// Where the arrays of a chunk begin, which are stepped through: to multiply for each of them would take longer.
struct Loads {
    const GatedParams& params;
    const char* q;
    const char* k;
    const char* v;
    const char* prepared;
    const char* weights;
    int column;

    __device__ __forceinline__ Loads(const GatedParams& params, const GatedBlock& block, long long token)
        : params(params), column(block.part * kBlockN) {
        // A division of its own: with a call of `divide` the products lack registers.
        const long long head_k = block.head / static_cast<unsigned int>(params.group_size.value);
        const long long batch = kVarlen ? 0 : block.index;
        q = params.q + token_offset(params.q_strides, batch, token, head_k);
        k = params.k + token_offset(params.k_strides, batch, token, head_k);
        v = params.v + token_offset(params.v_strides, batch, token, block.head) + column * params.v_strides.column;
        prepared = prepared_address(params, block.index, token, block.head);
        weights = prepared + 2 * sizeof(Triangle);
    }
    // Asks for what the output of a chunk needs alone, of which `num_tokens` are there, and steps on.
    __device__ __forceinline__ void for_output(SharedTiles& shared, int chunk, long long num_tokens, int loader) {
        load_rows<kTokens, kHeadDim, kLoaders>(shared.q[chunk % (kStages + 1)], q, params.q_strides.token,
                                               params.q_strides.column, num_tokens, params.head_dim, loader);
        copy_bytes<sizeof(Triangle), kLoaders>(&shared.weights[chunk % (kStages + 1)], weights, loader);
        q += kTokens * params.q_strides.token, weights += prepared_step();
    }
    // The same of all else.
    __device__ __forceinline__ void for_state(SharedTiles& shared, int chunk, long long num_tokens, int loader) {
        load_rows<kTokens, kHeadDim, kLoaders>(shared.k[chunk % (kStages + 2)], k, params.k_strides.token,
                                               params.k_strides.column, num_tokens, params.head_dim, loader);
        load_rows<kTokens, kBlockN, kLoaders>(shared.v[chunk % (kStages + 1)], v, params.v_strides.token,
                                              params.v_strides.column, num_tokens, params.head_dim_v - column, loader);
        copy_bytes<2 * sizeof(Triangle), kLoaders>(&shared.inverses[chunk % (kStages + 1)], prepared, loader);
        copy_bytes<sizeof(TokenDecays), kLoaders>(&shared.decays[chunk % (kStages + 2)],
                                                  prepared + 3 * sizeof(Triangle), loader);
        k += kTokens * params.k_strides.token, v += kTokens * params.v_strides.token, prepared += prepared_step();
    }
    __device__ __forceinline__ long long prepared_step() const {
        return params.num_heads_v * static_cast<long long>(sizeof(Prepared));
    }
};

// Chunks, kStages ahead of the states; what outputs need one chunk later, as they are.
__device__ __forceinline__ void load_chunks(const GatedParams& params, const GatedBlock& block, SharedTiles& shared,
                                            const TokenRange& tokens, int num_chunks, int loader) {
    Loads loads(params, block, tokens.begin);
    const long long num_tokens = tokens.end - tokens.begin;
    const auto left = [&](int chunk) { return num_tokens - chunk * static_cast<long long>(kTokens); };
#pragma unroll 1
    for (int chunk = 0; chunk <= num_chunks + kStages; ++chunk) {
        if (chunk >= kStages) {
            cp_async_wait_group<kStages - 1>();
            meet(shared.meeting, chunk - kStages);  // for states of the chunk kStages before this one
        }
        if (chunk < num_chunks) loads.for_state(shared, chunk, left(chunk), loader);
        if (!kCarry && chunk > 0 && chunk <= num_chunks) loads.for_output(shared, chunk - 1, left(chunk - 1), loader);
        cp_async_commit();
    }
}

__device__ __forceinline__ void gated_delta(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, loader = threadIdx.x - kFirstLoader * 32;
    const TokenRange tokens = tokens_of(params, block);
    const auto num_chunks = static_cast<int>((tokens.end - tokens.begin + kTokens - 1) / kTokens);
    const bool has_state = block.index < params.num_sequences;
    if (threadIdx.x == 0) mbarrier_init(shared.meeting, kThreads / 32);
    __syncthreads();
    if (warp < kStateWarps) {
        if (has_state) walk_states(params, block, shared, num_chunks, warp, lane);
    } else if (loader >= 0 && loader < kLoaders) {
        if (has_state && num_chunks > 0) load_chunks(params, block, shared, tokens, num_chunks, loader);
    } else {
        const int output_warp = warp - kStateWarps - (loader < 0 ? 0 : kLoaders / 32);
        walk_outputs(params, block, shared, tokens, num_chunks, output_warp, lane);
    }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_delta_mma(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::gated_delta(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
