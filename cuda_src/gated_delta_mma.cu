// The gated delta rule, chunk by chunk, on the tensor cores for 16-bit floats (sm_80 and newer): with w and u of
// gated_wy.cu, c the sum of the gates' logarithms from the chunk's first token on and S the state before it,
//     v' = u - w S;  o_i = scale (exp(c_i) q_i S + sum over j <= i of exp(c_i - c_j) (q_i.k_j) v'_j);
//     S = exp(c_last) S + sum of exp(c_last - c_j) k_j v'_j^T.
//
// Grid: one block per kBlockN features of one head of v of one sequence; packed sequences have one more, of the tokens
// behind the last, whose output is 0. The state stays in registers from the first chunk to the last, so that it never
// travels through memory; what the next chunk needs arrives while one is computed.
//
// Warps: two own 16 tokens of the chunk, half of the features each, and every one some of the state. All need all of
// the state, and of v', which they leave in shared memory in 16 bits.

#ifndef CUFLASH_THREADS
#define CUFLASH_THREADS 256  // the only number
#endif

#include "gated/load.cuh"
#include "gated/sequence.cuh"
#include "gated/store.cuh"
#include "ptx/exp2.cuh"

namespace cuflash {

constexpr int kTokens = kBlockM, kNumWarps = kThreads / 32;
constexpr int kPitch = kHeadDim + 8, kPitchV = kBlockN + 8, kPitchP = kTokens + 8;
constexpr int kSteps = kHeadDim / 16, kTokenSteps = kTokens / 16;
constexpr int kShares = kNumWarps * 16 / kTokens, kWarpFeatures = kBlockN / kShares, kFeatureTiles = kWarpFeatures / 8;
// The state's 16 x 16 tiles: warps have some rows of them, or share those.
constexpr int kStateShares = kSteps < kNumWarps ? kNumWarps / kSteps : 1;
constexpr int kStateRows = kSteps * kStateShares / kNumWarps, kStateTiles = kBlockN / kStateShares / 8;

static_assert(kTokens == 64 && kShares == 2, "two warps have 16 tokens");
static_assert(kStateRows * kNumWarps == kSteps * kStateShares && kStateTiles % 2 == 0 && kFeatureTiles % 2 == 0);

// What arrives of a chunk.
struct Arriving {
    alignas(16) Element q[kTokens][kPitch];
    alignas(16) Element k[kTokens][kPitch];
    alignas(16) Element w[kTokens][kPitch];
    alignas(16) Element u[kTokens][kPitchV];
    TokenDecays decays[kTokens];  // behind the last token zeros, as all else
};

struct SharedTiles {
    Arriving stages[kStages];
    alignas(16) Element state[kHeadDim][kPitchV];
    alignas(16) Element weights[kTokens][kPitchP];
    alignas(16) Element values[kTokens][kPitchV];   // v'
    alignas(16) Element decayed[kTokens][kPitchV];  // exp(c_last - c_j) v'
};

using State = float[kStateRows][kStateTiles][4];
using Output = float[kFeatureTiles][4];

// A warp's place in its block.
struct Warp {
    int lane;
    int row, share, feature;  // tokens and features of its own
    int state_row, state_column;

    __device__ __forceinline__ explicit Warp(int warp, int lane)
        : lane(lane),
          row(warp / kShares * 16),
          share(warp % kShares),
          feature(warp % kShares * kWarpFeatures),
          state_row(warp / kStateShares * kStateRows * 16),
          state_column(warp % kStateShares * kStateTiles * 8) {}
    // Row r of a lane's two, of a tile of 16.
    __device__ __forceinline__ int of_tile(int r) const { return lane / 4 + r * 8; }
};

// Where the arrays of a chunk begin, which are stepped through: to multiply for each of them would take longer.
struct Walk {
    const GatedParams& params;
    const char* q;
    const char* k;
    const char* transformed;
    int column;

