// What a call may have one value of per query head: slopes of ALiBi, and sinks. Each may be of any float type, so that
// they are converted here.
#pragma once

#include "common/numeric.cuh"
#include "common/params.cuh"

namespace cuflash {

constexpr bool kHasRowOffset = kHasAlibi;  // of all logits of a row, see logit_offset

// Whether the call has one more logit per head.
__device__ __forceinline__ bool has_sink_per_head(const AttentionParams& params) { return params.sinks != nullptr; }

// Where the values of a tile's heads are; those of a head are named by its number, relative to the tile's first.
struct HeadValues {
    const char* alibi_slopes;
    const char* sinks;  // null also for rows that belong to no sequence

    __device__ __forceinline__ Accumulator slope(const AttentionParams& params, int head) const {
        return load_float(alibi_slopes + head * params.alibi_slopes_strides.head, params.alibi_slopes_dtype);
    }
    __device__ __forceinline__ bool has_sink() const { return sinks != nullptr; }
    __device__ __forceinline__ void leave_out_sink() { sinks = nullptr; }
    __device__ __forceinline__ Accumulator sink(const AttentionParams& params, int head) const {
        return load_float(sinks + head * params.sinks_strides.head, params.sinks_dtype);
    }
};

}  // namespace cuflash
