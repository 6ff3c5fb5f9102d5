// E4M3 elements as 16-bit integers, and their dot products (VPDPWSSD), for processors that multiply pairs of integers
// at twice the rate of float32.
//
// An element times 2^Bits, Bits <= 6, is an integer below 2^15, unless it is smaller than 2^(3 - Bits). Such a `small`
// element counts as zero here. The elements of a register split into those at even places and those at odd places.
#pragma once
#include "shift_decode.h"

#if defined(__AVX512F__)
#define MXFP8_DOTS_OF_INTEGERS "vpdpwssd"
#else
#define MXFP8_DOTS_OF_INTEGERS "%{vex%} vpdpwssd"
#endif

namespace mxfp8::MXFP8_ISA {

constexpr int kMostBits = 6;
constexpr int first_integer(int bits) { return (10 - bits) << E4M3::mantissa_bits; }  // magnitude codes from here on

// An element is an integer, 8 to 15, times 2^(its exponent code - 10). Returns the factor of that integer.
template <int Bits>
constexpr int power_of(int exponent) {
  return 1 << exponent >> (10 - Bits);
}

// Adds products of pairs to sums. The code is the instruction itself: with its intrinsic, GCC 12 keeps sums in memory,
// which takes twice the time.
MXFP8_INLINE void add_dots(Ints pairs, Ints other_pairs, Ints* sums) {
#if defined(MXFP8_EMULATED_DOTS)
  *sums = reinterpret_cast<Ints>(vnni_emulation::dpwssd(
      reinterpret_cast<__m256i>(*sums), reinterpret_cast<__m256i>(pairs), reinterpret_cast<__m256i>(other_pairs)));
#else
  __asm__(MXFP8_DOTS_OF_INTEGERS " %2, %1, %0" : "+v"(*sums) : "v"(pairs), "v"(other_pairs));
#endif
}

// A block's integers.
struct BlockIntegers {
  __m256i even, odd;
};
template <int Bits>
MXFP8_INLINE BlockIntegers integers_of_block(__m256i codes) {
  const auto powers = [](int shift) MXFP8_INLINE_LAMBDA {
    const auto byte = [shift](int exponent) { return char(power_of<Bits>(exponent) >> shift & 0xff); };
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(byte(0), byte(1), byte(2), byte(3), byte(4), byte(5), byte(6),
                                                     byte(7), byte(8), byte(9), byte(10), byte(11), byte(12), byte(13),
                                                     byte(14), byte(15)));
  };
  const __m256i exponents = _mm256_and_si256(_mm256_srli_epi16(codes, E4M3::mantissa_bits), _mm256_set1_epi8(0x0f));
  const __m256i low = _mm256_shuffle_epi8(powers(0), exponents), high = _mm256_shuffle_epi8(powers(8), exponents);
  const __m256i eighths = _mm256_or_si256(_mm256_and_si256(codes, _mm256_set1_epi8(7)), _mm256_set1_epi8(8));
  const __m256i lower = _mm256_set1_epi16(0xff);
  const __m256i even_powers = _mm256_or_si256(_mm256_and_si256(lower, low), _mm256_slli_epi16(high, 8));
  const __m256i odd_powers = _mm256_or_si256(_mm256_srli_epi16(low, 8), _mm256_andnot_si256(lower, high));
  const __m256i even = _mm256_mullo_epi16(_mm256_and_si256(lower, eighths), even_powers);
  const __m256i odd = _mm256_mullo_epi16(_mm256_srli_epi16(eighths, 8), odd_powers);
  // The sign of a word is the sign of its upper byte; a word is zero only if its upper byte is zero.
  return {_mm256_sign_epi16(even, _mm256_slli_epi16(codes, 8)), _mm256_sign_epi16(odd, codes)};
}

// Bits for the elements of a block whose magnitude codes are 1 to last.
MXFP8_INLINE uint32_t small_elements(__m256i codes, int last) {
  const __m256i less = _mm256_sub_epi8(_mm256_and_si256(codes, _mm256_set1_epi8(0x7f)), _mm256_set1_epi8(1));
  return uint32_t(
      _mm256_movemask_epi8(_mm256_cmpeq_epi8(less, _mm256_min_epu8(less, _mm256_set1_epi8(char(last - 1))))));
}
MXFP8_INLINE uint32_t nan_elements(__m256i codes) {
  const __m256i magnitudes = _mm256_or_si256(codes, _mm256_set1_epi8(char(0x80)));
  return uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(magnitudes, _mm256_set1_epi8(-1))));
}

// A register's integers, as pairs.
struct Pairs {
  Ints even, odd;
};

