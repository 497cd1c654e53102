// Attention forward on tensor cores through mma.sync: float16 and bfloat16 from sm_80 on.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, last to first, kBlockN at a time. K and V have two buffers each: the next tile arrives
// while this one is multiplied, and a tile costs one barrier.
//
// Warps: each owns 16 or 32 rows from beginning to end. Scores, weights and output stay in registers, where mma.sync
// leaves them. With 32 rows a warp reads K and V from shared memory half as often as with 16, which else is the limit.
// There are so few warps that latency counts: addresses are kept, rows are looked up once, copies are issued between
// products, and weights are computed beside the products of those that are there already.
//
// Tensor cores round toward zero while they accumulate, so a sum over all keys would drift. O starts again from zero
// every few thousand keys; what it was joins a total by multiply-adds, in memory, as that is so rare.

#include "common/epilogue.cuh"
#include "common/key_loader.cuh"
#include "common/logit_unit.cuh"
#include "common/mma_products.cuh"
#include "common/mma_softmax.cuh"

namespace cuflash {

constexpr int kTilesPerSum = 4096 / kBlockN;  // until then the drift is a tenth of the rounding to 16 bits

constexpr bool kPerRow = kBiasDtype != 0 || kHasMask || kHasAlibi;  // logits need more than their scores

// Warps pass by tiles that none of their rows sees, where that does not cost the registers of others.
constexpr bool kSkipUnseen = kStages > 1 && kRowTiles*(kFeatureTiles + kKeyTiles) <= 40;

// What a tile row needs for every tile of keys, looked up once.
struct TileRow {
    KeyRange visible;
    LogitRow logit;
};

struct SharedTiles {
    alignas(16) Element q[kBlockM][kPitchQ];
    KeyTiles stages[kStages];
    alignas(16) Element p[kShare > 1 ? kBlockM : 1][kPitchP];
    alignas(16) TileRow rows[kBlockM];
    float exchange[kShare > 1 ? kNumWarps : 1][32];  // a value per row, between warps that share it
    TileMap tile;
    TileKeys keys;
    LogitUnit unit;
};

// Tiles of keys are counted from the last; only that one may be shorter. Those from inner_begin to inner_end are seen
// by all rows.
struct KeyWalk {
    const TileKeys& keys;  // in shared memory: registers are few
    int num_tiles;
    int last_keys;
    int inner_begin, inner_end;

    __device__ __forceinline__ KeyWalk(const TileKeys& tile_keys) : keys(tile_keys) {
        const long long begin = keys.any.begin;
        const long long num_keys = max(keys.any.end - begin, 0LL);
        num_tiles = static_cast<int>((num_keys + kBlockN - 1) / kBlockN);
        last_keys = static_cast<int>(num_keys - static_cast<long long>(num_tiles - 1) * kBlockN);
        inner_begin = num_tiles - static_cast<int>(max(keys.all.end - begin, 0LL) / kBlockN);
        inner_end = num_tiles - static_cast<int>(min((keys.all.begin - begin + kBlockN - 1) / kBlockN,
                                                     static_cast<long long>(num_tiles)));
    }
    __device__ __forceinline__ long long first_key(int index) const {
        return keys.any.begin + static_cast<long long>(num_tiles - 1 - index) * kBlockN;
    }
};

template <typename T>
__device__ __forceinline__ T* address_of_lane(T* address, int lane) {
    return reinterpret_cast<T*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(address), lane));
}

