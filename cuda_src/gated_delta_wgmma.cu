// The gated delta rule, chunk by chunk, on Hopper's tensor cores for 16-bit floats (sm_90a), as gated_delta_mma.cu has
// it, with T and weights of gated_prepare.cu:
//     v' = T diag(beta) (v - diag(exp(c)) k S);  S = exp(c_last) S + sum of exp(c_last - c_j) k_j v'_j^T;
//     o_i = scale (exp(c_i) q_i S + sum over j <= i of weights_ij v'_j).
//
// Grid: one block per 64 features of one head of v of one sequence, or of each of its segments; packed sequences have
// one more, of the tokens behind the last, whose output is 0.
//
// A warpgroup has the state in registers, transposed: each result is a left operand of the next product, whose right
// operand is in shared memory as it came. Products run beside what scales and rounds the results of others: those of q
// and S beside v - diag(exp(c)) k S, those of weights and v' beside the next state's rounding, and the output of a
// chunk is staged while the next one's keys are multiplied. Four more warps load chunks and store outputs.

#ifndef CUFLASH_BLOCK_N
#define CUFLASH_BLOCK_N 64  // the only number
#endif
#ifndef CUFLASH_STAGES
#define CUFLASH_STAGES 2
#endif
#ifndef CUFLASH_THREADS
#define CUFLASH_THREADS 256  // the only number
#endif

#include "gated/load.cuh"
#include "gated/sequence.cuh"
#include "gated/state.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/stmatrix.cuh"
#include "wgmma/panels.cuh"

namespace cuflash {

constexpr int kSteps = kHeadDim / 16, kPitchV = kBlockN + 8, kLoaders = kThreads - 128;

static_assert(kTokens == 64 && kBlockN == 64 && kLoaders == 128 && (kHeadDim == 64 || kHeadDim == 128));

using TokenRows = Panels<kTokens, kHeadDim>;

// Of the chunk whose state is computed, those to come, and the one before, whose weights are still multiplied.
struct SharedTiles {
    TokenRows k[kStages + 1];
    TokenRows q[kStages + 1];  // the last 16 tokens first
    alignas(16) Element v[kStages + 1][kTokens][kPitchV];
    Triangle inverses[kStages + 1][2];
    Triangle weights[kStages + 2];
    TokenDecays decays[kStages + 1];
    alignas(16) Element out[2][kTokens][kPitchV];  // of a chunk that is stored, and of the next
    Mbarrier meeting;                              // of all warps, once per chunk
};

// d = S^T rows^T, of which `state` has the left operands.
__device__ __forceinline__ void multiply_features(Columns& d, const Fragment (&state)[kSteps], TokenRows& rows) {
    wgmma<kBfloat16, false, false>(d, state[0], rows.features(0));
#pragma unroll
    for (int step = 1; step < kSteps; ++step) wgmma<kBfloat16, false, true>(d, state[step], rows.features(step));
}

// Results of triangles have the last 16 tokens first, so that what a column adds to is the first part of registers: the
// compiler gives each product registers that follow one another.
__device__ __forceinline__ constexpr int tile_of(int token_tile) {
    return kTokens / 8 - 2 - token_tile + token_tile % 2 * 2;
}

// d += a triangle^T, of which a is the left operand of columns from kColumn on.
template <bool kAdd, int kColumn = 0>
__device__ __forceinline__ void multiply_triangle(Columns& d, const Fragment (&a)[kTokenSteps], Triangle& triangle) {
    constexpr int kTiles = kTokens / 8 - 2 * kColumn;
    const SharedAddress matrices = shared_address(triangle.matrices[Triangle::at(kTokenSteps - 1, kColumn)]);
    wgmma<kBfloat16, false, kAdd || (kColumn > 0)>(reinterpret_cast<float (&)[kTiles][4]>(d), a[kColumn],
                                                   SharedMatrix::plain(matrices, 128, 256));
    if constexpr (kColumn + 1 < kTokenSteps) multiply_triangle<true, kColumn + 1>(d, a, triangle);
}

// Leaves a warp's 16 features of the output of a chunk to the loading warps, which store it.
__device__ __forceinline__ void stage(Element (*rows)[kPitchV], float scale, int lane, const Columns& o) {
    const SharedAddress target = right_address(rows, lane);
#pragma unroll
    for (int block = 0; block < kTokenSteps; ++block) {
        Fragment pairs;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float (&tile)[4] = o[tile_of(2 * block + i / 2)];
            pairs[i] = pack(scale * tile[i % 2 * 2], scale * tile[i % 2 * 2 + 1]);
        }
        stmatrix_x4_transposed(target + block * 16 * kPitchV * 2, pairs);
    }
}

// What a warp of the warpgroup has of a sequence.
struct StateWarp {
    const GatedParams& params;
    SharedTiles& shared;
    int warp, lane;
    State state = {};
    Columns o = {};   // of the last chunk, until it is stored
    Columns updates;  // v'^T

