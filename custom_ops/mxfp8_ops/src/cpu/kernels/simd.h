// The few vector operations the float32 gemm needs, on the widest registers of the instruction set being compiled.
#pragma once
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "codec.h"

namespace mxfp8::MXFP8_ISA {

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kLanes = 16;
constexpr int kTileRows = 6;  // 6 x 4 accumulators, 4 + 1 operands: 29 of 32 registers
MXFP8_INLINE Vec zero() { return _mm512_setzero_ps(); }
MXFP8_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
MXFP8_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

// Adds up the lanes of four vectors: transposes within 128-bit lanes while adding, then adds those lanes.
MXFP8_INLINE __m128 sum_lanes(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const Vec all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m512d halves = _mm512_castps_pd(all);
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm256_castpd_ps(_mm512_extractf64x4_pd(halves, 1)));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
MXFP8_INLINE void store_sums(const Vec* v, float* out, bool accumulate) {
  const __m128 sums = sum_lanes(v[0], v[1], v[2], v[3]);
  _mm_storeu_ps(out, accumulate ? _mm_add_ps(_mm_loadu_ps(out), sums) : sums);
}

#elif defined(__AVX2__)

using Vec = __m256;
constexpr int kLanes = 8;
constexpr int kTileRows = 3;  // 3 x 4 accumulators, 3 + 1 operands: all 16 registers
MXFP8_INLINE Vec zero() { return _mm256_setzero_ps(); }
MXFP8_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
MXFP8_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
MXFP8_INLINE void store_sums(const Vec* v, float* out, bool accumulate) {
  const Vec all = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  _mm_storeu_ps(out, accumulate ? _mm_add_ps(_mm_loadu_ps(out), sums) : sums);
}

#else  // any machine: the vector extension of GCC and Clang

typedef float Vec __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kTileRows = 2;
MXFP8_INLINE Vec zero() { return Vec{}; }
MXFP8_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
MXFP8_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
MXFP8_INLINE void store_sums(const Vec* v, float* out, bool accumulate) {
  for (int i = 0; i < 4; ++i) {
    const float sum = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
    out[i] = accumulate ? out[i] + sum : sum;
  }
}

#endif

}  // namespace mxfp8::MXFP8_ISA