// Looks up the warp's rows, one per lane, and loads their queries.
__device__ __forceinline__ void load_queries(const AttentionParams& params, const TileMap& tile, SharedTiles& shared,
                                             const Warp& warp) {
    constexpr int kOwnRows = kRowsPerWarp / kShare;
    const int first_row = warp.first_row + warp.share * kOwnRows;
    const char* address = nullptr;
    if (warp.lane < kOwnRows) {
        const int tile_row = first_row + warp.lane;
        const Row row = row_at(params, tile, tile_row);
        if (row.valid) address = tile.q + row.head * params.q_strides.head + row.query * params.q_strides.row;
        shared.rows[tile_row].visible = row.valid ? visible_keys(params, tile, row.query) : KeyRange{0, 0};
        if constexpr (kPerRow) shared.rows[tile_row].logit = logit_row(params, tile, tile_row);
    }
    constexpr int kWidth = kVectorLoads ? 8 : 1, kVectors = kHeadDim / kWidth;
    constexpr int kRounds = (kOwnRows * kVectors + 31) / 32;  // all lanes take part: addresses come from each
#pragma unroll 4
    for (int vector = warp.lane; vector < kRounds * 32; vector += 32) {
        const int row = vector / kVectors, column = vector % kVectors * kWidth;
        const char* source = address_of_lane(address, row);
        if (kRounds * 32 != kOwnRows * kVectors && row >= kOwnRows) continue;
        const bool valid = source != nullptr && column < params.head_dim;
        Element* target = &shared.q[first_row + row][column];
        if constexpr (kVectorLoads) cp_async_16(target, source + column * 2, valid);
        else *target = valid ? load_bits<Element>(source + column * params.q_strides.column) : Element(0);
    }
}

// Whether a row of the warp sees a key of the tile by its position.
__device__ __forceinline__ bool any_row_sees(const TileRow* rows, long long n_begin, int lane) {
    const ColumnRange visible = columns_of(rows[lane % kRowsPerWarp].visible, n_begin);
    return __any_sync(0xffffffffu, visible.begin < visible.end);
}

// Hides the scores of keys that a row does not see by its position.
__device__ __forceinline__ void hide_scores(const TileRow* rows, long long n_begin, int lane, Scores& scores) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        __syncwarp();  // one row after the other: together they take more registers than there are
        const ColumnRange visible = columns_of(rows[row_of(r, lane)].visible, n_begin);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            if (!visible.has(column_of(i, lane))) at(scores, r, i) = -infinity();
        }
    }
}

// Scores become logits in units of unit.factor. `kVectors` asks for what has_vectors<kRun> has found in all rows.
template <bool kVectors>
__device__ __forceinline__ void scores_to_logits(const AttentionParams& params, const TileMap& tile,
                                                 const LogitUnit& unit, const TileRow* rows, long long n_begin,
                                                 int lane, Scores& scores) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        __syncwarp();
        RowContext row = row_context(params, tile, rows[row_of(r, lane)].logit, n_begin);
        row.alibi_slope *= unit.inverse;
        constexpr int kAtOnce = kVectors ? kRun : 2;
#pragma unroll
        for (int i = 0; i < kColumns; i += kAtOnce) {
            if (!kVectors) __syncwarp();  // addresses of elements take registers as well
            float logits[kAtOnce];
#pragma unroll
            for (int e = 0; e < kAtOnce; ++e) logits[e] = unit_score(unit, at(scores, r, i + e));
            scores_to_row_logits<kVectors>(params, row, column_of(i, lane), logits);
#pragma unroll
            for (int e = 0; e < kAtOnce; ++e) at(scores, r, i + e) = logits[e];
        }
    }
}

// Whether all the warp's rows have bias and mask in vectors for this tile.
__device__ __forceinline__ bool rows_have_vectors(const AttentionParams& params, const TileMap& tile,
                                                  const TileRow* rows, long long n_begin, int lane) {
    if constexpr (kBiasDtype == 0 && !kHasMask) return true;
    const RowContext row = row_context(params, tile, rows[lane % kRowsPerWarp].logit, n_begin);
    return __all_sync(0xffffffffu, has_vectors<kRun>(params, row));
}

