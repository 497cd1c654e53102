// What a CUDA compiler declares before the first line of a kernel, for g++: qualifiers, indices, barriers, warp-wide
// functions, arithmetic. Included before every kernel; runtime.cpp is behind it.
#pragma once

#include <stdio.h>
#include <string.h>

#define INFINITY __builtin_inff()

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __constant__ static
#define __launch_bounds__(...)
#undef __noinline__
#define __noinline__ __attribute__((noinline))
#ifdef CPU_CUDA_DEBUG  // a debugger shows the variables of functions that are called
#define __forceinline__ inline
#else
#define __forceinline__ inline __attribute__((always_inline))
#endif
#define __align__(bytes) __attribute__((aligned(bytes)))
// Kernels declare dynamic shared memory alone: `extern __shared__ ... char shared_memory[]`, which runtime.cpp holds.
#define __shared__

struct CpuCudaIndex {
    unsigned int x, y, z;
};

extern "C" {
// What kernels use of <math.h>; with C++'s own a kernel would take a fifth longer to compile.
float expf(float);
double exp(double);
float exp2f(float);
float logf(float);
double log(double);
float tanhf(float);
double tanh(double);
float fmaxf(float, float);
double fmax(double, double);
float fminf(float, float);
double fmin(double, double);
float fabsf(float);
double fabs(double);
float fmaf(float, float, float);
double fma(double, double, double);
float nextafterf(float, float);

extern const CpuCudaIndex threadIdx, blockIdx, blockDim, gridDim;

// Waits for all threads of the block.
void cpu_cuda_sync_block();
// Waits for as many threads, whole warps, in the barrier of this number; 0 is that of the whole block. Returns whether
// any of them brought a true predicate. Those that vote and those that do not are an error in one barrier.
bool cpu_cuda_sync_some(int barrier, int num_threads, bool votes, bool predicate);
// Comes to one without waiting.
void cpu_cuda_arrive_some(int barrier, int num_threads);
// Barriers in shared memory, each of a phase at a time; all lanes of a warp arrive or wait together.
void cpu_cuda_mbarrier_init(void* address, int num_warps);
void cpu_cuda_mbarrier_arrive(const void* address);
void cpu_cuda_mbarrier_wait(const void* address, bool parity);
// So many bytes are to be copied before the phase under way is over; fewer than 0: they are.
void cpu_cuda_mbarrier_expect(const void* address, int num_bytes);
// Waits for the 32 lanes of the warp; the last one runs `compute` on what each brought and for what each takes away.
// Lanes that meet in operations of different names are an error. `orders_memory`: a barrier for shared memory too.
void cpu_cuda_collective(const char* name, const void* input, void* output, bool orders_memory,
                         void (*compute)(const void* const* inputs, void* const* outputs));
// Reads or writes shared or global memory with all checks, from definitions of instructions.
void cpu_cuda_read(const void* address, unsigned int size);
void cpu_cuda_write(void* address, unsigned int size);
// A copy of `size` bytes (of zeros if not `valid`) into shared memory that nobody may touch until its wait.
void cpu_cuda_copy_async(void* target, const void* source, unsigned int size, bool valid);
// Makes a group of this thread's copies since the last one.
void cpu_cuda_copy_commit();
// Waits for all groups but the newest `pending`.
void cpu_cuda_copy_wait(int pending);
void cpu_cuda_fail(const char* message);
// Arithmetic that keeps what is below the normal range.
float cpu_cuda_multiply(float a, float b);
float cpu_cuda_multiply_add(float a, float b, float c);
float cpu_cuda_divide(float a, float b);

// What mutants.py puts into sources. Whether a mutant is the one that runs:
bool cpu_cuda_mutant(int mutant);
// A condition, or what a mutant has in its place.
bool cpu_cuda_guard(int mutant, bool forced, bool actual);
}

// A place of its own for each call, as on a GPU.
__forceinline__ void __syncthreads() { cpu_cuda_sync_block(); }
__forceinline__ int __syncthreads_or(int predicate) { return cpu_cuda_sync_some(0, blockDim.x, true, predicate != 0); }

inline void __syncwarp(unsigned int mask = 0xffffffffu) {
    if (mask != 0xffffffffu) cpu_cuda_fail("__syncwarp: masks other than all 32 lanes are not covered");
    cpu_cuda_collective("__syncwarp", nullptr, nullptr, true, [](const void* const*, void* const*) {});
}

template <typename T>
struct CpuCudaShuffle {
    T value;
    int source;  // lane whose value is taken
};

template <typename T>
T cpu_cuda_shuffle(const char* name, unsigned int mask, T value, int source) {
    if (mask != 0xffffffffu) cpu_cuda_fail("shuffle: masks other than all 32 lanes are not covered");
    using Input = CpuCudaShuffle<T>;
    const Input input = {value, source};
    T result;
    cpu_cuda_collective(name, &input, &result, false, [](const void* const* inputs, void* const* outputs) {
        for (int lane = 0; lane < 32; ++lane) {
            const int source = static_cast<const Input*>(inputs[lane])->source;
            *static_cast<T*>(outputs[lane]) = static_cast<const Input*>(inputs[source])->value;
        }
    });
    return result;
}

