// The dispatch table: which row of it a product takes.
#pragma once
#include <iterator>
#include <string>

#include "../contract.h"
#include "../error.h"
#include "mxfp8_cuda_plan.h"

namespace mxfp8::cuda {

// Position of a dtype among kValueDtypes, then kElementFormats: its bit in mxfp8_cuda_route, and how kernels.h counts.
using Kind = int;
constexpr int kValueKinds = int(std::size(kValueDtypes)), kKinds = kValueKinds + int(std::size(kElementFormats));

constexpr const Dtype& row_of(Kind kind) {
  return kind < kValueKinds ? kValueDtypes[kind] : kElementFormats[kind - kValueKinds];
}
constexpr bool is_element(Kind kind) { return kind >= kValueKinds; }

// Throws Error for an unknown code, or one of the wrong kind.
constexpr Kind kind_of(int64_t code) {
  for (Kind kind = 0; kind < kKinds; ++kind) {
    if (row_of(kind).code == code) return kind;
  }
  throw Error(MXFP8_BAD_ARGUMENT, "dtype " + std::to_string(code), "a code of mxfp8_ops.h", "report this as a bug");
}
Kind value_kind(int64_t dtype);
Kind element_kind(int64_t format);

constexpr Kind kF32 = kind_of(MXFP8_FLOAT32), kF16 = kind_of(MXFP8_FLOAT16), kBF16 = kind_of(MXFP8_BFLOAT16),
               kE4M3 = kind_of(MXFP8_E4M3), kINT8 = kind_of(MXFP8_INT8);

// How many rows of bfloat16 a row of x is.
inline int64_t parts_of(Kind kind) { return kind == kF32 ? 3 : kind == kF16 ? 2 : 1; }

constexpr int64_t kSkinnyRows = 64;  // the most rows of bfloat16 that gemm_skinny takes

enum Row { kNoRow = -1, kSkinny, kBlockScaled, kLarge, kSlices, kParts, kFloat32, kRows };

// The properties of a product that decide its row.
struct Shape {
  Kind x, b;
  int64_t m, n, k;
  bool x_aligned, b_aligned;  // to 16 bytes
};

// The same place, free to take any row.
inline mxfp8_cuda_place unforced(mxfp8_cuda_place place) {
  place.forced = 0;
  return place;
}

// A product of many rows, for questions about a weight.
inline Shape many_rows(Kind x, Kind b, int64_t n, int64_t k, bool b_aligned) {
  return {x, b, kSkinnyRows + 1, n, k, true, b_aligned};
}

// A product, in words.
inline std::string words_of(Kind x, Kind b, int64_t m, int64_t n, int64_t k) {
  return std::string(row_of(x).name) + " times " + row_of(b).name + ", M = " + std::to_string(m) +
         ", N = " + std::to_string(n) + ", K = " + std::to_string(k);
}

// The first row that fits, or the forced one; kNoRow if there is none.
Row choose(const mxfp8_cuda_place&, const Shape&);

}  // namespace mxfp8::cuda