    __device__ __forceinline__ Walk(const GatedParams& params, const GatedBlock& block, long long batch,
                                    long long token)
        : params(params), column(block.part * kBlockN) {
        const long long head_k = divide(block.head, params.group_size);
        q = params.q + token_offset(params.q_strides, batch, token, head_k);
        k = params.k + token_offset(params.k_strides, batch, token, head_k);
        transformed = params.transformed + transformed_row(params, batch * params.seqlen + token, block.head);
    }
    // Asks for a chunk of which `num_tokens` are there, and steps on.
    __device__ __forceinline__ void load(Arriving& target, long long num_tokens) {
        const long long stride = params.num_heads_v * kTransformedBytes;
        load_rows<kTokens, kHeadDim>(target.q, q, params.q_strides.token, params.q_strides.column, num_tokens,
                                     params.head_dim);
        load_rows<kTokens, kHeadDim>(target.k, k, params.k_strides.token, params.k_strides.column, num_tokens,
                                     params.head_dim);
        load_rows<kTokens, kHeadDim, true>(target.w, transformed, stride, 2, num_tokens, kHeadDim);
        load_rows<kTokens, kBlockN, true>(target.u, transformed + 2 * (kHeadDim + column), stride, 2, num_tokens,
                                          kBlockN);
        if (threadIdx.x < kTokens)
            cp_async_16(shared_address(&target.decays[threadIdx.x]),
                        transformed + threadIdx.x * stride + 2 * (kHeadDim + kHeadDimV), threadIdx.x < num_tokens);
        q += kTokens * params.q_strides.token, k += kTokens * params.k_strides.token;
        transformed += kTokens * stride;
    }
};

// exp(c_i - c_j) (q_i.k_j) for tokens up to the row's own. Warps that share rows have every other 16 tokens.
__device__ __forceinline__ void weigh(SharedTiles& shared, Arriving& chunk, const Warp& warp) {
    float scores[kTokenSteps / kShares][2][4] = {};
    const SharedAddress q = left_address(chunk.q + warp.row, warp.lane), k = right_address(chunk.k, warp.lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        Fragment queries;
        ldmatrix_x4(queries, q + step * 32);
#pragma unroll
        for (int i = 0; i < kTokenSteps / kShares; ++i) {
            const int first = (i * kShares + warp.share) * 16;
            // right either way: keys behind the rows weigh nothing
            if (first > warp.row) continue;
            Fragment keys;
            ldmatrix_x4(keys, k + first * kPitch * 2 + step * 32);
            multiply(scores[i][0], scores[i][1], queries, keys);
        }
    }
#pragma unroll
    for (int i = 0; i < kTokenSteps / kShares; ++i) {
        const int first = (i * kShares + warp.share) * 16;
        // right either way: keys behind the rows weigh nothing
        if (first > warp.row) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp.row + warp.of_tile(r);
            const float later = chunk.decays[row].log;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int key = first + n * 8 + warp.lane % 4 * 2;
                const float earlier[2] = {chunk.decays[key].log, chunk.decays[key + 1].log};
                const float low = key <= row ? exp2_approximate(later - earlier[0]) * scores[i][n][2 * r] : 0;
                const float high = key < row ? exp2_approximate(later - earlier[1]) * scores[i][n][2 * r + 1] : 0;
                *reinterpret_cast<unsigned int*>(&shared.weights[row][key]) = pack(low, high);
            }
        }
    }
}

