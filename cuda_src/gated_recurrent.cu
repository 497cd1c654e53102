// The gated delta rule, token by token (any GPU): S = exp(g) S; u = beta (v - S^T k); S = S + k u^T; o = scale S^T q.
//
// Grid: one block per slice of kColumns x 32 features of v of one head of one sequence; packed sequences have one more,
// of the tokens behind the last, whose output is 0. A slice of the state stays in registers from the first token to the
// last: each lane holds kColumns neighbouring features of v, each warp a part of the features of k.
//
// With S before the step, o = scale (exp(g) S^T q + (k.q) u): so both sums over the features of k are taken at once,
// and warps meet but once for each token. A single token is bound by memory, as the state is read and written for it.

#include "common/math.cuh"
#include "gated/sequence.cuh"

namespace cuflash {

constexpr int kNumWarps = kThreads / 32;
constexpr int kRows = kHeadDim / kNumWarps;  // features of k of each warp
constexpr int kColumns = kBlockN / 32;       // features of v of each lane
constexpr int kLoads = (kHeadDim + kThreads - 1) / kThreads;

static_assert(kHeadDim % kNumWarps == 0 && kRows % 4 == 0 && kBlockN % 32 == 0);

struct SharedTiles {
    // Of tokens that take turns.
    Accumulator q[2][kHeadDim];
    Accumulator k[2][kHeadDim];
    struct Sums {
        Accumulator of_k[kColumns][32], of_q[kColumns][32], of_both;
    } sums[kNumWarps];
};

// Addresses of a token's arrays for a head, which step from token to token.
struct TokenPlace {
    const char* q;
    const char* k;
    const char* v;
    const char* log_g;
    const char* beta;
    char* out;

    __device__ __forceinline__ TokenPlace(const GatedParams& params, long long batch, long long token, int head) {
        const long long head_k = divide(head, params.group_size);
        q = params.q + token_offset(params.q_strides, batch, token, head_k);
        k = params.k + token_offset(params.k_strides, batch, token, head_k);
        v = params.v + token_offset(params.v_strides, batch, token, head);
        log_g = params.log_g + token_offset(params.log_g_strides, batch, token, head);
        beta = params.beta + token_offset(params.beta_strides, batch, token, head);
        out = params.out + token_offset(params.out_strides, batch, token, head);
    }
    __device__ __forceinline__ void step(const GatedParams& params) {
        q += params.q_strides.token, k += params.k_strides.token, v += params.v_strides.token;
        log_g += params.log_g_strides.token, beta += params.beta_strides.token, out += params.out_strides.token;
    }
};

// What a thread loads of a token.
struct Step {
    Accumulator q[kLoads], k[kLoads], v[kColumns];
    Accumulator decay, beta;

    __device__ __forceinline__ void load(const GatedParams& params, const TokenPlace& place, int column) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int row = threadIdx.x + i * kThreads;
            const bool has = row < params.head_dim;
            q[i] = has ? load_as<kDtype>(place.q + row * params.q_strides.column) : 0;
            k[i] = has ? load_as<kDtype>(place.k + row * params.k_strides.column) : 0;
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const bool has = column + c < params.head_dim_v;
            v[c] = has ? load_as<kDtype>(place.v + (column + c) * params.v_strides.column) : 0;
        }
        decay = exponential(load_float(place.log_g, params.gate_dtype));
        beta = load_float(place.beta, params.beta_dtype);
    }
    __device__ __forceinline__ void share(SharedTiles& shared, int turn) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int row = threadIdx.x + i * kThreads;
            if (row < kHeadDim) shared.q[turn][row] = q[i], shared.k[turn][row] = k[i];
        }
    }
};

using State = Accumulator[kRows][kColumns];

// What moves at once of it: neighbouring features of v or, where those of k are neighbours, of k.
constexpr int kAcross = kVectorLoads && kSwappedStates ? 16 / sizeof(Accumulator) : 1;
constexpr int kAlong = kVectorLoads && !kSwappedStates ? kColumns : 1;
struct alignas(kAcross * kAlong * sizeof(Accumulator)) StateVector {
    Accumulator values[kAcross * kAlong];
};

