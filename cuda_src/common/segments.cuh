// Packed sequences: from the number of a tile to the sequence that holds it, without the host knowing any length.
#pragma once

#include "common/numeric.cuh"

namespace cuflash {

// Boundaries of sequences in an array of integers, as many as there are sequences and one more.
struct PackedSequences {
    const char* boundaries;
    long long stride;
    int size;  // bytes of a boundary, negative when signed
    long long count;
    long long num_tokens;
    long long rows_per_token;
};

struct Segment {
    long long index;  // sequence number; -1 and num_sequences for tokens before the first and behind the last
    long long begin;
    long long end;
    long long tile;  // of this block, counted inside the segment
};

// Boundary i, not above the number of tokens; the caller raises those below their predecessors, or 0.
__device__ __forceinline__ long long boundary_of(const PackedSequences& packed, long long i) {
    if (i > packed.count) return packed.num_tokens;
    return min(load_integer(packed.boundaries + i * packed.stride, packed.size), packed.num_tokens);
}

// Finds the segment that holds tile number `tile` of kBlockM rows, by a running sum over all sequences. Called by the
// 32 lanes of one warp together. Boundaries that fall are raised to their predecessor, so segments are disjoint and
// cover every token whatever the values.
__device__ __forceinline__ bool find_segment(const PackedSequences& packed, long long tile, Segment& found) {
    constexpr int kPerLane = 4;
    constexpr unsigned int kAllLanes = 0xffffffffu;
    const int lane = threadIdx.x & 31;
    long long chunk_begin = 0;  // token at which this chunk of boundaries starts
    long long tiles_before = 0;
    const long long num_boundaries = packed.count + 2;
    // right either way: no tiles are behind the last boundary
    for (long long first = 0; first < num_boundaries; first += 32 * kPerLane) {
        long long ends[kPerLane];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) ends[i] = boundary_of(packed, first + lane * kPerLane + i);
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
            num_tiles += ((ends[i] - segment_begin) * packed.rows_per_token + kBlockM - 1) / kBlockM;
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
                    const long long tiles = ((ends[i] - segment_begin) * packed.rows_per_token + kBlockM - 1) / kBlockM;
                    if (remaining < tiles) {
                        found = {first + lane * kPerLane + i - 1, segment_begin, ends[i], remaining};
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

}  // namespace cuflash
