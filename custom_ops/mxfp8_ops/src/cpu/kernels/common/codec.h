// The number formats, as branch-free scalar code that the compiler vectorizes: the C++ twin of encode, decode and the
// scale rules in numerics.py. Everything here lives in the namespace of the instruction set that it is compiled for.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "../kernels.h"

#define MXFP8_INLINE static inline __attribute__((always_inline))
#define MXFP8_INLINE_MEMBER inline __attribute__((always_inline))
#define MXFP8_INLINE_LAMBDA __attribute__((always_inline))
#define MXFP8_NOINLINE static __attribute__((noinline))

namespace mxfp8::MXFP8_ISA {

constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kFirstNormal = 0x00800000;
constexpr uint32_t kQuietNan = 0x7fc00000;
constexpr uint32_t kElementNan = 0x7f;
constexpr int kScaleNan = 255;

// Types E4M3, E5M2, INT8: formats.ELEMENT_FORMATS. A format without NaN is of integers, in two's complement.
template <int MantissaBits, int Bias, uint32_t MaxCode>
struct ElementFormat {
  static constexpr int mantissa_bits = MantissaBits, bias = Bias, emax = int(MaxCode >> MantissaBits) - Bias;
  static constexpr uint32_t max_code = MaxCode;
  static constexpr bool has_infinity = MaxCode + 1 < kElementNan, is_integer = MaxCode == kElementNan;
};
#define MXFP8_TYPE(NAME, ...) \
  struct NAME : ElementFormat<__VA_ARGS__> {};
MXFP8_ELEMENT_FORMATS(MXFP8_TYPE)
#undef MXFP8_TYPE

MXFP8_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

MXFP8_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds the bits of a float32 magnitude to a narrower float, half to even; the caller saturates. The function adds a
// power of two. Its unit in the last place is the unit of the narrow format at this magnitude, or, for smaller
// magnitudes, at the format's smallest normal number. So the float32 sum rounds where the narrow format does, and its
// low bits count those units. They are signed numbers because every instruction set compares signed numbers.
template <int MantissaBits, int Bias>
MXFP8_INLINE uint32_t round_magnitude(uint32_t magnitude) {
  constexpr int shift = 23 - MantissaBits;
  constexpr int32_t first_normal = (128 - Bias) << 23;
  const int32_t binade = int32_t(magnitude & kInfinity);
  const uint32_t power = uint32_t(binade > first_normal ? binade : first_normal) + (uint32_t(shift) << 23);
  const uint32_t units = bits_of(float_of(magnitude) + float_of(power)) - power;
  return units + (power >> shift) - (uint32_t(128 - Bias + shift) << MantissaBits);
}

// Element code of a finite value that is already divided by its scale. -0 stays -0, where there is one.
template <class F>
MXFP8_INLINE uint32_t encode(float value) {
  if constexpr (F::is_integer) {
    // The addition rounds: the unit in the last place of the sum is the unit of the code, so the low bits of the sum
    // count units. The value is below 4, and the sum stays in the binade of `power`.
    constexpr float power = 1.5f * (1 << (23 - F::mantissa_bits));
    constexpr int32_t most = F::max_code;
    const int32_t units = int32_t(bits_of(value + power) - bits_of(power));
    return uint8_t(units > most ? most : units < -most ? -most : units);
  }
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = round_magnitude<F::mantissa_bits, F::bias>(bits & kMagnitude);
  const uint32_t code = rounded < F::max_code ? rounded : F::max_code;
  return code | ((bits >> 24) & 0x80);
}

// Bits of the float32 value of an element code. A subtraction makes subnormal elements from a normal float, so that no
// denormal float32 is ever an operand.
template <class F>
MXFP8_INLINE uint32_t decode_bits(uint32_t code) {
  if (F::is_integer) return bits_of(float(int8_t(code)) * (1.0f / (1 << F::mantissa_bits)));
  constexpr int shift = 23 - F::mantissa_bits;
  constexpr uint32_t first_normal = uint32_t(128 - F::bias) << 23;
  const uint32_t magnitude = code & 0x7f;
  const uint32_t sign = (code & 0x80) << 24;
  const uint32_t normal = (magnitude << shift) + (uint32_t(127 - F::bias) << 23);
  const uint32_t subnormal = bits_of(float_of((magnitude << shift) + first_normal) - float_of(first_normal));
  uint32_t bits = magnitude < (1u << F::mantissa_bits) ? subnormal : normal;
  bits = magnitude > F::max_code ? kQuietNan : bits;
  if (F::has_infinity) bits = magnitude == F::max_code + 1 ? kInfinity : bits;
  return bits | sign;
}

template <class F>
MXFP8_INLINE float decode(uint32_t code) {
  return float_of(decode_bits<F>(code));
}

// 2^(s - 127); code 0 is the subnormal 2^-127, code 255 is NaN.
MXFP8_INLINE float scale_value(uint32_t code) {
  if (code == kScaleNan) return float_of(kQuietNan);
  return float_of(code == 0 ? 0x00400000 : code << 23);
}

// 2^(127 - s) for s in 0..254.
MXFP8_INLINE float inverse_scale_value(uint32_t code) {
  return float_of(code == 254 ? 0x00400000 : (254 - code) << 23);
}

// Scale code of a block whose largest magnitude has these bits; `increment` is formats.scale_increment. The code is
// right unless any_in_doubt is true of it: then call scale_code.
template <class F>
MXFP8_INLINE uint32_t fast_scale_code(uint32_t amax, uint32_t increment) {
  if (amax >= kInfinity) return kScaleNan;
  const int code = int((amax + increment) >> 23) - F::emax;
  return uint32_t(code < 0 ? 0 : code > 254 ? 254 : code);
}

// Whether a code is in doubt: NaN, or, in a format whose emax is 0, code 1, because the magnitude may be subnormal. The
// comparison is in bytes, so that a register holds many.
template <class F>
MXFP8_INLINE bool any_in_doubt(const uint8_t* codes, int64_t count) {
  uint8_t any = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto next = uint8_t(codes[i] + 1);  // 0 for NaN; 2 for code 1, in doubt if emax is 0
    any = uint8_t(any | uint8_t(F::emax == 0 ? (next & 0xfd) == 0 : next == 0));
  }
  return any != 0;
}

