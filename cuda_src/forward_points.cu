// Attention forward for point clouds: few features, float32 and float64, as many queries and keys as there are. No
// tensor cores: with 16 features or fewer a pair takes about as long for its exponential as for its products.
//
// Grid: one block per tile of kBlockM rows of one (batch, head); a row is one query of one head. Blocks walk the keys
// that any of their rows sees, first to last, kBlockN at a time.
//
// Threads: each owns kQueries rows from beginning to end: queries, references and output stay in its registers. Keys
// and values lie in shared memory, feature by feature, where all lanes of a warp read the same neighbouring keys: one
// instruction reads four, or two doubles, for kQueries pairs each. kChunk keys are scored, weighed and accumulated at a
// time. Where a block has fewer rows than threads, kLanes neighbouring lanes share their rows and take turns at the
// chunks; what they have is merged in the end.
//
// Chunks are summed from zero and joined to O, which starts again from zero every 512 keys and joins totals in memory
// (common/total.cuh): a running sum over all keys would lose digits as it grows.

#ifndef CUFLASH_DTYPE
#define CUFLASH_DTYPE CUFLASH_FLOAT32
#endif
#ifndef CUFLASH_HEAD_DIM
#define CUFLASH_HEAD_DIM 4
#endif
#ifndef CUFLASH_BLOCK_N
#define CUFLASH_BLOCK_N 128
#endif

#include "common/epilogue.cuh"
#include "common/schedule.cuh"
#include "points/sums.cuh"

namespace cuflash {

struct SharedTiles {
    alignas(16) Accumulator k[kHeadDim][kPitch];
    alignas(16) Accumulator v[kHeadDimV][kPitch];
    TileMap tile;
    TileKeys keys;
};

// Keys that no query of the tile sees become zeros: they may hold anything, and 0 x NaN is NaN. Several loads are on
// their way at a time.
template <int kFeatures>
__device__ __forceinline__ void load(Accumulator (&target)[kFeatures][kPitch], const char* array,
                                     const Strides& strides, int num_features, long long n_begin, int num_keys) {
    constexpr int kPasses = kBlockN * kFeatures / kThreads;
    constexpr int kAtOnce = kPasses % 8 == 0 ? 8 : kPasses & -kPasses;
    array += n_begin * strides.row;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kAtOnce) {
        Accumulator values[kAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int element = (pass + i) * kThreads + threadIdx.x;
            const int key = element / kFeatures, feature = element % kFeatures;
            if (key < num_keys && feature < num_features)
                values[i] = load_bits<Element>(array + key * strides.row + feature * strides.column);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int element = (pass + i) * kThreads + threadIdx.x;
            target[element % kFeatures][element / kFeatures] = values[i];
        }
    }
}

__device__ __forceinline__ void load_queries(const AttentionParams& params, const TileMap& tile, const Place& place,
                                             Rows& rows) {
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
        const char* query = query_row(params, tile, place.tile_row(r));
#pragma unroll
        for (int d = 0; d < kHeadDim; ++d) {
            const bool valid = query != nullptr && d < params.head_dim;
            rows.q[r][d] = valid ? load_bits<Element>(query + d * params.q_strides.column) : 0;
        }
        if constexpr (kOnlyScale) rows.references[r].row_unit = fold_scale(params, rows.q[r]);
    }
}

__device__ __forceinline__ void read_chunk(Accumulator (&values)[kChunk], const Accumulator* chunk) {
#pragma unroll
    for (int c = 0; c < kChunk; c += kVector) {
        const Vector16 vector = *reinterpret_cast<const Vector16*>(chunk + c);
#pragma unroll
        for (int e = 0; e < kVector; ++e) values[c + e] = vector.values[e];
    }
}

// scores = Q K^T
__device__ __forceinline__ void score(const SharedTiles& shared, int column, const Rows& rows, Scores& scores) {
#pragma unroll
    for (int d = 0; d < kHeadDim; ++d) {
        Accumulator k[kChunk];
        read_chunk(k, &shared.k[d][column]);
#pragma unroll
        for (int r = 0; r < kQueries; ++r) {
#pragma unroll
            for (int c = 0; c < kChunk; ++c) {
                if (d == 0) scores[r][c] = multiply_subnormal(rows.q[r][d], k[c]);
                else scores[r][c] = multiply_add_subnormal(rows.q[r][d], k[c], scores[r][c]);
            }
        }
    }
}

// Doubles are read one by one as quickly.
constexpr bool kPieces = kBiasDtype != CUFLASH_FLOAT64;

