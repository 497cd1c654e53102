// The register budget: what a thread keeps through a tile of keys, beside output and scores that must be there, and
// what it reads or computes again. A spill costs more than all of it, and the compiler spills first what lives longest.
#pragma once

#include "mma/layout.cuh"

namespace cuflash {

constexpr int kOutputRegisters = 4 * kRowTiles * kFeatureTiles, kScoreRegisters = 4 * kRowTiles * kKeyTiles;
constexpr int kQueryRegisters = 4 * kRowTiles * kStepsK;

// Where registers are few, what is needed once per tile is not kept in them: addresses are computed again, and the
// rows' maxima lie in shared memory.
constexpr int kManyRegisters = kHasArrays ? 80 : kWarpgroups ? 96 : 112;
constexpr bool kFewRegisters =
    kPaged || kStages == 1 || (kWarpsPerRow > 1 ? kHasArrays : kOutputRegisters >= kManyRegisters);

// What follows from the index of a thread is kept, or computed again at every call.
__device__ __forceinline__ Warp place_of_warp() {
    if constexpr (!kFewRegisters) return Warp(threadIdx.x);
    else return Warp(thread_index_again());
}

// Q stays in registers where it takes few and others leave them, else it is read again for every tile of keys.
constexpr bool kKeepQ = kQueryRegisters <= 32 && kOutputRegisters <= 64 && !kHasArrays;
using KeptQueries = Queries[kKeepQ ? kStepsK : 1];

// What a block walks through is a copy in registers, or else read where the block has it.
constexpr bool kKeepWalk = kProducers != 0 || (kWarpsPerRow == 1 && !kFewRegisters && kThreads * kMinBlocks <= 256);

// Warps in step pass by tiles that none of their rows sees, where that does not cost the registers of others.
constexpr bool kSkipUnseen = kStages > 1 && kOutputRegisters + kScoreRegisters <= 160;

// Matrices of V that are on their way from shared memory while as many are multiplied by shared weights: equal parts
// of a warp's features, as large as registers allow.
constexpr int kMatricesV = kFeatureTiles / 2;
constexpr int kMatricesAhead = kStages == 1 || kMatricesV == 7 ? 1 : kMatricesV < 7 ? kMatricesV : 2;

// Rows whose bias and mask are read before the products, of `kRowRegisters` each, from what is left of a thread's
// registers when output, scores and addresses have theirs.
constexpr int kColumnBytes = (kBiasDtype != 0 ? sizeof(ElementOf<kBiasDtype>::Type) : 0) + kHasMask;
constexpr int kRowRegisters = kColumns / kRun * (kHasArrays ? kRun * kColumnBytes / 4 : 1);
constexpr int kRegisters = (65536 / kMinBlocks - 40 * kProducers) / (kThreads - kProducers);
constexpr int kMostRegisters = kWarpgroups ? 216 : 256;
constexpr int kScoresTwice = kWarpgroups ? kScoreRegisters * 3 / 2 : 2 * kScoreRegisters;  // also as operands
constexpr int kRegistersLeft =
    (kRegisters < kMostRegisters ? kRegisters : kMostRegisters) - 16 - kOutputRegisters - kScoresTwice;
constexpr int kMostAhead = kRegistersLeft < 32 ? kRegistersLeft : kWarpsPerRow > 1 ? 24 : 32;
constexpr int kRowsAhead = kRowRegisters >= kMostAhead           ? 1
                           : kRows * kRowRegisters <= kMostAhead ? kRows
                                                                 : kMostAhead / kRowRegisters;

}  // namespace cuflash
