// Attention forward in double precision on tensor cores, for wide heads.
#ifndef CUFLASH_DTYPE
#define CUFLASH_DTYPE CUFLASH_FLOAT64  // the only one
#endif

#include "common/epilogue.cuh"
#include "common/exponential.cuh"
#include "common/schedule.cuh"
#include "common/total.cuh"
#include "precise/pieces.cuh"
#include "precise/queries.cuh"
#include "ptx/mma_float64.cuh"

namespace cuflash {

static_assert(kDtype == CUFLASH_FLOAT64);

constexpr int kNumWarps = kThreads / 32;
constexpr int kRowTiles = kBlockM / 16, kRows = 2 * kRowTiles;
constexpr int kSteps = kHeadDim / 16, kStepsV = kHeadDimV / 16;
constexpr int kPiecesV = (kStepsV + kNumWarps - 1) / kNumWarps;
constexpr int kSlots = 4;
static_assert(kBlockN == 16 * kNumWarps && kSteps % kSlots == 0);

using Scores = double[kRowTiles][2][4];
using Output = double[kPiecesV][kRowTiles][2][4];

struct SharedTiles {
    Queries q;
    Piece pieces[kNumWarps][kSlots];
    Vector16 weights[kNumWarps][kRowTiles][4][32];
    double maxima[kNumWarps][kBlockM];
    TileMap tile;
    TileKeys keys;
};

struct WarpPlace {
    int lane, warp, row, run;

    __device__ __forceinline__ explicit WarpPlace(unsigned int thread)
        : lane(thread % 32), warp(__shfl_sync(0xffffffffu, thread / 32, 0)), row(thread % 32 / 4), run(thread % 4) {}
    __device__ __forceinline__ int column(int i) const { return i / 2 * 8 + run * 2 + i % 2; }
    __device__ __forceinline__ int tile_row(int r) const { return r * 8 + row; }
};

template <typename Tiles>
__device__ __forceinline__ double& at(Tiles& scores, int r, int i) {
    return scores[r / 2][i / 2][r % 2 * 2 + i % 2];
}

// What a warp copies and multiplies, piece by piece.
struct Feed {
    const AttentionParams& params;
    SharedTiles& shared;
    const WarpPlace& place;
    const char *k, *v;  // the lane's part of this tile
    long long keys_left;    // from this tile on
    int num_groups;
    int slot;

    __device__ __forceinline__ Feed(const AttentionParams& params, SharedTiles& shared, const WarpPlace& place)
        : params(params), shared(shared), place(place), slot(0) {
        const long long begin = shared.keys.any.begin;
        keys_left = shared.keys.any.end - begin;
        k = shared.tile.k + (begin + place.warp * 16) * params.k_strides.row;
        v = shared.tile.v + begin * params.v_strides.row + place.warp * 128;
        if constexpr (kVectorLoads) {
            k += place.lane / 8 * params.k_strides.row + place.lane % 8 * 16;
            v += place.lane / 8 * params.v_strides.row + place.lane % 8 * 16;
        }
        begin_tile();
    }
    __device__ __forceinline__ void begin_tile() {
        num_groups = keys_left < kBlockN ? (static_cast<int>(keys_left) + 15) / 16 : kNumWarps;
    }
    __device__ __forceinline__ void end_tile() {
        keys_left -= kBlockN;
        k += kBlockN * params.k_strides.row;
        v += kBlockN * params.v_strides.row;
        begin_tile();
    }
    __device__ __forceinline__ bool has_keys() const { return place.warp < num_groups; }
    __device__ __forceinline__ Piece& piece() const { return shared.pieces[place.warp][slot]; }
    __device__ __forceinline__ void turn() { slot = (slot + 1) % kSlots; }

    // Into the slot at hand.
    __device__ __forceinline__ void load_k(int step, long long tile_offset) const {
        const long long left = keys_left - tile_offset - place.warp * 16;
        if (left > 0)
            load_piece(piece(), k + tile_offset * params.k_strides.row + step * 128, params.k_strides,
                       params.head_dim - step * 16, static_cast<int>(min(left, 16LL)), place.lane);
        cp_async_commit();
    }
    // Piece `index` of group `group`.
    __device__ __forceinline__ void load_v(int group, int index) const {
        if ((index + 1) * kNumWarps <= kStepsV || index * kNumWarps + place.warp < kStepsV)
            load_piece(piece(), v + group * 16 * params.v_strides.row + index * kNumWarps * 128, params.v_strides,
                       params.head_dim_v - (index * kNumWarps + place.warp) * 16,
                       static_cast<int>(min(keys_left - group * 16, 16LL)), place.lane);
        cp_async_commit();
    }
    // What comes `index` behind the first piece of V.
    __device__ __forceinline__ void load_behind_k(int index) const {
        if (index < num_groups * kPiecesV) load_v(index / kPiecesV, index % kPiecesV);
        else load_k(index - num_groups * kPiecesV, kBlockN);
    }

