// Rows of words to columns.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace mxfp8::MXFP8_ISA {

constexpr int64_t kStep = 16;  // rows that are transposed at a time

#if defined(__AVX512F__)
// 16 rows of 16 words; strides are in bytes.
MXFP8_INLINE void transpose_tile(const char* from, int64_t stride, char* to, int64_t to_stride) {
  const auto lane = [](const char* at) { return _mm_loadu_ps(reinterpret_cast<const float*>(at)); };
  const auto pairs = [](Vec x) { return _mm512_castps_pd(x); };
  for (int part = 0; part < 4; ++part) {  // four columns
    Vec rows[4];                          // row i, i + 4, i + 8 and i + 12, four words of each
    for (int i = 0; i < 4; ++i) {
      const char* at = from + i * stride + 16 * part;
      rows[i] = _mm512_castps128_ps512(lane(at));
      rows[i] = _mm512_insertf32x4(rows[i], lane(at + 4 * stride), 1);
      rows[i] = _mm512_insertf32x4(rows[i], lane(at + 8 * stride), 2);
      rows[i] = _mm512_insertf32x4(rows[i], lane(at + 12 * stride), 3);
    }
    const Vec a = _mm512_unpacklo_ps(rows[0], rows[1]), b = _mm512_unpackhi_ps(rows[0], rows[1]);
    const Vec c = _mm512_unpacklo_ps(rows[2], rows[3]), d = _mm512_unpackhi_ps(rows[2], rows[3]);
    char* out = to + 4 * part * to_stride;
    _mm512_storeu_pd(out, _mm512_unpacklo_pd(pairs(a), pairs(c)));
    _mm512_storeu_pd(out + to_stride, _mm512_unpackhi_pd(pairs(a), pairs(c)));
    _mm512_storeu_pd(out + 2 * to_stride, _mm512_unpacklo_pd(pairs(b), pairs(d)));
    _mm512_storeu_pd(out + 3 * to_stride, _mm512_unpackhi_pd(pairs(b), pairs(d)));
  }
}
#elif defined(__AVX2__)
// 8 rows of 8 words; strides are in bytes.
MXFP8_INLINE void transpose_tile(const char* from, int64_t stride, char* to, int64_t to_stride) {
  const auto lane = [](const char* at) { return _mm_loadu_ps(reinterpret_cast<const float*>(at)); };
  const auto pairs = [](Vec x) { return _mm256_castps_pd(x); };
  const auto put = [](char* at, __m256d x) { _mm256_storeu_pd(reinterpret_cast<double*>(at), x); };
  for (int part = 0; part < 2; ++part) {  // four columns
    Vec rows[4];                          // row i and i + 4, four words of each
    for (int i = 0; i < 4; ++i) {
      const char* at = from + i * stride + 16 * part;
      rows[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(lane(at)), lane(at + 4 * stride), 1);
    }
    const Vec a = _mm256_unpacklo_ps(rows[0], rows[1]), b = _mm256_unpackhi_ps(rows[0], rows[1]);
    const Vec c = _mm256_unpacklo_ps(rows[2], rows[3]), d = _mm256_unpackhi_ps(rows[2], rows[3]);
    char* out = to + 4 * part * to_stride;
    put(out, _mm256_unpacklo_pd(pairs(a), pairs(c)));
    put(out + to_stride, _mm256_unpackhi_pd(pairs(a), pairs(c)));
    put(out + 2 * to_stride, _mm256_unpacklo_pd(pairs(b), pairs(d)));
    put(out + 3 * to_stride, _mm256_unpackhi_pd(pairs(b), pairs(d)));
  }
}
#else
// kLanes rows of kLanes words; strides are in bytes.
MXFP8_INLINE void transpose_tile(const char* from, int64_t stride, char* to, int64_t to_stride) {
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) std::memcpy(to + j * to_stride + i * 4, from + i * stride + j * 4, 4);
  }
}
#endif

// kStep rows of `count` words to `count` rows of kStep; strides are in words of 4 bytes.
MXFP8_INLINE void transpose_rows(const void* rows, int64_t stride, int64_t count, void* columns, int64_t to_stride) {
  const auto* from = static_cast<const char*>(rows);
  auto* to = static_cast<char*>(columns);
  int64_t j = 0;
#if defined(__AVX2__)
  for (; j + kLanes <= count; j += kLanes) {
    for (int64_t i = 0; i < kStep; i += kLanes) {
      transpose_tile(from + (i * stride + j) * 4, 4 * stride, to + (j * to_stride + i) * 4, 4 * to_stride);
    }
  }
#endif
  for (; j < count; ++j) {
    for (int64_t i = 0; i < kStep; ++i) std::memcpy(to + (j * to_stride + i) * 4, from + (i * stride + j) * 4, 4);
  }
}

}  // namespace mxfp8::MXFP8_ISA
