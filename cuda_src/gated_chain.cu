// The states in front of the segments of sequences, from what each segment carries: with L what it makes of a state of
// zeros and M what it makes of the identity if values are zeros (gated_delta_mma.cu and gated_delta_wgmma.cu, kCarry),
//     S = M S + L.
//
// Grid: one block per kBlockN features of one head of v of one sequence. A thread has a row of half of them. All of it
// is float32 on the ordinary units: it is little, and states pass through it unrounded.

#ifndef CUFLASH_BLOCK_N
#define CUFLASH_BLOCK_N 8  // the only number
#endif
#ifndef CUFLASH_THREADS
#define CUFLASH_THREADS 128  // two for each feature of k
#endif

#include "common/math.cuh"
#include "gated/params.cuh"

namespace cuflash {

constexpr int kColumns = kBlockN / 2;              // of a thread
constexpr int kBatch = kThreads <= 256 ? 32 : 16;  // elements of M on their way: as many as there are registers for

static_assert(kThreads == 2 * kHeadDim && kHeadDim % kBatch == 0 && kColumns == 4);

struct alignas(16) Features {
    float values[kColumns];
};

struct SharedTiles {
    Features state[2][kHeadDim][2];  // before a segment, and behind it
};

// Of a thread: its row, and the first of its columns.
struct Place {
    int row, half, column;

    __device__ __forceinline__ long long offset(const StateStrides& strides, long long index, int head) const {
        return index * strides.index + head * strides.head + row * strides.row + column * strides.column;
    }
};

__device__ __forceinline__ Features product(const char* factors, long long stride, int num_factors,
                                            const Features (&state)[kHeadDim][2], int half) {
    Features sums = {};
#pragma unroll 1
    for (int begin = 0; begin < kHeadDim; begin += kBatch) {
        float batch[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k)
            batch[k] = begin + k < num_factors ? load_bits<float>(factors + (begin + k) * stride) : 0;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            const Features& before = state[begin + k][half];
            // Where there is nothing, what grows without bound makes nothing of it.
#pragma unroll
            for (int j = 0; j < kColumns; ++j)
                if (before.values[j] != 0) sums.values[j] = multiply_add(batch[k], before.values[j], sums.values[j]);
        }
    }
    return sums;
}

__device__ __forceinline__ void gated_chain(const GatedParams& params, SharedTiles& shared) {
    const GatedBlock block = gated_block(params);
    Place place = {static_cast<int>(threadIdx.x % kHeadDim), static_cast<int>(threadIdx.x / kHeadDim), 0};
    place.column = block.part * kBlockN + place.half * kColumns;
    const auto is_there = [&](int j) { return place.row < params.head_dim && place.column + j < params.head_dim_v; };
    const long long num_segments = (params.seqlen + params.segment_tokens - 1) / params.segment_tokens;
    Features own = {};
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
        const StateStrides& strides = params.initial_state_strides;
        const long long at = place.offset(strides, block.index, block.head) + j * strides.column;
        if (params.initial_state != nullptr && is_there(j)) own.values[j] = load_bits<float>(params.initial_state + at);
    }
#pragma unroll 1
    for (long long segment = 0;; ++segment) {
        auto& state = shared.state[segment % 2];
        state[place.row][place.half] = own;
        const long long walk = block.index * num_segments + segment;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
            const StateStrides& strides = params.final_state_strides;
            const long long at = place.offset(strides, walk, block.head) + j * strides.column;
            if (is_there(j)) store_bits(params.final_state + at, own.values[j]);
        }
        if (segment + 1 == num_segments) break;
        __syncthreads();
        const StateStrides& strides = params.states_strides;
        const char* const carried = params.states + place.offset(strides, walk - block.index, block.head);
        const char* const factors = carried + (params.identity_column - place.column) * strides.column;
        // right either way: what is finite counts nothing there
        if (place.row < params.head_dim) own = product(factors, strides.column, params.head_dim, state, place.half);
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
            // right either way: what is finite counts nothing there
            if (is_there(j)) own.values[j] += load_bits<float>(carried + j * strides.column);
    }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_gated_chain(const __grid_constant__ cuflash::GatedParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::gated_chain(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
