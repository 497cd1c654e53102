// Build-time choices: CUFLASH_* macros from the generated entry file become typed constants. Every macro has a default,
// with which each .cu compiles alone (float16: what all of them take); nothing below this header looks at one.
#pragma once

#define CUFLASH_FLOAT16 1
#define CUFLASH_BFLOAT16 2
#define CUFLASH_FLOAT32 3
#define CUFLASH_FLOAT64 4

#ifndef CUFLASH_DTYPE
#define CUFLASH_DTYPE CUFLASH_FLOAT16
#endif
#ifndef CUFLASH_OUT_DTYPE
#define CUFLASH_OUT_DTYPE CUFLASH_DTYPE
#endif
#ifndef CUFLASH_BIAS_DTYPE  // 0: the call has no bias
#define CUFLASH_BIAS_DTYPE 0
#endif
#ifndef CUFLASH_STATE_DTYPE  // of states before chunks
#define CUFLASH_STATE_DTYPE CUFLASH_DTYPE
#endif
#ifndef CUFLASH_SWAPPED_STATES  // features of v come first
#define CUFLASH_SWAPPED_STATES 0
#endif
#ifndef CUFLASH_HEAD_DIM
#define CUFLASH_HEAD_DIM 64
#endif
#ifndef CUFLASH_HEAD_DIM_V  // 0: the call has no values, and no output
#define CUFLASH_HEAD_DIM_V CUFLASH_HEAD_DIM
#endif
#ifndef CUFLASH_BLOCK_M
#define CUFLASH_BLOCK_M 64
#endif
#ifndef CUFLASH_BLOCK_N
#define CUFLASH_BLOCK_N 64
#endif
#ifndef CUFLASH_THREADS
#define CUFLASH_THREADS 128
#endif
#ifndef CUFLASH_STAGES
#define CUFLASH_STAGES 1
#endif
#ifndef CUFLASH_WARPS_PER_ROW  // warps that share their rows, in kernels where some do
#define CUFLASH_WARPS_PER_ROW 1
#endif
#ifndef CUFLASH_KEY_SHARES  // parts into which the keys of a tile are divided among such warps, where they are
#define CUFLASH_KEY_SHARES 1
#endif
#ifndef CUFLASH_WARPGROUPS  // whether warpgroups multiply (wgmma), one for every 64 rows; other threads load
#define CUFLASH_WARPGROUPS 0
#endif
#ifndef CUFLASH_PRODUCTS  // of pairs of float16 that make one of floats: three, or one, which is what tf32 keeps
#define CUFLASH_PRODUCTS 3
#endif
#ifndef CUFLASH_PREPARED  // whether keys and values are what an earlier launch has made of them
#define CUFLASH_PREPARED 0
#endif
#ifndef CUFLASH_MIN_BLOCKS
#define CUFLASH_MIN_BLOCKS 1
#endif
#ifndef CUFLASH_MASK
#define CUFLASH_MASK 0
#endif
#ifndef CUFLASH_ALIBI
#define CUFLASH_ALIBI 0
#endif
// 0: the call has none. 1: any. Else it is from 1e-15 to 256, and where small scores are capped by a polynomial, this
// is its degree.
#ifndef CUFLASH_SOFTCAP
#define CUFLASH_SOFTCAP 0
#endif
#ifndef CUFLASH_VARLEN
#define CUFLASH_VARLEN 0
#endif
#ifndef CUFLASH_QUERY_OFFSET  // whether each batch has one of its own, in an array; lengths likewise
#define CUFLASH_QUERY_OFFSET 0
#endif
#ifndef CUFLASH_SEQLENS_K
#define CUFLASH_SEQLENS_K 0
#endif
#ifndef CUFLASH_PAGED  // whether keys lie in pages
#define CUFLASH_PAGED 0
#endif
#ifndef CUFLASH_WALKS_ON  // whether blocks, as many as the GPU holds, go on to other tiles of rows
#define CUFLASH_WALKS_ON 0
#endif
#ifndef CUFLASH_STACKED  // whether partial results to merge lie one behind the other in one array
#define CUFLASH_STACKED 1
#endif
#ifndef CUFLASH_PARTS  // how many of them there may be, a power of two; with 8: any number
#define CUFLASH_PARTS 8
#endif
#ifndef CUFLASH_CARRY  // what segments make of states is wanted, not outputs
#define CUFLASH_CARRY 0
#endif
#ifndef CUFLASH_ALIGNMENT
#define CUFLASH_ALIGNMENT 16
#endif

