// The functions of group.h, on AVX-512.
#pragma once
#include "../common/codec.h"

namespace mxfp8::MXFP8_ISA {

MXFP8_INLINE __m512i load_512(const void* p) { return _mm512_loadu_si512(p); }

// Lane b of the result: the largest lane of v[b], as epi32.
MXFP8_INLINE __m512i largest_lanes(const __m512i (&v)[16]) {
  __m512i a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    a[i] =
        _mm512_max_epu32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  }
  for (int i = 0; i < 4; ++i) {
    b[i] =
        _mm512_max_epu32(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
  }
  for (int i = 0; i < 2; ++i) {
    c[i] = _mm512_max_epu32(_mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0x44),
                            _mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0xee));
  }
  return _mm512_max_epu32(_mm512_shuffle_i32x4(c[0], c[1], 0x88), _mm512_shuffle_i32x4(c[0], c[1], 0xdd));
}

// Bits of each block's largest magnitude, as float32. 16-bit values are in the upper half of a lane, where their order
// is the order of the whole lane.
template <class From>
MXFP8_INLINE __m512i largest_magnitudes(Float32, const From& x) {
  const __m512i mask = _mm512_set1_epi32(int(kMagnitude));
  __m512i v[16];
  for (int b = 0; b < 16; ++b) {
    const float* block = x[b];
    prefetch_block(block, kPrefetch);
    v[b] = _mm512_max_epu32(_mm512_and_si512(load_512(block), mask), _mm512_and_si512(load_512(block + 16), mask));
  }
  return largest_lanes(v);
}
template <class From>
MXFP8_INLINE __m512i largest_halves(const From& x) {
  const __m512i mask = _mm512_set1_epi16(0x7fff);
  __m512i v[16];
  for (int b = 0; b < 16; ++b) {
    prefetch_block(x[b], kPrefetch);
    const __m512i pairs = _mm512_and_si512(load_512(x[b]), mask);
    v[b] = _mm512_max_epu16(pairs, _mm512_slli_epi32(pairs, 16));
  }
  return _mm512_srli_epi32(largest_lanes(v), 16);
}
template <class From>
MXFP8_INLINE __m512i largest_magnitudes(BFloat16, const From& x) {
  return _mm512_slli_epi32(largest_halves(x), 16);
}
template <class From>
MXFP8_INLINE __m512i largest_magnitudes(Float16, const From& x) {
  return _mm512_castps_si512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(largest_halves(x))));
}

MXFP8_INLINE __m512 load_lanes(Float32, const float* x) { return _mm512_loadu_ps(x); }
MXFP8_INLINE __m512 load_lanes(Float16, const uint16_t* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
MXFP8_INLINE __m512 load_lanes(BFloat16, const uint16_t* x) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// The steps of round_magnitude.
template <class F>
struct Rounding {
  static constexpr int shift = 23 - F::mantissa_bits;
  __m512 magnitude, power, sum;
  MXFP8_INLINE_MEMBER explicit Rounding(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i binade = _mm512_and_si512(bits, _mm512_set1_epi32(int(kInfinity)));
    const __m512i at_least = _mm512_max_epi32(binade, _mm512_set1_epi32((128 - F::bias) << 23));
    magnitude = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(kMagnitude))));
    power = _mm512_castsi512_ps(_mm512_add_epi32(at_least, _mm512_set1_epi32(shift << 23)));
    sum = _mm512_add_ps(magnitude, power);
  }
  // The code plus a constant, which the caller subtracts.
  MXFP8_INLINE_MEMBER __m512i code() const {
    const __m512i bits = _mm512_castps_si512(power);
    return _mm512_add_epi32(_mm512_sub_epi32(_mm512_castps_si512(sum), bits), _mm512_srli_epi32(bits, shift));
  }
  // The difference between the value and its code.
  MXFP8_INLINE_MEMBER __m512 error() const {
    const __m512 largest = _mm512_set1_ps(float_of(decode_bits<F>(F::max_code)));
    return _mm512_sub_ps(magnitude, _mm512_min_ps(_mm512_sub_ps(sum, power), largest));
  }
};