#if defined(__AVX512F__)
// Both bytes of an integer, from tables by magnitude code. The upper byte is `kOther` if the element is not an integer.
constexpr uint8_t kOther = 0x80;
template <int Bits>
struct IntegerTables {
  alignas(64) uint8_t bytes[2][128];
  constexpr IntegerTables() : bytes{} {
    for (int code = 1; code < 128; ++code) {
      const bool none = code < first_integer(Bits) || code > int(E4M3::max_code);
      const int value = none ? kOther << 8 : (8 | (code & 7)) * power_of<Bits>(code >> E4M3::mantissa_bits);
      bytes[0][code] = uint8_t(value);
      bytes[1][code] = uint8_t(value >> 8);
    }
  }
};
template <int Bits>
constexpr IntegerTables<Bits> integer_tables{};

template <int Bits>
struct IntegerDecoder {
  __m512i tables[2][2];
  MXFP8_INLINE_MEMBER IntegerDecoder() {
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) tables[i][j] = _mm512_load_si512(integer_tables<Bits>.bytes[i] + 64 * j);
    }
  }
  // `others` gets a bit for each element that is not an integer: small or NaN. In the result a small element is zero, a
  // NaN is any number.
  MXFP8_INLINE_MEMBER Pairs operator()(Bytes elements, uint64_t* others) const {
    const auto codes = reinterpret_cast<__m512i>(elements);
    const __m512i low = _mm512_permutex2var_epi8(tables[0][0], codes, tables[0][1]);
    __m512i high = _mm512_permutex2var_epi8(tables[1][0], codes, tables[1][1]);
    const __mmask64 whole = _mm512_testn_epi8_mask(high, _mm512_set1_epi8(char(kOther)));
    high = _mm512_maskz_mov_epi8(whole, high);
    *others = ~whole;
    const __m512i lower = _mm512_set1_epi16(0xff), none = _mm512_setzero_si512();
    const __m512i even = _mm512_ternarylogic_epi32(lower, low, _mm512_slli_epi16(high, 8), 0xca);  // lower ? low : high
    const __m512i odd = _mm512_ternarylogic_epi32(lower, _mm512_srli_epi16(low, 8), high, 0xca);
    const __mmask32 even_signs = _mm512_movepi16_mask(_mm512_slli_epi16(codes, 8));
    return {reinterpret_cast<Ints>(_mm512_mask_sub_epi16(even, even_signs, none, even)),
            reinterpret_cast<Ints>(_mm512_mask_sub_epi16(odd, _mm512_movepi16_mask(codes), none, odd))};
  }
};
MXFP8_INLINE uint32_t lanes_of(Ints mask) { return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)); }
#else
template <int Bits>
struct IntegerDecoder {
  MXFP8_INLINE_MEMBER Pairs operator()(Bytes elements, uint64_t* others) const {
    const auto codes = reinterpret_cast<__m256i>(elements);
    const BlockIntegers integers = integers_of_block<Bits>(codes);
    *others = small_elements(codes, first_integer(Bits) - 1) | nan_elements(codes);
    return {reinterpret_cast<Ints>(integers.even), reinterpret_cast<Ints>(integers.odd)};
  }
};
MXFP8_INLINE uint32_t lanes_of(Ints mask) {
  return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(reinterpret_cast<__m256i>(mask))));
}
#endif

// Small elements times 2^kSmallBits, integers below 2^7; all other elements are zero.
constexpr int kSmallBits = 9;
template <int Bits>
MXFP8_INLINE Pairs small_integers(Bytes codes) {
  static_assert(Bits >= 5, "of four binades");
  const Bytes magnitudes = codes & uint8_t(0x7f);
  const auto above = [&](uint8_t least) MXFP8_INLINE_LAMBDA { return larger(magnitudes, Bytes{} + least) - least; };
  // Up to code 16 an element is its code, then its slope doubles every eight.
  const Bytes values = magnitudes + above(16) + 2 * above(24) + 4 * above(32);
  const Bytes small = values & reinterpret_cast<Bytes>(magnitudes < uint8_t(first_integer(Bits)));
  const Shorts signs = reinterpret_cast<Shorts>(codes), words = reinterpret_cast<Shorts>(small);
  const auto with_sign = [](Shorts value, Shorts sign) MXFP8_INLINE_LAMBDA {
    return reinterpret_cast<Ints>((value ^ (sign >> 15)) - (sign >> 15));
  };
  return {with_sign(words & 0xff, signs << 8), with_sign(words >> 8, signs)};
}

// A bit for each NaN.
MXFP8_INLINE uint64_t nan_bits(Bytes codes) {
#if defined(__AVX512F__)
  return _mm512_cmpeq_epi8_mask(reinterpret_cast<__m512i>(codes | uint8_t(0x80)), _mm512_set1_epi8(-1));
#else
  return nan_elements(reinterpret_cast<__m256i>(codes));
#endif
}

// The values of kLanes elements, also small ones, times 2^-8; NaN becomes any number.
MXFP8_INLINE Vec values_of(const uint8_t* codes) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m256i halves = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8), 1);
  return _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(short(0xbfff))));
#else
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const __m128i halves = _mm_srai_epi16(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8), 1);
  return _mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16(short(0xbfff))));
#endif
}

}  // namespace mxfp8::MXFP8_ISA