// o = Q S and v' = u - w S, of the warp's tokens and features. v' is left to all warps, as it is and as it enters the
// state.
__device__ __forceinline__ void multiply_state(SharedTiles& shared, Arriving& chunk, const Warp& warp, Output& o) {
    const SharedAddress q = left_address(chunk.q + warp.row, warp.lane),
                        w = left_address(chunk.w + warp.row, warp.lane);
    const SharedAddress state = left_address(shared.state, warp.lane) + warp.feature * 2;
    Output products = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        Fragment queries, keys;
        ldmatrix_x4(queries, q + step * 32);
        ldmatrix_x4(keys, w + step * 32);
#pragma unroll
        for (int f = 0; f < kFeatureTiles; f += 2) {
            Fragment columns;
            ldmatrix_x4_transposed(columns, state + step * 16 * kPitchV * 2 + f * 16);
            multiply(products[f], products[f + 1], keys, columns);
            multiply(o[f], o[f + 1], queries, columns);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int token = warp.row + warp.of_tile(r);
        const float decay = chunk.decays[token].to_end;
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
            const int at = warp.feature + f * 8 + warp.lane % 4 * 2;
            const auto pair = *reinterpret_cast<const unsigned int*>(&chunk.u[token][at]);
            const float low = unpacked(pair, 0) - products[f][2 * r], high = unpacked(pair, 1) - products[f][2 * r + 1];
            *reinterpret_cast<unsigned int*>(&shared.values[token][at]) = pack(low, high);
            *reinterpret_cast<unsigned int*>(&shared.decayed[token][at]) = pack(decay * low, decay * high);
        }
    }
}

// o = exp(c) o + weights v', of the warp's tokens and features.
__device__ __forceinline__ void accumulate(SharedTiles& shared, const Arriving& chunk, const Warp& warp, Output& o) {
    const int first = warp.row + warp.of_tile(0);
    const float decays[2] = {chunk.decays[first].from_begin, chunk.decays[first + 8].from_begin};
#pragma unroll
    for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[f][i] *= decays[i / 2];
    }
    const SharedAddress weights = left_address(shared.weights + warp.row, warp.lane);
    const SharedAddress values = left_address(shared.values, warp.lane) + warp.feature * 2;
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
        if (step * 16 > warp.row) continue;
        Fragment rows;
        ldmatrix_x4(rows, weights + step * 32);
#pragma unroll
        for (int f = 0; f < kFeatureTiles; f += 2) {
            Fragment columns;
            ldmatrix_x4_transposed(columns, values + step * 16 * kPitchV * 2 + f * 16);
            multiply(o[f], o[f + 1], rows, columns);
        }
    }
}

// S = exp(c_last) S + K^T (exp(c_last - c) v'), of the warp's part of the state.
__device__ __forceinline__ void update_state(SharedTiles& shared, Arriving& chunk, const Warp& warp, State& state) {
    const float decay = chunk.decays[0].of_chunk;
    const SharedAddress values = left_address(shared.decayed, warp.lane) + warp.state_column * 2;
#pragma unroll
    for (int m = 0; m < kStateRows; ++m) {
        const SharedAddress k = right_address(chunk.k, warp.lane) + (warp.state_row + m * 16) * 2;
#pragma unroll
        for (int f = 0; f < kStateTiles; ++f) {
#pragma unroll
            for (int i = 0; i < 4; ++i) state[m][f][i] *= decay;
        }
#pragma unroll
        for (int step = 0; step < kTokenSteps; ++step) {
            Fragment rows;
            ldmatrix_x4_transposed(rows, k + step * 16 * kPitch * 2);
#pragma unroll
            for (int f = 0; f < kStateTiles; f += 2) {
                Fragment columns;
                ldmatrix_x4_transposed(columns, values + step * 16 * kPitchV * 2 + f * 16);
                multiply(state[m][f], state[m][f + 1], rows, columns);
            }
        }
    }
}

// Leaves the state to all warps.
__device__ __forceinline__ void share_state(SharedTiles& shared, const Warp& warp, const State& state) {
#pragma unroll
    for (int m = 0; m < kStateRows; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp.state_row + m * 16 + warp.of_tile(r);
#pragma unroll
            for (int f = 0; f < kStateTiles; ++f)
                *reinterpret_cast<unsigned int*>(&shared.state[row][warp.state_column + f * 8 + warp.lane % 4 * 2]) =
                    pack(state[m][f][2 * r], state[m][f][2 * r + 1]);
        }
    }
}

