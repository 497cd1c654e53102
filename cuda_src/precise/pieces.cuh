// Keys and values on their way into shared memory in pieces, for warps that multiply keys and features of their own.
#pragma once

#include "common/load.cuh"
#include "common/mask.cuh"
#include "precise/layout.cuh"

namespace cuflash {

// 16 keys and 16 features, row by row. Units of 16 bytes are swizzled, so that lanes meet different banks whether they
// read neighbouring features of their keys, or one feature of every other key.
struct alignas(128) Piece {
    static constexpr int kKeys = 16, kFeatures = 16, kRowBytes = kFeatures * 8;
    char bytes[kKeys * kRowBytes];

    __device__ __forceinline__ static int offset(int key, int unit) { return key * kRowBytes + (unit ^ key % 8) * 16; }
    __device__ __forceinline__ const Vector16& pair(int key, int unit) const {
        return *reinterpret_cast<const Vector16*>(&bytes[offset(key, unit)]);
    }
    __device__ __forceinline__ double value(int key, int feature) const {
        return pair(key, feature / 2).values[feature % 2];
    }
    // A lane that copies by vectors begins here: keys lane / 8 and every fourth from there, of which it has a unit.
    __device__ __forceinline__ static long long part(const Strides& strides, int lane) {
        return kVectorLoads ? lane / 8 * strides.row + lane % 8 * 16 : 0;
    }
    // Bytes from a piece to the one of the next features.
    __device__ __forceinline__ static long long step(const Strides& strides) {
        return kVectorLoads ? kRowBytes : kFeatures * strides.column;
    }
    // Copies the first `num_keys` and `num_features`, which may be more than there are here or none; others become
    // zeros: they may hold anything, and 0 x NaN is NaN. Called by a warp.
    __device__ __forceinline__ void load(const char* source, const Strides& strides, int num_keys, int num_features,
                                         int lane) {
        if constexpr (kVectorLoads) {
            const SharedAddress target = shared_address(bytes);
            const int first = offset(lane / 8, lane % 8);
            const int keys_left = (lane % 8 * 2 < num_features ? num_keys : 0) - lane / 8;
#pragma unroll
            for (int i = 0; i < kKeys / 4; ++i) {
                cp_async_16(target + (first ^ i % 2 * 64) + i * 4 * kRowBytes, source, i * 4 < keys_left);
                source += 4 * strides.row;
            }
        } else {
            const int feature = lane % kFeatures;
#pragma unroll 1
            for (int key = lane / kFeatures; key < kKeys; key += 32 / kFeatures) {
                double* unit = reinterpret_cast<double*>(&bytes[offset(key, feature / 2)]);
                unit[feature % 2] = key < num_keys && feature < num_features
                                        ? load_bits<double>(source + key * strides.row + feature * strides.column)
                                        : 0;
            }
        }
    }
};

// Pieces on their way: as many as there are buffers for.
constexpr int kPiecesAhead = 4;
static_assert(kSteps >= kPiecesAhead);

// What a warp multiplies in a tile of keys, in this order: its own keys, all features; then all keys, 16 at a time,
// each with its own features. When a piece has been multiplied, a later one begins to arrive where it was.
struct Feed {
    const AttentionParams& params;
    Piece (&pieces)[kPiecesAhead];
    int lane, share;
    const char *k, *v;   // the lane's part of its keys of this tile, and of all of them, of the warp's first features
    long long num_keys;  // from this tile on
    int current = 0;     // of the pieces

    __device__ __forceinline__ Feed(const AttentionParams& params, const TileMap& tile, const KeyRange& keys,
                                    Piece (*of_warps)[kPiecesAhead], const Place& place)
        : params(params),
          pieces(of_warps[uniform(place.share)]),
          lane(place.lane),
          share(uniform(place.share)),
          num_keys(keys.end - keys.begin) {
        k = tile.k + (keys.begin + share * kWarpKeys) * params.k_strides.row + Piece::part(params.k_strides, lane);
        if constexpr (kHasValues)
            v = tile.v + keys.begin * params.v_strides.row + share * Piece::step(params.v_strides) +
                Piece::part(params.v_strides, lane);
    }
    // Groups of 16 keys that the tile has.
    __device__ __forceinline__ int num_groups() const {
        constexpr int kAll = kBlockN / Piece::kKeys;
        // right either way: weights of other keys are 0
        return num_keys < kBlockN ? (static_cast<int>(num_keys) + Piece::kKeys - 1) / Piece::kKeys : kAll;
    }
    __device__ __forceinline__ bool has_keys() const { return share * kWarpKeys < num_keys; }
    __device__ __forceinline__ void next_tile() {
        num_keys -= kBlockN;
        k += kBlockN * params.k_strides.row;
        if constexpr (kHasValues) v += kBlockN * params.v_strides.row;
    }

    // Waits for the current piece.
    __device__ __forceinline__ const Piece& arrive() const {
        cp_async_wait_group<kPiecesAhead - 1>();
        __syncwarp();
        return pieces[current];
    }
    // Features from step x 16 on, of the warp's keys in this tile or the next one, arrive where the current piece was,
    // with which the warp is through.
    __device__ __forceinline__ void replace_by_k(int step, bool of_next_tile) {
        const long long keys_left = num_keys - (of_next_tile ? kBlockN : 0) - share * kWarpKeys;
        const char* source = k + step * Piece::step(params.k_strides);
        if (of_next_tile) source += kBlockN * params.k_strides.row;
        // Else the piece is not waited for: what comes next into its place could meet zeros that are on their way.
        if (keys_left > 0)
            pieces[current].load(source, params.k_strides, keys_of_piece(keys_left),
                                 params.head_dim - step * Piece::kFeatures, lane);
        turn();
    }
    // Whether the warp has a piece of V beside its first ones: some have one less than others.
    __device__ __forceinline__ bool has_values(int piece) const {
        // right either way: it spares a look at the warp
        return (piece + 1) * kWarpsPerRow * Piece::kFeatures <= kHeadDimV ||
               (piece * kWarpsPerRow + share) * Piece::kFeatures < kHeadDimV;
    }
    __device__ __forceinline__ void replace_by_v(int group, int piece) {
        const int step = piece * kWarpsPerRow;
        const char* source = v + group * Piece::kKeys * params.v_strides.row + step * Piece::step(params.v_strides);
        pieces[current].load(source, params.v_strides, keys_of_piece(num_keys - group * Piece::kKeys),
                             params.head_dim_v - (step + share) * Piece::kFeatures, lane);
        turn();
    }
    // By what comes behind the last features of K, and `index` pieces.
    __device__ __forceinline__ void replace_behind_k(int index) {
        const int num_values = kHasValues ? num_groups() * kPiecesV : 0;
        if (index < num_values) replace_by_v(index / kPiecesV, index % kPiecesV);
        else replace_by_k(index - num_values, true);
    }

  private:
    __device__ __forceinline__ static int keys_of_piece(long long keys_left) {
        // right either way: it only keeps the cast in range
        return static_cast<int>(min(keys_left, static_cast<long long>(Piece::kKeys)));
    }
    __device__ __forceinline__ void turn() {
        cp_async_commit();
        current = (current + 1) % kPiecesAhead;
    }
};

}  // namespace cuflash