// How long functions are compiled: once, but inline where warpgroups choose how many registers they have, as beside a
// call the compiler would give all warps as many as the call takes.
#if CUFLASH_WARPGROUPS
#define CUFLASH_ONE_COPY __forceinline__
#else
#define CUFLASH_ONE_COPY __noinline__
#endif

namespace cuflash {

constexpr int kDtype = CUFLASH_DTYPE;
constexpr int kOutDtype = CUFLASH_OUT_DTYPE;
constexpr int kBiasDtype = CUFLASH_BIAS_DTYPE;
constexpr int kStateDtype = CUFLASH_STATE_DTYPE;
constexpr bool kSwappedStates = CUFLASH_SWAPPED_STATES;
// Head dimensions as the tiles hold them; the arrays' own may be smaller and the rest is zero.
constexpr int kHeadDim = CUFLASH_HEAD_DIM;
constexpr bool kHasValues = CUFLASH_HEAD_DIM_V != 0;
constexpr int kHeadDimV = kHasValues ? CUFLASH_HEAD_DIM_V : 16;  // else of types that are there, but not used
constexpr int kBlockM = CUFLASH_BLOCK_M;
constexpr int kBlockN = CUFLASH_BLOCK_N;
constexpr int kThreads = CUFLASH_THREADS;
constexpr int kStages = CUFLASH_STAGES;  // buffers for tiles of keys
constexpr int kWarpsPerRow = CUFLASH_WARPS_PER_ROW;
constexpr int kKeyShares = CUFLASH_KEY_SHARES;
constexpr bool kWarpgroups = CUFLASH_WARPGROUPS;                      // multiply 64 rows each
constexpr int kProducers = kWarpgroups ? kThreads - 2 * kBlockM : 0;  // threads that do not multiply
constexpr int kProducts = CUFLASH_PRODUCTS;
constexpr bool kPrepared = CUFLASH_PREPARED;
constexpr int kMinBlocks = CUFLASH_MIN_BLOCKS;
constexpr bool kHasMask = CUFLASH_MASK;
constexpr bool kHasAlibi = CUFLASH_ALIBI;
constexpr int kCapDegree = CUFLASH_SOFTCAP;
constexpr bool kHasSoftcap = kCapDegree != 0;
constexpr bool kAddsTerms = kBiasDtype != 0 || kHasAlibi;  // to scaled scores
constexpr bool kHasRowTerms = kAddsTerms || kHasMask;      // logits need more than their scores
constexpr bool kHasArrays = kBiasDtype != 0 || kHasMask;   // one is read for every logit
constexpr bool kVarlen = CUFLASH_VARLEN;
constexpr bool kHasOffsets = CUFLASH_QUERY_OFFSET;
constexpr bool kHasLengths = CUFLASH_SEQLENS_K;
constexpr bool kPaged = CUFLASH_PAGED;
constexpr bool kWalksOn = CUFLASH_WALKS_ON;
constexpr bool kCarry = CUFLASH_CARRY;
constexpr int kParts = CUFLASH_PARTS;
constexpr bool kStacked = CUFLASH_STACKED;  // otherwise each is an array of its own
// 16: q, k, v and out move in 16-byte vectors. 1: elements lie on no boundary. Otherwise: element by element.
constexpr int kAlignment = CUFLASH_ALIGNMENT;
constexpr bool kVectorLoads = kAlignment == 16;
constexpr bool kAlignedElements = kAlignment != 1;

}  // namespace cuflash