// The scale code for any magnitude. A subnormal magnitude takes half of the increment: its bits are the mantissa of the
// exponent -127, shifted right by one. Where emax is larger than 0, its scale code is 0 with either increment.
template <class F>
MXFP8_INLINE uint32_t scale_code(uint32_t amax, uint32_t increment) {
  return fast_scale_code<F>(amax, F::emax == 0 && amax < kFirstNormal ? increment / 2 : increment);
}

// Value dtypes: how each is stored, a signed integer of that size, and its conversion from and to float32, which rounds
// to nearest even. load_block returns a block's float32 values: in place if they are float32 already, or else in
// `room`. store_short_block stores values that have at most 8 significant bits, and are normal, infinite or NaN.
struct Float32 {
  using Storage = float;
  using Bits = int32_t;
  MXFP8_INLINE float load(float value) { return value; }
  MXFP8_INLINE float store(float value) { return value; }
  MXFP8_INLINE const float* load_block(const float* x, float*) { return x; }
  MXFP8_INLINE void store_short_block(const float* values, float* y) { std::memcpy(y, values, kBlock * sizeof *y); }
};
struct Float16 {
  using Storage = uint16_t;
  using Bits = int16_t;
  MXFP8_INLINE float load(uint16_t half) {
    constexpr uint32_t first_normal = 113u << 23;
    const uint32_t magnitude = uint32_t(half & 0x7fff) << 13;
    const uint32_t subnormal = bits_of(float_of(magnitude + first_normal) - float_of(first_normal));
    uint32_t bits = magnitude < (1u << 23) ? subnormal : magnitude + (112u << 23);
    bits = magnitude >= (31u << 23) ? magnitude | kInfinity : bits;
    return float_of(bits | (uint32_t(half & 0x8000) << 16));
  }
  MXFP8_INLINE uint16_t store(float value) {
    const uint32_t magnitude = bits_of(value) & kMagnitude;
    uint32_t half = round_magnitude<10, 15>(magnitude);
    half = magnitude >= 0x477ff000 ? 0x7c00 : half;  // 65520 and above round to infinity
    half = magnitude > kInfinity ? 0x7e00 : half;
    return uint16_t(half | ((bits_of(value) >> 16) & 0x8000));
  }
  MXFP8_INLINE const float* load_block(const uint16_t* x, float* room) {
#if defined(__F16C__)
    for (int i = 0; i < kBlock; i += 8) {
      _mm256_storeu_ps(room + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
    }
#else
    for (int i = 0; i < kBlock; ++i) room[i] = load(x[i]);
#endif
    return room;
  }
  MXFP8_INLINE void store_short_block(const float* values, uint16_t* y) {
#if defined(__F16C__)
    for (int i = 0; i < kBlock; i += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i), halves);
    }
#else
    for (int i = 0; i < kBlock; ++i) y[i] = store(values[i]);
#endif
  }
};
struct BFloat16 {
  using Storage = uint16_t;
  using Bits = int16_t;
  MXFP8_INLINE float load(uint16_t bits) { return float_of(uint32_t(bits) << 16); }
  MXFP8_INLINE uint16_t store(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return uint16_t((bits & kMagnitude) > kInfinity ? (bits >> 16) | 0x40 : rounded);
  }
  MXFP8_INLINE const float* load_block(const uint16_t* x, float* room) {
    for (int i = 0; i < kBlock; ++i) room[i] = load(x[i]);
    return room;
  }
  MXFP8_INLINE void store_short_block(const float* values, uint16_t* y) {
    for (int i = 0; i < kBlock; ++i) y[i] = uint16_t(bits_of(values[i]) >> 16);
  }
};

// Calls f(T{}) with the type that stands for a dtype or format code. The callers check codes (cpu/arguments.cpp for the
// C ABI, ort/nodes.cpp for nodes): an unknown code ends the process here.
template <class Call>
MXFP8_INLINE void with_dtype(int dtype, const Call& call) {
  // No switch: with one, GCC 12 makes packing float32 8% slower.
  if (dtype == MXFP8_FLOAT32) {
    call(Float32{});
  } else if (dtype == MXFP8_FLOAT16) {
    call(Float16{});
  } else if (dtype == MXFP8_BFLOAT16) {
    call(BFloat16{});
  } else {
    __builtin_trap();
  }
}
template <class Call>
MXFP8_INLINE void with_format(int format, const Call& call) {
  switch (format) {
#define MXFP8_CASE(NAME, ...) \
  case MXFP8_##NAME:          \
    return call(NAME{});
    MXFP8_ELEMENT_FORMATS(MXFP8_CASE)
#undef MXFP8_CASE
    default:
      __builtin_trap();
  }
}

}  // namespace mxfp8::MXFP8_ISA
