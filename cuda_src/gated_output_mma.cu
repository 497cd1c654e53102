// Output of the chunks of the gated delta rule on the tensor cores for 16-bit floats (sm_80 and newer):
// o_i = scale (exp(c_i) q_i H + sum over j <= i of exp(c_i - c_j) (q_i.k_j) v_j), H being the state before the chunk.
//
// Grid: one block per kBlockN features of a few heads of v, all of one head of q and k, of one chunk; chunks are
// counted over all sequences.
//
// Everything is read once, so the time is that of memory. Blocks ask for the first state before they know which tokens
// are their own, for the next one as soon as they have multiplied one, and several to a multiprocessor take turns with
// arithmetic: v takes the place of k, so that they fit.
//
// Warps: kShares of them own 16 rows of the chunk: each some of the scores, which stay in its registers while heads
// change, and some of the features of the output. They hand weights to each other.

#include "gated/load.cuh"
#include "gated/steps.cuh"
#include "gated/store.cuh"

namespace cuflash {

constexpr int kShares = kThreads * 16 / (32 * kBlockM);
constexpr int kKeySteps = kBlockM / 16, kOwnKeySteps = (kKeySteps + kShares - 1) / kShares;
constexpr int kWarpFeatures = kBlockN / kShares, kFeatureTiles = kWarpFeatures / 8;
constexpr int kSteps = kHeadDim / 16;  // of sums over features of k
constexpr int kPitch = kHeadDim + 8;   // elements: rows of a matrix begin in different banks
constexpr int kPitchV = kBlockN + 8;
constexpr int kStateRows = kSwappedStates ? kBlockN : kHeadDim, kStateColumns = kSwappedStates ? kHeadDim : kBlockN;
constexpr int kMaxHeads = kThreads / kBlockM;  // of v: a thread loads one gate

static_assert(kThreads * 16 == 32 * kBlockM * kShares && kHeadDim % 16 == 0 && kWarpFeatures % 16 == 0);

// Of 16 rows for 16 keys as a left operand, a lane's own.
struct alignas(16) Weights {
    Fragment fragment;
};

struct SharedTiles {
    alignas(16) Element q[kBlockM][kPitch];
    union {  // v arrives when k has been multiplied
        alignas(16) Element k[kBlockM][kPitch];
        alignas(16) Element v[kBlockM][kPitchV];
    };
    alignas(16) Element state[kStateRows][kStateColumns + 8];
    Weights weights[kKeySteps * (kKeySteps + 1) / 2][32];
    alignas(8) float log_decay[kMaxHeads][kBlockM];  // to base 2
    Chunk chunk;
    int first_head, column;  // the block's own

    __device__ __forceinline__ Weights& weights_of(int group, int key_step, int lane) {
        return weights[group * (group + 1) / 2 + key_step][lane];
    }
};

// What is a thread's own: found again by each step, so that it needs no registers between them. A shuffle hides from
// the assembler, too, that it is the same. Made by all 32 lanes of a warp together.
struct Own {
    const unsigned int thread = __shfl_xor_sync(0xffffffffu, threadIdx.x, 0);
    const int lane = thread % 32, group = thread / (32 * kShares);
    const int share = thread / 32 % kShares;  // of keys and features
    const int first_row = group * 16 + lane / 4, first_feature = share * kWarpFeatures;
};

using Scores = float[kOwnKeySteps][2][4];
using Output = float[kFeatureTiles][4];

// Asks for what is multiplied.
struct Loads {
    const GatedParams& params;
    SharedTiles& shared;

