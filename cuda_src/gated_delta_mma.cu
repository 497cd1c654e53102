// The gated delta rule, chunk by chunk, on the tensor cores for 16-bit floats (sm_80 and newer): with T of
// gated_inverse.cu, c the sum of the gates' logarithms from the chunk's first token on and S the state before it,
//     v' = T diag(beta) (v - diag(exp(c)) k S);  S = exp(c_last) S + sum of exp(c_last - c_j) k_j v'_j^T;
//     o_i = scale (exp(c_i) q_i S + sum over j <= i of exp(c_i - c_j) (q_i.k_j) v'_j).
//
// Grid: one block per kBlockN features of one head of v of one sequence; packed sequences have one more, of the tokens
// behind the last, whose output is 0. The state stays in registers from the first chunk to the last, so that it never
// travels through memory.
//
// Warps have one of three tasks, and meet once per chunk. One of kStateWarps owns 16 features of v of the state. It
// computes transposes, in which a result has the layout of the next product's left operand, so that a chunk takes it
// three products and no exchange. One of kOutputWarps has 16 tokens of the chunk before, and multiplies what the state
// warps left of it: the transposes of their operands are right operands as they are. One loads the chunks to come.

#ifndef CUFLASH_BLOCK_N
#define CUFLASH_BLOCK_N 32
#endif
#ifndef CUFLASH_STAGES
#define CUFLASH_STAGES 2
#endif
#ifndef CUFLASH_THREADS
#define CUFLASH_THREADS 224  // 16 features of v, or 16 tokens, for each warp, and one more
#endif

#include "gated/load.cuh"
#include "gated/prepared.cuh"
#include "gated/sequence.cuh"
#include "gated/store.cuh"
#include "ptx/exp2.cuh"