// Sums of squares in float64 of scaled values and of their errors, lane by lane; the upper eight lanes have their own
// sums.
template <class F>
struct Squares {
  __m512d signal[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  __m512d noise[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  MXFP8_INLINE_MEMBER void add(__m512 values) {
    add(values, signal);
    add(Rounding<F>(values).error(), noise);
  }
  MXFP8_INLINE_MEMBER void add(__m512 values, __m512d* sums) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(values));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1));
    sums[0] = _mm512_fmadd_pd(low, low, sums[0]);
    sums[1] = _mm512_fmadd_pd(high, high, sums[1]);
  }
};

// Codes of 64 scaled values. The pack of codes leaves groups of four, which in_order puts in order; the pack of the
// values themselves, with signed saturation, leaves their signs.
template <class F>
MXFP8_INLINE __m512i encode_four(__m512 v0, __m512 v1, __m512 v2, __m512 v3) {
  if constexpr (F::is_integer) {
    const auto whole = [](__m512 v) MXFP8_INLINE_LAMBDA {
      return _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(1 << F::mantissa_bits)));
    };
    const __m512i packed =
        _mm512_packs_epi16(_mm512_packs_epi32(whole(v0), whole(v1)), _mm512_packs_epi32(whole(v2), whole(v3)));
    return _mm512_max_epi8(packed, _mm512_set1_epi8(-int(F::max_code)));
  }
  const __m512i offset = _mm512_set1_epi16(short((128 - F::bias + Rounding<F>::shift) << F::mantissa_bits));
  const __m512i low = _mm512_packus_epi32(Rounding<F>(v0).code(), Rounding<F>(v1).code());
  const __m512i high = _mm512_packus_epi32(Rounding<F>(v2).code(), Rounding<F>(v3).code());
  const __m512i codes = _mm512_packus_epi16(_mm512_sub_epi16(low, offset), _mm512_sub_epi16(high, offset));
  const __m512i signs = _mm512_packs_epi16(_mm512_packs_epi32(_mm512_castps_si512(v0), _mm512_castps_si512(v1)),
                                           _mm512_packs_epi32(_mm512_castps_si512(v2), _mm512_castps_si512(v3)));
  const __m512i saturated = _mm512_min_epu8(codes, _mm512_set1_epi8(char(F::max_code)));
  return _mm512_ternarylogic_epi32(saturated, signs, _mm512_set1_epi8(char(0x80)), 0xf8);  // saturated | signs & 0x80
}
MXFP8_INLINE __m512i in_order(__m512i groups) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), groups);
}

// Codes of two blocks.
template <class D, class F>
MXFP8_INLINE __m512i encode_two(const typename D::Storage* x0, const typename D::Storage* x1, const float* inverse) {
  const __m512 first = _mm512_set1_ps(inverse[0]), second = _mm512_set1_ps(inverse[1]);
  return in_order(
      encode_four<F>(_mm512_mul_ps(load_lanes(D{}, x0), first), _mm512_mul_ps(load_lanes(D{}, x0 + 16), first),
                     _mm512_mul_ps(load_lanes(D{}, x1), second), _mm512_mul_ps(load_lanes(D{}, x1 + 16), second)));
}
MXFP8_INLINE void store_two(Adjacent<uint8_t> to, int64_t block, __m512i codes) {
  _mm512_storeu_si512(to[block], codes);
}
MXFP8_INLINE void store_two(uint8_t* const* to, int64_t block, __m512i codes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[block]), _mm512_castsi512_si256(codes));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[block + 1]), _mm512_extracti64x4_epi64(codes, 1));
}

// Codes of one row of columns, each with its own scale.
template <class D, class F>
MXFP8_INLINE void encode_columns(const typename D::Storage* x, const float* inverse, int64_t width, uint8_t* codes) {
  int64_t i = 0;
  for (; i + kColumnTile <= width; i += kColumnTile) {
    for (int64_t j = 0; j < kColumnTile; j += 64 / int64_t(sizeof *x)) __builtin_prefetch(x + width + i + j, 0, 2);
    __m512 v[4];
    for (int j = 0; j < 4; ++j) {
      v[j] = _mm512_mul_ps(load_lanes(D{}, x + i + 16 * j), _mm512_load_ps(inverse + i + 16 * j));
    }
    _mm512_storeu_si512(codes + i, in_order(encode_four<F>(v[0], v[1], v[2], v[3])));
  }
  for (; i < width; ++i) codes[i] = uint8_t(encode<F>(D::load(x[i]) * inverse[i]));
}

