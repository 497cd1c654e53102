// Output of the chunks of the gated delta rule on the tensor cores for 16-bit floats (sm_80 and newer):
// o_i = scale (exp(c_i) q_i H + sum over j <= i of exp(c_i - c_j) (q_i.k_j) v_j), H being the state before the chunk.
//
// Grid: one block per kBlockN features of one head of v of one chunk; chunks are counted over all sequences.
//
// Everything is read once, so the time is that of memory. Blocks ask for the state before they know which tokens are
// their own, and several to a multiprocessor take turns with arithmetic: v takes the place of k, so that they fit.
//
// Warps: kShares of them own 16 rows of the chunk, whose weights stay in the registers of each, and its features of the
// output.

#include "gated/load.cuh"
#include "gated/steps.cuh"
#include "gated/store.cuh"

namespace cuflash {

constexpr int kShares = kThreads * 16 / (32 * kBlockM);
constexpr int kKeyTiles = kBlockM / 8;  // of a warp's weights
constexpr int kWarpFeatures = kBlockN / kShares, kFeatureTiles = kWarpFeatures / 8;
constexpr int kSteps = kHeadDim / 16;  // of sums over features of k
constexpr int kPitch = kHeadDim + 8;   // elements: rows of a matrix begin in different banks
constexpr int kPitchV = kBlockN + 8;
constexpr int kStateRows = kSwappedStates ? kBlockN : kHeadDim, kStateColumns = kSwappedStates ? kHeadDim : kBlockN;

static_assert(kThreads * 16 == 32 * kBlockM * kShares && kHeadDim % 16 == 0 && kWarpFeatures % 16 == 0);

struct SharedTiles {
    alignas(16) Element q[kBlockM][kPitch];
    union {  // v arrives when k has been multiplied
        alignas(16) Element k[kBlockM][kPitch];
        alignas(16) Element v[kBlockM][kPitchV];
    };
    alignas(16) Element state[kStateRows][kStateColumns + 8];
    alignas(8) float log_decay[kBlockM];  // to base 2
    Chunk chunk;
};

using Weights = unsigned int[kBlockM / 16][4];
using Output = float[kFeatureTiles][4];

// Asks for everything, in the order in which it is multiplied.
struct Loads {
    const GatedParams& params;
    SharedTiles& shared;
    int head, column;