namespace cuflash {

constexpr int kPitch = kHeadDim + 8, kPitchV = kBlockN + 8;
constexpr int kSteps = kHeadDim / 16, kTokenTiles = kTokens / 8;
constexpr int kStateWarps = kBlockN / 16, kOutputWarps = kTokenSteps;

static_assert(kThreads == 32 * (kStateWarps + kOutputWarps + 1) && kHeadDim % 16 == 0 && kBlockN % 16 == 0);

// The state before a chunk and its v', as right operands of 16 features of v.
struct Operands {
    WarpFragment state[kSteps];
    WarpFragment values[kTokenSteps];
};

// Of the chunk whose state is computed, those to come, and the one before, as far as its output needs them.
struct SharedTiles {
    alignas(16) Element q[kStages + 1][kTokens][kPitch];
    alignas(16) Element k[kStages + 2][kTokens][kPitch];
    alignas(16) Element v[kStages + 1][kTokens][kPitchV];
    Inverse inverses[kStages + 1];
    TokenDecays decays[kStages + 2];
    Operands operands[2][kStateWarps];
};

// Transposed: 16 features of v, and of k.
using State = float[2 * kSteps][4];
// Transposed as well: 16 features of v, and tokens.
using Columns = float[kTokenTiles][4];

struct Pair {
    float first, second;
};

// Of the tokens of a lane's columns of a tile.
__device__ __forceinline__ Pair pair_of(const float (&of_tokens)[kTokens], int tile, int lane) {
    const float* const first = &of_tokens[tile * 8 + lane % 4 * 2];
    struct alignas(8) Both {
        float first, second;
    };
    const Both both = *reinterpret_cast<const Both*>(first);
    return {both.first, both.second};
}

// Two neighbouring tiles of a result as the left operand of a product.
__device__ __forceinline__ void as_operand(Fragment& operand, const float (&first)[4], const float (&second)[4]) {
    operand[0] = pack(first[0], first[1]), operand[1] = pack(first[2], first[3]);
    operand[2] = pack(second[0], second[1]), operand[3] = pack(second[2], second[3]);
}

// A left operand of a product that others read as a right operand.
__device__ __forceinline__ void hand_over(LaneFragment& target, const Fragment& left) {
    target = {{left[0], left[1], left[2], left[3]}};
}

// A left operand as the right operand that is its transpose.
__device__ __forceinline__ void transpose(Fragment& right, const LaneFragment& left) {
    right[0] = left.registers[0], right[1] = left.registers[2];
    right[2] = left.registers[1], right[3] = left.registers[3];
}

__device__ __forceinline__ void copy(Fragment& fragment, const LaneFragment& source) {
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[i] = source.registers[i];
}

// What a chunk adds to the state: exp(c_last - c) v', transposed, and the decay exp(c_last) of what was before.
struct Change {
    Fragment values[kTokenSteps];
    float decay;
};

// S = decay S + k^T values, with keys of the chunk of `change`, and products = S^T k^T, with those of the next one. The
// state is left to the output warps.
__device__ __forceinline__ void step_state(State& state, const Change& change, Element (*last_k)[kPitch],
                                           Element (*k)[kPitch], int lane, Columns& products, Operands& operands) {
    const SharedAddress last_keys = left_address(last_k, lane), keys = right_address(k, lane);
    const auto change_tiles = [&](int step) {
#pragma unroll
        for (int i = 0; i < 8; ++i) state[2 * step + i / 4][i % 4] *= change.decay;
#pragma unroll
        for (int block = 0; block < kTokenSteps; ++block) {
            Fragment rows;
            ldmatrix_x4_transposed(rows, last_keys + (block * 16 * kPitch + step * 16) * 2);
            multiply(state[2 * step], state[2 * step + 1], change.values[block], rows);
        }
    };
    change_tiles(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        // While these are multiplied, those before them come to an end.
        if (step + 1 < kSteps) change_tiles(step + 1);
        Fragment rows;
        as_operand(rows, state[2 * step], state[2 * step + 1]);
#pragma unroll
        for (int block = 0; block < kTokenSteps; ++block) {
            Fragment columns;
            ldmatrix_x4(columns, keys + (block * 16 * kPitch + step * 16) * 2);
            multiply(products[2 * block], products[2 * block + 1], rows, columns);
        }
        hand_over(operands.state[step][lane], rows);
    }
}

// v'^T = (v - diag(exp(c)) products)^T (T diag(beta))^T, which is left to the output warps, and what it changes.
__device__ __forceinline__ void solve(Change& change, const Columns& products, Element (*v)[kPitchV],
                                      const Inverse& inverse, const TokenDecays& decays, int lane,
                                      Operands& operands) {
    Columns updates = {};
    const SharedAddress values = right_address(v, lane);
#pragma unroll
    for (int column = 0; column < kTokenSteps; ++column) {
        Fragment own, rest;
        ldmatrix_x4_transposed(own, values + column * 16 * kPitchV * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&tile)[4] = products[2 * column + i / 2];
            const Pair decay = pair_of(decays.from_begin, 2 * column + i / 2, lane);
            const int at = i % 2 * 2;
            rest[i] =
                pack(unpacked(own[i], 0) - decay.first * tile[at], unpacked(own[i], 1) - decay.second * tile[at + 1]);
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
#pragma unroll
            for (int row = column; row < kTokenSteps; ++row) {
                Fragment factors;
                copy(factors, (part == 0 ? inverse.low : inverse.high)[Inverse::at(row, column)][lane]);
                multiply(updates[2 * row], updates[2 * row + 1], rest, factors);
            }
        }
    }
    change.decay = decays.from_begin[kTokens - 1];
#pragma unroll
    for (int block = 0; block < kTokenSteps; ++block) {
        Fragment plain;
        as_operand(plain, updates[2 * block], updates[2 * block + 1]);
        hand_over(operands.values[block][lane], plain);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const Pair to_end = pair_of(decays.to_end, 2 * block + i / 4, lane);
            updates[2 * block + i / 4][i % 4] *= i % 2 == 0 ? to_end.first : to_end.second;
        }
        as_operand(change.values[block], updates[2 * block], updates[2 * block + 1]);
    }
}

// Calls `visit(offset, value)` for each element of a state warp that is there.
template <typename Visit>
__device__ __forceinline__ void for_each_element(const GatedParams& params, const GatedBlock& block,
                                                 const StateStrides& strides, int warp, int lane, State& state,
                                                 Visit visit) {
    const long long head = block.index * strides.index + block.head * strides.head;
#pragma unroll
    for (int tile = 0; tile < 2 * kSteps; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = tile * 8 + lane % 4 * 2 + i % 2;
            const int column = block.part * kBlockN + warp * 16 + i / 2 * 8 + lane / 4;
            if (row < params.head_dim && column < params.head_dim_v)
                visit(head + row * strides.row + column * strides.column, state[tile][i]);
        }
    }
}

