// Gates of a chunk's tokens: their logarithms, added up from the first token on.
#pragma once

#include "gated/chunk.cuh"

namespace cuflash {

// exp of it is 0 in float. What is below it, as a gate that is closed, would make all sums behind it as large.
constexpr float kLeastLogGate = -104;

// Of two neighbouring tokens.
struct alignas(8) Gates {
    float first, second;
};

// The two logarithms of a lane for the tokens 2 lane and 2 lane + 1 of 64 from `gates` on, the address of the first;
// 0 for tokens that are not there, behind which sums stay as they are.
__device__ __forceinline__ Gates load_gates(const GatedParams& params, const char* gates, long long num_tokens) {
    const int token = threadIdx.x % 32 * 2;
    const auto load = [&](int i) {
        return i < num_tokens ? load_float(gates + i * params.log_g_strides.token, params.gate_dtype) : 0.0f;
    };
    return {maximum(load(token), kLeastLogGate), maximum(load(token + 1), kLeastLogGate)};
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