// 2^(2 * (s - 127)), the square of a scale.
MXFP8_INLINE double squared_scale(uint32_t code) {
  const uint64_t bits = (uint64_t(2 * code) + 1023 - 254) << 52;
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The biased exponents of the largest magnitudes, rounded as scale_code does.
template <class F>
MXFP8_INLINE __m512i raised_exponents(__m512i amax, uint32_t increment) {
  __m512i added = _mm512_set1_epi32(int(increment));
  if constexpr (F::emax == 0) {
    const __mmask16 subnormal = _mm512_cmplt_epu32_mask(amax, _mm512_set1_epi32(int(kFirstNormal)));
    added = _mm512_mask_srli_epi32(added, subnormal, added, 1);
  }
  return _mm512_srli_epi32(_mm512_add_epi32(amax, added), 23);
}

// Scales and elements of a group, from its largest magnitudes. False if a block needs the slower code.
template <class D, class F, class From, class To>
MXFP8_INLINE bool quantize_group(const From& x, __m512i amax, uint32_t increment, const To& elements, uint8_t* scales,
                                 Sums* sums) {
  const __m512i raised = raised_exponents<F>(amax, increment);
  const __m512i codes = _mm512_max_epi32(_mm512_sub_epi32(raised, _mm512_set1_epi32(F::emax)), _mm512_setzero_si512());
  if (_mm512_cmpge_epu32_mask(raised, _mm512_set1_epi32(254)) != 0) return false;
  alignas(64) float inverse[kGroup];
  alignas(64) uint32_t code[kGroup];
  _mm512_store_si512(inverse, _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254), codes), 23));
  _mm512_store_si512(code, codes);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(scales), _mm512_cvtepi32_epi8(codes));
  for (int b = 0; b < kGroup; b += 2) {
    store_two(elements, b, encode_two<D, F>(x[b], x[b + 1], inverse + b));
  }
  if (sums == nullptr) return true;
  __m512d signal = _mm512_loadu_pd(sums->signal), noise = _mm512_loadu_pd(sums->noise);
  for (int b = 0; b < kGroup; ++b) {
    const __m512 factor = _mm512_set1_ps(inverse[b]);
    Squares<F> squares;
    squares.add(_mm512_mul_ps(load_lanes(D{}, x[b]), factor));
    squares.add(_mm512_mul_ps(load_lanes(D{}, x[b] + 16), factor));
    const __m512d square = _mm512_set1_pd(squared_scale(code[b]));
    signal = _mm512_fmadd_pd(_mm512_add_pd(squares.signal[0], squares.signal[1]), square, signal);
    noise = _mm512_fmadd_pd(_mm512_add_pd(squares.noise[0], squares.noise[1]), square, noise);
  }
  _mm512_storeu_pd(sums->signal, signal);
  _mm512_storeu_pd(sums->noise, noise);
  return true;
}

constexpr bool kGroupsAddErrors = true;

// The loop computes the largest magnitudes of a group before it encodes the group in front, so no step waits for them.
template <class D, class F, class Blocks>
MXFP8_INLINE int64_t quantize_groups(Blocks& blocks, int64_t groups, uint32_t increment, uint8_t* scales, Sums* sums) {
  __m512i next = _mm512_setzero_si512();
  for (int64_t i = -1; i < groups; ++i) {
    const __m512i amax = next;
    if (i + 1 < groups) {
      blocks.gather(i + 1);
      next = blocks.with(i + 1, [&](auto x, auto) MXFP8_INLINE_LAMBDA { return largest_magnitudes(D{}, x); });
    }
    if (i < 0) continue;
    const bool done = blocks.with(i, [&](auto x, auto elements) MXFP8_INLINE_LAMBDA {
      return quantize_group<D, F>(x, amax, increment, elements, scales + i * kGroup, sums);
    });
    if (!done) return i;
    blocks.finish(i);
  }
  return groups;
}

