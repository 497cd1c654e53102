// A tile's logits on their way from scores: what is left to do with them, keys that rows do not see, and the largest.
#pragma once

#include "mma/bias_mask.cuh"
#include "ptx/maximum.cuh"

namespace cuflash {

constexpr float kLowestScore = -1e18f;

// What is left to do with the scores of a tile.
struct TileLogits {
    RowValues shift;     // kShiftedLogits: to be added
    float odd[3];        // kPolynomialLogits: the logit as a polynomial of the score, see LogitUnit::odd
    bool is_polynomial;  // more than the score itself
    // Then: size of the lane's largest score in each row or, once they are capped or hidden, the largest itself.
    RowValues largest;
    ArrayRows arrays;  // kHasArrays: on the way

    // What a score is multiplied by.
    __device__ __forceinline__ float factor(float score) const {
        const float square = score * score;
        return multiply_add(square, kCapDegree == 3 ? odd[1] : multiply_add(square, odd[2], odd[1]), odd[0]);
    }
    // A score whose weight is 0. What will be squared comes with the sign that the polynomial's last term makes low.
    __device__ __forceinline__ float hidden_score() const {
        if constexpr (!kPolynomialLogits) return -infinity();
        return kCapDegree == 3 && is_polynomial ? -kLowestScore : kLowestScore;
    }
};

// Of a lane's columns, counted from its first one, a bit for each that lies in front of another one.
__device__ __forceinline__ unsigned int columns_before(int column) {
    static_assert(kColumns <= 32);
    constexpr unsigned int kOfRun = kRun, kOfLanes = 4 * kRun;
    const unsigned int before = max(column, 0);
    const unsigned int count = before / kOfLanes * kOfRun + min(before % kOfLanes, kOfRun);
    // right either way: a shift by all bits
    return count >= 32 ? ~0u : (1u << count) - 1;
}

// Hides keys that a row does not see by its position.
__device__ __forceinline__ void hide_scores(const View& view, TileLogits& logits, Scores& scores) {
    const float hidden = logits.hidden_score();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        // fence: few at a time
        __syncwarp();  // one row after the other: together they take more registers than there are
        const ColumnRange visible = view.visible(r).counted_from(column_of(0, view.lane));
        // Bits become predicates several at a time; comparisons would be two for each score.
        const unsigned int seen = columns_before(visible.end) & ~columns_before(visible.begin);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            if (!(seen >> i & 1)) at(scores, r, i) = hidden;
        }
        if constexpr (kPolynomialLogits) {
            __syncwarp();  // fence: few at a time
            float largest = kLowestScore;
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                const float score = at(scores, r, i);
                largest = maximum(largest, score == hidden ? kLowestScore : score);
            }
            logits.largest[r] = largest;
        }
    }
}

// The largest of the lane's scores in each row. `kKeepNan`: NaN if there is one, else the largest of the others.
template <bool kKeepNan>
__device__ __forceinline__ RowValues largest_scores(Scores& scores) {
    RowValues largest;
    const auto larger = [](float a, float b) { return kKeepNan ? maximum_or_nan(a, b) : maximum(a, b); };
    constexpr int kChains = kRows > 2 ? 1 : 2;  // of each row: four in all, as one maximum waits for another
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float chains[kChains];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const float score = at(scores, r, i);
            chains[i % kChains] = i < kChains ? score : larger(chains[i % kChains], score);
        }
        largest[r] = kChains == 1 ? chains[0] : larger(chains[0], chains[kChains - 1]);
    }
    return largest;
}

}  // namespace cuflash