// Calls `visit(offset, value)` for each element of the lane's part of a head's state that is there.
template <typename Visit>
__device__ __forceinline__ void for_each_element(const GatedParams& params, const GatedBlock& block,
                                                 const StateStrides& strides, const Warp& warp, State& state,
                                                 Visit visit) {
    const long long head = block.index * strides.index + block.head * strides.head;
#pragma unroll
    for (int m = 0; m < kStateRows; ++m) {
#pragma unroll
        for (int f = 0; f < kStateTiles; ++f) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = warp.state_row + m * 16 + warp.of_tile(i / 2);
                const int column = block.part * kBlockN + warp.state_column + f * 8 + warp.lane % 4 * 2 + i % 2;
                if (row < params.head_dim && column < params.head_dim_v)
                    visit(head + row * strides.row + column * strides.column, state[m][f][i]);
            }
        }
    }
}

// `out` is where the warp's first row begins, of `num_tokens` that are left from there on.
__device__ __forceinline__ void store(const GatedParams& params, char* out, long long num_tokens, int column,
                                      const Warp& warp, float scale, const Output& o) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int token = warp.of_tile(r);
        store_row<kVectorLoads>(token < num_tokens ? out + token * params.out_strides.token : nullptr,
                                column + warp.feature, params.head_dim_v, params.out_strides.column, o, r, scale,
                                warp.lane);
    }
}

// One chunk, of which everything has arrived; o is what it adds to the output.
__device__ __forceinline__ void take_chunk(SharedTiles& shared, Arriving& chunk, const Warp& warp, State& state,
                                           Output& o) {
    multiply_state(shared, chunk, warp, o);
    weigh(shared, chunk, warp);
    __syncthreads();
    update_state(shared, chunk, warp, state);
    share_state(shared, warp, state);
    accumulate(shared, chunk, warp, o);
}

__device__ __forceinline__ void gated_delta(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    const Warp warp(threadIdx.x / 32, threadIdx.x % 32);
    const TokenRange tokens = tokens_of(params, block.index);
    const long long batch = kVarlen ? 0 : block.index;
    Walk walk(params, block, batch, tokens.begin);
    char* out = params.out + token_offset(params.out_strides, batch, tokens.begin + warp.row, block.head);
    const long long out_step = kTokens * params.out_strides.token;
    if (block.index == params.num_sequences) {
        const Output zeros = {};
        for (long long left = tokens.end - tokens.begin - warp.row; left > 0; left -= kTokens, out += out_step)
            store(params, out, left, walk.column, warp, 1, zeros);
        return;
    }
    State state = {};
    if (params.initial_state != nullptr)
        for_each_element(params, block, params.initial_state_strides, warp, state,
                         [&](long long at, float& value) { value = load_bits<float>(params.initial_state + at); });
    share_state(shared, warp, state);
    long long left = tokens.end - tokens.begin;
    if (left > 0) walk.load(shared.stages[0], left);
    int stage = 0;
#pragma unroll 1
    for (; left > 0; left -= kTokens, out += out_step) {
        cp_async_wait();
        __syncthreads();  // the chunk and the state are there, and the last chunk is not looked at any more
        Arriving& chunk = shared.stages[stage];
        stage = (stage + 1) % kStages;
        if (kStages > 1 && left > kTokens) walk.load(shared.stages[stage], left - kTokens);
        Output o = {};
        take_chunk(shared, chunk, warp, state, o);
        store(params, out, left - warp.row, walk.column, warp, static_cast<float>(params.scale), o);
        if (kStages == 1 && left > kTokens) {
            __syncthreads();
            walk.load(chunk, left - kTokens);
        }
    }
    if (params.final_state != nullptr)
        for_each_element(params, block, params.final_state_strides, warp, state,
                         [&](long long at, float value) { store_bits(params.final_state + at, value); });
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_delta_mma(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::gated_delta(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