// Stores lse and output of the warp's rows. Each lane finishes one row; 16-bit output passes through the rows of Q, so
// that neighbouring lanes store neighbouring vectors.
__device__ __forceinline__ void store_rows(const AttentionParams& params, const TileMap& tile, SharedTiles& shared,
                                           const RowStates& states, Output& o, const Warp& warp) {
    const int lane = warp.lane;
    float row_max = 0, row_sum = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float sum = states.row_sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float maximum_of_row = __shfl_sync(0xffffffffu, states.row_max[r], lane % 8 * 4);
        const float sum_of_row = __shfl_sync(0xffffffffu, sum, lane % 8 * 4);
        if (lane / 8 == r) row_max = maximum_of_row, row_sum = sum_of_row;
    }
    if constexpr (kShare > 1) {
        float (*const sums)[32] = shared.exchange + threadIdx.x / 64 * 2;
        warp.wait();  // for the rows of Q as well
        sums[warp.share][lane] = row_sum;
        warp.wait();
        row_sum = sums[0][lane] + sums[1][lane];
    }
    char* address = nullptr;
    float factor = 0;
    const Row row = row_at(params, tile, warp.first_row + lane);
    if (lane < kRowsPerWarp && row.valid) {
        const FinishedRow finished =
            finish_row(params, tile, row, row_max * shared.unit.factor, row_sum * kReferenceUnit);
        factor = finished.multiplier / finished.divisor * kReferenceUnit;
        if (warp.share == 0) store_lse(params, tile, row, finished.lse);
        address = output_row(params, tile, row);
    }
    __syncwarp();
    const int first_column = warp.share * kWarpFeatures;
    Element(*const staging)[kPitchQ] = &shared.q[warp.first_row];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float row_factor = __shfl_sync(0xffffffffu, factor, row_of(r, lane));
        char* const row_address = address_of_lane(address, row_of(r, lane));
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
            const int column = first_column + f * 8 + lane % 4 * 2;
            const float values[2] = {at(o, r, 2 * f) * row_factor, at(o, r, 2 * f + 1) * row_factor};
            if constexpr (sizeof(OutElement) == 2)
                *reinterpret_cast<unsigned int*>(&staging[row_of(r, lane)][column]) = output_pair(values);
            else if (row_address) store_output(params, row_address, column, values);
        }
    }
    if constexpr (sizeof(OutElement) == 2) {
        constexpr int kVectors = kWarpFeatures / 8;
        __syncwarp();
#pragma unroll 8
        for (int vector = lane; vector < kRowsPerWarp * kVectors; vector += 32) {
            const int row_idx = vector / kVectors, column = first_column + vector % kVectors * 8;
            store_elements(params, address_of_lane(address, row_idx), column,
                           *reinterpret_cast<const Elements16*>(&staging[row_idx][column]));
        }
    }
}

