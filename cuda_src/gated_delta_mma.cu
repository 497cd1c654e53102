// The gated delta rule, chunk by chunk, on the tensor cores for 16-bit floats (sm_80 and newer): with w and u of
// gated_wy.cu, c the sum of the gates' logarithms from the chunk's first token on and S the state before it,
//     v' = u - w S;  o_i = scale (exp(c_i) q_i S + sum over j <= i of exp(c_i - c_j) (q_i.k_j) v'_j);
//     S = exp(c_last) S + sum of exp(c_last - c_j) k_j v'_j^T.
//
// Grid: one block per kBlockN features of one head of v of one sequence; packed sequences have one more, of the tokens
// behind the last, whose output is 0. The state stays in registers from the first chunk to the last, so that it never
// travels through memory; what the next chunk needs arrives while one is computed.
//
// Warps: each owns 16 tokens of the chunk, and a quarter of the state's rows. All need all of the state, and of v',
// which they leave in shared memory in 16 bits.

#include "common/load.cuh"
#include "common/store.cuh"
#include "gated/fragments.cuh"
#include "gated/sequence.cuh"
#include "gated/steps.cuh"

namespace cuflash {

constexpr int kTokens = kBlockM, kNumWarps = kThreads / 32;
constexpr int kPitch = kHeadDim + 8, kPitchV = kBlockN + 8;
constexpr int kSteps = kHeadDim / 16, kTokenSteps = kTokens / 16;
constexpr int kStateTiles = kHeadDim / 16 / kNumWarps;  // of 16 rows, of a warp
constexpr int kFeatureTiles = kBlockN / 8, kKeyTiles = kTokens / 8;

static_assert(kTokens == 64 && kThreads == 128, "a lane has two gates, a warp 16 tokens");
static_assert(kHeadDim % (16 * kNumWarps) == 0 && kBlockN % 16 == 0);

// What arrives of a chunk.
struct Arriving {
    alignas(16) Element q[kTokens][kPitch];
    alignas(16) Element k[kTokens][kPitch];
    alignas(16) Element w[kTokens][kPitch];
    alignas(16) Element u[kTokens][kPitchV];
};

struct SharedTiles {
    Arriving stages[2];
    alignas(16) Element state[kHeadDim][kPitchV];
    alignas(16) Element values[kTokens][kPitchV];   // v'
    alignas(16) Element decayed[kTokens][kPitchV];  // exp(c_last - c_j) v'
    alignas(8) float log_decay[kTokens];
};

using State = float[kStateTiles][kFeatureTiles][4];
using Output = float[kFeatureTiles][4];
using Weights = unsigned int[kTokenSteps][4];

// A block's place, and what it asks for.
struct Walk {
    const GatedParams& params;
    GatedBlock block;
    TokenRange tokens;
    int head_k, column;

    __device__ __forceinline__ long long batch() const { return kVarlen ? 0 : block.index; }
    template <typename Byte>
    __device__ __forceinline__ Byte* row(Byte* array, const TokenStrides& strides, long long token, int head) const {
        return array + batch() * strides.batch + token * strides.token + head * strides.head;
    }
    __device__ __forceinline__ void load(Arriving& target, long long first) const {
        const long long count = tokens.end - first;
        load_tile<kTokens, kHeadDim>(target.q, 0, 0, params.head_dim, params.q_strides.column, [&](int i) {
            return i < count ? row(params.q, params.q_strides, first + i, head_k) : nullptr;
        });
        load_tile<kTokens, kHeadDim>(target.k, 0, 0, params.head_dim, params.k_strides.column, [&](int i) {
            return i < count ? row(params.k, params.k_strides, first + i, head_k) : nullptr;
        });
        const long long transformed = batch() * params.seqlen + first;
        load_vectors<kHeadDim>(target.w, transformed, 0, count);
        load_vectors<kBlockN>(target.u, transformed, kHeadDim + column, count);
    }
    // Of w and u, from a feature on.
    template <int kWidth>
    __device__ __forceinline__ void load_vectors(Element (*target)[kWidth + 8], long long first, int feature,
                                                 long long count) const {
        constexpr int kChunks = kWidth / 8;
        for (int i = threadIdx.x; i < kTokens * kChunks; i += kThreads) {
            const int token = i / kChunks, at = i % kChunks * 8;
            const char* const source =
                params.transformed + transformed_row(params, first + token, block.head) + (feature + at) * 2;
            cp_async_16(&target[token][at], source, token < count);
        }
    }
    __device__ __forceinline__ Gates load_gates(long long first) const {
        return cuflash::load_gates(params, row(params.log_g, params.log_g_strides, first, block.head),
                                   tokens.end - first);
    }
};

// exp(c_i - c_j) (q_i.k_j) for tokens up to the row's own, of the warp's rows, as a left operand.
__device__ __forceinline__ void weigh(Arriving& chunk, const float (&log_decay)[kTokens], int warp, int lane,
                                      Weights& weights) {
    float scores[kKeyTiles][4] = {};
    const SharedAddress q = left_address(chunk.q + warp * 16, lane), k = right_address(chunk.k, lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        Fragment queries;
        ldmatrix_x4(queries, q + step * 32);
#pragma unroll
        for (int n = 0; n < kKeyTiles; n += 2) {
            if (n > 2 * warp) continue;
            Fragment keys;
            ldmatrix_x4(keys, k + n * 8 * kPitch * 2 + step * 32);
            multiply(scores[n], scores[n + 1], queries, keys);
        }
    }
    const int first = warp * 16 + lane / 4;
    const float later[2] = {log_decay[first], log_decay[first + 8]};
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
        if (n > 2 * warp + 1) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first + r * 8, key = n * 8 + lane % 4 * 2;
            const float low = key <= row ? exponential(later[r] - log_decay[key]) * scores[n][2 * r] : 0;
            const float high = key < row ? exponential(later[r] - log_decay[key + 1]) * scores[n][2 * r + 1] : 0;
            weights[n / 2][n % 2 * 2 + r] = pack(low, high);
        }
    }
}

