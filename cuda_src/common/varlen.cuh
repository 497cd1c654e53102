// Packed sequences: from the number of a tile to the sequence that holds it, without the host knowing any length.
#pragma once

#include "common/dense.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// A sequence, or the tokens before the first or behind the last one.
struct Segment {
    unsigned int index;  // 1 + that of the sequence; 0 and num_sequences + 1 for others
    unsigned int begin;
    unsigned int end;
    unsigned int num_tiles;  // of each head
    unsigned int tile;       // the one that was asked for, counted inside the segment
};

__device__ __forceinline__ unsigned int tiles_of_rows(const AttentionParams& params, unsigned int num_queries) {
    return (num_queries * static_cast<unsigned int>(params.packed_heads) + kBlockM - 1) / kBlockM;
}

// Finds the segment that holds a tile, by its number in all segments, by a running sum over them. Called by the 32
// lanes of a warp together, and all of them find it. Boundaries that fall are raised to their predecessor, so segments
// are disjoint and cover every token whatever the values.
__device__ __forceinline__ bool find_segment(const AttentionParams& params, unsigned int tile, Segment& found) {
    constexpr int kPerLane = 4;
    constexpr unsigned int kAllLanes = 0xffffffffu;
    const unsigned int lane = thread_index_again() % 32, last = static_cast<unsigned int>(params.num_sequences);
    unsigned int chunk_begin = 0;  // token at which this chunk of boundaries starts
    unsigned int tiles_before = 0;
    // right either way: no tiles are behind the last boundary
    for (unsigned int first = 0; first < last + 2; first += 32 * kPerLane) {
        const unsigned int number = first + lane * kPerLane;  // of the lane's first boundary
        const char* addresses[kPerLane];
        addresses[0] = params.cu_seqlens_q + min(number, last) * params.cu_seqlens_q_stride;
#pragma unroll
        for (int i = 1; i < kPerLane; ++i)
            addresses[i] = addresses[i - 1] + (number + i <= last ? params.cu_seqlens_q_stride : 0);
        long long values[kPerLane];
        load_integers(addresses, params.cu_seqlens_q_size, values);
        unsigned int ends[kPerLane];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const unsigned int end = values[i] < 0 ? 0 : static_cast<unsigned int>(min(values[i], params.seqlen_q));
            ends[i] = number + i <= last ? end : static_cast<unsigned int>(params.seqlen_q);
            if (i > 0) ends[i] = max(ends[i], ends[i - 1]);
        }
        unsigned int highest = ends[kPerLane - 1];
        for (int distance = 1; distance < 32; distance *= 2)
            highest = max(highest, __shfl_up_sync(kAllLanes, highest, distance));
        unsigned int begin = __shfl_up_sync(kAllLanes, highest, 1);
        begin = lane == 0 ? chunk_begin : max(begin, chunk_begin);
        unsigned int num_tiles[kPerLane], tiles_of_lane = 0;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            ends[i] = max(ends[i], begin);
            num_tiles[i] = tiles_of_rows(params, ends[i] - (i > 0 ? ends[i - 1] : begin));
            tiles_of_lane += num_tiles[i];
        }
        unsigned int running = tiles_of_lane;
        for (int distance = 1; distance < 32; distance *= 2) {
            const unsigned int other = __shfl_up_sync(kAllLanes, running, distance);
            if (lane >= distance) running += other;
        }
        const unsigned int owners = __ballot_sync(kAllLanes, tile < tiles_before + running);
        if (owners != 0) {
            const int owner = __ffs(owners) - 1;
            unsigned int rest = tile - tiles_before - (running - tiles_of_lane);
            unsigned int index = number, end = ends[0], tiles = num_tiles[0];
#pragma unroll
            for (int i = 1; i < kPerLane; ++i) {
                if (rest >= tiles) rest -= tiles, begin = end, end = ends[i], tiles = num_tiles[i], ++index;
            }
            found.index = __shfl_sync(kAllLanes, index, owner);
            found.begin = __shfl_sync(kAllLanes, begin, owner);
            found.end = __shfl_sync(kAllLanes, end, owner);
            found.num_tiles = __shfl_sync(kAllLanes, tiles, owner);
            found.tile = __shfl_sync(kAllLanes, rest, owner);
            return true;
        }
        chunk_begin = max(chunk_begin, __shfl_sync(kAllLanes, highest, 31));
        tiles_before += __shfl_sync(kAllLanes, running, 31);
    }
    return false;
}

// Place of a tile of a segment's rows, and its keys, which only sequences have.
struct PackedTile {
    TilePlace place;
    TileExtent extent;
    bool is_sequence;

    __device__ __forceinline__ PackedTile(const AttentionParams& params, const Segment& segment, unsigned int plane,
                                          unsigned int m_block)
        : is_sequence(segment.index - 1 < params.num_sequences) {
        const unsigned int index = is_sequence ? segment.index - 1 : 0;
        long long keys[2] = {0, 0};
        if (is_sequence) {
            const char* const boundary = params.cu_seqlens_k + index * params.cu_seqlens_k_stride;
            load_integers<2>({boundary, boundary + params.cu_seqlens_k_stride}, params.cu_seqlens_k_size, keys);
        }
        const long long begin = max(keys[0], 0LL);
        // right either way: less than no keys are none
        const long long seqlen_k = max(min(keys[1], params.seqlen_k) - begin, 0LL);
        const long long seqlen_q = segment.end - segment.begin;
        place = {index, static_cast<int>(plane * static_cast<unsigned int>(params.packed_heads)), m_block,
                 segment.begin, begin};
        extent = {seqlen_q, seqlen_k, params.offset_from_lengths ? seqlen_k - seqlen_q : params.query_offset_value, 0,
                  seqlen_k};
        extent.begin_at(params, m_block);
    }
};

}  // namespace cuflash
