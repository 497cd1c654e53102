// The run-time arguments of the kernels, one struct passed by value. cuflash/gpu/params.py mirrors AttentionParams
// field by field, cuflash/gpu/combine.py CombineParams.
#pragma once

#include "common/config.cuh"
#include "common/divide.cuh"

namespace cuflash {

constexpr int kBatchAxes = 4;

// Bytes from element to element. Axes that an array lacks have stride 0. `row` is the query or key axis, `column` the
// feature (for bias and mask: the key) axis.
struct Strides {
    long long batch[kBatchAxes];
    long long head;
    long long row;
    long long column;
};

__device__ __forceinline__ long long batch_offset(const Strides& strides, const long long (&coordinates)[kBatchAxes]) {
    long long offset = 0;
#pragma unroll
    for (int axis = 0; axis < kBatchAxes; ++axis) offset += coordinates[axis] * strides.batch[axis];
    return offset;
}

struct AttentionParams {
    const char* q;
    const char* k;
    const char* v;
    char* out;
    char* lse;  // null: not wanted
    const char* bias;
    const char* mask;
    const char* alibi_slopes;   // null: none
    const char* sinks;          // null: none
    const char* query_offsets;  // null: query_offset holds for every batch
    const char* cu_seqlens_q;
    const char* cu_seqlens_k;

    // What a call of the same form but other lengths changes.
    Strides q_strides;
    Strides k_strides;
    Strides v_strides;
    Strides out_strides;
    Strides lse_strides;
    long long seqlen_q;  // packed sequences: tokens in all
    long long seqlen_k;
    long long query_offset;
    Divisor num_m_blocks;      // tiles along the rows of one head (packed sequences: upper bound over all of them)
    Divisor planes_at_once;    // heads whose tiles take turns, those with the most keys first; 0: one after another
    Divisor tiles_at_once;     // of them
    long long heads_continue;  // all arrays step from batch to batch as from the last head to one behind it
    long long first_block;     // index of this launch's first block in the whole grid
    // Blocks that share the keys of one tile; out and lse are then their partial results, this many bytes apart, and
    // the columns of lse are the row's largest logit, its sum relative to that and its offset, see store_sum.
    Divisor num_splits;
    long long out_split_stride;
    long long lse_split_stride;

    // What it keeps.
    Strides bias_strides;
    Strides mask_strides;
    Strides alibi_strides;
    Strides sink_strides;
    Strides query_offset_strides;
    long long cu_seqlens_q_stride;
    long long cu_seqlens_k_stride;
    Divisor batch_shape[kBatchAxes];
    Divisor group_size;       // query heads per key head
    Divisor packed_heads;     // query heads that share a tile: 1 or group_size
    Divisor head_tiles;       // tiles that hold one query of each head
    long long num_batches;    // product of batch_shape; packed sequences: 1
    long long num_sequences;  // packed sequences only
    long long window_left;
    long long window_right;

    double scale;
    double softcap;
    double scale_by_softcap;  // scale / softcap

    int head_dim;
    int head_dim_v;
    int offset_from_lengths;  // query_offset is seqlen_k - seqlen_q of each packed sequence
    int alibi_dtype;          // CUFLASH_FLOAT16 ...
    int sink_dtype;
    int query_offset_size;  // bytes, negative when signed
    int cu_seqlens_q_size;
    int cu_seqlens_k_size;
};

constexpr int kRowAxes = kBatchAxes + 2;
constexpr int kMaxParts = kStacked ? 1 : 16;

// Bytes from element to element along the axes of the rows: those of a result but its features.
struct RowStrides {
    long long axis[kRowAxes];
};

// Partial results over disjoint keys, to be joined row by row.
struct CombineParams {
    const char* outs[kMaxParts];  // stacked: the first part
    const char* lses[kMaxParts];
    char* out;
    char* lse;  // null: not wanted

    RowStrides outs_strides[kMaxParts];
    RowStrides lses_strides[kMaxParts];
    RowStrides out_strides;
    RowStrides lse_strides;
    long long outs_column_stride[kMaxParts];
    long long out_column_stride;
    long long outs_part_stride;  // stacked: from part to part
    long long lses_part_stride;
    // Bytes from column to column where `lses` or `lse` are sums, see store_sum; 0 where they are logarithms.
    long long lses_column_stride;
    long long lse_column_stride;
    Divisor shape[kRowAxes];
    long long num_rows;  // product of shape
    long long num_parts;
    long long head_dim_v;
};

}  // namespace cuflash
