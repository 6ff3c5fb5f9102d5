// Elements to bfloat16, and A packed as bfloat16. 64 elements at a time: both bytes of a value come from tables indexed
// by the element code (VPERMI2B). A scale is added to the exponent of every value except zeros.
#pragma once
#include "bf16_exact.h"

namespace mxfp8::MXFP8_ISA {

constexpr int kScaleValues = 512;  // elements whose 16 scales are loaded at once

// Two registers of 32 values each: `even` has the values of the codes at even places, `odd` the others. A 32-bit lane
// of four codes along K becomes a pair along K in the same lane of each register.
struct Values {
  __m512i even, odd;
};

// 64 values from their lower and upper bytes.
MXFP8_INLINE Values joined(__m512i low, __m512i high) {
  const __m512i upper = _mm512_set1_epi16(short(0xff00));
  return {_mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 8), low, upper, 0xf4),   // | (low & ~upper)
          _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, upper, 0xf8)};  // | (high & upper)
}

// 64 values from two halves in order.
MXFP8_INLINE Values dealt(const __m512i* half) {
  const auto narrow = [](__m512i first, __m512i second) {  // the lower halves of 32-bit lanes
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(first)), _mm512_cvtepi32_epi16(second), 1);
  };
  return {narrow(half[0], half[1]), narrow(_mm512_srli_epi32(half[0], 16), _mm512_srli_epi32(half[1], 16))};
}

// The bytes of the 128 magnitudes, computed once.
template <class F>
struct Tables {
  alignas(64) uint8_t low[128], high[128];
  constexpr Tables() : low{}, high{} {
    for (int code = 0; code < 128; ++code) {
      const int field = code >> F::mantissa_bits, fraction = code & ((1 << F::mantissa_bits) - 1);
      int exponent = field + 127 - F::bias, mantissa = fraction << (7 - F::mantissa_bits);
      if (field == 0) {  // subnormal: shift until the leading bit is where it is implied
        exponent += 1;
        for (; mantissa != 0 && mantissa < 128; mantissa *= 2) exponent -= 1;
        mantissa -= 128;
      }
      int bits = exponent * 128 + mantissa;
      if (code == 0) bits = 0;
      if (code > int(F::max_code)) bits = F::has_infinity && fraction == 0 ? 0x7f80 : 0x7fc0;
      low[code] = uint8_t(bits);
      high[code] = uint8_t(bits >> 8);
    }
  }
};
template <class F>
constexpr Tables<F> kTables{};

// _mm512_permutex2var_epi8, with the result in the register of the index. With the intrinsic, GCC 12 copies the operand
// that it overwrites: a copy takes the time of half a dot product.
MXFP8_INLINE __m512i look_up(__m512i index, __m512i low, __m512i high) {
  asm("vpermi2b %2, %1, %0" : "+v"(index) : "v"(low), "vm"(high));
  return index;
}

template <class F>
class Decoder {
 public:
  Decoder() {
    for (int i = 0; i < 2; ++i) {
      low_[i] = _mm512_load_si512(kTables<F>.low + 64 * i);
      high_[i] = _mm512_load_si512(kTables<F>.high + 64 * i);
    }
  }

  // Without scales; NaN and Inf come out as such. `highest` collects the upper bytes of all magnitudes: see
  // has_special.
  MXFP8_INLINE_MEMBER Values values(__m512i codes, __m512i* highest) const {
    asm("" : "+v"(codes));  // otherwise GCC loads them once per use, and they may cross cache lines
    if constexpr (F::is_integer) {
      // A sign and a magnitude. 128, which the tables take for 0, is 2 = 0x4000.
      const __m512i magnitude = _mm512_abs_epi8(codes), two = _mm512_srli_epi16(magnitude, 1);
      const __m512i low = look_up(magnitude, low_[0], low_[1]);
      __m512i high = look_up(magnitude, high_[0], high_[1]);
      high = _mm512_ternarylogic_epi32(high, two, _mm512_set1_epi8(0x40), 0xf8);  // high | (two & 0x40)
      return joined(low, _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(char(0x80)), 0xf8));
    }
    const __m512i magnitude = look_up(codes, high_[0], high_[1]);
    *highest = _mm512_max_epu8(*highest, magnitude);
    // magnitude | (codes & 0x80)
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(char(0x80)), 0xf8);
    const __m512i low = look_up(codes, low_[0], low_[1]);
    return joined(low, high);
  }

  // Whether a NaN or Inf was among the codes whose upper bytes were collected.
  MXFP8_INLINE_MEMBER static bool has_special(__m512i highest) {
    return !F::is_integer && _mm512_cmpeq_epi8_mask(highest, _mm512_set1_epi8(0x7f)) != 0;
  }

 private:
  __m512i low_[2], high_[2];  // bytes of the 128 magnitudes
};