template <class D, class F>
MXFP8_INLINE bool quantize_turned(const ColumnTile<D>& tile, uint32_t increment, uint8_t* turned, int64_t stride,
                                  uint8_t* scales, Sums* sums) {
  const __m512i mask = _mm512_set1_epi32(int(kMagnitude));
  const __m512i gather = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
  alignas(64) float values[kBlock][kColumnTile];
  __m512i amax[4] = {};
  for (int64_t row = tile.depth; row < kBlock; ++row) std::memset(values[row], 0, sizeof values[row]);
  for (int64_t row = 0; row < tile.depth; ++row) {
    for (int i = 0; i < 4; ++i) {
      const __m512 v = load_lanes(D{}, tile.x + row * tile.stride + 16 * i);
      _mm512_store_ps(values[row] + 16 * i, v);
      amax[i] = _mm512_max_epu32(amax[i], _mm512_and_si512(_mm512_castps_si512(v), mask));
    }
    tile.fetch(row);
  }
  __m512i codes[4];
  for (int i = 0; i < 4; ++i) {
    const __m512i raised = raised_exponents<F>(amax[i], increment);
    if (_mm512_cmpge_epu32_mask(raised, _mm512_set1_epi32(254)) != 0) return false;
    codes[i] = _mm512_max_epi32(_mm512_sub_epi32(raised, _mm512_set1_epi32(F::emax)), _mm512_setzero_si512());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(scales + 16 * i), _mm512_cvtepi32_epi8(codes[i]));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 inverse =
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254), codes[i]), 23));
    __m512i fours[8];  // lane c: four consecutive elements of column c
    Squares<F> squares;
    for (int four = 0; four < 8; ++four) {
      __m512 v[4];
      for (int j = 0; j < 4; ++j) {
        v[j] = _mm512_mul_ps(_mm512_load_ps(values[4 * four + j] + 16 * i), inverse);
        if (sums != nullptr) squares.add(v[j]);
      }
      fours[four] = _mm512_shuffle_epi8(encode_four<F>(v[0], v[1], v[2], v[3]), gather);
    }
    __m512i twos[8], ones[8];
    for (int j = 0; j < 4; ++j) {
      twos[2 * j] = _mm512_unpacklo_epi32(fours[2 * j], fours[2 * j + 1]);
      twos[2 * j + 1] = _mm512_unpackhi_epi32(fours[2 * j], fours[2 * j + 1]);
    }
    for (int j = 0; j < 2; ++j) {
      for (int h = 0; h < 2; ++h) {
        ones[4 * j + 2 * h] = _mm512_unpacklo_epi64(twos[4 * j + h], twos[4 * j + 2 + h]);
        ones[4 * j + 2 * h + 1] = _mm512_unpackhi_epi64(twos[4 * j + h], twos[4 * j + 2 + h]);
      }
    }
    // ones[c] and ones[4 + c] hold, in 128-bit lane l, elements 0..15 and 16..31 of column 4 * l + c.
    for (int c = 0; c < 4; ++c) {
      uint8_t* to = turned + (16 * i + c) * stride;
      const auto put = [&](int lane, __m128i low, __m128i high) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4 * lane * stride), low);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4 * lane * stride + 16), high);
      };
      put(0, _mm512_castsi512_si128(ones[c]), _mm512_castsi512_si128(ones[4 + c]));
      put(1, _mm512_extracti32x4_epi32(ones[c], 1), _mm512_extracti32x4_epi32(ones[4 + c], 1));
      put(2, _mm512_extracti32x4_epi32(ones[c], 2), _mm512_extracti32x4_epi32(ones[4 + c], 2));
      put(3, _mm512_extracti32x4_epi32(ones[c], 3), _mm512_extracti32x4_epi32(ones[4 + c], 3));
    }
    for (int half = 0; sums != nullptr && half < 2; ++half) {
      double* signal = sums->signal + 16 * i + 8 * half;
      double* noise = sums->noise + 16 * i + 8 * half;
      alignas(64) double square[8];
      for (int c = 0; c < 8; ++c) square[c] = squared_scale(scales[16 * i + 8 * half + c]);
      const __m512d squared = _mm512_load_pd(square);
      _mm512_storeu_pd(signal, _mm512_fmadd_pd(squares.signal[half], squared, _mm512_loadu_pd(signal)));
      _mm512_storeu_pd(noise, _mm512_fmadd_pd(squares.noise[half], squared, _mm512_loadu_pd(noise)));
    }
  }
  return true;
}

}  // namespace mxfp8::MXFP8_ISA