// What the logits of a tile of keys need beside scores.
struct RowTerms {
    RowContext contexts[kQueries];
    Reads reads;            // of all the warp's rows for this tile
    long long keys_before;  // of a chunk at column 0
    long long keys_behind;
    RowColumns<kChunk> ahead[kQueries];  // of the next chunk, on the way

    __device__ __forceinline__ void begin(const AttentionParams& params, const TileMap& tile, const Place& place,
                                          long long n_begin) {
        bool vectors = true, pieces = kPieces;
#pragma unroll
        for (int r = 0; r < kQueries; ++r) {
            contexts[r] = row_context(params, tile, logit_row(params, tile, place.tile_row(r)), n_begin);
            vectors &= has_vectors<kChunk>(params, contexts[r]);
            pieces &= has_pieces(params, contexts[r]);
        }
        vectors = __all_sync(0xffffffffu, vectors);
        pieces = __all_sync(0xffffffffu, pieces);
        // right either way: another way to read the same
        reads = vectors ? Reads::kVectors : pieces ? Reads::kPieces : Reads::kElements;
        keys_before = n_begin;
        keys_behind = tile.seqlen_k - n_begin - kChunk;
        fetch(params, place.lane * kChunk);
    }

    // A chunk behind the tile repeats its end, or is of the next one: nobody asks for it.
    __device__ __forceinline__ void fetch(const AttentionParams& params, int column) {
        if constexpr (!kHasArrays) return;
        // right either way: it only keeps what is read inside the arrays
        const bool are_beside = min(keys_before + column, keys_behind - column) >= kMostBeside;
        if (reads == Reads::kVectors) fetch_rows<Reads::kVectors>(params, column);
        else if (kPieces && reads == Reads::kPieces && are_beside) fetch_rows<Reads::kPieces>(params, column);
        else fetch_rows<Reads::kElements>(params, column);
    }

    template <Reads kReads>
    __device__ __forceinline__ void fetch_rows(const AttentionParams& params, int column) {
#pragma unroll
        for (int r = 0; r < kQueries; ++r) ahead[r].template load<kReads>(params, contexts[r], column);
    }
};

__device__ __forceinline__ void scores_to_logits(const AttentionParams& params, const TileMap& tile, bool at_edge,
                                                 long long n_begin, int column, RowTerms& terms, const Place& place,
                                                 Scores& scores) {
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
        if constexpr (!kOnlyScale) {
            const ScoreScale scale = score_scale(params);
#pragma unroll
            for (int c = 0; c < kChunk; ++c) scores[r][c] = scaled_score(scale, scores[r][c]);
        }
        if constexpr (kHasRowTerms) scores_to_row_logits<true>(terms.contexts[r], terms.ahead[r], column, scores[r]);
        if (at_edge) {  // right either way: all of it is visible
            const ColumnRange visible = visible_columns(params, tile, place.tile_row(r), n_begin);
#pragma unroll
            for (int c = 0; c < kChunk; ++c)
                if (!visible.has(column + c)) scores[r][c] = -infinity();
        }
    }
    if constexpr (kHasRowTerms) terms.fetch(params, column + kLanes * kChunk);
}

__device__ __forceinline__ Accumulator largest_of(const Accumulator (&scores)[kChunk]) {
    Accumulator largest = scores[0];
#pragma unroll
    for (int c = 1; c < kChunk; ++c) largest = larger(largest, scores[c]);
    return largest;
}

// Whether one of the scores is above a limit. One comparison each takes double precision half of a maximum; float has
// an instruction for that.
__device__ __forceinline__ bool any_above(const Accumulator (&scores)[kChunk], Accumulator limit) {
    if constexpr (kIsDouble) {
        bool is_above = false;
#pragma unroll
        for (int c = 0; c < kChunk; ++c) is_above |= scores[c] > limit;
        return is_above;
    } else {
        return largest_of(scores) > limit;
    }
}

// Raises references that scores are above, each for itself: a row's bits do not depend on others.
__device__ __forceinline__ void raise_references(const Scores& scores, Rows& rows) {
    bool is_above[kQueries], any_is = false;
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
        is_above[r] = any_above(scores[r], rows.references[r].limit);
        any_is |= is_above[r];
    }
    if (!any_is) return;  // right either way: none is raised
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
        Reference& reference = rows.references[r];
        if (!is_above[r]) continue;
        const Accumulator earlier = reference.row_max;
        reference.raise(largest_of(scores[r]));
        const Accumulator correction = reference.factor(earlier);
