// Operands of products that warps leave to each other, and those of triangles.
#pragma once

#include "gated/fragments.cuh"
#include "gated/prepared.cuh"

namespace cuflash {

// What every lane of a warp holds of a 16 x 16 matrix.
struct alignas(16) LaneFragment {
    unsigned int registers[4];
};
using WarpFragment = LaneFragment[32];

// A left operand of a product that others read as a right operand.
__device__ __forceinline__ void hand_over(LaneFragment& target, const Fragment& left) {
    target = {{left[0], left[1], left[2], left[3]}};
}

// A left operand as the right operand that is its transpose.
__device__ __forceinline__ void transpose(Fragment& right, const LaneFragment& left) {
    right[0] = left.registers[0], right[1] = left.registers[2];
    right[2] = left.registers[1], right[3] = left.registers[3];
}

// A matrix of a triangle as the right operand that is its transpose, or as a left operand.
__device__ __forceinline__ SharedAddress right_address(Triangle& triangle, int row, int column, int lane) {
    return shared_address(&triangle.matrices[Triangle::at(row, column)][lane / 16][lane / 8 % 2][lane % 8]);
}
__device__ __forceinline__ SharedAddress left_address(Triangle& triangle, int row, int column, int lane) {
    return shared_address(&triangle.matrices[Triangle::at(row, column)][lane / 8 % 2][lane / 16][lane % 8]);
}

}  // namespace cuflash