// Calls `visit(offset, vector)` for the thread's part of a head's state.
template <typename Visit>
__device__ __forceinline__ void for_each_vector(const GatedParams& params, const GatedBlock& block, int column,
                                                const StateStrides& strides, State& state, Visit visit) {
    const int first_row = threadIdx.x / 32 * kRows;
    const long long head = block.index * strides.index + block.head * strides.head;
#pragma unroll
    for (int r = 0; r < kRows; r += kAcross) {
#pragma unroll
        for (int c = 0; c < kColumns; c += kAlong) {
            if (first_row + r >= params.head_dim || column + c >= params.head_dim_v) continue;
            StateVector vector;
#pragma unroll
            for (int e = 0; e < kAcross * kAlong; ++e) vector.values[e] = state[r + e % kAcross][c + e / kAcross];
            visit(head + (first_row + r) * strides.row + (column + c) * strides.column, vector);
#pragma unroll
            for (int e = 0; e < kAcross * kAlong; ++e) state[r + e % kAcross][c + e / kAcross] = vector.values[e];
        }
    }
}

// What the lanes of a warp have of both sums over the features of k, and of k.q.
__device__ __forceinline__ void sum_rows(const State& state, SharedTiles& shared, int turn) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Accumulator* const q = &shared.q[turn][warp * kRows];
    const Accumulator* const k = &shared.k[turn][warp * kRows];
    Accumulator of_k[kColumns] = {}, of_q[kColumns] = {}, of_both = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const Accumulator q_value = q[r], k_value = k[r];
        of_both = multiply_add(q_value, k_value, of_both);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            of_k[c] = multiply_add(state[r][c], k_value, of_k[c]);
            of_q[c] = multiply_add(state[r][c], q_value, of_q[c]);
        }
    }
    SharedTiles::Sums& sums = shared.sums[warp];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums.of_k[c][lane] = of_k[c], sums.of_q[c][lane] = of_q[c];
    if (lane == 0) sums.of_both = of_both;
}

// One token behind the barrier at which all sums of it are there: its output, and the state behind it.
__device__ __forceinline__ void take_step(const GatedParams& params, const Step& step, const SharedTiles& shared,
                                          int turn, int column, char* out, State& state) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Accumulator of_both = 0, update[kColumns];
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) of_both += shared.sums[w].of_both;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
        Accumulator of_k = 0, of_q = 0;
#pragma unroll
        for (int w = 0; w < kNumWarps; ++w) {
            of_k += shared.sums[w].of_k[c][lane];
            of_q += shared.sums[w].of_q[c][lane];
        }
        update[c] = step.beta * (step.v[c] - step.decay * of_k);
        const Accumulator result = multiply_add(of_both, update[c], step.decay * of_q);
        if (warp == c % kNumWarps && column + c < params.head_dim_v)
            store_bits(out + (column + c) * params.out_strides.column,
                       to_output(static_cast<Accumulator>(params.scale) * result));
    }
    const Accumulator* const k = &shared.k[turn][warp * kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const Accumulator k_value = k[r];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) state[r][c] = multiply_add(k_value, update[c], step.decay * state[r][c]);
    }
}

__device__ __forceinline__ void write_zeros(const GatedParams& params, TokenPlace place, long long count, int column) {
    for (long long i = threadIdx.x / 32; i < count; i += kNumWarps) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            if (column + c < params.head_dim_v)
                store_bits(place.out + i * params.out_strides.token + (column + c) * params.out_strides.column,
                           to_output(0));
        }
    }
}

__device__ __forceinline__ void gated_recurrent(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    const int column = block.part * kBlockN + threadIdx.x % 32 * kColumns;
    const TokenRange tokens = tokens_of(params, block);
    TokenPlace place(params, kVarlen ? 0 : block.index, tokens.begin, block.head);
    if (block.index == params.num_sequences) return write_zeros(params, place, tokens.end - tokens.begin, column);

    State state = {};
    if (params.initial_state != nullptr) {
        for_each_vector(
            params, block, column, params.initial_state_strides, state,
            [&](long long at, StateVector& vector) { vector = load_bits<StateVector>(params.initial_state + at); });
    }
    Step step;
    if (tokens.begin < tokens.end) {
        step.load(params, place, column);
        step.share(shared, 0);
        __syncthreads();
    }
    int turn = 0;
#pragma unroll 1
    for (long long token = tokens.begin; token < tokens.end; ++token) {
        char* const out = place.out;
        sum_rows(state, shared, turn);
        Step next = {};
        place.step(params);
        if (token + 1 < tokens.end) {
            next.load(params, place, column);
            next.share(shared, turn ^ 1);
        }
        __syncthreads();
        take_step(params, step, shared, turn, column, out, state);
        __syncthreads();  // nobody looks at this token any more
        step = next;
        turn ^= 1;
    }
    if (params.final_state != nullptr) {
        for_each_vector(params, block, column, params.final_state_strides, state,
                        [&](long long at, const StateVector& vector) { store_bits(params.final_state + at, vector); });
    }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_recurrent(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::gated_recurrent(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