    __device__ __forceinline__ void stage_output(int chunk) {
        Element(*const rows)[kPitchV] = shared.out[chunk % 2];
        stage(reinterpret_cast<Element(*)[kPitchV]>(&rows[0][warp * 16]), static_cast<float>(params.scale), lane, o);
    }
    // From the state before a chunk, of which everything has arrived then, to its v'. The output of the chunk before it
    // is staged meanwhile; before the first these are zeros that nobody stores.
    __device__ __forceinline__ void begin(int chunk) {
        const int slot = chunk % (kStages + 1);
        const TokenDecays& decays = shared.decays[slot];
        Fragment rows[kSteps];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) as_operand(rows[step], state[2 * step], state[2 * step + 1]);
        meet(shared.meeting, chunk);
        const float decay = decays.from_begin[kTokens - 1];
        Fragment values[kTokenSteps];
        const SharedAddress v = right_address(shared.v[slot], lane) + warp * 32;
#pragma unroll
        for (int i = 0; i < kTokenSteps; ++i) ldmatrix_x4_transposed(values[i], v + i * 16 * kPitchV * 2);
        Columns products;
        wgmma_fence();
        multiply_features(products, rows, shared.k[slot]);
        wgmma_commit();
        if constexpr (!kCarry) {
            wgmma_wait<1>(o);
            stage_output(chunk + 1);
        }
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) state[i / 4][i % 4] *= decay;
        if constexpr (!kCarry) {
            wgmma_fence();
            multiply_features(o, rows, shared.q[slot]);
            wgmma_commit();
        }
        Fragment high[kTokenSteps], low[kTokenSteps];
        wgmma_wait<kCarry ? 0 : 1>(products);
#pragma unroll
        for (int i = 0; i < kTokenSteps; ++i) subtract(high[i], low[i], i, products, values[i], decays, lane);
        wgmma_fence();
        multiply_triangle<false>(updates, high, shared.inverses[slot][1]);
        multiply_triangle<true>(updates, low, shared.inverses[slot][0]);
        multiply_triangle<true>(updates, high, shared.inverses[slot][0]);
        wgmma_commit();
        if constexpr (!kCarry) {
            wgmma_wait<1>(o);
#pragma unroll
            for (int tile = 0; tile < kTokens / 8; ++tile) {
                const Pair from_begin = pair_of(decays.from_begin, tile, lane);
#pragma unroll
                for (int i = 0; i < 4; ++i) o[tile_of(tile)][i] *= i % 2 == 0 ? from_begin.first : from_begin.second;
            }
        }
        wgmma_wait<0>(updates);
    }
    // From v' of a chunk to the state behind it, and to its output, which is still under way then.
    __device__ __forceinline__ void end(int chunk) {
        const int slot = chunk % (kStages + 1);
        Fragment plain[kTokenSteps], decayed[kTokenSteps];
#pragma unroll
        for (int i = 0; i < kTokenSteps; ++i) {
            const float (&first)[4] = updates[tile_of(2 * i)], (&second)[4] = updates[tile_of(2 * i + 1)];
            as_operand(plain[i], first, second);
            decay_to_end(decayed[i], first, second, i, shared.decays[slot], lane);
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kTokenSteps; ++i) wgmma<kBfloat16, true, true>(state, decayed[i], shared.k[slot].tokens(i));
        wgmma_commit();
        if constexpr (!kCarry) {
            multiply_triangle<true>(o, plain, shared.weights[chunk % (kStages + 2)]);
            wgmma_commit();
        }
        wgmma_wait<kCarry ? 0 : 1>(state);
    }
};

// From the initial state to the final one. The warps of the block's first 128 threads.
__device__ __forceinline__ void walk_states(const GatedParams& params, const GatedBlock& block, SharedTiles& shared,
                                            int num_chunks, int warp, int lane) {
    StateWarp own = {params, shared, warp, lane};
    load_state(params, block, warp, lane, own.state);
    if (num_chunks > 0) {
        // Nothing is under way where the loop begins again: registers of products could not be told from others there.
        own.begin(0);
        int chunk = 0;
#pragma unroll 1
        for (; chunk + 1 < num_chunks; ++chunk) {
            own.end(chunk);
            own.begin(chunk + 1);
        }
        own.end(chunk);
        if constexpr (!kCarry) {
            meet(shared.meeting, num_chunks);
            wgmma_wait<0>(own.o);
            own.stage_output(chunk);
            meet(shared.meeting, num_chunks + 1);
        }
    }
    store_state(params, block, warp, lane, own.state);
}

