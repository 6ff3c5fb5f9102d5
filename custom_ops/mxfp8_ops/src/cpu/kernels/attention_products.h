// c [rows, n] = or += a [rows, k] . b [k, n], n whole vectors, k counted in words of a and b: floats, or pairs of
// bfloat16, values 2 i and 2 i + 1 along k in one word. Strides are in words.
#pragma once
#include "gemm.h"
#include "simd.h"

namespace mxfp8::MXFP8_ISA {

struct Floats {
  static MXFP8_INLINE_MEMBER Vec add(Vec a, Vec b, Vec sum) { return multiply_add(a, b, sum); }
};
#if defined(__AVX512BF16__)
struct Pairs {
  static MXFP8_INLINE_MEMBER Vec add(Vec a, Vec b, Vec sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};
#endif

template <class Words, int R, int N>
MXFP8_INLINE void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t k, float* c,
                                int64_t c_stride, bool accumulate) {
  Vec sums[R][N];
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < N; ++j) sums[i][j] = zero();
  }
  for (int64_t at = 0; at < k; ++at, b += b_stride) {
    Vec row[N];
    for (int j = 0; j < N; ++j) row[j] = load(b + j * kLanes);
    for (int i = 0; i < R; ++i) {
      const Vec value = all_of(a[i * a_stride + at]);
      for (int j = 0; j < N; ++j) sums[i][j] = Words::add(value, row[j], sums[i][j]);
    }
  }
#pragma GCC unroll 12  // or the sums go through memory
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      float* to = c + i * c_stride + j * kLanes;
      store(to, accumulate ? load(to) + sums[i][j] : sums[i][j]);
    }
  }
}

template <class Words, int N>
MXFP8_NOINLINE void multiply_columns(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t k,
                                     float* c, int64_t c_stride, int64_t rows, bool accumulate) {
  constexpr int kMost = N == 4 ? kTileRows : 2 * kTileRows;  // as many sums as there are registers for
  for (int64_t i = 0; i < rows; i += kMost) {
    with_rows<kMost>(rows - i, [&](auto r) {
      multiply_tile<Words, decltype(r)::value, N>(a + i * a_stride, a_stride, b, b_stride, k, c + i * c_stride,
                                                  c_stride, accumulate);
    });
  }
}

template <class Words>
MXFP8_INLINE void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t k, float* c,
                           int64_t c_stride, int64_t rows, int64_t n, bool accumulate) {
  for (int64_t j = 0; j < n;) {
    const int64_t vectors = (n - j) / kLanes;
    const auto columns = vectors >= 4   ? multiply_columns<Words, 4>
                         : vectors >= 2 ? multiply_columns<Words, 2>
                                        : multiply_columns<Words, 1>;
    columns(a, a_stride, b + j, b_stride, k, c + j, c_stride, rows, accumulate);
    j += (vectors >= 4 ? 4 : vectors >= 2 ? 2 : 1) * kLanes;
  }
}

}  // namespace mxfp8::MXFP8_ISA
