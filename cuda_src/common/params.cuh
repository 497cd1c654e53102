// The run-time arguments of the forward kernels, one struct passed by value. cuflash/gpu/arguments.py packs each field
// by its name.
//
// What blocks of all calls look at before they load lies close together: a warp waits 66 clocks for each line of 64
// bytes, or 130 if four do, as every launch finds the cache of arguments empty.
#pragma once

#include "common/config.cuh"
#include "common/divide.cuh"

namespace cuflash {

constexpr int kBatchAxes = 4;
constexpr int kStridedArrays = 14;  // of those below

// Bytes from element to element. Axes that an array lacks have stride 0. `batch` is the last of the leading axes, `row`
// the query or key axis, `column` the feature (for bias and mask: the key) axis.
struct Strides {
    long long batch;
    long long head;
    long long row;
    long long column;
};

// Those of the leading axes in front of the last one.
struct OuterStrides {
    long long axes[kBatchAxes - 1];
};

struct AttentionParams {
    const char* q;
    const char* k;
    const char* v;
    char* out;
    char* lse;  // null: not wanted
    const char* bias;
    const char* mask;
    const char* alibi_slopes;  // null: none
    const char* sinks;         // null: none
    const char* query_offset;  // null: query_offset_value holds for every batch
    const char* seqlens_k;     // keys in a cache before new ones are appended
    const char* page_table;    // of a cache
    const char* k_new;
    const char* v_new;
    const char* cu_seqlens_q;
    const char* cu_seqlens_k;
    const char* prepared_k;  // what an earlier launch has made of k and v
    const char* prepared_v;

    Strides q_strides;
    Strides k_strides;  // of pages: from one to the next as along the last leading axis
    Strides v_strides;
    Strides out_strides;
    Strides lse_strides;
    Strides bias_strides;
    Strides mask_strides;
    Strides alibi_slopes_strides;
    Strides sinks_strides;
    Strides query_offset_strides;
    Strides seqlens_k_strides;
    Strides page_table_strides;  // from entry to entry as from head to head
    Strides k_new_strides;
    Strides v_new_strides;

    long long seqlen_q;  // packed sequences: tokens in all
    long long seqlen_k;  // of a cache with lengths of its own: what it has room for
    long long query_offset_value;
    Divisor num_m_blocks;    // tiles along the rows of one head (packed sequences: upper bound over all of them)
    Divisor planes_at_once;  // heads whose tiles take turns, those with the most keys first
    Divisor tiles_at_once;   // of them
    long long num_stops;     // of blocks that walk on (packed sequences: upper bound), see wgmma/place.cuh
    long long in_pairs;      // whether these are pairs of tiles
    long long first_block;   // index of this launch's first block in the whole grid
    // Blocks that share the keys of one tile; out and lse are then their partial results, this many bytes apart, and
    // the columns of lse are the row's largest logit, its sum relative to that and its offset, see store_sum.
    Divisor num_splits;
    long long split_size;  // keys of each of them, counted from key 0; 0: those that the tile sees are shared out
    long long out_split_stride;
    long long lse_split_stride;

    Divisor batch_shape;    // of the last leading axis
    Divisor group_size;     // query heads per key head
    Divisor packed_heads;   // query heads that share a tile (GQA packing): 1 or group_size
    Divisor head_tiles;     // tiles that hold one query of each head
    long long num_batches;  // of all leading axes; packed sequences: 1
    long long window_left;
    long long window_right;

    double scale;
    double softcap;
    double scale_by_softcap;  // scale / softcap

    int head_dim;
    int head_dim_v;
    int offset_from_lengths;  // query_offset is seqlen_k - seqlen_q of each sequence
    int alibi_slopes_dtype;   // CUFLASH_FLOAT16 ...
    int sinks_dtype;
    int query_offset_size;  // bytes, negative when signed
    int seqlens_k_size;
    int page_table_size;
    int cu_seqlens_q_size;
    int cu_seqlens_k_size;

    Divisor outer_shape[kBatchAxes - 1];
    long long cu_seqlens_q_stride;
    long long cu_seqlens_k_stride;
    long long num_sequences;  // packed sequences only
    Divisor seqlen_new;       // keys that are appended to a cache
    long long num_pages;      // of a cache
    Divisor page_size;
    // Where each batch has a length of its own: so many splits share a tile's keys, or as many more as there are, so
    // that none has more keys than that.
    Divisor even_splits;
    long long largest_split;
    OuterStrides outer_strides[kStridedArrays];
};

}  // namespace cuflash
