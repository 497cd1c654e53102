// What HIP's runtime compiler declares before the first line of a kernel, as far as ours need it, on clang's builtins:
// so that clang alone can check that the sources compile for AMD GPUs (waves of 32 lanes: RDNA).
#pragma once

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __grid_constant__
#define __launch_bounds__(num_threads, min_blocks) __attribute__((amdgpu_flat_work_group_size(1, num_threads)))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))

struct HipIndex {
    unsigned int x;
};
#define threadIdx (HipIndex{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (HipIndex{__builtin_amdgcn_workgroup_id_x()})

inline __device__ void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
inline __device__ void __syncwarp() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}

template <typename T>
inline __device__ T __shfl_sync(unsigned int, T value, int source) {
    struct Words {
        int words[sizeof(T) / 4];
    };
    Words moved = __builtin_bit_cast(Words, value);
    for (int& word : moved.words) word = __builtin_amdgcn_ds_bpermute(source * 4, word);
    return __builtin_bit_cast(T, moved);
}
template <typename T>
inline __device__ T __shfl_xor_sync(unsigned int mask, T value, int lanes) {
    return __shfl_sync(mask, value, static_cast<int>(threadIdx.x & 31) ^ lanes);
}
template <typename T>
inline __device__ T __shfl_up_sync(unsigned int mask, T value, unsigned int distance) {
    const int lane = static_cast<int>(threadIdx.x & 31);
    const int source = lane - static_cast<int>(distance);
    return __shfl_sync(mask, value, source < 0 ? lane : source);
}
inline __device__ unsigned int __ballot_sync(unsigned int, int predicate) {
    return __builtin_amdgcn_ballot_w32(predicate != 0);
}
inline __device__ int __any_sync(unsigned int mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline __device__ int __all_sync(unsigned int mask, int predicate) { return __ballot_sync(mask, predicate) == ~0u; }
inline __device__ int __ffs(unsigned int value) { return __builtin_ffs(static_cast<int>(value)); }

inline __device__ unsigned int __float_as_uint(float value) { return __builtin_bit_cast(unsigned int, value); }
inline __device__ float __uint_as_float(unsigned int bits) { return __builtin_bit_cast(float, bits); }
inline __device__ float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
inline __device__ double __longlong_as_double(long long bits) { return __builtin_bit_cast(double, bits); }
inline __device__ int __double2hiint(double value) {
    return static_cast<int>(__builtin_bit_cast(long long, value) >> 32);
}
inline __device__ int __double2loint(double value) { return static_cast<int>(__builtin_bit_cast(long long, value)); }
inline __device__ double __hiloint2double(int high, int low) {
    return __longlong_as_double(static_cast<long long>(high) << 32 | static_cast<unsigned int>(low));
}

// From AMD's device libraries, which a link would bring.
extern "C" __device__ float __ocml_exp_f32(float);
extern "C" __device__ double __ocml_exp_f64(double);
extern "C" __device__ float __ocml_log_f32(float);
extern "C" __device__ double __ocml_log_f64(double);
extern "C" __device__ float __ocml_tanh_f32(float);
extern "C" __device__ double __ocml_tanh_f64(double);
extern "C" __device__ float __ocml_cvtrtz_f32_f64(double);
inline __device__ float expf(float x) { return __ocml_exp_f32(x); }
inline __device__ double exp(double x) { return __ocml_exp_f64(x); }
inline __device__ float logf(float x) { return __ocml_log_f32(x); }
inline __device__ double log(double x) { return __ocml_log_f64(x); }
inline __device__ float tanhf(float x) { return __ocml_tanh_f32(x); }
inline __device__ double tanh(double x) { return __ocml_tanh_f64(x); }
inline __device__ float __double2float_rz(double x) { return __ocml_cvtrtz_f32_f64(x); }
inline __device__ float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline __device__ double fmax(double a, double b) { return __builtin_fmax(a, b); }
inline __device__ float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline __device__ double fmin(double a, double b) { return __builtin_fmin(a, b); }
inline __device__ float fabsf(float x) { return __builtin_fabsf(x); }
inline __device__ double fabs(double x) { return __builtin_fabs(x); }
inline __device__ float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline __device__ double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

inline __device__ int min(int a, int b) { return b < a ? b : a; }
inline __device__ int max(int a, int b) { return a < b ? b : a; }
inline __device__ long long min(long long a, long long b) { return b < a ? b : a; }
inline __device__ long long max(long long a, long long b) { return a < b ? b : a; }
