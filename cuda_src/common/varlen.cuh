// Packed sequences: from the number of a tile to the sequence that holds it, without the host knowing any length, and
// the addresses of its arrays.
#pragma once

#include "common/rows.cuh"

namespace cuflash {

struct Segment {
    long long index;  // sequence number; -1 and num_sequences for tokens before the first and behind the last
    long long begin;
    long long end;
    long long tile;  // of this block, counted inside the segment
};

// Boundary i of the packed queries, not above their number; the caller raises those below their predecessors, or 0.
__device__ __forceinline__ long long query_boundary(const AttentionParams& params, long long i) {
    if (i > params.num_sequences) return params.seqlen_q;
    const long long value =
        load_integer(params.cu_seqlens_q + i * params.cu_seqlens_q_stride, params.cu_seqlens_q_size);
    return min(value, params.seqlen_q);
}

// Finds the segment that holds tile number `tile`, by a running sum over all sequences. Called by the 32 lanes of one
// warp together. Boundaries that fall are raised to their predecessor, so segments are disjoint and cover every token
// whatever the values. A segment's tiles are numbered from the last one on, which may see the most keys.
__device__ __forceinline__ bool find_segment(const AttentionParams& params, long long tile, Segment& found) {
    constexpr int kPerLane = 4;
    constexpr unsigned int kAllLanes = 0xffffffffu;
    const int lane = threadIdx.x & 31;
    long long chunk_begin = 0;  // token at which this chunk of boundaries starts
    long long tiles_before = 0;
    const long long num_boundaries = params.num_sequences + 2;
    // right either way: no tiles are behind the last boundary
    for (long long first = 0; first < num_boundaries; first += 32 * kPerLane) {
        long long ends[kPerLane];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) ends[i] = query_boundary(params, first + lane * kPerLane + i);
#pragma unroll
        for (int i = 1; i < kPerLane; ++i) ends[i] = max(ends[i], ends[i - 1]);
        long long highest = ends[kPerLane - 1];
        for (int distance = 1; distance < 32; distance *= 2) {
            highest = max(highest, __shfl_up_sync(kAllLanes, highest, distance));
        }
        long long begin = __shfl_up_sync(kAllLanes, highest, 1);
        begin = lane == 0 ? chunk_begin : max(begin, chunk_begin);

        long long num_tiles = 0;
        long long segment_begin = begin;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            ends[i] = max(ends[i], segment_begin);
            num_tiles += ((ends[i] - segment_begin) * params.packed_heads + kBlockM - 1) / kBlockM;
            segment_begin = ends[i];
        }
        long long running = num_tiles;
        for (int distance = 1; distance < 32; distance *= 2) {
            const long long other = __shfl_up_sync(kAllLanes, running, distance);
            if (lane >= distance) running += other;
        }
        const unsigned int owners = __ballot_sync(kAllLanes, tile < tiles_before + running);
        if (owners != 0) {
            if (lane == __ffs(owners) - 1) {  // right either way: what other lanes find goes nowhere
                long long remaining = tile - tiles_before - (running - num_tiles);
                segment_begin = begin;
                for (int i = 0; i < kPerLane; ++i) {
                    const long long tiles = ((ends[i] - segment_begin) * params.packed_heads + kBlockM - 1) / kBlockM;
                    if (remaining < tiles) {
                        found = {first + lane * kPerLane + i - 1, segment_begin, ends[i], tiles - 1 - remaining};
                        break;
                    }
                    remaining -= tiles;
                    segment_begin = ends[i];
                }
            }
            return lane == __ffs(owners) - 1;
        }
        chunk_begin = max(chunk_begin, __shfl_sync(kAllLanes, highest, 31));
        tiles_before += __shfl_sync(kAllLanes, running, 31);
    }
    return false;
}

// Fills `tile` with a tile of packed sequences. Called by all threads of warp 0; true for the one that has done it.
__device__ __forceinline__ bool map_packed_tile(const AttentionParams& params, unsigned int tile_idx, TileMap& tile) {
    const Divided segment_tile(tile_idx, params.head_tiles);
    const int head = static_cast<int>(segment_tile.rest * static_cast<unsigned int>(params.packed_heads));
    Segment segment;
    if (!find_segment(params, segment_tile.quotient, segment)) return false;
    const long long begin_q = segment.begin;
    const bool is_sequence = segment.index >= 0 && segment.index < params.num_sequences;
    long long begin_k = 0;
    long long end_k = 0;
    if (is_sequence) {
        const char* boundaries = params.cu_seqlens_k + segment.index * params.cu_seqlens_k_stride;
        begin_k = max(load_integer(boundaries, params.cu_seqlens_k_size), 0LL);
        end_k = min(load_integer(boundaries + params.cu_seqlens_k_stride, params.cu_seqlens_k_size), params.seqlen_k);
        end_k = max(end_k, begin_k);  // right either way: less than no keys are none
    }
    const int head_kv = static_cast<int>(Divided(head, params.group_size).quotient);
    const long long sequence = is_sequence ? segment.index : 0;
    tile.q = params.q + head * params.q_strides.head + begin_q * params.q_strides.row;
    tile.k = params.k + head_kv * params.k_strides.head + begin_k * params.k_strides.row;
    tile.v = params.v + head_kv * params.v_strides.head + begin_k * params.v_strides.row;
    tile.out = params.out + head * params.out_strides.head + begin_q * params.out_strides.row;
    tile.lse = params.lse + head * params.lse_strides.head + begin_q * params.lse_strides.row;
    tile.bias = nullptr;
    tile.mask = nullptr;
    tile.per_head = head_values(params, head, sequence, is_sequence);
    tile.seqlen_q = segment.end - segment.begin;
    tile.seqlen_k = end_k - begin_k;
    tile.query_offset = params.offset_from_lengths ? tile.seqlen_k - tile.seqlen_q : params.query_offset_value;
    tile.key_begin = 0;
    tile.key_end = tile.seqlen_k;
    tile.begin_at(params, segment.tile * kBlockM);
    return true;
}

}  // namespace cuflash