// From the initial state to the final one.
__device__ __forceinline__ void walk_states(const GatedParams& params, const GatedBlock& block, SharedTiles& shared,
                                            int num_chunks, int warp, int lane) {
    State state = {};
    if (params.initial_state != nullptr)
        for_each_element(params, block, params.initial_state_strides, warp, lane, state,
                         [&](long long at, float& value) { value = load_bits<float>(params.initial_state + at); });
    // Before the first chunk it adds nothing, of keys that are there.
    Change change = {{}, 1};
    Element(*last_k)[kPitch] = shared.k[0];
#pragma unroll 1
    for (int chunk = 0;; ++chunk) {
        __syncthreads();
        if (num_chunks == 0 || (chunk == num_chunks && params.final_state == nullptr)) break;
        Element(*const k)[kPitch] = chunk < num_chunks ? shared.k[chunk % (kStages + 2)] : last_k;
        Operands& operands = shared.operands[chunk % 2][warp];
        Columns products = {};
        step_state(state, change, last_k, k, lane, products, operands);
        if (chunk == num_chunks) break;
        solve(change, products, reinterpret_cast<Element(*)[kPitchV]>(&shared.v[chunk % (kStages + 1)][0][warp * 16]),
              shared.inverses[chunk % (kStages + 1)], shared.decays[chunk % (kStages + 2)], lane, operands);
        last_k = k;
    }
    if (params.final_state != nullptr)
        for_each_element(params, block, params.final_state_strides, warp, lane, state,
                         [&](long long at, float value) { store_bits(params.final_state + at, value); });
}

using Output = float[2 * kStateWarps][4];