    template <int kWidth, int kTilePitch>
    __device__ __forceinline__ void tokens(Element (&target)[kBlockM][kTilePitch], const char* array,
                                           const TokenStrides& strides, int which, int first, int count) const {
        const Chunk& chunk = shared.chunk;
        load_rows<kBlockM, kWidth>(target, chunk_row(array, strides, chunk, 0, which) + first * strides.column,
                                   strides.token, strides.column, chunk.num_tokens, count - first);
    }
    __device__ __forceinline__ void q_and_k(int head_k) const {
        tokens<kHeadDim>(shared.q, params.q, params.q_strides, head_k, 0, params.head_dim);
        tokens<kHeadDim>(shared.k, params.k, params.k_strides, head_k, 0, params.head_dim);
    }
    __device__ __forceinline__ void v(int head) const {
        const int column = shared.column;
        tokens<kBlockN>(shared.v, params.v, params.v_strides, head, column, params.head_dim_v);
    }
    // Rows of the state are features of k, or of v where those come first.
    __device__ __forceinline__ void state(long long chunk, int head, int column) const {
        const StateStrides& strides = params.states_strides;
        const char* const begin = params.states + chunk * strides.index + head * strides.head;
        const bool has = has_state(params, chunk);
        const long long row_stride = kSwappedStates ? strides.column : strides.row;
        const long long column_stride = kSwappedStates ? strides.row : strides.column;
        const int first_row = kSwappedStates ? column : 0, first_column = kSwappedStates ? 0 : column;
        const int num_rows = kSwappedStates ? params.head_dim_v : params.head_dim;
        const int num_columns = kSwappedStates ? params.head_dim : params.head_dim_v;
        const char* const source = begin + first_row * row_stride + first_column * column_stride;
        const int rows_left = has ? num_rows - first_row : 0, columns_left = num_columns - first_column;
        if constexpr (kStateDtype == kDtype) {
            load_rows<kStateRows, kStateColumns>(shared.state, source, row_stride, column_stride, rows_left,
                                                 columns_left);
        } else {
#pragma unroll 2
            for (int i = threadIdx.x; i < kStateRows * kStateColumns / 2; i += kThreads) {
                const int row = i / (kStateColumns / 2), pair = i % (kStateColumns / 2) * 2;
                float values[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool is_there = row < rows_left && pair + e < columns_left;
                    const char* const address = source + row * row_stride + (pair + e) * column_stride;
                    values[e] = is_there ? load_as<kStateDtype>(address) : 0;
                }
                *reinterpret_cast<unsigned int*>(&shared.state[row][pair]) = pack(values[0], values[1]);
            }
        }
    }
};

// Scores q_i.k_j of the own.group's rows with each kShares-th 16 keys, from the own.share's own on.
__device__ __forceinline__ void score(SharedTiles& shared, Scores& scores) {
    const Own own;
    const SharedAddress q = left_address(shared.q + own.group * 16, own.lane);
    const SharedAddress k = right_address(shared.k + own.share * 16, own.lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        Fragment queries;
        ldmatrix_x4(queries, q + step * 32);
#pragma unroll
        for (int i = 0; i < kOwnKeySteps; ++i) {
            // right either way: keys behind the rows weigh nothing
            if (i * kShares + own.share > own.group) continue;
            Fragment keys;
            ldmatrix_x4(keys, k + i * kShares * 16 * kPitch * 2 + step * 32);
            multiply(scores[i][0], scores[i][1], queries, keys);
        }
    }
}

// weights = exp(c_i - c_j) scores for keys up to the row's own.
__device__ __forceinline__ void weigh(SharedTiles& shared, const float (&log_decay)[kBlockM], const Scores& scores) {
    const Own own;
    const float later[2] = {log_decay[own.first_row], log_decay[own.first_row + 8]};
#pragma unroll
    for (int i = 0; i < kOwnKeySteps; ++i) {
        const int step = i * kShares + own.share;
        if (step > own.group) continue;
        Weights weights;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int key = step * 16 + n * 8 + own.lane % 4 * 2;
            const auto earlier = *reinterpret_cast<const Gates*>(&log_decay[key]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = own.first_row + r * 8;
                const float low = key <= row ? exp2_approximate(later[r] - earlier.first) * scores[i][n][2 * r] : 0;
                const float high =
                    key < row ? exp2_approximate(later[r] - earlier.second) * scores[i][n][2 * r + 1] : 0;
                weights.fragment[n * 2 + r] = pack(low, high);
            }
        }
        shared.weights_of(own.group, step, own.lane) = weights;
    }
}

// o = Q H
__device__ __forceinline__ void multiply_state(SharedTiles& shared, Output& o) {
    const Own own;
    constexpr int kStatePitch = kStateColumns + 8;
    const SharedAddress q = left_address(shared.q + own.group * 16, own.lane);
    const SharedAddress state = kSwappedStates ? right_address(shared.state + own.first_feature, own.lane)
                                               : left_address(shared.state, own.lane) + own.first_feature * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        Fragment queries;
        ldmatrix_x4(queries, q + step * 32);
#pragma unroll
        for (int f = 0; f < kFeatureTiles; f += 2) {
            Fragment values;
            if constexpr (kSwappedStates) ldmatrix_x4(values, state + f * 8 * kStatePitch * 2 + step * 32);
            else ldmatrix_x4_transposed(values, state + step * 16 * kStatePitch * 2 + f * 16);
            multiply(o[f], o[f + 1], queries, values);
        }
    }
}

