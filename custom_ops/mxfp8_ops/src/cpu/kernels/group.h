// Sixteen whole blocks at a time, so that what follows from a block's largest magnitude - scale, inverse - is computed
// for sixteen at once, and no block waits for another. AVX-512; elsewhere the compiler's vectors.
#pragma once
#include <limits>

#include "codec.h"

namespace mxfp8::MXFP8_ISA {

constexpr int64_t kGroup = 16;  // blocks

// Sums over one task, one lane per position so that the compiler needs no reassociation.
struct Sums {
  double signal[kColumnTile] = {};
  double noise[kColumnTile] = {};
  void add_to(Stats* stats) const {
    for (int i = 0; i < kColumnTile; ++i) {
      stats->signal += signal[i];
      stats->noise += noise[i];
    }
  }
};

// Largest magnitude of `count` stored values, as the bits of a float32: magnitudes order as their bits do, and NaN is
// above infinity. They are compared as signed numbers because every instruction set does that.
template <class D, class Count>
MXFP8_INLINE uint32_t largest_magnitude(const typename D::Storage* x, Count count) {
  using Bits = typename D::Bits;
  Bits largest = 0;
  for (Count i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= std::numeric_limits<Bits>::max();
    largest = bits > largest ? bits : largest;
  }
  typename D::Storage stored;
  std::memcpy(&stored, &largest, sizeof stored);
  return bits_of(D::load(stored));
}

// Asks for values that are `bytes` ahead: the processor's own prefetching stops at every page.
template <class T>
MXFP8_INLINE void prefetch_block(const T* x, size_t bytes) {
  for (size_t byte = 0; byte < kBlock * sizeof *x; byte += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(x) + bytes + byte);
  }
}
constexpr size_t kPrefetch = 4096;  // bytes

// Raises the largest magnitude of each column, as stored, by that of `Rows` rows.
template <class D, int Rows>
MXFP8_INLINE void raise_magnitudes(const typename D::Storage* x, int64_t stride, int64_t width,
                                   typename D::Bits* __restrict amax) {
  using Bits = typename D::Bits;
  const auto raise = [&](int64_t i) {
    Bits largest = amax[i];
    for (int row = 0; row < Rows; ++row) {
      Bits bits;
      std::memcpy(&bits, x + row * stride + i, sizeof bits);
      bits &= std::numeric_limits<Bits>::max();
      largest = bits > largest ? bits : largest;
    }
    amax[i] = largest;
  };
  constexpr int64_t line = 64 / sizeof *x;
  int64_t i = 0;
  for (; i + line <= width; i += line) {
    for (int row = 0; row < Rows; ++row) __builtin_prefetch(x + (row + Rows) * stride + i);
    for (int64_t j = i; j < i + line; ++j) raise(j);
  }
  for (; i < width; ++i) raise(i);
}

// Loads one row of up to 64 columns, and raises their largest magnitudes, as float32 bits.
template <class D>
MXFP8_INLINE void load_columns(const typename D::Storage* x, int64_t width, float* __restrict values,
                               int32_t* __restrict amax) {
  for (int64_t i = 0; i < width; ++i) {
    values[i] = D::load(x[i]);
    const int32_t magnitude = int32_t(bits_of(values[i]) & kMagnitude);
    amax[i] = magnitude > amax[i] ? magnitude : amax[i];
  }
}

#if defined(__AVX512BW__)

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

