// States that warps hold transposed: 16 features of v, and all features of k, in the layout of results of mma. A result
// is then the left operand of the next product.
#pragma once

#include "gated/fragments.cuh"
#include "gated/params.cuh"
#include "gated/prepared.cuh"

namespace cuflash {

using State = float[kHeadDim / 8][4];
// Transposed as well: 16 features of v, and tokens.
using Columns = float[kTokens / 8][4];

struct alignas(8) Pair {
    float first, second;
};

// Of the tokens of a lane's columns of a tile.
__device__ __forceinline__ Pair pair_of(const float (&of_tokens)[kTokens], int tile, int lane) {
    return *reinterpret_cast<const Pair*>(&of_tokens[tile * 8 + lane % 4 * 2]);
}

// Two neighbouring tiles of a result as the left operand of a product.
__device__ __forceinline__ void as_operand(Fragment& operand, const float (&first)[4], const float (&second)[4]) {
    operand[0] = pack(first[0], first[1]), operand[1] = pack(first[2], first[3]);
    operand[2] = pack(second[0], second[1]), operand[3] = pack(second[2], second[3]);
}

// (v - diag(exp(c)) k S)^T of 16 tokens, as a sum of two left operands: with the products of keys and state.
__device__ __forceinline__ void subtract(Fragment& high, Fragment& low, int block, const Columns& products,
                                         const Fragment& v, const TokenDecays& decays, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float (&tile)[4] = products[2 * block + i / 2];
        const Pair decay = pair_of(decays.from_begin, 2 * block + i / 2, lane);
        const float first = unpacked(v[i], 0) - decay.first * tile[i % 2 * 2];
        const float second = unpacked(v[i], 1) - decay.second * tile[i % 2 * 2 + 1];
        high[i] = pack(first, second);
        low[i] = pack(first - unpacked(high[i], 0), second - unpacked(high[i], 1));
    }
}

// exp(c_last - c) v' of 16 tokens, transposed, as a left operand.
__device__ __forceinline__ void decay_to_end(Fragment& operand, const float (&first)[4], const float (&second)[4],
                                             int block, const TokenDecays& decays, int lane) {
    float decayed[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const Pair to_end = pair_of(decays.to_end, 2 * block + i / 4, lane);
        decayed[i / 4][i % 4] = (i < 4 ? first : second)[i % 4] * (i % 2 == 0 ? to_end.first : to_end.second);
    }
    as_operand(operand, decayed[0], decayed[1]);
}

// Calls `visit(row, column, value)` for each element of a warp.
template <typename Visit>
__device__ __forceinline__ void for_each_element(const GatedBlock& block, int warp, int lane, State& state,
                                                 Visit visit) {
#pragma unroll
    for (int tile = 0; tile < kHeadDim / 8; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = tile * 8 + lane % 4 * 2 + i % 2;
            const int column = block.part * kBlockN + warp * 16 + i / 2 * 8 + lane / 4;
            visit(row, column, state[tile][i]);
        }
    }
}

// The same where an array of states has one, with its address in the array's state `index`.
template <typename Visit>
__device__ __forceinline__ void for_each_address(const GatedParams& params, const GatedBlock& block, int num_columns,
                                                 const StateStrides& strides, long long index, int warp, int lane,
                                                 State& state, Visit visit) {
    const long long head = index * strides.index + block.head * strides.head;
    for_each_element(block, warp, lane, state, [&](int row, int column, float& value) {
        if (row < params.head_dim && column < num_columns)
            visit(head + row * strides.row + column * strides.column, value);
    });
}

// What a segment carries, kCarry: what it makes of a state of zeros, and behind the features of v, from the column of
// the identity on, what it makes of that if values are zeros. (gated_chain.cu puts both together.)
__device__ __forceinline__ void load_state(const GatedParams& params, const GatedBlock& block, int warp, int lane,
                                           State& state) {
    if constexpr (kCarry) {
        for_each_element(block, warp, lane, state, [&](int row, int column, float& value) {
            value = column - params.identity_column == row ? 1 : 0;
        });
    } else if (params.initial_state != nullptr) {
        for_each_address(params, block, params.head_dim_v, params.initial_state_strides,
                         block.index * params.num_segments + block.segment, warp, lane, state,
                         [&](long long at, float& value) { value = load_bits<float>(params.initial_state + at); });
    }
}

__device__ __forceinline__ void store_state(const GatedParams& params, const GatedBlock& block, int warp, int lane,
                                            State& state) {
    const auto store = [&](long long at, float value) { store_bits(params.final_state + at, value); };
    if constexpr (kCarry) {
        for_each_address(params, block, params.identity_column + params.head_dim, params.final_state_strides,
                         block.index * params.num_segments + block.segment, warp, lane, state, store);
    } else if (params.final_state != nullptr && block.segment + 1 == params.num_segments) {
        for_each_address(params, block, params.head_dim_v, params.final_state_strides, block.index, warp, lane, state,
                         store);
    }
}

// kLoaders threads ask for bytes that lie one behind the other.
template <int kBytes, int kLoaders>
__device__ __forceinline__ void copy_bytes(void* target, const char* source, int loader) {
    const SharedAddress shared = shared_address(target) + loader * 16;
#pragma unroll
    for (int at = 0; at < kBytes; at += kLoaders * 16) {
        // right either way: the second says it all, the first at compile time
        if (at + kLoaders * 16 <= kBytes || at + loader * 16 < kBytes)
            cp_async_16(shared + at, source + at + loader * 16, true);
    }
}

}  // namespace cuflash
