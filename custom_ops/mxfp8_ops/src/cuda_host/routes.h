// The dispatch table: which row of it a product takes.
#pragma once
#include "mxfp8_cuda_plan.h"

namespace mxfp8::cuda {

// Positions of dtypes and element formats in tables: their bits in mxfp8_cuda_route, and how kernels.h counts them.
enum Kind { kF32, kF16, kBF16, kE4M3, kE5M2 };

// Throws std::invalid_argument for an unknown code, or one that is no value dtype or no element format.
Kind kind_of(int64_t code);
Kind value_kind(int64_t dtype);
Kind element_kind(int64_t format);

inline bool is_element(Kind kind) { return kind >= kE4M3; }

// How many rows of bfloat16 a row of x is.
inline int64_t parts_of(Kind kind) { return kind == kF32 ? 3 : kind == kF16 ? 2 : 1; }

constexpr int64_t kSkinnyRows = 64;  // the most rows of bfloat16 that gemm_skinny takes

enum Row { kNoRow = -1, kSkinny, kBlockScaled, kFold, kFused, kLarge, kSlices, kParts, kFloat32, kRows };

// What decides about a product.
struct Shape {
  Kind x, b;
  int64_t m, n, k;
  bool x_aligned, b_aligned;  // to 16 bytes
  bool wide;                  // b is kept in bfloat16 too
};

// The first row that fits, or the forced one; kNoRow if there is none.
Row choose(const mxfp8_cuda_place&, const Shape&);

}  // namespace mxfp8::cuda
