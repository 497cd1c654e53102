// The row map: which head, query and output row a row of a tile stands for - dense or packed sequences, one head per
// tile or the query heads of a group packed into it. Everything after this header works per row and does not know the
// difference.
#pragma once

#include "common/heads.cuh"

namespace cuflash {

// Lengths and ranges of one block's share of the work.
struct TileExtent {
    long long seqlen_q;
    long long seqlen_k;
    long long query_offset;
    long long key_begin;  // keys that the block is to look at, at most: all of them, or its split
    long long key_end;
    long long first_query;    // of the first row
    unsigned int first_head;  // of it, of the packed ones
    int num_rows;             // that the tile has; 0: the block has nothing to do

    // Rows are counted over queries x packed heads, by 32 bits.
    __device__ __forceinline__ void begin_at(const AttentionParams& params, unsigned int m_block) {
        const unsigned int row = m_block * kBlockM;
        const Divided first(row, params.packed_heads);
        first_query = first.quotient, first_head = first.rest;
        num_rows = static_cast<int>(min(seqlen_q * params.packed_heads - row, static_cast<long long>(kBlockM)));
    }
};

// Where a batch's entries of the page table begin, for calls that have one; it takes no room in others.
template <bool kIsThere>
struct Pages {
    __device__ __forceinline__ void set_pages(const char*) {}
    __device__ __forceinline__ const char* pages() const { return nullptr; }
};
template <>
struct Pages<true> {
    const char* entries;

    __device__ __forceinline__ void set_pages(const char* address) { entries = address; }
    __device__ __forceinline__ const char* pages() const { return entries; }
};

// The number of a tile's first key among the rows that an earlier launch has made of all keys, for calls that have
// them.
template <bool kIsThere>
struct PreparedRow {
    __device__ __forceinline__ void set_first_prepared(long long) {}
    __device__ __forceinline__ long long first_prepared() const { return 0; }
};
template <>
struct PreparedRow<true> {
    long long first;

    __device__ __forceinline__ void set_first_prepared(long long row) { first = row; }
    __device__ __forceinline__ long long first_prepared() const { return first; }
};

// Whether a split of the keys is the first one, in which the sink counts. It is asked for where all splits know the
// sink: where rows have an offset. Elsewhere those behind the first have none.
template <bool kIsThere>
struct FirstSplit {
    __device__ __forceinline__ void set_first_split(bool) {}
    __device__ __forceinline__ bool is_first_split() const { return true; }
};
template <>
struct FirstSplit<true> {
    bool is_first;

    __device__ __forceinline__ void set_first_split(bool first) { is_first = first; }
    __device__ __forceinline__ bool is_first_split() const { return is_first; }
};

// The same with the arrays. Addresses point at the batch, the first head and the first token of the sequence; those of
// arrays that the call has not are null, or nothing where no call of the build has them.
struct TileMap : TileExtent, Pages<kPaged>, PreparedRow<kPrepared>, FirstSplit<kHasRowOffset> {
    const char* q;
    const char* k;
    const char* v;
    char* out;
    char* lse;
    const char* bias;
    const char* mask;
    HeadValues per_head;
};
// Numbers of arrays, in the order of AttentionParams; those of a tile come first.
constexpr int kArrayK = 1, kArrayV = 2, kArrayOut = 3, kArrayLse = 4, kLastTileArray = 8, kArrayQueryOffset = 9;

// Query and head (relative to the tile's first) of one tile row.
struct Row {
    long long query;
    int head;
    bool valid;
};

__device__ __forceinline__ Row find_row(const AttentionParams& params, const TileExtent& tile, int tile_row) {
    const Divided place(tile.first_head + tile_row, params.packed_heads);
    return {tile.first_query + place.quotient, static_cast<int>(place.rest), tile_row < tile.num_rows};
}
// One copy: written out in many places it would take registers of main loops.
static __device__ CUFLASH_ONE_COPY Row row_at(const AttentionParams& params, const TileExtent& tile, int tile_row) {
    return find_row(params, tile, tile_row);
}

// Where the query of a row begins; null for rows behind the last one.
__device__ __forceinline__ const char* query_row(const AttentionParams& params, const TileMap& tile, const Row& row) {
    return row.valid ? tile.q + row.head * params.q_strides.head + row.query * params.q_strides.row : nullptr;
}
__device__ __forceinline__ const char* query_row(const AttentionParams& params, const TileMap& tile, int tile_row) {
    const bool is_packed = kWarpgroups || params.packed_heads != 1;
    // right either way: a division by 1, and a call where there are calls
    if (is_packed) return query_row(params, tile, row_at(params, tile, tile_row));
    return query_row(params, tile, Row{tile.first_query + tile_row, 0, tile_row < tile.num_rows});
}

// What another lane of the warp has looked up. All lanes call it together.
template <typename T>
__device__ __forceinline__ T* address_of_lane(T* address, int lane) {
    return reinterpret_cast<T*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(address), lane));
}

}  // namespace cuflash