// Stores the staged output of a chunk, of which `num_tokens` are there; `out` is where the first begins.
__device__ __forceinline__ void store(const GatedParams& params, char* out, long long num_tokens, int num_features,
                                      Element (*rows)[kPitchV], int loader) {
    const int column = loader % 8 * 8;
    if (column >= num_features) return;
#pragma unroll
    for (int token = loader / 8; token < kTokens; token += kLoaders / 8) {
        if (token < num_tokens)
            *reinterpret_cast<Vector16*>(out + token * params.out_strides.token + column * 2) =
                *reinterpret_cast<const Vector16*>(&rows[token][column]);
    }
}

// Loads chunks, kStages ahead of the states, and stores outputs, which are staged beside the next chunk's products.
__device__ __forceinline__ void load_and_store(const GatedParams& params, const GatedBlock& block, SharedTiles& shared,
                                               const TokenRange& tokens, int num_chunks, int loader) {
    const long long head_k = divide(block.head, params.group_size), batch = kVarlen ? 0 : block.index;
    const int column = block.part * kBlockN, num_features = params.head_dim_v - column;
    const char* q = params.q + token_offset(params.q_strides, batch, tokens.begin, head_k);
    const char* k = params.k + token_offset(params.k_strides, batch, tokens.begin, head_k);
    const char* v = params.v + token_offset(params.v_strides, batch, tokens.begin, block.head) + column * 2;
    const char* prepared = prepared_address(params, block.index, tokens.begin, block.head);
    char* out = params.out + token_offset(params.out_strides, batch, tokens.begin, block.head) + column * 2;
    long long left = tokens.end - tokens.begin, left_of_output = left;
    const PanelCopy<kHeadDim> copy_k(params.k_strides.token, params.head_dim, loader);
    const PanelCopy<kHeadDim> copy_q(params.q_strides.token, params.head_dim, loader);
    k = copy_k.own_part(k), q = copy_q.own_part(q);
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks + kStages + (kCarry ? 0 : 2); ++chunk) {
        if (chunk >= kStages) {
            cp_async_wait_group<kStages - 1>();
            fence_async_proxy();
            meet(shared.meeting, chunk - kStages);  // for states of the chunk kStages before this one
        }
        if (chunk < num_chunks) {
            const int slot = chunk % (kStages + 1);
            // right either way: what is rounded to int are rows of one array
            const int num_tokens = static_cast<int>(min(left, 1LL * kTokens));
            copy_k.template load<false>(shared.k[slot], k, num_tokens);
            if constexpr (!kCarry) {
                copy_q.template load<false, true>(shared.q[slot], q, num_tokens);
                copy_bytes<sizeof(Triangle), kLoaders>(&shared.weights[chunk % (kStages + 2)],
                                                       prepared + 2 * sizeof(Triangle), loader);
            }
            load_rows<kTokens, kBlockN, kLoaders>(shared.v[slot], v, params.v_strides.token, 2, left, num_features,
                                                  loader);
            copy_bytes<2 * sizeof(Triangle), kLoaders>(&shared.inverses[slot], prepared, loader);
            copy_bytes<sizeof(TokenDecays), kLoaders>(&shared.decays[slot], prepared + 3 * sizeof(Triangle), loader);
            q += kTokens * params.q_strides.token, k += kTokens * params.k_strides.token;
            v += kTokens * params.v_strides.token, left -= kTokens;
            prepared += params.num_heads_v * static_cast<long long>(sizeof(Prepared));
        }
        cp_async_commit();
        const int done = chunk - kStages - 2;
        if (!kCarry && done >= 0) {
            store(params, out, left_of_output, num_features, shared.out[done % 2], loader);
            out += kTokens * params.out_strides.token, left_of_output -= kTokens;
        }
    }
}

// Zeros as the output of tokens of no sequence.
__device__ __forceinline__ void hide(const GatedParams& params, const GatedBlock& block, const TokenRange& tokens) {
    const int column = block.part * kBlockN + threadIdx.x % 8 * 8;
    if (column >= params.head_dim_v) return;
    char* const out = params.out + token_offset(params.out_strides, 0, 0, block.head) + column * 2;
    for (long long token = tokens.begin + threadIdx.x / 8; token < tokens.end; token += kThreads / 8)
        *reinterpret_cast<Vector16*>(out + token * params.out_strides.token) = {};
}

__device__ __forceinline__ void gated_delta(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    const TokenRange tokens = tokens_of(params, block);
    const auto num_chunks = static_cast<int>((tokens.end - tokens.begin + kTokens - 1) / kTokens);
    // Known to be the same for all lanes: products in a branch that might be taken by some would wait for each other.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) mbarrier_init(shared.meeting, kThreads / 32);
    __syncthreads();
    if (block.index == params.num_sequences) hide(params, block, tokens);
    else if (warp < 4) walk_states(params, block, shared, num_chunks, warp, threadIdx.x % 32);
    else if (num_chunks > 0) load_and_store(params, block, shared, tokens, num_chunks, threadIdx.x - 128);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_delta_wgmma(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(1024) char shared_memory[];
    cuflash::gated_delta(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
