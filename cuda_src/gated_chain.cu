// The states in front of the segments of sequences, from what each segment carries: with L what it makes of a state of
// zeros and M what it makes of the identity if values are zeros (gated_delta_mma.cu and gated_delta_wgmma.cu, kCarry),
//     S = M S + L.
//
// Grid: one block per kBlockN features of one head of v of one sequence. A thread has a row of a part of them. All of
// it is float32 on the ordinary units: it is little, and states pass through it unrounded.

#ifndef CUFLASH_BLOCK_N
#define CUFLASH_BLOCK_N 8  // the only number
#endif
#ifndef CUFLASH_THREADS
#define CUFLASH_THREADS 256  // the only number
#endif

#include "common/math.cuh"
#include "gated/params.cuh"

namespace cuflash {

constexpr int kColumns = 4;  // of a thread
constexpr int kRowThreads = kThreads * kColumns / kBlockN, kRows = (kHeadDim + kRowThreads - 1) / kRowThreads;

static_assert(kBlockN % kColumns == 0 && kThreads * kColumns % kBlockN == 0);

struct SharedTiles {
    alignas(16) float state[2][kHeadDim][kBlockN];  // before a segment, and behind it
};

struct alignas(16) Part {
    float values[kColumns];
};

__device__ __forceinline__ const char* state_at(const char* array, const StateStrides& strides, long long index,
                                                int head, int row, int column) {
    return array + index * strides.index + head * strides.head + row * strides.row + column * strides.column;
}

__device__ __forceinline__ void gated_chain(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    const int first = threadIdx.x / kRowThreads * kColumns, column = block.part * kBlockN + first;
    const int num_columns = min(params.head_dim_v - column, kColumns);
    const auto num_segments = static_cast<int>((params.seqlen + params.segment_tokens - 1) / params.segment_tokens);
    Part own[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int row = i * kRowThreads + threadIdx.x % kRowThreads;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
            if (params.initial_state != nullptr && row < params.head_dim && j < num_columns)
                own[i].values[j] = load_bits<float>(state_at(params.initial_state, params.initial_state_strides,
                                                             block.index, block.head, row, column + j));
        }
    }
#pragma unroll 1
    for (int segment = 0;; ++segment) {
        const long long walk = block.index * num_segments + segment,
                        carried = block.index * (num_segments - 1) + segment;
        float (*const state)[kBlockN] = shared.state[segment % 2];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = i * kRowThreads + threadIdx.x % kRowThreads;
            if (row >= params.head_dim) continue;
            *reinterpret_cast<Part*>(&state[row][first]) = own[i];
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
                if (j < num_columns)
                    store_bits(const_cast<char*>(state_at(params.final_state, params.final_state_strides, walk,
                                                          block.head, row, column + j)),
                               own[i].values[j]);
            }
        }
        if (segment + 1 == num_segments) return;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = i * kRowThreads + threadIdx.x % kRowThreads;
            if (row >= params.head_dim) continue;
            Part next = {};
#pragma unroll 16
            for (int k = 0; k < params.head_dim; ++k) {
                const float factor = load_bits<float>(state_at(params.states, params.states_strides, carried,
                                                               block.head, row, params.identity_column + k));
                const Part before = *reinterpret_cast<const Part*>(&state[k][first]);
                // Where there is nothing, what grows without bound makes nothing of it.
#pragma unroll
                for (int j = 0; j < kColumns; ++j) {
                    if (before.values[j] != 0) next.values[j] = multiply_add(factor, before.values[j], next.values[j]);
                }
            }
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
                if (j < num_columns)
                    own[i].values[j] =
                        next.values[j] + load_bits<float>(state_at(params.states, params.states_strides, carried,
                                                                   block.head, row, column + j));
            }
        }
    }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_chain(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::gated_chain(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
