// The test for exact bfloat16 products of elements times scales, and the exact sums of columns that fail it. See
// gemm_bf16.cpp.
#pragma once
#include "panel.h"

namespace mxfp8::MXFP8_ISA {

constexpr int kLowestNormal = -126;
constexpr int kStepBf16 = 64;  // elements decoded at once

// The exponent of the lowest bit that an element can have, relative to its scale.
template <class F>
constexpr int kElementExponent = 1 - F::bias - F::mantissa_bits;
// The exponent of the highest bit; the code -128 is a binade above the largest result of encode.
template <class F>
constexpr int kHighestExponent = F::emax + (F::is_integer ? 1 : 0);

// The scales with which every finite element, scaled, is finite and every nonzero one is normal.
template <class F>
constexpr int kMaxScale = 254 - kHighestExponent<F>;
template <class F>
constexpr int kMinScale = 1 - kElementExponent<F>;

// Exponents of the lowest and highest bit in any packed value; NaN and Inf do not count.
struct Extent {
  int lowest = kAllZero, highest = -kAllZero;
  MXFP8_INLINE_MEMBER void add(int low, int high) {
    lowest = low < lowest ? low : lowest;
    highest = high > highest ? high : highest;
  }
};

// Values of dtype D, to be packed as bfloat16.
template <class D>
struct AsBf16 {};

// Calls f(T{}) with the type of A: elements of a format, or values that are, or become, bfloat16.
template <class Call>
MXFP8_INLINE void with_a_format(const GemmArgs& args, const Call& call) {
  if (args.a_scales != nullptr) return with_format(args.a_format, call);
  with_dtype(args.a_format, [&](auto dtype) MXFP8_INLINE_LAMBDA { call(AsBf16<decltype(dtype)>{}); });
}

// Replaces the sums that a panel added to one column of a strip by exact sums. `before` [rows, Columns] is the column
// before that.
template <class F, int Columns>
MXFP8_NOINLINE void correct_column(const GemmArgs& args, int64_t row, int64_t rows, int64_t column, Chunk chunk,
                                   const float* before, float* strip) {
  for (int64_t i = 0; i < rows; ++i) {
    strip[i * kGemmColumns] = before[i * Columns] + exact_dot<F>(args, row + i, column, chunk.k, chunk.count);
  }
}

// Whether elements of B, without their scales, may be multiplied with packed A: every product, and every sum of four,
// must stay in the range of normal floats.
MXFP8_INLINE bool multiplies_codes(const GemmArgs& args, const Extent& extent) {
  bool fits = false;
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    fits = extent.lowest + kElementExponent<F> >= kLowestNormal && extent.highest + kHighestExponent<F> + 4 <= 127;
  });
  return fits;
}

// The smallest scale code of B that keeps every weight normal, and every product with a value of A whose lowest bit has
// this `exponent`.
template <class F>
MXFP8_INLINE int lowest_scale(int exponent) {
  const int needed = 127 + kLowestNormal - exponent - kElementExponent<F>;
  return needed < kMinScale<F> ? kMinScale<F> : needed > 255 ? 255 : needed;
}

// Makes the panels of some columns of a constant weight. They do not depend on A: lowest_scale is applied to them
// later.
MXFP8_INLINE void make_bf16_panels(const GemmArgs& args, int64_t column_begin, int64_t column_end, void* data) {
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    for (int64_t column = column_begin; column < column_end; column += kPanel) {
      make_panel<F>(args, column, 0, kMinScale<F>, kMaxScale<F>, data, [](int64_t, int64_t) {});
    }
  });
}

}  // namespace mxfp8::MXFP8_ISA