inline int cpu_cuda_lane() { return static_cast<int>(threadIdx.x & 31); }

template <typename T>
T __shfl_sync(unsigned int mask, T value, int source) {
    return cpu_cuda_shuffle("__shfl_sync", mask, value, source & 31);
}
template <typename T>
T __shfl_xor_sync(unsigned int mask, T value, int lanes) {
    return cpu_cuda_shuffle("__shfl_xor_sync", mask, value, cpu_cuda_lane() ^ lanes);
}
template <typename T>
T __shfl_up_sync(unsigned int mask, T value, unsigned int distance) {
    const int source = cpu_cuda_lane() - static_cast<int>(distance);
    return cpu_cuda_shuffle("__shfl_up_sync", mask, value, source < 0 ? cpu_cuda_lane() : source);
}
template <typename T>
T __shfl_down_sync(unsigned int mask, T value, unsigned int distance) {
    const int source = cpu_cuda_lane() + static_cast<int>(distance);
    return cpu_cuda_shuffle("__shfl_down_sync", mask, value, source > 31 ? cpu_cuda_lane() : source);
}

inline unsigned int __ballot_sync(unsigned int mask, int predicate) {
    if (mask != 0xffffffffu) cpu_cuda_fail("__ballot_sync: masks other than all 32 lanes are not covered");
    unsigned int result;
    cpu_cuda_collective("__ballot_sync", &predicate, &result, false,
                        [](const void* const* inputs, void* const* outputs) {
                            unsigned int votes = 0;
                            for (int lane = 0; lane < 32; ++lane)
                                votes |= (*static_cast<const int*>(inputs[lane]) != 0 ? 1u : 0u) << lane;
                            for (int lane = 0; lane < 32; ++lane) *static_cast<unsigned int*>(outputs[lane]) = votes;
                        });
    return result;
}
inline int __any_sync(unsigned int mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned int mask, int predicate) { return __ballot_sync(mask, predicate) == 0xffffffffu; }

inline int __ffs(unsigned int value) { return __builtin_ffs(static_cast<int>(value)); }
inline int __popc(unsigned int value) { return __builtin_popcount(value); }

template <typename To, typename From>
To cpu_cuda_same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "only the type changes");
    To result;
    memcpy(&result, &value, sizeof(To));
    return result;
}
inline unsigned int __float_as_uint(float value) { return cpu_cuda_same_bits<unsigned int>(value); }
inline float __uint_as_float(unsigned int bits) { return cpu_cuda_same_bits<float>(bits); }
inline int __float_as_int(float value) { return cpu_cuda_same_bits<int>(value); }
inline float __int_as_float(int bits) { return cpu_cuda_same_bits<float>(bits); }
inline double __longlong_as_double(long long bits) { return cpu_cuda_same_bits<double>(bits); }
inline int __double2hiint(double value) { return static_cast<int>(cpu_cuda_same_bits<long long>(value) >> 32); }
inline int __double2loint(double value) { return static_cast<int>(cpu_cuda_same_bits<long long>(value)); }
inline double __hiloint2double(int high, int low) {
    return __longlong_as_double(static_cast<long long>(high) << 32 | static_cast<unsigned int>(low));
}

// Rounded toward zero.
inline float __double2float_rz(double value) {
    const float nearest = static_cast<float>(value);
    return fabs(static_cast<double>(nearest)) > fabs(value) ? nextafterf(nearest, 0.0f) : nearest;
}

#define CPU_CUDA_MIN_MAX(T)                          \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
CPU_CUDA_MIN_MAX(int)
CPU_CUDA_MIN_MAX(unsigned int)
CPU_CUDA_MIN_MAX(long long)
CPU_CUDA_MIN_MAX(unsigned long long)
#undef CPU_CUDA_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// A minimum or maximum, or what two mutants have in its place: its first argument, and its second.
#define CPU_CUDA_CLAMP(name)                                                        \
    template <typename A, typename B>                                               \
    auto cpu_cuda_##name(int first, int second, A a, B b) -> decltype(name(a, b)) { \
        const auto result = name(a, b);                                             \
        const bool takes_a = cpu_cuda_guard(first, true, result == a);              \
        const bool takes_b = cpu_cuda_guard(second, true, result == b);             \
        return takes_b && (result != b || !takes_a) ? b : a;                        \
    }
CPU_CUDA_CLAMP(min)
CPU_CUDA_CLAMP(max)
#undef CPU_CUDA_CLAMP

// Which copies the compiler checks by itself depends on their size, and on the processor that it compiles for.
extern "C" void __tsan_read_range(void* address, size_t size);
extern "C" void __tsan_write_range(void* address, size_t size);
__attribute__((always_inline)) inline void cpu_cuda_copy(void* target, const void* source, size_t size) {
#ifdef __SANITIZE_THREAD__
    __tsan_read_range(const_cast<void*>(source), size);
    __tsan_write_range(target, size);
#endif
    memcpy(target, source, size);
}
#define memcpy cpu_cuda_copy
