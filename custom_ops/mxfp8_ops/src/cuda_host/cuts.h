// How gemm_skinny and gemm_fused are cut up: the rows of the weight of a thread block, and the parts of K.
#pragma once
#include "experimental/variants.h"
#include "routes.h"

namespace mxfp8::cuda {

struct SkinnyCut {
  int tiles_log2;   // 1, 2, 4 or 8 tiles of eight rows of x, or of its parts
  bool few;         // how many of a block's eight warps share x, each with 16 rows of the weight; see skinny_warps
  int64_t blocks;   // thread blocks across N
  int64_t splits;   // thread blocks that share the rows and each take a part of K; finish.cu adds up their sums
  bool four_ahead;  // variant of 2 tiles
};

struct FusedCut {
  int64_t blocks;  // 1 or 2: how many 64 rows of the weight each of a thread block's two warpgroups takes
  int64_t splits;  // as above
  int64_t grid;
  Variant variant;
};

constexpr int64_t kFusedTokens = 128;  // rows of x that a thread block takes
// The sizes of a product's x and y, as measured.h counts them.
inline Sizes sizes_of(const mxfp8_cuda_place& place, const Shape& s) {
  return {place.capability, place.processors, row_of(s.x).code, s.m * parts_of(s.x), s.n};
}

constexpr int kFusedShared = 1024 + 6 * (int(kFusedTokens) * 128 + 8);  // stages of 64 values of K, a barrier each,
                                                                        // and what aligning them takes
SkinnyCut cut_skinny(const mxfp8_cuda_place&, const Shape&);            // M parts_of(x) <= kSkinnyRows
FusedCut cut_fused(const mxfp8_cuda_place&, const Shape&);

}  // namespace mxfp8::cuda