    template <int kWidth, int kTilePitch>
    __device__ __forceinline__ void tokens(Element (&target)[kBlockM][kTilePitch], const char* array,
                                           const TokenStrides& strides, int which, int first, int count) const {
        const Chunk& chunk = shared.chunk;
        load_rows<kBlockM, kWidth>(target, chunk_row(array, strides, chunk, 0, which) + first * strides.column,
                                   strides.token, strides.column, chunk.num_tokens, count - first);
    }
    __device__ __forceinline__ void q_and_k() const {
        const int head_k = static_cast<int>(divide(head, params.group_size));
        tokens<kHeadDim>(shared.q, params.q, params.q_strides, head_k, 0, params.head_dim);
        tokens<kHeadDim>(shared.k, params.k, params.k_strides, head_k, 0, params.head_dim);
    }
    __device__ __forceinline__ void v() const {
        tokens<kBlockN>(shared.v, params.v, params.v_strides, head, column, params.head_dim_v);
    }
    // Rows of the state are features of k, or of v where those come first.
    __device__ __forceinline__ void state(long long chunk) const {
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

// weights = exp(c_i - c_j) (q_i.k_j) for keys up to the row's own, of the group's rows, as a left operand.
__device__ __forceinline__ void weigh(SharedTiles& shared, int group, int lane, Weights& weights) {
    float scores[kKeyTiles][4] = {};
    const SharedAddress q = left_address(shared.q + group * 16, lane), k = right_address(shared.k, lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        Fragment queries;
        ldmatrix_x4(queries, q + step * 32);
#pragma unroll
        for (int n = 0; n < kKeyTiles; n += 2) {
            // right either way: keys behind the rows weigh nothing
            if (n > 2 * group) continue;
            Fragment keys;
            ldmatrix_x4(keys, k + n * 8 * kPitch * 2 + step * 32);
            multiply(scores[n], scores[n + 1], queries, keys);
        }
    }
    const int first = group * 16 + lane / 4;
    const float later[2] = {shared.log_decay[first], shared.log_decay[first + 8]};
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
        // right either way: keys behind the rows weigh nothing
        if (n > 2 * group + 1) continue;
        const int key = n * 8 + lane % 4 * 2;
        const auto earlier = *reinterpret_cast<const Gates*>(&shared.log_decay[key]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first + r * 8;
            const float low = key <= row ? exp2_approximate(later[r] - earlier.first) * scores[n][2 * r] : 0;
            const float high = key < row ? exp2_approximate(later[r] - earlier.second) * scores[n][2 * r + 1] : 0;
            weights[n / 2][n % 2 * 2 + r] = pack(low, high);
        }
    }
}

// o = exp(c_i) Q H
__device__ __forceinline__ void multiply_state(SharedTiles& shared, int group, int first_feature, int lane, Output& o) {
    constexpr int kStatePitch = kStateColumns + 8;
    const SharedAddress q = left_address(shared.q + group * 16, lane);
    const SharedAddress state = kSwappedStates ? right_address(shared.state + first_feature, lane)
                                               : left_address(shared.state, lane) + first_feature * 2;
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
    const int first = group * 16 + lane / 4;
    const float decays[2] = {exp2_approximate(shared.log_decay[first]), exp2_approximate(shared.log_decay[first + 8])};
#pragma unroll
    for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[f][i] *= decays[i / 2];
    }
}

// o += weights V
__device__ __forceinline__ void accumulate(SharedTiles& shared, int group, int first_feature, int lane,
                                           const Weights& weights, Output& o) {
    const SharedAddress v = left_address(shared.v, lane) + first_feature * 2;
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) {
        if (step > group) continue;
#pragma unroll
        for (int f = 0; f < kFeatureTiles; f += 2) {
            Fragment values;
            ldmatrix_x4_transposed(values, v + step * 16 * kPitchV * 2 + f * 16);
            multiply(o[f], o[f + 1], weights[step], values);
        }
    }
}

__device__ __forceinline__ void store(const GatedParams& params, const Chunk& chunk, int head, int column, int row,
                                      int lane, Output& o) {
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
        const int token = row + lane / 4 + r * 8;
        char* const out = chunk_row(params.out, params.out_strides, chunk, token, head);
        store_row<kVectorLoads>(token < chunk.num_tokens ? out : nullptr, column, params.head_dim_v,
                                params.out_strides.column, o, r, scale, lane);
    }
}

__device__ __forceinline__ void gated_output(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = block.part * kBlockN;
    const int group = warp / kShares, first_feature = warp % kShares * kWarpFeatures;
    const Loads loads = {params, shared, block.head, column};
    loads.state(block.index);  // all that is known before the chunk is found
    if (warp == 0) find_chunk(params, block.index, shared.chunk);
    __syncthreads();
    const Chunk& chunk = shared.chunk;
    if (chunk.num_tokens == 0) {
        cp_async_wait();
        return;
    }
    loads.q_and_k();
    for (int token = threadIdx.x; token < kBlockM; token += kThreads) {
        const char* const gate = chunk_row(params.log_g, params.log_g_strides, chunk, token, block.head);
        const float log_decay = token < chunk.num_tokens ? load_float(gate, params.gate_dtype) : 0;
        // Behind a closed gate all are the least, between which nothing decays.
        shared.log_decay[token] = maximum(log_decay * kLog2e, -largest_finite());
    }
    cp_async_wait();
    __syncthreads();
    Weights weights;
    weigh(shared, group, lane, weights);
    __syncthreads();
    loads.v();
    Output o = {};
    multiply_state(shared, group, first_feature, lane, o);
    cp_async_wait();
    __syncthreads();
    accumulate(shared, group, first_feature, lane, weights, o);
    store(params, chunk, block.head, column + first_feature, group * 16, lane, o);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_output_mma(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::gated_output(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