    __device__ __forceinline__ void multiply_qk_step(int step, Scores& scores) const {
        cp_async_wait_group<kSlots - 1>();
        __syncwarp();
        double b[2][4], a[kRowTiles][8];
        const Piece& piece = this->piece();
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Vector16 pair = *reinterpret_cast<const Vector16*>(
                    &piece.bytes[Piece::offset(n * 8 + place.row, place.run * 2 + h)]);
                b[n][2 * h] = pair.values[0], b[n][2 * h + 1] = pair.values[1];
            }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const Vector16 both = shared.q[m][step][e][place.lane];
                a[m][2 * e] = both.values[0], a[m][2 * e + 1] = both.values[1];
            }
        }
        __syncwarp();
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int n = 0; n < 2; ++n) mma_m16n8k16(scores[m][n], a[m], b[n]);
    }
    __device__ __forceinline__ void multiply_qk(Scores& scores) {
#pragma unroll
        for (int i = 0; i < kRowTiles * 8; ++i) scores[i / 8][i / 4 % 2][i % 4] = 0;
#pragma unroll 1
        for (int step = 0; step < kSteps - kSlots; ++step) {
            multiply_qk_step(step, scores);
            load_k(step + kSlots, 0);
            turn();
        }
#pragma unroll 1
        for (int i = 0; i < kSlots; ++i) {
            multiply_qk_step(kSteps - kSlots + i, scores);
            load_behind_k(i);
            turn();
        }
    }

    // O += P V, of the warp's features.
    __device__ __forceinline__ void accumulate(Output& o) {
#pragma unroll 1
        for (int group = 0; group < num_groups; ++group) {
            double p[kRowTiles][8];
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const Vector16 both = shared.weights[group][m][e][place.lane];
                    p[m][2 * e] = both.values[0], p[m][2 * e + 1] = both.values[1];
                }
            }
#pragma unroll
            for (int i = 0; i < kPiecesV; ++i) {
                cp_async_wait_group<kSlots - 1>();
                __syncwarp();
                const bool is_there = (i + 1) * kNumWarps <= kStepsV || i * kNumWarps + place.warp < kStepsV;
                if (is_there) {
                    double b[2][4];
#pragma unroll
                    for (int f = 0; f < 2; ++f) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int key = e / 2 * 8 + place.run * 2 + e % 2;
                            b[f][e] = reinterpret_cast<const double*>(
                                &piece().bytes[Piece::offset(key, f * 4 + place.row / 2)])[place.row % 2];
                        }
                    }
                    __syncwarp();
#pragma unroll
                    for (int f = 0; f < 2; ++f)
#pragma unroll
                        for (int m = 0; m < kRowTiles; ++m) mma_m16n8k16(o[i][m][f], p[m], b[f]);
                }
                const int behind = i + kSlots - (num_groups - group) * kPiecesV;
                if (behind < 0) load_v(group + (i + kSlots) / kPiecesV, (i + kSlots) % kPiecesV);
                else load_k(behind, kBlockN);
                turn();
            }
        }
    }
};

struct OutputTotal : Total<kRows, 4 * kPiecesV + 1> {
    static constexpr int kValues = 4 * kPiecesV;
    __device__ __forceinline__ OutputTotal() {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            row_max[r] = -infinity();
#pragma unroll
            for (int i = 0; i <= kValues; ++i) sums[r][i] = 0;
        }
    }
    __device__ __forceinline__ static double& value(Output& o, int r, int i) {
        return o[i / 4][r / 2][i / 2 % 2][r % 2 * 2 + i % 2];
    }
    __device__ __forceinline__ void take(Output& o, OnlineSoftmax<kRows>& softmax) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const double by = factor(r, softmax.row_max[r], 1);
            row_max[r] = softmax.row_max[r];
            double before[kValues];
#pragma unroll
            for (int i = 0; i < kValues; ++i) before[i] = sums[r][i];
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                sums[r][i] = multiply_add_subnormal(before[i], by, value(o, r, i));
                value(o, r, i) = 0;
            }
            sums[r][kValues] = multiply_add_subnormal(static_cast<double>(sums[r][kValues]), by, softmax.row_sum[r]);
            softmax.row_sum[r] = 0;
        }
    }
};

