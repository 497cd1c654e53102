// Turns all rows of K and V into pairs of float16, for blocks of precise_float32.cu that would each do it again.
//
// Grid: one block per kBlockN rows of one (batch, key head), those of K first, then those of V. Each warp turns rows
// into pairs as precise_float32.cu does with those of Q, in shared memory, from where the block stores them.

#ifndef CUFLASH_DTYPE
#define CUFLASH_DTYPE CUFLASH_FLOAT32  // the only one
#endif

#include "common/dense.cuh"
#include "precise/prepared_rows.cuh"

namespace cuflash {

static_assert(kDtype == CUFLASH_FLOAT32);

template <int kWidth>
struct Rows : PairRows<kBlockN, kWidth> {
    static constexpr int kChunksOfRow = prepared_bytes(kWidth) / 16;

    __device__ __forceinline__ void prepare(const char* source, const Strides& strides, int num_features,
                                            long long num_rows, char* target) {
        this->load(source, strides, num_features, num_rows);
        cp_async_wait();
#pragma unroll 1
        for (int pass = 0; pass < this->kPasses; ++pass) {
            const int row = this->row_of(threadIdx.x, pass);
            FoundInRow found = this->make_pairs(threadIdx.x, row, num_features);
#pragma unroll
            for (int lanes = this->kLanes / 2; lanes > 0; lanes /= 2)
                found.kinds |= __shfl_xor_sync(0xffffffffu, found.kinds, lanes);
            if (threadIdx.x % this->kLanes == 0) *chunk(row, kChunksOfRow - 1) = {{found.scale, found.kinds}};
        }
        __syncthreads();
        const int rows_left = static_cast<int>(min(num_rows, static_cast<long long>(kBlockN)));
        for (int i = threadIdx.x; i < rows_left * kChunksOfRow; i += kThreads)
            reinterpret_cast<Chunk*>(target)[i] = *chunk(i / kChunksOfRow, i % kChunksOfRow);
    }

    struct alignas(16) Chunk {
        FoundInRow found;
        unsigned int rest[2];
    };
    __device__ __forceinline__ Chunk* chunk(int row, int index) {
        return reinterpret_cast<Chunk*>(this->rows[row]) + index;
    }
};

union SharedTiles {
    Rows<kHeadDim> k;
    Rows<kHeadDimV> v;
};

__device__ __forceinline__ void prepare_pairs(const AttentionParams& params, SharedTiles& shared) {
    const long long num_tiles = (params.seqlen_k + kBlockN - 1) / kBlockN;
    const long long num_heads = divide(params.head_tiles * params.packed_heads, params.group_size);
    const long long num_blocks = params.num_batches * num_heads * num_tiles;
    const bool is_v = blockIdx.x >= num_blocks;
    const long long plane = divide(blockIdx.x - (is_v ? num_blocks : 0), num_tiles);
    const long long batch = divide(plane, num_heads), head = plane - batch * num_heads;
    const long long row = (blockIdx.x - (is_v ? num_blocks : 0) - plane * num_tiles) * kBlockN;
    const Strides& strides = is_v ? params.v_strides : params.k_strides;
    const Divided index(static_cast<unsigned int>(batch), params.batch_shape);
    const char* array = (is_v ? params.v : params.k) + index.rest * strides.batch;
    array = outer_address(params, array, is_v ? kArrayV : kArrayK, index.quotient) + head * strides.head +
            row * strides.row;
    const long long first = plane * params.seqlen_k + row;
    char* const k = const_cast<char*>(params.prepared_k) + first * prepared_bytes(kHeadDim);
    char* const v = const_cast<char*>(params.prepared_v) + first * prepared_bytes(kHeadDimV);
    if (!is_v) shared.k.prepare(array, strides, params.head_dim, params.seqlen_k - row, k);
    else shared.v.prepare(array, strides, params.head_dim_v, params.seqlen_k - row, v);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads)
    cuflash_prepare_pairs(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::prepare_pairs(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
