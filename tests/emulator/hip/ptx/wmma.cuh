// cuda_src/ptx/wmma.cuh on RDNA3's WMMA, which multiplies 16 x 16 tiles of float16 and bfloat16 (and no tf32). A lane
// holds row lane % 16 of A or column lane % 16 of B, lanes 16 to 31 the same once more; of C it holds the elements of
// column lane % 16 in every second row, from row lane / 16 on.
#pragma once

#include "common/config.cuh"

namespace cuflash {

struct WmmaC {
    float x[8];
};

using WmmaFloats = float __attribute__((ext_vector_type(8)));
using WmmaHalves = _Float16 __attribute__((ext_vector_type(16)));
using WmmaBits = short __attribute__((ext_vector_type(16)));

__device__ __forceinline__ int wmma_lane() { return static_cast<int>(threadIdx.x & 15); }
__device__ __forceinline__ int wmma_row(int i) { return 2 * i + static_cast<int>(threadIdx.x >> 4 & 1); }

__device__ __forceinline__ void wmma_load_column(WmmaC& c, const float* shared) {
#pragma unroll
    for (int i = 0; i < 8; ++i) c.x[i] = shared[wmma_row(i)];
}

template <int kOffset>
__device__ __forceinline__ void wmma_store(float* shared, const WmmaC& c, int pitch) {
#pragma unroll
    for (int i = 0; i < 8; ++i) shared[kOffset + wmma_row(i) * pitch + wmma_lane()] = c.x[i];
}

__device__ __forceinline__ void wmma_fence() {}

template <int dtype>
struct Wmma {
    static_assert(dtype == CUFLASH_FLOAT16 || dtype == CUFLASH_BFLOAT16, "RDNA3 multiplies 16-bit floats");
    static constexpr int kDepth = 16;
    struct A {
        unsigned int x[8];
    };
    struct B : A {};
    struct BTransposed : A {};

    template <int kOffset>
    static __device__ __forceinline__ void load(A& a, const unsigned short* shared, int pitch) {
        load_line(a, shared + kOffset + wmma_lane() * pitch, 1);
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(B& b, const unsigned short* shared, int pitch) {
        load_line(b, shared + kOffset + wmma_lane(), pitch);
    }
    template <int kOffset>
    static __device__ __forceinline__ void load(BTransposed& b, const unsigned short* shared, int pitch) {
        load_line(b, shared + kOffset + wmma_lane() * pitch, 1);
    }
    static __device__ __forceinline__ void multiply_add(WmmaC& c, const A& a, const A& b) {
        WmmaFloats sum = __builtin_bit_cast(WmmaFloats, c);
        if constexpr (dtype == CUFLASH_FLOAT16) {
            sum = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(__builtin_bit_cast(WmmaHalves, a.x),
                                                             __builtin_bit_cast(WmmaHalves, b.x), sum);
        } else {
            sum = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(__builtin_bit_cast(WmmaBits, a.x),
                                                              __builtin_bit_cast(WmmaBits, b.x), sum);
        }
        c = __builtin_bit_cast(WmmaC, sum);
    }

  private:
    static __device__ __forceinline__ void load_line(A& operand, const unsigned short* shared, int step) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            operand.x[i] = shared[2 * i * step] | static_cast<unsigned int>(shared[(2 * i + 1) * step]) << 16;
    }
};

}  // namespace cuflash