// Bits of each block's largest magnitude, as float32. 16-bit values travel in the upper half of a lane, where their
// order is that of the whole lane.
MXFP8_INLINE __m512i largest_magnitudes(Float32, const float* x) {
  const __m512i mask = _mm512_set1_epi32(int(kMagnitude));
  __m512i v[16];
  for (int b = 0; b < 16; ++b) {
    const float* block = x + b * kBlock;
    prefetch_block(block, kPrefetch);
    v[b] = _mm512_max_epu32(_mm512_and_si512(load_512(block), mask), _mm512_and_si512(load_512(block + 16), mask));
  }
  return largest_lanes(v);
}
MXFP8_INLINE __m512i largest_halves(const uint16_t* x) {
  const __m512i mask = _mm512_set1_epi16(0x7fff);
  __m512i v[16];
  for (int b = 0; b < 16; ++b) {
    prefetch_block(x + b * kBlock, kPrefetch);
    const __m512i pairs = _mm512_and_si512(load_512(x + b * kBlock), mask);
    v[b] = _mm512_max_epu16(pairs, _mm512_slli_epi32(pairs, 16));
  }
  return _mm512_srli_epi32(largest_lanes(v), 16);
}
MXFP8_INLINE __m512i largest_magnitudes(BFloat16, const uint16_t* x) {
  return _mm512_slli_epi32(largest_halves(x), 16);
}
MXFP8_INLINE __m512i largest_magnitudes(Float16, const uint16_t* x) {
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
  // The code, but for a constant that the caller subtracts.
  MXFP8_INLINE_MEMBER __m512i code() const {
    const __m512i bits = _mm512_castps_si512(power);
    return _mm512_add_epi32(_mm512_sub_epi32(_mm512_castps_si512(sum), bits), _mm512_srli_epi32(bits, shift));
  }
  // What the code falls short of the value.
  MXFP8_INLINE_MEMBER __m512 error() const {
    const __m512 largest = _mm512_set1_ps(float_of(decode_bits<F>(F::max_code)));
    return _mm512_sub_ps(magnitude, _mm512_min_ps(_mm512_sub_ps(sum, power), largest));
  }
};

// Sums of squares in float64 of scaled values and of their errors, lane by lane; the upper eight lanes apart.
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

// Codes of 64 scaled values. Packing leaves groups of four, which in_order puts in order; packing the values
// themselves, with signed saturation, leaves their signs.
template <class F>
MXFP8_INLINE __m512i encode_four(__m512 v0, __m512 v1, __m512 v2, __m512 v3) {
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

template <class D, class F>
MXFP8_INLINE __m512i encode_two(const typename D::Storage* x, const float* inverse) {
  const __m512 first = _mm512_set1_ps(inverse[0]), second = _mm512_set1_ps(inverse[1]);
  return in_order(
      encode_four<F>(_mm512_mul_ps(load_lanes(D{}, x), first), _mm512_mul_ps(load_lanes(D{}, x + 16), first),
                     _mm512_mul_ps(load_lanes(D{}, x + 32), second), _mm512_mul_ps(load_lanes(D{}, x + 48), second)));
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

// Quantizes a group, and adds up its errors if `sums` is not null. False if a block needs more care - it holds a NaN or
// Inf, or its largest element may be infinite -: then nothing that was written counts.
template <class D, class F>
MXFP8_INLINE bool quantize_group(const typename D::Storage* x, uint32_t increment, uint8_t* elements, uint8_t* scales,
                                 Sums* sums) {
  const __m512i amax = largest_magnitudes(D{}, x);
  const __m512i raised = _mm512_srli_epi32(_mm512_add_epi32(amax, _mm512_set1_epi32(int(increment))), 23);
  const __m512i codes = _mm512_max_epi32(_mm512_sub_epi32(raised, _mm512_set1_epi32(F::emax)), _mm512_setzero_si512());
  if (_mm512_cmpge_epu32_mask(raised, _mm512_set1_epi32(254)) != 0) return false;
  alignas(64) float inverse[kGroup];
  alignas(64) uint32_t code[kGroup];
  _mm512_store_si512(inverse, _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254), codes), 23));
  _mm512_store_si512(code, codes);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(scales), _mm512_cvtepi32_epi8(codes));
  for (int b = 0; b < kGroup; b += 2) {
    _mm512_storeu_si512(elements + b * kBlock, encode_two<D, F>(x + b * kBlock, inverse + b));
  }
  if (sums == nullptr) return true;
  __m512d signal = _mm512_loadu_pd(sums->signal), noise = _mm512_loadu_pd(sums->noise);
  for (int b = 0; b < kGroup; ++b) {
    const __m512 factor = _mm512_set1_ps(inverse[b]);
    Squares<F> squares;
    squares.add(_mm512_mul_ps(load_lanes(D{}, x + b * kBlock), factor));
    squares.add(_mm512_mul_ps(load_lanes(D{}, x + b * kBlock + 16), factor));
    const __m512d square = _mm512_set1_pd(squared_scale(code[b]));
    signal = _mm512_fmadd_pd(_mm512_add_pd(squares.signal[0], squares.signal[1]), square, signal);
    noise = _mm512_fmadd_pd(_mm512_add_pd(squares.noise[0], squares.noise[1]), square, noise);
  }
  _mm512_storeu_pd(sums->signal, signal);
  _mm512_storeu_pd(sums->noise, noise);
  return true;
}

