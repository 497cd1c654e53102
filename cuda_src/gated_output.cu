// Output of the chunks of the gated delta rule, on the ordinary arithmetic units of any GPU:
// o_i = scale (exp(c_i) q_i H + sum over j <= i of exp(c_i - c_j) (q_i.k_j) v_j), H being the state before the chunk.
//
// Grid: one block per kRowTile rows of a chunk of one head of v; chunks are counted over all sequences. Weights
// exp(c_i - c_j) (q_i.k_j) are computed for all keys of the chunk, then kSlice features of the output at a time.
//
// Warps: each has kRows rows; lanes have keys, or features, 32 apart.

#include "common/load.cuh"
#include "common/store.cuh"
#include "gated/chunk.cuh"

namespace cuflash {

constexpr int kRowTile = 16, kNumWarps = kThreads / 32;
constexpr int kRows = kRowTile / kNumWarps;
constexpr int kKeys = (kBlockM + 31) / 32;  // of each lane
constexpr int kPiece = 16;                  // features, or keys, that are in shared memory at a time
constexpr int kSlice = 64, kColumns = kSlice / 32;

static_assert(kRowTile % kNumWarps == 0 && kBlockM % kRowTile == 0);

struct SharedTiles {
    Chunk chunk;
    Accumulator log_decay[kBlockM];
    Accumulator weights[kRowTile][kBlockM + 1];
    Accumulator q[kRowTile][kPiece + 1];
    Accumulator keys[kBlockM][kPiece + 1];
    Accumulator values[kPiece][kSlice];  // of the state, or of v
};

struct GatedRows {
    const GatedParams& params;
    SharedTiles& shared;
    int head, head_k;
    int first_row;

    __device__ __forceinline__ bool has_token(int token) const { return token < shared.chunk.num_tokens; }
    __device__ __forceinline__ const char* row(const char* array, const TokenStrides& strides, int token,
                                               int which) const {
        return has_token(token) ? chunk_row(array, strides, shared.chunk, token, which) : nullptr;
    }
    __device__ __forceinline__ void load_q(int first) const {
        const auto address = [&](int i) { return row(params.q, params.q_strides, first_row + i, head_k); };
        load_tile<kRowTile, kPiece>(shared.q, 0, first, params.head_dim, params.q_strides.column, address);
    }
    __device__ __forceinline__ void load_k(int first) const {
        const auto address = [&](int i) { return row(params.k, params.k_strides, i, head_k); };
        load_tile<kBlockM, kPiece>(shared.keys, 0, first, params.head_dim, params.k_strides.column, address);
    }
    __device__ __forceinline__ void load_v(int first_key, int column) const {
        const auto address = [&](int i) { return row(params.v, params.v_strides, first_key + i, head); };
        load_tile<kPiece, kSlice>(shared.values, 0, column, params.head_dim_v, params.v_strides.column, address);
    }
    // Rows of the state, one for each feature of k.
    __device__ __forceinline__ void load_state(int first, int column) const {
        const StateStrides& strides = params.states_strides;
        const char* const state = params.states + shared.chunk.index * strides.index + head * strides.head;
        for (int i = threadIdx.x; i < kPiece * kSlice; i += kThreads) {
            const int r = first + i / kSlice, c = column + i % kSlice;
            const bool has = r < params.head_dim && c < params.head_dim_v;
            shared.values[i / kSlice][i % kSlice] =
                has ? load_as<kStateDtype>(state + r * strides.row + c * strides.column) : Accumulator(0);
        }
    }
};

// weights = exp(c_i - c_j) (q_i.k_j)
__device__ __forceinline__ void weigh(const GatedRows& rows) {
    SharedTiles& shared = rows.shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Accumulator scores[kRows][kKeys] = {};
    // right either way: features behind the last are 0
    for (int first = 0; first < rows.params.head_dim; first += kPiece) {
        rows.load_q(first);
        rows.load_k(first);
        __syncthreads();
        for (int d = 0; d < kPiece; ++d) {
#pragma unroll
            for (int n = 0; n < kKeys; ++n) {
                const Accumulator key = n * 32 + lane < kBlockM ? shared.keys[n * 32 + lane][d] : 0;
#pragma unroll
                for (int r = 0; r < kRows; ++r)
                    scores[r][n] = multiply_add(shared.q[warp * kRows + r][d], key, scores[r][n]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int row = rows.first_row + warp * kRows + r;
#pragma unroll
        for (int n = 0; n < kKeys; ++n) {
            const int key = n * 32 + lane;
            if (key >= kBlockM) continue;
            const Accumulator weight = scores[r][n] * decay_between(shared.log_decay[row], shared.log_decay[key]);
            shared.weights[warp * kRows + r][key] = key <= row ? weight : 0;
        }
    }
}

using Output = Accumulator[kRows][kColumns];

// o += left rows, `left(r)` being what row r of the warp is multiplied with, one for each of the rows in shared memory.
template <typename Left>
__device__ __forceinline__ void accumulate(const SharedTiles& shared, Output& o, Left left) {
    for (int d = 0; d < kPiece; ++d) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const Accumulator value = shared.values[d][c * 32 + threadIdx.x % 32];
#pragma unroll
            for (int r = 0; r < kRows; ++r) o[r][c] = multiply_add(left(r, d), value, o[r][c]);
        }
    }
}

// kSlice features of the output.
__device__ __forceinline__ void compute_slice(const GatedRows& rows, int column) {
    SharedTiles& shared = rows.shared;
    const int first = threadIdx.x / 32 * kRows;
    Output o = {};
    for (int d = 0; d < rows.params.head_dim && has_state(rows.params, shared.chunk.index); d += kPiece) {
        rows.load_q(d);
        rows.load_state(d, column);
        __syncthreads();
        accumulate(shared, o, [&](int r, int i) { return shared.q[first + r][i]; });
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int row = rows.first_row + first + r;
        const Accumulator decay = exponential(shared.log_decay[row]);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) o[r][c] *= decay;
    }
    for (int key = 0; key < rows.first_row + kRowTile; key += kPiece) {
        rows.load_v(key, column);
        __syncthreads();
        accumulate(shared, o, [&](int r, int i) { return shared.weights[first + r][key + i]; });
        __syncthreads();
    }
    const GatedParams& params = rows.params;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int row = rows.first_row + first + r;
        if (!rows.has_token(row)) continue;
        char* const out = chunk_row(params.out, params.out_strides, shared.chunk, row, rows.head);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const int at = column + c * 32 + static_cast<int>(threadIdx.x % 32);
            const Accumulator value = shared.chunk.sequence < 0 ? 0 : static_cast<Accumulator>(params.scale) * o[r][c];
            if (at < params.head_dim_v) store_bits(out + at * params.out_strides.column, to_output(value));
        }
    }
}

__device__ __forceinline__ void gated_output(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    if (threadIdx.x < 32) find_chunk(params, block.index, shared.chunk);
    __syncthreads();
    const int head_k = static_cast<int>(divide(block.head, params.group_size));
    const GatedRows rows = {params, shared, block.head, head_k, block.part * kRowTile};
    // right either way: nothing would be stored
    if (!rows.has_token(rows.first_row)) return;
    for (int token = threadIdx.x; token < kBlockM; token += kThreads) {
        const char* const gate = rows.row(params.log_g, params.log_g_strides, token, block.head);
        shared.log_decay[token] = gate ? load_float(gate, params.gate_dtype) : 0;
    }
    weigh(rows);
    // right either way: nothing would be stored of a slice more
    for (int column = 0; column < params.head_dim_v; column += kSlice) compute_slice(rows, column);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_output(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::gated_output(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