using LoaderK = TileLoader<kHeadDim, kPitchK>;
using LoaderV = TileLoader<kHeadDimV, kPitchV>;

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    const TileMap& tile = shared.tile;
    const TileKeys& keys = shared.keys;
    if (threadIdx.x < 32) {
        map_block(params, shared.tile);
        __syncwarp();
        if (threadIdx.x == 0 && tile.num_rows != 0) shared.keys = tile_keys(params, tile);
    }
    if (threadIdx.x == kThreads - 32) shared.unit = logit_unit(params);
    __syncthreads();
    if (tile.num_rows == 0) return;
    const Warp warp;
    const int lane = warp.lane;
    const TileRow* rows = &shared.rows[warp.first_row];

    const KeyWalk walk(keys);
    const bool lags = warp.lags();
    LoaderK load_k(tile.k, params.k_strides, walk.first_key(0), shared.stages[0].k[0], params.head_dim);
    LoaderV load_v(tile.v, params.v_strides, walk.first_key(0), shared.stages[0].v[0], params.head_dim_v);
    if (lags) load_k.become(load_v);
    const Strides strides_of_half = lags ? params.v_strides : params.k_strides;
    const Strides& k_strides = kStaggered ? strides_of_half : params.k_strides;
    const SharedAddress lane_q = kept_shared_address(&shared.q[warp.first_row + lane % 16][lane / 16 * 8]);
    const SharedAddress lane_p =
        kShare > 1 ? kept_shared_address(&shared.p[warp.first_row + lane % 16][lane / 16 * 8]) : lane_q;
    const SharedAddress lane_k =
        kept_shared_address(&shared.stages[0].k[warp.share * kWarpKeys + lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
    const SharedAddress lane_v =
        kept_shared_address(&shared.stages[0].v[lane % 16][warp.share * kWarpFeatures + lane / 16 * 8]);

    RowStates states;
    OutputTotal total;
    Output o = {};
    bool pending = false;  // weights of the last tile are to be multiplied by V
    KeptQueries kept;
    const float multiplier = shared.unit.multiplier;
    if (walk.num_tiles > 0) {
        if (!lags) load_k.template load<false, 1>(params.k_strides, 0, walk.last_keys, 0);
        if (kStaggered ? lags : kStages > 1) load_v.template load<false, 1>(params.v_strides, 0, walk.last_keys, 0);
        load_queries(params, tile, shared, warp);
        if constexpr (kKeepQ) {
            cp_async_wait();
            warp.wait();
#pragma unroll
            for (int step = 0; step < kStepsK; ++step) load_queries(kept[step], lane_q, step);
        }
    }
#pragma unroll 1
    for (int first = 0; first < walk.num_tiles; first += kTilesPerSum) {
        const int end = min(first + kTilesPerSum, walk.num_tiles);
#pragma unroll 1
        for (int i = first; i < end; ++i) {
            cp_async_wait();
            __syncthreads();
            const int stage = i % kStages, next_stage = (i + 1) % kStages;
            const int next_keys = i + 1 < walk.num_tiles ? kBlockN : 0;
            if constexpr (kStaggered) {
                if (lags) {
                    if (pending) multiply_pv(o, {}, lane_p, lane_v + next_stage * kStageBytes);
                    barrier_wait(15, kThreads / 2);
                }
            }
            load_k.previous_tile(k_strides);
            if (kStages > 1 || i > 0) load_v.previous_tile(params.v_strides);
            const auto load_part = [&](int part) {
                if constexpr (kStages > 1) {
                    load_k.template load<true, kStepsK>(k_strides, next_stage, next_keys, part);
                    if constexpr (!kStaggered)
                        load_v.template load<true, kStepsK>(params.v_strides, next_stage, next_keys, part);
                } else {
                    load_v.template load<false, kStepsK>(params.v_strides, 0, i == 0 ? walk.last_keys : kBlockN, part);
                }
            };
            const bool at_edge = i < walk.inner_begin || i >= walk.inner_end;
            if (kSkipUnseen && at_edge && !any_row_sees(rows, walk.first_key(i), lane)) {
#pragma unroll
                for (int part = 0; part < kStepsK; ++part) load_part(part);
                pending = false;
                continue;
            }
            Scores scores;
            multiply_qk(scores, lane_q, kept, lane_k + stage * kStageBytes, load_part);
            if constexpr (kStages == 1) {
                cp_async_wait();
                __syncthreads();
                load_k.template load<true, 1>(params.k_strides, 0, next_keys, 0);
            }

            const long long n_begin = walk.first_key(i) + warp.share * kWarpKeys;
            if constexpr (kPerRow || kHasSoftcap) {
                if (rows_have_vectors(params, tile, rows, n_begin, lane))
                    scores_to_logits<true>(params, tile, shared.unit, rows, n_begin, lane, scores);
                else scores_to_logits<false>(params, tile, shared.unit, rows, n_begin, lane, scores);
            } else if (shared.unit.scaled) {
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
#pragma unroll
                    for (int column = 0; column < kColumns; ++column) at(scores, r, column) *= shared.unit.scale.scale;
                }
            }
            if (at_edge) hide_scores(rows, n_begin, lane, scores);
            scores_to_weights(scores, multiplier, states, o, shared.exchange, warp);
            Weights weights;
            round_scores(weights, scores);
            if constexpr (kShare > 1) {
                store_weights(&shared.p[warp.first_row], warp.share * kWarpKeys, weights, lane);
                warp.wait();
            }
            pending = lags;
            if (!lags) multiply_pv(o, weights, lane_p, lane_v + stage * kStageBytes);
        }
        if (first != 0) add_total(o, total, states, multiplier);
        if (first + kTilesPerSum < walk.num_tiles) restart(o, total, states);
    }
    if (pending) multiply_pv(o, {}, lane_p, lane_v + (walk.num_tiles - 1) % kStages * kStageBytes);
    cp_async_wait();
    store_rows(params, tile, shared, states, o, warp);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_forward_mma(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
