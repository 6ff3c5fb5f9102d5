// The few vector operations that the float32 gemm needs, on the widest registers of the instruction set that this is
// compiled for.
//
// halves_to_floats decodes 32 elements through float16. An E5M2 code is the upper byte of a float16. An E4M3 code
// becomes a float16, 2^-8 too small, when its magnitude moves a bit down. The conversion of subnormal numbers is
// correct, at full speed. INT8 codes are converted as integers.
#pragma once
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "codec.h"

namespace mxfp8::MXFP8_ISA {

#define MXFP8_CHECK(NAME, ...)                                                   \
  static_assert(NAME::is_integer || NAME::bias == (NAME::has_infinity ? 15 : 7), \
                "halves_to_floats does not know it yet");
MXFP8_ELEMENT_FORMATS(MXFP8_CHECK)
#undef MXFP8_CHECK

// The factor that halves_to_floats needs is the scale times this number.
template <class F>
constexpr float kHalfFactor = F::is_integer     ? 1.0f / (1 << F::mantissa_bits)
                              : F::has_infinity ? 1.0f
                                                : 256.0f;

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kLanes = 16;
constexpr int kTileRows = 6;     // 6 x 4 accumulators, 4 + 1 operands: 29 of 32 registers
constexpr int kFloatRows = 12;   // rows of a tile in gemm_f32.cpp: 12 x 2 accumulators, 2 + 1 operands
constexpr int kSkinnyGroup = 8;  // rows of A that gemm_skinny_f32.cpp multiplies at once
MXFP8_INLINE Vec zero() { return _mm512_setzero_ps(); }
MXFP8_INLINE Vec all_of(float x) { return _mm512_set1_ps(x); }  // straight from memory: adding takes a port of FMA
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

// The scales of the 64 elements from k on, a lane for each four elements: one block per half.
MXFP8_INLINE Vec spread_scales(const float* scales, int64_t k) {
  const float* two = scales + k / kBlock;
  return _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(two[0]), _mm512_set1_ps(two[1]));
}

template <class F>
MXFP8_INLINE void halves_to_floats(const uint8_t* elements, float factor, float* out) {
  if constexpr (F::is_integer) {
    for (int i = 0; i < kBlock; i += kLanes) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(elements + i));
      _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), _mm512_set1_ps(factor)));
    }
    return;
  }
  const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(elements)));
  __m512i halves = _mm512_slli_epi16(codes, 8);
  if (!F::has_infinity) halves = _mm512_and_si512(_mm512_srai_epi16(halves, 1), _mm512_set1_epi16(short(0xbfff)));
  const Vec low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  const Vec high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  _mm512_storeu_ps(out, _mm512_mul_ps(low, _mm512_set1_ps(factor)));
  _mm512_storeu_ps(out + 16, _mm512_mul_ps(high, _mm512_set1_ps(factor)));
}
MXFP8_INLINE bool any_nan_code(const uint8_t* elements) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(elements));
  return _mm256_cmpeq_epi8_mask(_mm256_or_si256(codes, _mm256_set1_epi8(char(0x80))), _mm256_set1_epi8(-1)) != 0;
}

#elif defined(__AVX2__)

using Vec = __m256;
constexpr int kLanes = 8;
constexpr int kTileRows = 3;   // 3 x 4 accumulators, 3 + 1 operands: all 16 registers
constexpr int kFloatRows = 6;  // 6 x 2 accumulators, 2 + 1 operands
constexpr int kSkinnyGroup = 6;
MXFP8_INLINE Vec zero() { return _mm256_setzero_ps(); }
MXFP8_INLINE Vec all_of(float x) { return _mm256_set1_ps(x); }
MXFP8_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
MXFP8_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
MXFP8_INLINE void store_sums(const Vec* v, float* out, bool accumulate) {
  const Vec all = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  _mm_storeu_ps(out, accumulate ? _mm_add_ps(_mm_loadu_ps(out), sums) : sums);
}

MXFP8_INLINE Vec spread_scales(const float* scales, int64_t k) { return _mm256_set1_ps(scales[k / kBlock]); }

template <class F>
MXFP8_INLINE void halves_to_floats(const uint8_t* elements, float factor, float* out) {
  if constexpr (F::is_integer) {
    for (int i = 0; i < kBlock; i += kLanes) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(elements + i));
      _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_set1_ps(factor)));
    }
    return;
  }
  for (int i = 0; i < kBlock; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(elements + i));
    __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
    if (!F::has_infinity) halves = _mm256_and_si256(_mm256_srai_epi16(halves, 1), _mm256_set1_epi16(short(0xbfff)));
    const Vec low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    const Vec high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(low, _mm256_set1_ps(factor)));
    _mm256_storeu_ps(out + i + 8, _mm256_mul_ps(high, _mm256_set1_ps(factor)));
  }
}
MXFP8_INLINE bool any_nan_code(const uint8_t* elements) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(elements));
  const __m256i ones = _mm256_set1_epi8(-1);
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_or_si256(codes, _mm256_set1_epi8(char(0x80))), ones)) != 0;
}

#else  // any machine: the vector extension of GCC and Clang

typedef float Vec __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kTileRows = 2;
constexpr int kSkinnyGroup = 4;
MXFP8_INLINE Vec zero() { return Vec{}; }
MXFP8_INLINE Vec all_of(float x) { return Vec{x, x, x, x}; }
MXFP8_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
#if defined(__aarch64__)
constexpr int kFloatRows = 8;  // 8 x 2 accumulators, 2 + 8 operands: 26 of 32 registers
MXFP8_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
#else
constexpr int kFloatRows = 6;
MXFP8_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
#endif
MXFP8_INLINE void store_sums(const Vec* v, float* out, bool accumulate) {
  for (int i = 0; i < 4; ++i) {
    const float sum = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
    out[i] = accumulate ? out[i] + sum : sum;
  }
}
MXFP8_INLINE Vec spread_scales(const float* scales, int64_t k) { return Vec{} + scales[k / kBlock]; }

#endif

MXFP8_INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

}  // namespace mxfp8::MXFP8_ISA