// Adds `exponents`, see exponents_of, to the nonzero values; -0 becomes 0.
MXFP8_INLINE __m512i add_exponents(__m512i values, __m512i exponents) {
  const __mmask32 nonzero = _mm512_test_epi16_mask(values, _mm512_set1_epi16(0x7fff));
  return _mm512_maskz_add_epi16(nonzero, values, exponents);
}

// The numbers that up to 16 scale codes add to the exponent of a bfloat16: each is in a pair of equal 16-bit lanes.
MXFP8_INLINE __m512i exponents_of(__m128i scales) {
  const __m512i shifted = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_cvtepu8_epi32(scales), _mm512_set1_epi32(127)), 7);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, shifted, _mm512_slli_epi32(shifted, 16));
}

MXFP8_INLINE __m128i load_scales(const uint8_t* scales, int64_t count) {
  return _mm_maskz_loadu_epi8(count >= 16 ? __mmask16(0xffff) : __mmask16((1u << count) - 1), scales);
}
MXFP8_INLINE __m512i load_codes(const uint8_t* elements, int64_t count) {
  if (count >= 64) return _mm512_loadu_si512(elements);
  return _mm512_maskz_loadu_epi8((uint64_t(1) << count) - 1, elements);
}

// Which of 16 blocks have a scale outside lowest..highest.
MXFP8_INLINE __mmask16 outside(__m128i scales, int lowest, int highest) {
  return _mm_cmplt_epu8_mask(scales, _mm_set1_epi8(char(lowest))) |
         _mm_cmpgt_epu8_mask(scales, _mm_set1_epi8(char(highest)));
}

// Whether a block is all zeros and its scale is a number: then its scale does not matter.
MXFP8_INLINE bool is_zero(const uint8_t* elements, int64_t count, uint8_t scale) {
  const __mmask32 present = count >= kBlock ? ~__mmask32(0) : (__mmask32(1) << count) - 1;
  const __m256i codes = _mm256_maskz_loadu_epi8(present, elements);
  return scale != kScaleNan && _mm256_test_epi8_mask(codes, _mm256_set1_epi8(0x7f)) == 0;
}

// 2^(s - 127) of 16 scale codes.
MXFP8_INLINE __m512 scale_values(__m128i scales) {
  const __m512i codes = _mm512_cvtepu8_epi32(scales);
  __m512i bits = _mm512_slli_epi32(codes, 23);
  bits = _mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(codes, codes), _mm512_set1_epi32(0x00400000));
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(kScaleNan)),
                               _mm512_set1_epi32(kQuietNan));
  return _mm512_castsi512_ps(bits);
}

// _mm512_dpbf16_ps, without the copies of sums that GCC 12 adds to it.
MXFP8_INLINE __m512 dot_product(__m512 sum, __m512i a, __m512i b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "v"(a));
  return sum;
}
// The lanes of steps 0, 1, .. of 16 blocks: each takes two, one per half.
MXFP8_INLINE __m512i lanes_of_step(int64_t step) {
  const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  return _mm512_add_epi32(first, _mm512_set1_epi32(int(2 * step)));
}

