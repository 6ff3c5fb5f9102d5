// Matrices of bytes, turned in registers.
#pragma once
#include "codec.h"

#if defined(__AVX2__)
#include <immintrin.h>

namespace mxfp8::MXFP8_ISA {

constexpr int kTurnRows = 16;

#if defined(__AVX512F__)

// Turns 16 rows of 16 groups of codes: row g of the result holds group g of every row.
MXFP8_INLINE void turn(__m512i* rows) {
  __m512i pairs[kTurnRows], quads[kTurnRows];
  for (int i = 0; i < kTurnRows; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  // quads[i + j], i = 0, 4, 8, 12: 128-bit lane l holds group 4 l + j of rows i..i+3.
  for (int i = 0; i < kTurnRows; i += 4) {
    for (int j = 0; j < 2; ++j) {
      quads[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
      quads[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
    }
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i low[2] = {_mm512_shuffle_i32x4(quads[j], quads[4 + j], 0x88),        // lanes 0, 2 of rows 0-7
                            _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0x88)};  // and of rows 8-15
    const __m512i high[2] = {_mm512_shuffle_i32x4(quads[j], quads[4 + j], 0xdd),       // lanes 1, 3
                             _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0xdd)};
    rows[j] = _mm512_shuffle_i32x4(low[0], low[1], 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(low[0], low[1], 0xdd);
    rows[4 + j] = _mm512_shuffle_i32x4(high[0], high[1], 0x88);
    rows[12 + j] = _mm512_shuffle_i32x4(high[0], high[1], 0xdd);
  }
}
#endif

// Turns 16 rows of 16 bytes.
MXFP8_INLINE void turn(__m128i* rows) {
  __m128i other[kTurnRows];
  // Each pass interleaves row i with row i + 8: a rotation of the eight bits that say where a byte is.
  for (int pass = 0; pass < 4; ++pass) {
    for (int i = 0; i < kTurnRows / 2; ++i) {
      other[2 * i] = _mm_unpacklo_epi8(rows[i], rows[i + kTurnRows / 2]);
      other[2 * i + 1] = _mm_unpackhi_epi8(rows[i], rows[i + kTurnRows / 2]);
    }
    for (int i = 0; i < kTurnRows; ++i) rows[i] = other[i];
  }
}

}  // namespace mxfp8::MXFP8_ISA

#endif
