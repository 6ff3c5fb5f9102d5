// c [rows, n] = or += a [rows, k] . b [k, n], n whole vectors, k counted in words of a and b: floats, or pairs of
// bfloat16, values 2 i and 2 i + 1 along k in one word. Strides are in words.
#pragma once
#include "../common/simd.h"
#include "../gemm/gemm.h"

namespace mxfp8::MXFP8_ISA {

// The second operand: `load` gives the words of columns column..column + kLanes - 1.
struct Floats {
  const float* b;
  int64_t stride;
  MXFP8_INLINE_MEMBER Vec load(int64_t k, int64_t column) const { return MXFP8_ISA::load(b + k * stride + column); }
  static MXFP8_INLINE_MEMBER Vec add(Vec a, Vec b, Vec sum) { return multiply_add(a, b, sum); }
};
#if defined(__AVX512BF16__)
MXFP8_INLINE Vec add_pairs(Vec a, Vec b, Vec sum) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
struct Pairs : Floats {
  static MXFP8_INLINE_MEMBER Vec add(Vec a, Vec b, Vec sum) { return add_pairs(a, b, sum); }
};
#endif

template <class B, int R, int N>
MXFP8_INLINE void multiply_tile(const float* a, int64_t a_stride, const B& b, int64_t column, int64_t k, float* c,
                                int64_t c_stride, bool accumulate) {
  Vec sums[R][N];
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < N; ++j) sums[i][j] = zero();
  }
  for (int64_t at = 0; at < k; ++at) {
    Vec row[N];
    for (int j = 0; j < N; ++j) row[j] = b.load(at, column + j * kLanes);
    for (int i = 0; i < R; ++i) {
      const Vec value = all_of(a[i * a_stride + at]);
      for (int j = 0; j < N; ++j) sums[i][j] = B::add(value, row[j], sums[i][j]);
    }
  }
#pragma GCC unroll 12  // otherwise the sums go through memory
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      float* to = c + i * c_stride + column + j * kLanes;
      store(to, accumulate ? load(to) + sums[i][j] : sums[i][j]);
    }
  }
}

template <class B, int N>
MXFP8_NOINLINE void multiply_columns(const float* a, int64_t a_stride, const B& b, int64_t column, int64_t k, float* c,
                                     int64_t c_stride, int64_t rows, bool accumulate) {
  constexpr int kMost = N == 4 ? kTileRows : 2 * kTileRows;  // the registers have room for its sums
  for (int64_t i = 0; i < rows; i += kMost) {
    with_rows<kMost>(rows - i, [&](auto r) {
      multiply_tile<B, decltype(r)::value, N>(a + i * a_stride, a_stride, b, column, k, c + i * c_stride, c_stride,
                                              accumulate);
    });
  }
}

template <class B>
MXFP8_INLINE void multiply(const float* a, int64_t a_stride, const B& b, int64_t k, float* c, int64_t c_stride,
                           int64_t rows, int64_t n, bool accumulate) {
  for (int64_t j = 0; j < n;) {
    const int64_t vectors = (n - j) / kLanes;
    const auto columns = vectors >= 4   ? multiply_columns<B, 4>
                         : vectors >= 2 ? multiply_columns<B, 2>
                                        : multiply_columns<B, 1>;
    columns(a, a_stride, b, j, k, c, c_stride, rows, accumulate);
    j += (vectors >= 4 ? 4 : vectors >= 2 ? 2 : 1) * kLanes;
  }
}

}  // namespace mxfp8::MXFP8_ISA
