#include "routes.h"

namespace mxfp8::cuda {
namespace {

constexpr int64_t bit(Kind kind) { return int64_t(1) << kind; }
constexpr int64_t kElements = bit(kKinds) - bit(kValueKinds), kE4M3Only = bit(kE4M3), kWide = bit(kF32) | bit(kF16);
constexpr int64_t kExact = bit(kBF16) | kElements;  // what bfloat16 tensor cores multiply exactly, apart from scales
constexpr int64_t kAll = kWide | kExact;            // that the kernels look out for
constexpr int64_t kMxfp8 = bit(kE4M3) | bit(kind_of(MXFP8_E5M2));  // what Blackwell multiplies

// clang-format off
// The first row that fits wins.
//
// skinny        gemm_skinny.cu: reads the packed weight once, bfloat16 tensor cores; for few rows.
// block_scaled  cuBLASLt: the MXFP8 product of Blackwell's tensor cores; swizzle_scales.cu lays out the scales.
// large         dequantize.cu to bfloat16, then cuBLASLt; gemm_float32.cu repairs it if bfloat16 could not hold an
//               operand.
// slices        gemm_skinny.cu on 64 rows at a time, if cuBLASLt is missing or refuses.
// parts         bfloat16_parts.cu: a float32 is the sum of three bfloat16 values, a float16 of two; a row above
//               multiplies them, three (two) rows for each row of x, and finish.cu adds up. gemm_float32.cu repairs what
//               is not finite. For few rows, `skinny` does all of that itself.
// float32       gemm_float32.cu: ordinary cores, anything else.
constexpr mxfp8_cuda_route kRoutes[kRows] = {
    // name          from    M     N %  whole   x          b          cuBLASLt
    //                                 blocks
    {"skinny",         80,  64,      1,    1,    kAll,      kElements, 0},
    {"block_scaled",  100,   0,     16,    1,    kMxfp8,    kE4M3Only, MXFP8_BLOCK_SCALED_PRODUCTS},
    {"large",          80,   0,      1,    0,    kExact,    kElements, MXFP8_BFLOAT16_PRODUCTS},
    {"slices",         80,   1 << 24, 1,   1,    kExact,    kElements, 0},
    {"parts",          80,   0,      1,    0,    kWide,     kElements, 0},
    {"float32",        80,   0,      1,    0,    kAll,      kElements, 0},
};
// clang-format on

bool fits(Row at, const mxfp8_cuda_place& place, const Shape& s) {
  const mxfp8_cuda_route& row = kRoutes[at];
  if (place.capability < row.capability) return false;
  if ((row.cublaslt & ~place.cublaslt) != 0) return false;
  if ((row.x_kinds & bit(s.x)) == 0 || (row.b_kinds & bit(s.b)) == 0) return false;
  if (row.most_rows != 0 && s.m * parts_of(s.x) > row.most_rows) return false;
  const bool whole = s.k % 32 == 0 && s.k < (1 << 25) && s.x_aligned && s.b_aligned;
  if (s.n % row.n_multiple != 0 || (row.whole_blocks && !whole)) return false;
  if (at == kLarge) return s.m <= INT32_MAX && s.n <= INT32_MAX && s.k <= INT32_MAX;  // cuBLASLt's kernels count so
  if (at == kParts) {
    const Row of_parts = choose(unforced(place), {kBF16, s.b, parts_of(s.x) * s.m, s.n, s.k, true, s.b_aligned});
    return of_parts != kFloat32 && of_parts != kNoRow;
  }
  return true;
}

}  // namespace

Kind value_kind(int64_t dtype) {
  const Kind kind = kind_of(dtype);
  if (is_element(kind)) {
    throw Error(MXFP8_BAD_ARGUMENT, "an element format for values", "float32, float16 or bfloat16",
                "report this as a bug");
  }
  return kind;
}

Kind element_kind(int64_t format) {
  const Kind kind = kind_of(format);
  if (!is_element(kind)) {
    throw Error(MXFP8_BAD_ARGUMENT, "a value dtype for elements", "an element format", "report this as a bug");
  }
  return kind;
}

Row choose(const mxfp8_cuda_place& place, const Shape& s) {
  if (s.k == 0) return kFloat32;  // nothing but the bias
  for (int row = 0; row < kRows; ++row) {
    if (place.forced != 0 && place.forced != row + 1) continue;
    if (fits(Row(row), place, s)) return Row(row);
  }
  return kNoRow;
}

}  // namespace mxfp8::cuda

extern "C" MXFP8_API const mxfp8_cuda_route* mxfp8_cuda_route_at(int row) {
  return row >= 0 && row < mxfp8::cuda::kRows ? &mxfp8::cuda::kRoutes[row] : nullptr;
}
