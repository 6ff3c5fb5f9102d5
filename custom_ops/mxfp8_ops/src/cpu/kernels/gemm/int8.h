// INT8 elements, their scales, and their dot products. On x86: of bytes (VPDPBUSD), at four times the rate of float32;
// in the set avx2, which lacks that instruction, of pairs of 16-bit integers (VPMADDWD), at up to twice the rate of
// float32. On Arm: of signed bytes, by SDOT, or by SMMLA at twice the rate of SDOT.
#pragma once
#include "shift_decode.h"

#if defined(__AVX512VNNI__)
#define MXFP8_DOTS_OF_BYTES "vpdpbusd"
#elif defined(__AVXVNNI__) || defined(MXFP8_EMULATED_DOTS)
#define MXFP8_DOTS_OF_BYTES "%{vex%} vpdpbusd"
#endif

namespace mxfp8::MXFP8_ISA {

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int64_t kIntWord = 8;  // elements along K that lie together in a panel
#else
constexpr int64_t kIntWord = 4;
#endif
// Scales whose products are normal float32 numbers, and finite with any sum of a block.
constexpr uint32_t kLowestScale = 127 - 57, kHighestScale = 127 + 46;
constexpr int kElementBits = INT8::mantissa_bits;  // an element is its code times 2^-6

#if defined(__aarch64__)
using Factor = int8_t;  // the type that dot products multiply
#elif defined(MXFP8_DOTS_OF_BYTES)
using Factor = int8_t;

// Adds products of four bytes to sums. The instruction itself: with its intrinsic GCC 12 keeps sums in memory.
MXFP8_INLINE void add_dots(Ints unsigned_bytes, Ints signed_bytes, Ints* sums) {
#if defined(MXFP8_EMULATED_DOTS)
  *sums = reinterpret_cast<Ints>(vnni_emulation::dpbusd(reinterpret_cast<__m256i>(*sums),
                                                        reinterpret_cast<__m256i>(unsigned_bytes),
                                                        reinterpret_cast<__m256i>(signed_bytes)));
#else
  __asm__(MXFP8_DOTS_OF_BYTES " %2, %1, %0" : "+v"(*sums) : "v"(unsigned_bytes), "v"(signed_bytes));
#endif
}
#else
using Factor = int16_t;

// Adds products of two 16-bit integers to sums.
MXFP8_INLINE void add_dots(Ints a, Ints b, Ints* sums) {
  *sums += reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
#endif

// Sums may begin with a number whose mantissa has room for their bits: its exponent is kSumBits above the exponent of
// an integer.
constexpr int kSumBits = 23;
constexpr uint32_t kHalf = 0x400000;  // and the middle of its binade

// Bytes of packed A for each value: the bytes of a factor, and a few for each block.
constexpr int64_t kPackedBytes = int64_t(sizeof(Factor)) + 1;

// The scale of a block of A, times 2^-6; 0 for a block of zeros.
struct Int8Scale {
  float value;
  bool fits;
};
MXFP8_INLINE Int8Scale int8_scale(uint32_t code, const uint8_t* elements, int64_t count) {
  if (__builtin_expect(code >= kLowestScale && code <= kHighestScale, 1)) {
    return {float_of((code - kElementBits) << 23), true};
  }
  if (code == uint32_t(kScaleNan)) return {float_of(kQuietNan), true};
  uint8_t any = 0;
  for (int64_t i = 0; i < (count < kBlock ? count : kBlock); ++i) any |= elements[i];
  return {0.0f, any == 0};
}

}  // namespace mxfp8::MXFP8_ISA
