// Appends keys and values to a cache, in front of the launch that attends to them.
//
// Grid: one warp for each new key of one (batch, key head), and one for its value, which copies the row. Rows that the
// cache has no room for, or whose page the table does not name, go nowhere.

#include "common/cache.cuh"

namespace cuflash {

// Copies the features of a row: 16 bytes at a time where they lie so, else one by one.
__device__ __forceinline__ void copy_row(const char* source, long long source_step, char* target, long long target_step,
                                         int num_features) {
    constexpr int kElements = 16 / sizeof(Element);
    const int lane = threadIdx.x % 32;
    const bool in_vectors =
        source_step == sizeof(Element) && target_step == sizeof(Element) && num_features % kElements == 0 &&
        (reinterpret_cast<unsigned long long>(source) | reinterpret_cast<unsigned long long>(target)) % 16 == 0;
    if (in_vectors) {  // right either way: the same elements one by one
        for (int i = lane; i < num_features / kElements; i += 32)
            reinterpret_cast<Elements16*>(target)[i] = reinterpret_cast<const Elements16*>(source)[i];
    } else {
        for (int i = lane; i < num_features; i += 32)
            store_bits(target + i * target_step, load_bits<Element>(source + i * source_step));
    }
}

// What is appended to one of the two arrays, and where.
struct Target {
    const char* added;
    const Strides& added_strides;
    const char* cache;
    const Strides& strides;
    int num_features;
};

__device__ __forceinline__ void append_keys(const AttentionParams& params) {
    const long long idx = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) / 32;
    const long long num_heads = divide(params.head_tiles * params.packed_heads, params.group_size);
    const long long plane = divide(idx, params.seqlen_new), row = idx - plane * params.seqlen_new;
    const long long batch = divide(plane, 2 * num_heads), head = (plane - batch * 2 * num_heads) / 2;
    if (batch >= params.num_batches) return;
    const Target to = plane % 2 == 0
                          ? Target{params.k_new, params.k_new_strides, params.k, params.k_strides, params.head_dim}
                          : Target{params.v_new, params.v_new_strides, params.v, params.v_strides, params.head_dim_v};
    const long long key = cached_keys(params, batch) + row;
    if (key >= params.seqlen_k) return;
    const char* target = to.cache + head * to.strides.head;
    if constexpr (kPaged) {
        const PagedKey found(params, pages_of(params, batch), static_cast<unsigned int>(key));
        if (!found.exists(params)) return;
        target += found.offset(to.strides);
    } else {
        target += batch * to.strides.batch + key * to.strides.row;
    }
    const char* source = to.added + batch * to.added_strides.batch;
    source += head * to.added_strides.head + row * to.added_strides.row;
    copy_row(source, to.added_strides.column, const_cast<char*>(target), to.strides.column, to.num_features);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads)
    cuflash_append_keys(const __grid_constant__ cuflash::AttentionParams params) {
    cuflash::append_keys(params);
}