#pragma unroll
        for (int f = 0; f < kSums; ++f) rows.sums[r][f] = multiply_subnormal(rows.sums[r][f], correction);
    }
}

// Logits -> weights, which join the sums of their rows, in the order of values: those that are all 1 give 1.
__device__ __forceinline__ void weigh(const RowPowers& powers, Rows& rows, Scores& scores) {
    raise_references(scores, rows);
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
#pragma unroll
        for (int c = 0; c < kChunk; ++c) scores[r][c] = rows.references[r].weight(powers, scores[r][c]);
        Accumulator sum = scores[r][0];
#pragma unroll
        for (int c = 1; c < kChunk; ++c) sum += scores[r][c];
        rows.sums[r][kHeadDimV] += sum;
    }
}

// O += P V
__device__ __forceinline__ void accumulate(const SharedTiles& shared, int column, const Scores& weights, Rows& rows) {
#pragma unroll
    for (int f = 0; f < kHeadDimV; ++f) {
        Accumulator v[kChunk];
        read_chunk(v, &shared.v[f][column]);
#pragma unroll
        for (int r = 0; r < kQueries; ++r) {
            Accumulator value = multiply_subnormal(weights[r][0], v[0]);
#pragma unroll
            for (int c = 1; c < kChunk; ++c) value = multiply_add_subnormal(weights[r][c], v[c], value);
            rows.sums[r][f] = multiply_add_subnormal(value, Accumulator(1), rows.sums[r][f]);
        }
    }
}

__device__ __forceinline__ void store_rows(const AttentionParams& params, const TileMap& tile, const Place& place,
                                           const Rows& rows) {
    constexpr int kGroup = kVectorLoads ? kVector : 1;
    static_assert(kHeadDimV % kGroup == 0);
    if (place.lane != 0) return;  // right either way: the others have the same
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
        const Row row = row_at(params, tile, place.tile_row(r));
        if (!row.valid) continue;
        const FinishedRow finished =
            finish_row(params, tile, row, rows.references[r].largest_logit(), rows.sums[r][kHeadDimV]);
        store_lse(params, tile, row, finished);
        char* out = output_row(params, tile, row);
#pragma unroll
        for (int f = 0; f < kHeadDimV; f += kGroup) {
            Accumulator values[kGroup];
#pragma unroll
            for (int g = 0; g < kGroup; ++g)
                values[g] =
                    divide_subnormal(multiply_subnormal(rows.sums[r][f + g], finished.multiplier), finished.divisor);
            store_output(params, out, f, values);
        }
    }
}

__device__ __forceinline__ void attention_forward(const AttentionParams& params, SharedTiles& shared) {
    if (threadIdx.x < 32) map_block(params, shared.tile, shared.keys);
    __syncthreads();
    const TileMap& tile = shared.tile;
    if (tile.num_rows == 0) return;

    const Place place(threadIdx.x);
    const TileKeys keys = shared.keys;
    Rows rows;
    load_queries(params, tile, place, rows);
    const RowPowers powers(threadIdx.x % 32);
    RowsTotal totals[2];
    int count = 0;
#pragma unroll 1
    for (long long n_begin = keys.any.begin, first = n_begin; n_begin < keys.any.end;) {
        const int num_keys = keys.count_from(n_begin);
        const bool at_edge = keys.at_edge(n_begin, kBlockN);
        __syncthreads();
        load(shared.k, tile.k, params.k_strides, params.head_dim, n_begin, num_keys);
        load(shared.v, tile.v, params.v_strides, params.head_dim_v, n_begin, num_keys);
        RowTerms terms;
        if constexpr (kHasRowTerms) terms.begin(params, tile, place, n_begin);
        __syncthreads();
#pragma unroll 1
        for (int first_column = 0; first_column < num_keys; first_column += kLanes * kChunk) {
            const int column = first_column + place.lane * kChunk;
            Scores scores;
            score(shared, column, rows, scores);
            scores_to_logits(params, tile, at_edge, n_begin, column, terms, place, scores);
            weigh(powers, rows, scores);
            accumulate(shared, column, scores, rows);
        }
        n_begin += kBlockN;
        const bool is_end = n_begin >= keys.any.end;
        if (n_begin - first == kKeysPerSum || is_end) {
            join_totals(rows, totals, count++, is_end);
            first = n_begin;
        }
    }
    merge_lanes(rows);
    store_rows(params, tile, place, rows);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kMinBlocks)
    cuflash_forward_points(const __grid_constant__ cuflash::AttentionParams params) {
    extern __shared__ __align__(16) char shared_memory[];
    cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedTiles*>(shared_memory));
}