// Like add_exponents, for any elements; a NaN scale makes all values of its half NaN.
MXFP8_INLINE __m512i scale_any(__m512i values, __m512i exponents, const uint8_t* scales) {
  const __m512i infinity = _mm512_set1_epi16(0x7f80);
  const __m512i magnitudes = _mm512_and_si512(values, _mm512_set1_epi16(0x7fff));
  const __mmask32 changes =
      _mm512_test_epi16_mask(magnitudes, magnitudes) & _mm512_cmplt_epi16_mask(magnitudes, infinity);
  const uint32_t nan = (scales[0] == kScaleNan ? 0xffffu : 0) | (scales[1] == kScaleNan ? 0xffff0000u : 0);
  return _mm512_mask_mov_epi16(_mm512_mask_add_epi16(values, changes, values, exponents), nan,
                               _mm512_set1_epi16(0x7fc0));
}

// The smallest of 16 codes.
MXFP8_INLINE int smallest(__m128i codes) {
  const __m128i pairs = _mm_and_si128(_mm_min_epu8(codes, _mm_srli_epi16(codes, 8)), _mm_set1_epi16(0xff));
  return _mm_cvtsi128_si32(_mm_minpos_epu16(pairs)) & 0xff;
}

// Decodes up to kScaleValues elements of a row of A into steps `stride` values apart. False if a scale does not fit
// bfloat16. With `Any`, NaN scales, scale codes 0 of all-zero blocks, and NaN or Inf elements are allowed; without it,
// these return false too.
template <class F, bool Any>
MXFP8_INLINE bool pack_some(const Decoder<F>& decoder, const uint8_t* elements, const uint8_t* scales, int64_t count,
                            int64_t stride, uint16_t* out, Extent* extent) {
  const int64_t blocks = blocks_of(count);
  uint8_t codes[kScaleValues / kBlock] = {};
  const __m128i vector = load_scales(scales, blocks);
  if constexpr (Any) {
    std::memcpy(codes, scales, size_t(blocks));
    for (int64_t i = 0; i < blocks; ++i) {
      const int scale = codes[i];
      if (scale == kScaleNan || (scale == 0 && is_zero(elements + i * kBlock, count - i * kBlock, 0))) continue;
      if (scale < kMinScale<F> || scale > kMaxScale<F>) return false;
      extent->add(scale - 127 + kElementExponent<F>, scale - 127 + kHighestExponent<F>);
    }
  } else {
    const __m128i absent = _mm_movm_epi8(__mmask16(~((1u << blocks) - 1)));
    const int low = smallest(_mm_or_si128(vector, absent));
    const int high = 255 - smallest(_mm_xor_si128(vector, _mm_set1_epi8(-1)));
    if (low < kMinScale<F> || high > kMaxScale<F>) return false;
    extent->add(low - 127 + kElementExponent<F>, high - 127 + kHighestExponent<F>);
  }
  const __m512i exponents = exponents_of(vector);
  __m512i highest = _mm512_setzero_si512();
  for (int64_t i = 0; i * kStepBf16 < count; ++i) {
    const Values values = decoder.values(load_codes(elements + i * kStepBf16, count - i * kStepBf16), &highest);
    const __m512i step_exponents = _mm512_permutexvar_epi32(lanes_of_step(i), exponents);
    uint16_t* to = out + i * stride;
    for (int half = 0; half < 2; ++half) {
      const __m512i some = half == 0 ? values.even : values.odd;
      const __m512i scaled = Any ? scale_any(some, step_exponents, codes + 2 * i) : add_exponents(some, step_exponents);
      _mm512_store_si512(to + half * kBlock, scaled);
    }
  }
  return Any || !Decoder<F>::has_special(highest);
}

// Decodes a row of A into steps `stride` values apart. False if a scale does not fit bfloat16.
template <class F>
MXFP8_INLINE bool pack_elements(const Decoder<F>& decoder, const uint8_t* elements, const uint8_t* scales,
                                int64_t count, int64_t stride, uint16_t* out, Extent* extent) {
  for (int64_t k = 0; k < count; k += kScaleValues, out += kScaleValues / kStepBf16 * stride) {
    const int64_t some = min_of(count - k, kScaleValues);
    if (__builtin_expect(pack_some<F, false>(decoder, elements + k, scales + k / kBlock, some, stride, out, extent),
                         1)) {
      continue;
    }
    if (!pack_some<F, true>(decoder, elements + k, scales + k / kBlock, some, stride, out, extent)) return false;
  }
  return true;
}

