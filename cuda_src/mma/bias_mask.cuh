// Bias and mask for mma.sync: those of the first rows are read before the products, those of the others before the rows
// in front of them are worked on.
#pragma once

#include "mma/rows.cuh"

namespace cuflash {

static_assert(kColumns <= 32, "hide_by_bias has a bit for each");

// Elements that fill words are read one by one as quickly.
constexpr bool kPieces = kBiasDtype == 0 || sizeof(ElementOf<kBiasDtype>::Type) < 4;

// Rows on the way, and how they are read.
struct ArrayRows {
    Reads reads;  // of all the warp's rows for this tile
    RowColumns<kRun> ahead[kRowsAhead][kColumns / kRun];

    __device__ __forceinline__ void begin(const View& view) {
        const LogitRow& row = view.rows[view.lane % kRowsPerWarp].logit;
        const RowContext context = row_context(view.params, view.tile, row, view.n_begin);
        // right either way: it only keeps what is read inside the arrays
        const long long keys_beside = min(view.n_begin, view.tile.seqlen_k - view.n_begin - kWarpKeys);
        const bool vectors = __all_sync(0xffffffffu, has_vectors<kRun>(view.params, context));
        // right either way: it only keeps what is read inside the arrays
        const bool are_beside = kPieces & (keys_beside >= kMostBeside);
        const bool pieces = __all_sync(0xffffffffu, are_beside & has_pieces(view.params, context));
        // right either way: another way to read the same
        reads = vectors ? Reads::kVectors : pieces ? Reads::kPieces : Reads::kElements;
        fetch<kRowsAhead>(view, 0);
    }

    template <int kNumRows>
    __device__ __forceinline__ void fetch(const View& view, int first) {
        if (reads == Reads::kVectors) fetch_rows<Reads::kVectors, kNumRows>(view, first);
        else if (kPieces && reads == Reads::kPieces) fetch_rows<Reads::kPieces, kNumRows>(view, first);
        else fetch_rows<Reads::kElements, kNumRows>(view, first);
    }

    // Row r arrives during the products. A bias of 16 bits would be widened, and waited for, in the middle of them, if
    // it did not seem to depend on one of their results.
    __device__ __forceinline__ void widen_behind(int r, float score, const LogitUnit& unit) {
        if constexpr (kBiasDtype == CUFLASH_FLOAT16 || kBiasDtype == CUFLASH_BFLOAT16) {
            const unsigned int nothing = __float_as_uint(score) & __float_as_uint(unit.zero);
#pragma unroll
            for (RowColumns<kRun>& columns : ahead[r % kRowsAhead]) columns.biases.set(nothing);
        }
    }

    template <Reads kReads, int kNumRows>
    __device__ __forceinline__ void fetch_rows(const View& view, int first) {
#pragma unroll
        for (int r = first; r < first + kNumRows; ++r) {
            // fence: few at a time
            if (kReads == Reads::kElements) __syncwarp();  // addresses of elements take registers as well
            const RowContext row = view.context(r);
#pragma unroll
            for (int i = 0; i < kColumns; i += kRun)
                ahead[r % kRowsAhead][i / kRun].template load<kReads>(view.params, row, column_of(i, view.lane));
        }
    }
};

// Scores become logits, by all that they need beside the scores.
__device__ __forceinline__ void add_row_logits(const View& view, ArrayRows& arrays, Scores& scores) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        __syncwarp();  // fence: one row after the other
        const RowContext row = view.context(r);
        arrays.widen_behind(r, at(scores, r, 0), view.unit);
#pragma unroll
        for (int i = 0; i < kColumns; i += kRun) {
            float logits[kRun];
#pragma unroll
            for (int e = 0; e < kRun; ++e) logits[e] = unit_score(view.unit, at(scores, r, i + e));
            scores_to_row_logits<false>(row, arrays.ahead[r % kRowsAhead][i / kRun], column_of(i, view.lane), logits);
#pragma unroll
            for (int e = 0; e < kRun; ++e) at(scores, r, i + e) = logits[e];
        }
        if (kHasArrays && r + kRowsAhead < kRows) arrays.fetch<1>(view, r + kRowsAhead);
    }
}

// Hides what the bias hides, whatever its scores are. Columns behind the last key are hidden already.
__device__ __forceinline__ void hide_by_bias(const View& view, Scores& scores) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const RowContext row = view.context(r);
        unsigned int hidden = 0;  // bit i: value i
#pragma unroll 1
        for (int i = 0; i < kColumns; ++i) {
            const char* bias =
                row.bias + min(column_of(i, view.lane), row.last_column) * view.params.bias_strides.column;
            hidden |= static_cast<unsigned int>(load_as<kBiasDtype>(bias) == -infinity()) << i;
        }
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            if (hidden >> i & 1) at(scores, r, i) = -infinity();
        }
    }
}

}  // namespace cuflash