// o = Q S and v' = u - w S, of the warp's tokens.
__device__ __forceinline__ void multiply_state(Arriving& chunk, Element (*state_rows)[kPitchV], int warp, int lane,
                                               Output& o, Output& values) {
    const SharedAddress q = left_address(chunk.q + warp * 16, lane), w = left_address(chunk.w + warp * 16, lane);
    const SharedAddress state = left_address(state_rows, lane);
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
    for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = warp * 16 + lane / 4 + r * 8;
            const auto pair = *reinterpret_cast<const unsigned int*>(&chunk.u[token][f * 8 + lane % 4 * 2]);
#pragma unroll
            for (int e = 0; e < 2; ++e) values[f][2 * r + e] = unpacked(pair, e) - products[f][2 * r + e];
        }
    }
}

// Leaves v' of the warp's tokens to all warps, as it is and as it enters the state.
__device__ __forceinline__ void share_values(SharedTiles& shared, int warp, int lane, const Output& values) {
    const float last = shared.log_decay[kTokens - 1];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int token = warp * 16 + lane / 4 + r * 8;
        const float decay = exponential(last - shared.log_decay[token]);
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
            const float low = values[f][2 * r], high = values[f][2 * r + 1];
            const int at = f * 8 + lane % 4 * 2;
            *reinterpret_cast<unsigned int*>(&shared.values[token][at]) = pack(low, high);
            *reinterpret_cast<unsigned int*>(&shared.decayed[token][at]) = pack(decay * low, decay * high);
        }
    }
}

// o = exp(c) o + weights v', of the warp's tokens.
__device__ __forceinline__ void accumulate(SharedTiles& shared, int warp, int lane, const Weights& weights, Output& o) {
    const int first = warp * 16 + lane / 4;
    const float decays[2] = {exponential(shared.log_decay[first]), exponential(shared.log_decay[first + 8])};
#pragma unroll
    for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[f][i] *= decays[i / 2];
    }
    const SharedAddress values = left_address(shared.values, lane);
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
        if (step > warp) continue;
#pragma unroll
        for (int f = 0; f < kFeatureTiles; f += 2) {
            Fragment columns;
            ldmatrix_x4_transposed(columns, values + step * 16 * kPitchV * 2 + f * 16);
            multiply(o[f], o[f + 1], weights[step], columns);
        }
    }
}

// S = exp(c_last) S + K^T (exp(c_last - c) v'), of the warp's rows.
__device__ __forceinline__ void update_state(Arriving& chunk, SharedTiles& shared, int warp, int lane, State& state) {
    const float decay = exponential(shared.log_decay[kTokens - 1]);
    const SharedAddress values = left_address(shared.decayed, lane);
#pragma unroll
    for (int m = 0; m < kStateTiles; ++m) {
        const SharedAddress k = right_address(chunk.k, lane) + (warp * kStateTiles + m) * 32;
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
            for (int i = 0; i < 4; ++i) state[m][f][i] *= decay;
        }
#pragma unroll
        for (int step = 0; step < kTokenSteps; ++step) {
            Fragment rows;
            ldmatrix_x4_transposed(rows, k + step * 16 * kPitch * 2);
#pragma unroll
            for (int f = 0; f < kFeatureTiles; f += 2) {
                Fragment columns;
                ldmatrix_x4_transposed(columns, values + step * 16 * kPitchV * 2 + f * 16);
                multiply(state[m][f], state[m][f + 1], rows, columns);
            }
        }
    }
}