// Quantizes a tile of 32 rows and 64 columns, each column one block, and stores it turned: element k of column c is
// turned[c * stride + k]. False as above.
template <class D, class F>
MXFP8_INLINE bool quantize_turned(const typename D::Storage* x, int64_t x_stride, uint32_t increment, uint8_t* turned,
                                  int64_t stride, uint8_t* scales, Sums* sums) {
  const __m512i mask = _mm512_set1_epi32(int(kMagnitude));
  const __m512i gather = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
  alignas(64) float values[kBlock][kColumnTile];
  __m512i amax[4] = {};
  for (int row = 0; row < kBlock; ++row) {
    for (int i = 0; i < 4; ++i) {
      const __m512 v = load_lanes(D{}, x + row * x_stride + 16 * i);
      _mm512_store_ps(values[row] + 16 * i, v);
      amax[i] = _mm512_max_epu32(amax[i], _mm512_and_si512(_mm512_castps_si512(v), mask));
    }
    for (int64_t j = 0; j < kColumnTile; j += 64 / int64_t(sizeof *x)) {
      __builtin_prefetch(x + (row + kBlock) * x_stride + j);
    }
  }
  __m512i codes[4];
  for (int i = 0; i < 4; ++i) {
    const __m512i raised = _mm512_srli_epi32(_mm512_add_epi32(amax[i], _mm512_set1_epi32(int(increment))), 23);
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
        squares.add(v[j]);
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
    for (int half = 0; half < 2; ++half) {
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

#else

template <class D, class F>
MXFP8_INLINE void encode_columns(const typename D::Storage* x, const float* inverse, int64_t width, uint8_t* codes) {
  int64_t i = 0;
  for (; i + kBlock <= width; i += kBlock) {
    alignas(64) float room[kBlock];
    const float* values = D::load_block(x + i, room);
    for (int64_t j = 0; j < kBlock; ++j) codes[i + j] = uint8_t(encode<F>(values[j] * inverse[i + j]));
  }
  for (; i < width; ++i) codes[i] = uint8_t(encode<F>(D::load(x[i]) * inverse[i]));
}

template <class D, class F>
MXFP8_INLINE bool quantize_group(const typename D::Storage* x, uint32_t increment, uint8_t* elements, uint8_t* scales,
                                 Sums* sums) {
  if (sums != nullptr) return false;
  uint32_t amax[kGroup];
  float inverse[kGroup];
  for (int b = 0; b < kGroup; ++b) {
    prefetch_block(x + b * kBlock, kPrefetch);
    amax[b] = largest_magnitude<D>(x + b * kBlock, int(kBlock));
  }
  bool finite = true;
  for (int b = 0; b < kGroup; ++b) {
    const uint32_t scale = scale_code<F>(amax[b], increment);
    scales[b] = uint8_t(scale);
    inverse[b] = inverse_scale_value(scale);
    finite = finite && scale != kScaleNan;
  }
  if (!finite) return false;
  for (int b = 0; b < kGroup; ++b) {
    alignas(64) float room[kBlock];
    const float* values = D::load_block(x + b * kBlock, room);
    for (int i = 0; i < kBlock; ++i) elements[b * kBlock + i] = uint8_t(encode<F>(values[i] * inverse[b]));
  }
  return true;
}

template <class D, class F>
MXFP8_INLINE bool quantize_turned(const typename D::Storage*, int64_t, uint32_t, uint8_t*, int64_t, uint8_t*, Sums*) {
  return false;
}

#endif

}  // namespace mxfp8::MXFP8_ISA
