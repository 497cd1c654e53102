// What bias, mask and ALiBi make of the scores of mma.sync. Bias and mask of the first rows are read before the
// products, those of the others before the rows in front of them are worked on.
#pragma once

#include "mma/rows.cuh"

namespace cuflash {

static_assert(kColumns <= 32, "hide_by_bias has a bit for each");

constexpr int kColumnBytes = (kBiasDtype != 0 ? sizeof(ElementOf<kBiasDtype>::Type) : 0) + kHasMask;
constexpr int kRunRegisters = kHasArrays ? kRun * kColumnBytes / 4 : 1;
constexpr int kRowRegisters = kColumns / kRun * kRunRegisters;
// What is left of a thread's registers when output, scores and addresses have theirs.
constexpr int kRegistersLeft = 65536 / (kThreads * kMinBlocks > 256 ? kThreads * kMinBlocks : 256) - 16 -
                               4 * kRowTiles * (kFeatureTiles + 2 * kKeyTiles);
constexpr int kMostAhead = kRegistersLeft < 32 ? kRegistersLeft : kShare > 1 ? 24 : 32;
constexpr int kRowsAhead = kRowRegisters >= kMostAhead           ? 1
                           : kRows * kRowRegisters <= kMostAhead ? kRows
                                                                 : kMostAhead / kRowRegisters;

// Rows on the way, and how they are read.
struct ArrayRows {
    bool vectors;  // all the warp's rows have them for this tile
    RowColumns<kRun> ahead[kRowsAhead][kColumns / kRun];

    __device__ __forceinline__ void begin(const AttentionParams& params, const TileMap& tile, const TileRow* rows,
                                          long long n_begin, int lane) {
        const RowContext row = row_context(params, tile, rows[lane % kRowsPerWarp].logit, n_begin);
        vectors = __all_sync(0xffffffffu, has_vectors<kRun>(params, row));
    }

    template <int kNumRows>
    __device__ __forceinline__ void fetch(const AttentionParams& params, const TileMap& tile, const TileRow* rows,
                                          long long n_begin, int lane, int first) {
        if (vectors) fetch_rows<true, kNumRows>(params, tile, rows, n_begin, lane, first);
        else fetch_rows<false, kNumRows>(params, tile, rows, n_begin, lane, first);
    }

    template <bool kVectors, int kNumRows>
    __device__ __forceinline__ void fetch_rows(const AttentionParams& params, const TileMap& tile, const TileRow* rows,
                                               long long n_begin, int lane, int first) {
#pragma unroll
        for (int r = first; r < first + kNumRows; ++r) {
            if (!kVectors) __syncwarp();  // addresses of elements take registers as well
            const RowContext row = row_context(params, tile, rows[row_of(r, lane)].logit, n_begin);
#pragma unroll
            for (int i = 0; i < kColumns; i += kRun)
                ahead[r % kRowsAhead][i / kRun].template load<kVectors>(params, row, column_of(i, lane));
        }
    }
};

// Scores become logits, by all that they need beside the scores.
__device__ __forceinline__ void add_row_logits(const AttentionParams& params, const TileMap& tile,
                                               const LogitUnit& unit, const TileRow* rows, long long n_begin, int lane,
                                               ArrayRows& arrays, Scores& scores) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        __syncwarp();
        const RowContext row = row_context(params, tile, rows[row_of(r, lane)].logit, n_begin);
#pragma unroll
        for (int i = 0; i < kColumns; i += kRun) {
            float logits[kRun];
#pragma unroll
            for (int e = 0; e < kRun; ++e) logits[e] = unit_score(unit, at(scores, r, i + e));
            scores_to_row_logits<false>(row, arrays.ahead[r % kRowsAhead][i / kRun], column_of(i, lane), logits);
#pragma unroll
            for (int e = 0; e < kRun; ++e) at(scores, r, i + e) = logits[e];
        }
        if (kHasArrays && r + kRowsAhead < kRows) arrays.fetch<1>(params, tile, rows, n_begin, lane, r + kRowsAhead);
    }
}

// Hides what the bias hides, whatever its scores are. Columns behind the last key are hidden already.
__device__ __forceinline__ void hide_by_bias(const AttentionParams& params, const TileMap& tile, const TileRow* rows,
                                             long long n_begin, int lane, Scores& scores) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const RowContext row = row_context(params, tile, rows[row_of(r, lane)].logit, n_begin);
        unsigned int hidden = 0;  // bit i: value i
#pragma unroll 1
        for (int i = 0; i < kColumns; ++i) {
            const char* bias = row.bias + min(column_of(i, lane), row.last_column) * params.bias_strides.column;
            hidden |= static_cast<unsigned int>(load_as<kBiasDtype>(bias) == -infinity()) << i;
        }
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            if (hidden >> i & 1) at(scores, r, i) = -infinity();
        }
    }
}

}  // namespace cuflash
