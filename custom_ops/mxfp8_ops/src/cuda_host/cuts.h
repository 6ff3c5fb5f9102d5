// How gemm_skinny is cut up: the rows of the weight of a thread block, and the parts of K.
#pragma once
#include "routes.h"

namespace mxfp8::cuda {

struct SkinnyCut {
  int tiles_log2;  // 1, 2, 4 or 8 tiles of eight rows of x, or of its parts
  bool few;        // how many of a block's eight warps share x, each with 16 rows of the weight; see skinny_warps
  int64_t blocks;  // thread blocks across N
  int64_t splits;  // thread blocks that share the rows and each take a part of K; finish.cu adds up their sums
};

SkinnyCut cut_skinny(const mxfp8_cuda_place&, const Shape&);  // M parts_of(x) <= kSkinnyRows

}  // namespace mxfp8::cuda