// Up to 32 values as bfloat16, rounded to nearest even; zeros follow. By integers: the conversions of AVX512-BF16 read
// subnormal numbers as zero.
MXFP8_INLINE __m256i to_bf16(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values), upper = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0)));
}
MXFP8_INLINE __m512i load_bf16(BFloat16, const uint16_t* from, __mmask32 present) {
  return _mm512_maskz_loadu_epi16(present, from);
}
MXFP8_INLINE __m512i load_bf16(Float16, const uint16_t* from, __mmask32 present) {
  const __m512i halves = _mm512_maskz_loadu_epi16(present, from);
  const __m256i low = to_bf16(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)));
  const __m256i high = to_bf16(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
MXFP8_INLINE __m512i load_bf16(Float32, const float* from, __mmask32 present) {
  const __m256i low = to_bf16(_mm512_maskz_loadu_ps(__mmask16(present), from));
  const __m256i high = to_bf16(_mm512_maskz_loadu_ps(__mmask16(present >> 16), from + 16));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// The exponents of the finite bfloat16 values that were added, except zeros.
class Exponents {
 public:
  MXFP8_INLINE_MEMBER void add(__m512i values) {
    const __m512i all = _mm512_set1_epi16(0x7f80), exponents = _mm512_and_si512(values, all);
    const __mmask32 finite =
        _mm512_test_epi16_mask(values, _mm512_set1_epi16(0x7fff)) & _mm512_cmpneq_epi16_mask(exponents, all);
    lowest_ = _mm512_mask_min_epu16(lowest_, finite, lowest_, exponents);
    highest_ = _mm512_mask_max_epu16(highest_, finite, highest_, exponents);
  }

  MXFP8_INLINE_MEMBER void add_to(Extent* extent) const {
    alignas(64) uint16_t low[kBlock], high[kBlock];
    _mm512_store_si512(low, lowest_);
    _mm512_store_si512(high, highest_);
    for (int i = 0; i < kBlock; ++i) {
      if (low[i] == 0x7f80) continue;  // every finite value is zero
      // A subnormal has the lowest bit of all, which is below what the dot product reads.
      extent->add((low[i] >> 7) - 127 - (low[i] == 0 ? 8 : 7), (high[i] >> 7) - 127);
    }
  }

 private:
  __m512i lowest_ = _mm512_set1_epi16(0x7f80), highest_ = _mm512_setzero_si512();
};

template <class D>
MXFP8_INLINE void pack_values(const typename D::Storage* values, int64_t count, int64_t stride, uint16_t* out,
                              Extent* extent) {
  Exponents exponents;
  for (int64_t k = 0; k < count; k += kStepBf16) {
    __m512i half[2];
    for (int i = 0; i < 2; ++i) {
      const int64_t left = count - k - i * kBlock;
      const __mmask32 present = left >= kBlock ? ~__mmask32(0) : left <= 0 ? 0 : (__mmask32(1) << left) - 1;
      half[i] = load_bf16(D{}, values + k + i * kBlock, present);
      exponents.add(half[i]);
    }
    uint16_t* to = out + k / kStepBf16 * stride;
    const Values values_of_step = dealt(half);
    _mm512_store_si512(to, values_of_step.even);
    _mm512_store_si512(to + kBlock, values_of_step.odd);
  }
  exponents.add_to(extent);
}

// Packs `count` elements of a row of A, from k on, into steps `stride` values apart. False if a scale does not fit
// bfloat16.
template <class F>
MXFP8_INLINE bool pack_row(F, const GemmArgs& args, int64_t row, int64_t k, int64_t count, int64_t stride,
                           uint16_t* out, Extent* extent) {
  const RowOfA<uint8_t> a = row_of_a(args, row, k / kBlock);
  return pack_elements(Decoder<F>(), a.values, a.scales, count, stride, out, extent);
}
template <class D>
MXFP8_INLINE bool pack_row(AsBf16<D>, const GemmArgs& args, int64_t row, int64_t k, int64_t count, int64_t stride,
                           uint16_t* out, Extent* extent) {
  pack_values<D>(row_of_a<typename D::Storage>(args, row, k / kBlock).values, count, stride, out, extent);
  return true;
}

}  // namespace mxfp8::MXFP8_ISA