__device__ __forceinline__ void logits_of(const AttentionParams& params, const SharedTiles& shared,
                                          const WarpPlace& place, long long n_begin, Scores& scores) {
    const TileMap& tile = shared.tile;
    const ScoreScale scale = score_scale(params);
    const bool at_edge = n_begin < shared.keys.all.begin || n_begin + 16 > shared.keys.all.end;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) at(scores, r, i) = scaled_score(scale, at(scores, r, i));
        if constexpr (kHasRowTerms) {
            const RowContext row = row_context(params, tile, logit_row(params, tile, place.tile_row(r)), n_begin);
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                double logits[2] = {at(scores, r, i), at(scores, r, i + 1)};
                RowColumns<2> columns;
                columns.load<false>(params, row, place.column(i));
                scores_to_row_logits<true>(row, columns, place.column(i), logits);
                at(scores, r, i) = logits[0], at(scores, r, i + 1) = logits[1];
            }
        }
        if (at_edge) {
            const ColumnRange visible = visible_columns(params, tile, place.tile_row(r), n_begin);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!visible.has(place.column(i))) at(scores, r, i) = -infinity();
        }
    }
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    if (threadIdx.x < 32) map_block(params, shared.tile, shared.keys);
    __syncthreads();
    if (shared.tile.num_rows == 0) return;
    const WarpPlace place(threadIdx.x);
    const TileKeys& keys = shared.keys;
    Feed feed(params, shared, place);
    OnlineSoftmax<kRows> softmax;
    Output o = {};
    OutputTotal total;
    if (keys.any.begin < keys.any.end) {
#pragma unroll 1
        for (int i = 0; i < kSlots; ++i) {
            feed.load_k(i, 0);
            feed.turn();
        }
        load_queries(params, shared.tile, shared.q);
        __syncthreads();
    }
    int left_of_sum = kTilesPerSum;
#pragma unroll 1
    for (long long n_begin = keys.any.begin; n_begin < keys.any.end; n_begin += kBlockN) {
        Scores scores;
        double maxima[kRows];
        const bool has_keys = feed.has_keys();
        if (has_keys) {
            feed.multiply_qk(scores);
            logits_of(params, shared, place, n_begin + place.warp * 16, scores);
        } else {
#pragma unroll 1
            for (int i = 0; i < kSlots; ++i) {
                feed.load_behind_k(i);
                feed.turn();
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            double largest = -infinity();
            if (has_keys) largest = quad_maximum(maximum(maximum(at(scores, r, 0), at(scores, r, 1)), maximum(at(scores, r, 2), at(scores, r, 3))));
            if (place.run == 0) shared.maxima[place.warp][place.tile_row(r)] = largest;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            double largest = -infinity();
#pragma unroll
            for (int w = 0; w < kNumWarps; w += 4)
                if (w + place.run < kNumWarps) largest = maximum(largest, shared.maxima[w + place.run][place.tile_row(r)]);
            maxima[r] = quad_maximum(largest);
        }
        bool grown = false;
#pragma unroll
        for (int r = 0; r < kRows; ++r) grown |= maxima[r] > softmax.row_max[r];
        if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const double correction = softmax.follow(r, maxima[r]);
                softmax.row_sum[r] *= correction;
#pragma unroll
                for (int i = 0; i < 4 * kPiecesV; ++i) OutputTotal::value(o, r, i) *= correction;
            }
        }
        if (has_keys) {
            const int zero = unknown_zero();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    double value = at(scores, r, i) - finite_maximum(softmax.row_max[r]);
                    if (i >= 2) value = behind(at(scores, r, i - 2), value, zero);
                    at(scores, r, i) = exponential_of_negative(value);
                }
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                softmax.row_sum[r] += (at(scores, r, 0) + at(scores, r, 1)) + (at(scores, r, 2) + at(scores, r, 3));
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    shared.weights[place.warp][m][i][place.lane] = {at(scores, 2 * m, i), at(scores, 2 * m + 1, i)};
        }
        __syncthreads();
        feed.accumulate(o);
        feed.end_tile();
        if (--left_of_sum == 0 || n_begin + kBlockN >= keys.any.end) {
            total.take(o, softmax);
            left_of_sum = kTilesPerSum;
        }
    }
    cp_async_wait();
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        double sum = total.sums[r][OutputTotal::kValues];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (place.run == 0) shared.maxima[place.warp][place.tile_row(r)] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const Row row = row_at(params, shared.tile, place.tile_row(r));
        if (!row.valid) continue;
        double sum = 0;
#pragma unroll
        for (int w = 0; w < kNumWarps; ++w) sum += shared.maxima[w][place.tile_row(r)];
        const FinishedRow finished = finish_row(params, shared.tile, row, softmax.row_max[r], sum);
        if (place.run == 0 && place.warp == 0) store_lse(params, shared.tile, row, finished);
        char* out = output_row(params, shared.tile, row);
#pragma unroll
        for (int i = 0; i < 2 * kPiecesV; ++i) {
            double pair[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) pair[e] = multiply_subnormal(static_cast<double>(total.sums[r][i * 2 + e]), finished.multiplier) / finished.divisor;
            const int step = i / 2 * kNumWarps + place.warp;
            if (step < kStepsV) store_output(params, out, step * 16 + i % 2 * 8 + place.run * 2, pair);
        }
    }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_precise_wide(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(128) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