// The output of 16 tokens of a chunk, from kFirst on.
template <int kFirst>
__device__ __forceinline__ void compute_output(SharedTiles& shared, int chunk, int lane, Output& o) {
    const Operands(&operands)[kStateWarps] = shared.operands[chunk % 2];
    const TokenDecays& decays = shared.decays[chunk % (kStages + 2)];
    const SharedAddress q = left_address(shared.q[chunk % (kStages + 1)] + kFirst, lane);
    const SharedAddress k = right_address(shared.k[chunk % (kStages + 2)], lane);
    float scores[kTokenTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        Fragment queries;
        ldmatrix_x4(queries, q + step * 32);
#pragma unroll
        for (int block = 0; block < kTokenSteps; ++block) {
            // right either way: keys behind the rows weigh nothing
            if (block * 16 > kFirst) continue;
            Fragment keys;
            ldmatrix_x4(keys, k + (block * 16 * kPitch + step * 16) * 2);
            multiply(scores[2 * block], scores[2 * block + 1], queries, keys);
        }
#pragma unroll
        for (int warp = 0; warp < kStateWarps; ++warp) {
            Fragment columns;
            transpose(columns, operands[warp].state[step][lane]);
            multiply(o[2 * warp], o[2 * warp + 1], queries, columns);
        }
    }
    const int row = kFirst + lane / 4;
    const float later[2] = {decays.log[row], decays.log[row + 8]};
    const float from_begin[2] = {decays.from_begin[row], decays.from_begin[row + 8]};
#pragma unroll
    for (int tile = 0; tile < 2 * kStateWarps; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[tile][i] *= from_begin[i / 2];
    }
#pragma unroll
    for (int block = 0; block < kTokenSteps; ++block) {
        // right either way: keys behind the rows weigh nothing
        if (block * 16 > kFirst) continue;
        Fragment weights;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int tile = 2 * block + i / 2, r = i % 2, key = tile * 8 + lane % 4 * 2;
            const Pair earlier = pair_of(decays.log, tile, lane);
            weights[i] = pack(
                key <= row + 8 * r ? exp2_approximate(later[r] - earlier.first) * scores[tile][2 * r] : 0,
                key < row + 8 * r ? exp2_approximate(later[r] - earlier.second) * scores[tile][2 * r + 1] : 0);
        }
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

// The output of 16 tokens of each chunk, those from `first` on, one chunk behind the states.
template <int kFirst = kTokens - 16>
__device__ __forceinline__ void walk_outputs(const GatedParams& params, const GatedBlock& block, SharedTiles& shared,
                                             const TokenRange& tokens, int first, int lane) {
    // Compiled for each, as their products differ.
    if constexpr (kFirst > 0) {
        if (first < kFirst) return walk_outputs<kFirst - 16>(params, block, shared, tokens, first, lane);
    }
    const long long batch = kVarlen ? 0 : block.index;
    char* out = params.out + token_offset(params.out_strides, batch, tokens.begin + kFirst, block.head);
    long long left = tokens.end - tokens.begin - kFirst;
    const bool has_state = block.index < params.num_sequences;
    if (has_state) __syncthreads();
#pragma unroll 1
    for (int chunk = 0; left > -kFirst; left -= kTokens, ++chunk, out += kTokens * params.out_strides.token) {
        Output o = {};
        if (has_state) {
            __syncthreads();
            compute_output<kFirst>(shared, chunk, lane, o);
        }
        store(params, out, left, block.part * kBlockN, lane, o);
    }
}

// Where the arrays of a chunk begin, which are stepped through: to multiply for each of them would take longer.
struct Loads {
    const GatedParams& params;
    const char* q;
    const char* k;
    const char* v;
    const char* prepared;
    int column;

    __device__ __forceinline__ Loads(const GatedParams& params, const GatedBlock& block, long long token)
        : params(params), column(block.part * kBlockN) {
        const long long head_k = divide(block.head, params.group_size), batch = kVarlen ? 0 : block.index;
        q = params.q + token_offset(params.q_strides, batch, token, head_k);
        k = params.k + token_offset(params.k_strides, batch, token, head_k);
        v = params.v + token_offset(params.v_strides, batch, token, block.head) + column * params.v_strides.column;
        prepared = prepared_address(params, block.index, token, block.head);
    }
    // Asks for queries of which `num_tokens` are there, and steps on.
    __device__ __forceinline__ void queries(Element (*target)[kPitch], long long num_tokens, int lane) {
        load_rows<kTokens, kHeadDim, 32>(target, q, params.q_strides.token, params.q_strides.column, num_tokens,
                                         params.head_dim, lane);
        q += kTokens * params.q_strides.token;
    }
    // The same of all else.
    __device__ __forceinline__ void rest(SharedTiles& shared, int chunk, long long num_tokens, int lane) {
        load_rows<kTokens, kHeadDim, 32>(shared.k[chunk % (kStages + 2)], k, params.k_strides.token,
                                         params.k_strides.column, num_tokens, params.head_dim, lane);
        load_rows<kTokens, kBlockN, 32>(shared.v[chunk % (kStages + 1)], v, params.v_strides.token,
                                        params.v_strides.column, num_tokens, params.head_dim_v - column, lane);
        copy_bytes<sizeof(Inverse)>(&shared.inverses[chunk % (kStages + 1)], prepared, lane);
        copy_bytes<sizeof(TokenDecays)>(&shared.decays[chunk % (kStages + 2)], prepared + sizeof(Inverse), lane);
        k += kTokens * params.k_strides.token, v += kTokens * params.v_strides.token;
        prepared += params.num_heads_v * static_cast<long long>(sizeof(Prepared));
    }
    template <int kBytes>
    static __device__ __forceinline__ void copy_bytes(void* target, const char* source, int lane) {
        const SharedAddress shared = shared_address(target) + lane * 16;
#pragma unroll
        for (int at = 0; at < kBytes; at += 32 * 16) {
            if (at + 32 * 16 <= kBytes || at + lane * 16 < kBytes)
                cp_async_16(shared + at, source + at + lane * 16, true);
        }
    }
};

// Chunks, kStages ahead of the states; queries one chunk later, as outputs are.
__device__ __forceinline__ void load_chunks(const GatedParams& params, const GatedBlock& block, SharedTiles& shared,
                                            const TokenRange& tokens, int num_chunks, int lane) {
    Loads loads(params, block, tokens.begin);
    const long long num_tokens = tokens.end - tokens.begin;
#pragma unroll 1
    for (int chunk = 0; chunk <= num_chunks + kStages; ++chunk) {
        if (chunk >= kStages) {
            cp_async_wait_group<kStages - 1>();
            __syncthreads();  // for states of the chunk kStages before this one
        }
        if (chunk < num_chunks) loads.rest(shared, chunk, num_tokens - chunk * static_cast<long long>(kTokens), lane);
        if (chunk > 0 && chunk <= num_chunks)
            loads.queries(shared.q[(chunk - 1) % (kStages + 1)],
                          num_tokens - (chunk - 1) * static_cast<long long>(kTokens), lane);
        cp_async_commit();
    }
}

__device__ __forceinline__ void gated_delta(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const TokenRange tokens = tokens_of(params, block.index);
    const auto num_chunks = static_cast<int>(max((tokens.end - tokens.begin + kTokens - 1) / kTokens, 0LL));
    const int last = kThreads / 32 - 1, output_warp = warp - kStateWarps;
    // Those with the most keys to weigh are on units without states.
    if (output_warp >= 0 && warp < last)
        walk_outputs(params, block, shared, tokens, (kOutputWarps - 1 - output_warp) * 16, lane);
    else if (block.index == params.num_sequences)
        return;
    else if (warp < kStateWarps)
        walk_states(params, block, shared, num_chunks, warp, lane);
    else
        load_chunks(params, block, shared, tokens, num_chunks, lane);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_delta_mma(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::gated_delta(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
