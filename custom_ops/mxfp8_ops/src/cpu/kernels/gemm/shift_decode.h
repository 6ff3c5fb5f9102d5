// Elements become float32 by shifts alone: the sign goes to the top, exponent and mantissa below it, and the result is
// the element's value times 2^-bias_gap. INT8 codes become float32 by conversion. A register of bytes gives four
// registers of floats, element 4 l + i in lane l of register i.
//
// Subnormal elements become subnormal floats. They are correct, but a processor may take 150 cycles to multiply one. So
// the caller looks for them, with all_plain for many elements and look_at for a step, and calls `lift` for steps that
// have them. NaN and Inf become numbers.
#pragma once
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "../common/simd.h"

namespace mxfp8::MXFP8_ISA {

typedef int16_t Shorts __attribute__((vector_size(sizeof(Vec))));
typedef int32_t Ints __attribute__((vector_size(sizeof(Vec))));
// Not a memcpy to an element of an array: where that is a single register, GCC 12 loads, stores and loads again.
MXFP8_INLINE Ints load_ints(const void* from) {
  Ints ints;
  std::memcpy(&ints, from, sizeof ints);
  return ints;
}
typedef uint8_t Bytes __attribute__((vector_size(sizeof(Vec))));
typedef int8_t SignedBytes __attribute__((vector_size(sizeof(Vec))));

constexpr int kDecoded = int(sizeof(Vec));  // elements decoded at once

template <class F>
struct Shift {
  static constexpr int right = 1 + F::mantissa_bits;
  static constexpr uint32_t mask = 0x80000000 | (0x7fu << (24 - right));
  static constexpr int bias_gap = F::is_integer ? -F::mantissa_bits : 127 - F::bias;
  static constexpr int subnormals = (1 << F::mantissa_bits) - 1;  // codes 1 .. this
  static constexpr uint8_t special = 0x80 | (F::max_code + 1);    // codes with the sign set from here on: NaN, Inf
};

// The smaller, and the larger, of each two bytes. x86 needs the intrinsics: GCC 12 compiles `a < b ? a : b` to
// comparisons and selections.
MXFP8_INLINE Bytes smaller(Bytes a, Bytes b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Bytes>(_mm512_min_epu8(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Bytes>(_mm256_min_epu8(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<Bytes>(_mm_min_epu8(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return a < b ? a : b;
#endif
}
MXFP8_INLINE Bytes larger(Bytes a, Bytes b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Bytes>(_mm512_max_epu8(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Bytes>(_mm256_max_epu8(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<Bytes>(_mm_max_epu8(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return a > b ? a : b;
#endif
}

MXFP8_INLINE bool any_less(SignedBytes bytes, int8_t limit) {
#if defined(__AVX512BW__)
  return _mm512_cmplt_epi8_mask(reinterpret_cast<__m512i>(bytes), _mm512_set1_epi8(limit)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8(reinterpret_cast<__m256i>(bytes < limit)) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_epi8(reinterpret_cast<__m128i>(bytes < limit)) != 0;
#else
  uint64_t masks[kDecoded / 8], any = 0;
  const auto less = bytes < limit;
  std::memcpy(masks, &less, sizeof masks);
  for (const uint64_t part : masks) any |= part;
  return any != 0;
#endif
}

MXFP8_INLINE Bytes load_bytes(const uint8_t* elements) {
  Bytes bytes;
  std::memcpy(&bytes, elements, sizeof bytes);
  return bytes;
}

// Whether all elements are normal numbers: the elements of codes(0) to codes(Count - 1).
template <class F, int Count, class Codes>
MXFP8_INLINE bool all_plain(const Codes& codes) {
  if (F::is_integer) return true;
  constexpr int specials = 0x80 - int(F::max_code + 1);
  Bytes least = Bytes{} + uint8_t(0x7f);
#pragma GCC unroll 16
  for (int i = 0; i < Count; ++i) {
    // NaN and Inf become the smallest numbers, then comes zero, then subnormal codes.
    least = smaller(least, (codes(i) + uint8_t(specials)) & uint8_t(0x7f));
  }
  return !any_less(reinterpret_cast<SignedBytes>(least), int8_t(specials + 1 + Shift<F>::subnormals));
}

// Whether all elements are normal numbers or zeros: for elements where all_plain is false.
template <class F, int Count, class Codes>
MXFP8_INLINE bool all_plain_or_zero(const Codes& codes) {
  Bytes least = Bytes{} + uint8_t(0xff), most = {};
  for (int i = 0; i < Count; ++i) {
    const Bytes magnitude = codes(i) & uint8_t(0x7f);
    least = smaller(least, magnitude - uint8_t(1));  // zero becomes the largest
    most = larger(most, magnitude);
  }
  const Bytes turned = least - uint8_t(0x80), flipped = uint8_t(0x7f) - most;
  return !any_less(reinterpret_cast<SignedBytes>(turned), int8_t(-128 + Shift<F>::subnormals)) &&
         !any_less(reinterpret_cast<SignedBytes>(flipped), int8_t(0x7f - F::max_code));
}

// Collects codes in `specials`, see Shift::special. Returns whether a code is subnormal.
template <class F>
MXFP8_INLINE bool look_at(Bytes codes, Bytes* specials) {
  if (F::is_integer) return false;
  const Bytes signed_codes = codes | uint8_t(0x80);
  *specials = larger(*specials, signed_codes);
  // After the subtraction of 1, zero is the largest signed byte, and subnormal codes are the smallest signed bytes.
  return any_less(reinterpret_cast<SignedBytes>(signed_codes - uint8_t(1)), int8_t(-128 + Shift<F>::subnormals));
}

// Whether there is a NaN or Inf among the codes that look_at collected.
template <class F>
MXFP8_INLINE bool any_special(Bytes specials) {
  if (F::is_integer) return false;
  uint64_t masks[kDecoded / 8], any = 0;
  const auto special = specials >= Shift<F>::special;
  std::memcpy(masks, &special, sizeof masks);
  for (const uint64_t part : masks) any |= part;
  return any != 0;
}

// The floats of kDecoded elements, times 2^-bias_gap.
template <class F>
MXFP8_INLINE void decode_step(Bytes codes, Vec* out) {
  if constexpr (F::is_integer) {
    const Ints words = reinterpret_cast<Ints>(codes);
    for (int i = 0; i < 4; ++i) out[i] = __builtin_convertvector((words << (24 - 8 * i)) >> 24, Vec);
    return;
  }
  const Shorts bytes = reinterpret_cast<Shorts>(codes);
  const Ints odd = reinterpret_cast<Ints>(bytes >> Shift<F>::right);
  const Ints even = reinterpret_cast<Ints>((bytes << 8) >> Shift<F>::right);
  constexpr int32_t mask = int32_t(Shift<F>::mask);
  out[0] = reinterpret_cast<Vec>((even << 16) & mask);
  out[1] = reinterpret_cast<Vec>((odd << 16) & mask);
  out[2] = reinterpret_cast<Vec>(even & mask);
  out[3] = reinterpret_cast<Vec>(odd & mask);
}

constexpr int kLift = 3;  // 2^kLift times the smallest element, times 2^-bias_gap, is a normal float in either format

// Multiplies floats by 2^kLift, without a subnormal operand or result.
MXFP8_INLINE void lift(Vec* values) {
  const Ints first_normal = Ints{} + (1 << 23), power = Ints{} + ((kLift + 1) << 23);
  for (int i = 0; i < 4; ++i) {
    const Ints bits = reinterpret_cast<Ints>(values[i]), magnitude = bits & int32_t(kMagnitude);
    const Vec subnormal = reinterpret_cast<Vec>(magnitude + power) - reinterpret_cast<Vec>(power);
    const Ints normal = magnitude + (kLift << 23);
    const Ints lifted = magnitude < first_normal ? reinterpret_cast<Ints>(subnormal) : normal;
    values[i] = reinterpret_cast<Vec>(lifted | (bits ^ magnitude));
  }
}

}  // namespace mxfp8::MXFP8_ISA
