// The dot products of AVX-VNNI in instructions of AVX2, for processors without it: where CMake's MXFP8_EMULATE_VNNI is
// on, the kernels of avx2_vnni are compiled with this header before all others. After Intel's manual: neither
// instruction saturates.
#pragma once
#include <immintrin.h>

#define MXFP8_EMULATED_DOTS

namespace vnni_emulation {

// Adds products of four unsigned and signed bytes.
inline __m256i dpbusd(__m256i sums, __m256i unsigned_bytes, __m256i signed_bytes) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(unsigned_bytes, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(signed_bytes, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(unsigned_bytes, 8), _mm256_srai_epi16(signed_bytes, 8));
  return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}
// Adds products of two 16-bit integers.
inline __m256i dpwssd(__m256i sums, __m256i pairs, __m256i other_pairs) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, other_pairs));
}

}  // namespace vnni_emulation