// Leaves the state to all warps.
__device__ __forceinline__ void share_state(SharedTiles& shared, int warp, int lane, const State& state) {
#pragma unroll
    for (int m = 0; m < kStateTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = (warp * kStateTiles + m) * 16 + lane / 4 + r * 8;
#pragma unroll
            for (int f = 0; f < kFeatureTiles; ++f)
                *reinterpret_cast<unsigned int*>(&shared.state[row][f * 8 + lane % 4 * 2]) =
                    pack(state[m][f][2 * r], state[m][f][2 * r + 1]);
        }
    }
}

// Calls `visit(offset, value)` for each element of the lane's part of a head's state that is there.
template <typename Visit>
__device__ __forceinline__ void for_each_element(const Walk& walk, const StateStrides& strides, int warp, int lane,
                                                 State& state, Visit visit) {
    const long long head = walk.block.index * strides.index + walk.block.head * strides.head;
#pragma unroll
    for (int m = 0; m < kStateTiles; ++m) {
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = (warp * kStateTiles + m) * 16 + lane / 4 + i / 2 * 8;
                const int column = walk.column + f * 8 + lane % 4 * 2 + i % 2;
                if (row < walk.params.head_dim && column < walk.params.head_dim_v)
                    visit(head + row * strides.row + column * strides.column, state[m][f][i]);
            }
        }
    }
}

__device__ __forceinline__ void store(const Walk& walk, long long first, int warp, int lane, float scale,
                                      const Output& o) {
    const GatedParams& params = walk.params;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const long long token = first + warp * 16 + lane / 4 + r * 8;
        if (token >= walk.tokens.end) continue;
        char* const out = walk.row(params.out, params.out_strides, token, walk.block.head);
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
            const float pair[2] = {scale * o[f][2 * r], scale * o[f][2 * r + 1]};
            store_features(out, walk.column + f * 8 + lane % 4 * 2, params.head_dim_v, params.out_strides.column, pair);
        }
    }
}

// One chunk, of which everything but the state has arrived.
__device__ __forceinline__ void take_chunk(const Walk& walk, SharedTiles& shared, Arriving& chunk, long long first,
                                           Gates gates, int warp, int lane, State& state) {
    share_state(shared, warp, lane, state);
    if (warp == 0) *reinterpret_cast<Gates*>(&shared.log_decay[lane * 2]) = sum_gates(gates);
    __syncthreads();
    Weights weights;
    weigh(chunk, shared.log_decay, warp, lane, weights);
    Output o = {}, values;
    multiply_state(chunk, shared.state, warp, lane, o, values);
    share_values(shared, warp, lane, values);
    __syncthreads();
    accumulate(shared, warp, lane, weights, o);
    store(walk, first, warp, lane, static_cast<float>(walk.params.scale), o);
    update_state(chunk, shared, warp, lane, state);
}

__device__ __forceinline__ void gated_delta(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head_k = static_cast<int>(divide(block.head, params.group_size));
    const Walk walk = {params, block, tokens_of(params, block.index), head_k, block.part * kBlockN};
    const long long begin = walk.tokens.begin, end = walk.tokens.end;
    if (block.index == params.num_sequences) {
        const Output zeros = {};
        for (long long first = begin; first < end; first += kTokens) store(walk, first, warp, lane, 1, zeros);
        return;
    }
    State state = {};
    if (params.initial_state != nullptr)
        for_each_element(walk, params.initial_state_strides, warp, lane, state,
                         [&](long long at, float& value) { value = load_bits<float>(params.initial_state + at); });
    Gates gates = {};
    if (begin < end) {
        walk.load(shared.stages[0], begin);
        gates = walk.load_gates(begin);
    }
    int stage = 0;
#pragma unroll 1
    for (long long first = begin; first < end; first += kTokens, stage ^= 1) {
        cp_async_wait();
        __syncthreads();  // the chunk is there, and the last one is not looked at any more
        const Gates gates_here = gates;
        if (first + kTokens < end) {
            walk.load(shared.stages[stage ^ 1], first + kTokens);
            gates = walk.load_gates(first + kTokens);
        }
        take_chunk(walk, shared, shared.stages[stage], first, gates_here, warp, lane, state);
    }
    if (params.final_state != nullptr)
        for_each_element(walk, params.final_state_strides, warp, lane, state,
                         [&](long long at, float value) { store_bits(params.final_state + at, value); });
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_delta_mma(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::gated_delta(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