// o = exp(c_i) o + weights V
__device__ __forceinline__ void accumulate(SharedTiles& shared, const float (&log_decay)[kBlockM], Output& o) {
    const Own own;
    const float decays[2] = {exp2_approximate(log_decay[own.first_row]),
                             exp2_approximate(log_decay[own.first_row + 8])};
#pragma unroll
    for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[f][i] *= decays[i / 2];
    }
    const SharedAddress v = left_address(shared.v, own.lane) + own.first_feature * 2;
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
        if (step > own.group) continue;
        const Weights weights = shared.weights_of(own.group, step, own.lane);
#pragma unroll
        for (int f = 0; f < kFeatureTiles; f += 2) {
            Fragment values;
            ldmatrix_x4_transposed(values, v + step * 16 * kPitchV * 2 + f * 16);
            multiply(o[f], o[f + 1], weights.fragment, values);
        }
    }
}

__device__ __forceinline__ void store(const GatedParams& params, const Chunk& chunk, int head, int column, Output& o) {
    const Own own;
    if (chunk.sequence < 0) {
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
            for (int i = 0; i < 4; ++i) o[f][i] = 0;
        }
    }
    const float scale = static_cast<float>(params.scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int token = own.first_row + r * 8;
        char* const out = chunk_row(params.out, params.out_strides, chunk, token, head);
        store_row<kVectorLoads>(token < chunk.num_tokens ? out : nullptr, column + own.first_feature, params.head_dim_v,
                                params.out_strides.column, o, r, scale, own.lane);
    }
}

// Lanes load them one behind the other, of each thread's own head.
__device__ __forceinline__ void load_decays(const GatedParams& params, SharedTiles& shared, int first_head) {
    const Chunk& chunk = shared.chunk;
    const int i = threadIdx.x / kBlockM, token = threadIdx.x % kBlockM;
    if (i >= params.heads_per_block) return;
    const char* const gate = chunk_row(params.log_g, params.log_g_strides, chunk, token, first_head + i);
    const float log_decay = token < chunk.num_tokens ? load_float(gate, params.gate_dtype) : 0;
    // Behind a closed gate all are the least, between which nothing decays.
    shared.log_decay[i][token] = maximum(log_decay * kLog2e, -largest_finite());
}

__device__ __forceinline__ void gated_output(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    const Loads loads = {params, shared};
    loads.state(block.index, block.head, block.part * kBlockN);  // all that is known before the chunk is found
    if (threadIdx.x == 0) {
        shared.first_head = block.head;
        shared.column = block.part * kBlockN;
    }
    if (threadIdx.x < 32) find_chunk(params, block.index, shared.chunk);
    __syncthreads();
    const Chunk& chunk = shared.chunk;
    if (chunk.num_tokens == 0) {
        cp_async_wait();
        return;
    }
    loads.q_and_k(static_cast<int>(divide(shared.first_head, params.group_size)));
    load_decays(params, shared, shared.first_head);
    cp_async_wait();
    __syncthreads();
    Scores scores = {};
    score(shared, scores);
    __syncthreads();
    const int num_heads = static_cast<int>(params.heads_per_block);
#pragma unroll 1
    for (int i = 0; i < num_heads; ++i) {
        const auto& log_decay = shared.log_decay[i];
        loads.v(shared.first_head + i);
        cp_async_commit();
        weigh(shared, log_decay, scores);
        cp_async_wait_group<1>();
        __syncthreads();  // the state is there
        Output o = {};
        multiply_state(shared, o);
        cp_async_wait_group<0>();
        __syncthreads();  // v and weights are, and nobody needs the state
        if (i + 1 < num_heads) loads.state(chunk.index, shared.first_head + i + 1, shared.column);
        cp_async_commit();
        accumulate(shared, log_decay, o);
        store(params, chunk, shared.first_head + i, shared.column, o);
        __syncthreads();  // nobody needs v and weights
    }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_output_mma(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::gated_output(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
