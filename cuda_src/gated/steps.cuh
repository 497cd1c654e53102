// Gates of a chunk's tokens: logarithms to base 2, added up from the first token on.
#pragma once

#include "gated/chunk.cuh"
#include "ptx/exp2.cuh"

namespace cuflash {

constexpr float kLog2e = 1.4426950408889634f;
// 2 to the power of it is 0 in float. What is below it, as a gate that is closed, would make all sums behind it as
// large.
constexpr float kLeastLogGate = -150;

// Of two neighbouring tokens.
struct alignas(8) Gates {
    float first, second;
};

// Those of a lane for the tokens 2 lane and 2 lane + 1 of 64 from `gates` on, the address of the first; 0 for tokens
// that are not there, behind which sums stay as they are.
__device__ __forceinline__ Gates load_gates(const GatedParams& params, const char* gates, long long num_tokens) {
    const int token = threadIdx.x % 32 * 2;
    const auto load = [&](int i) {
        if (i >= num_tokens) return 0.0f;
        const float gate = load_float(gates + i * params.log_g_strides.token, params.gate_dtype);
        return maximum(gate * kLog2e, kLeastLogGate);
    };
    return {load(token), load(token + 1)};
}

// Sums from the first token to each. Called by the 32 lanes of a warp together.
__device__ __forceinline__ Gates sum_gates(Gates gates) {
    float running = gates.first + gates.second;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const float before = __shfl_up_sync(0xffffffffu, running, distance);
        if (static_cast<int>(threadIdx.x % 32) >= distance) running += before;
    }
    return {running - gates.second, running};
}

}  // namespace cuflash
