// The number formats on the device: elements, scales, and the dtypes of unquantized values. Bit for bit numerics.py.
//
// Scales are handled as integers and every power of two is built from bits, so nothing depends on lg2 or ex2. Nothing
// may be compiled with flush-to-zero: 2^-127 is a subnormal, and so are many of the values tested here.
#pragma once
#include "device.cuh"

constexpr u32 SCALE_NAN = 255;
constexpr u32 ELEMENT_NAN = 0x7f;
constexpr u32 INFINITY_BITS = 0x7f800000u;
constexpr u32 NAN_BITS = 0x7fffffffu;
constexpr u32 FIRST_NORMAL_BITS = 0x00800000u;

// formats.py has these rows too. `wide_shift` moves an element's low seven bits to where bfloat16 has its exponent and
// mantissa; the result, times 2^(127 - bias), is the element's value, also for subnormal elements. INT8 has neither:
// see wide.cuh.
struct E4M3 {
  static constexpr int parts = 1, mantissa_bits = 3, bias = 7, emax = 8, wide_shift = 4;
  static constexpr u32 max_code = 0x7e, wide_mask = 0x07f007f0u;
  static constexpr u32 special_carry = 0x01010101u;  // carries into bit 7 of a byte whose low bits exceed max_code
  static constexpr u32 first_exact = 3;              // below this code some element * 2^(s - 127) is not a bfloat16
  static constexpr u32 last_fast = 134;              // above this code 2^(s - bias) is not a bfloat16
  static constexpr bool has_infinity = false, is_element = true, is_integer = false;
};

struct E5M2 {
  static constexpr int parts = 1, mantissa_bits = 2, bias = 15, emax = 15, wide_shift = 3;
  static constexpr u32 max_code = 0x7b, wide_mask = 0x0fe00fe0u;
  static constexpr u32 special_carry = 0x04040404u;
  static constexpr u32 first_exact = 10;
  static constexpr u32 last_fast = 142;
  static constexpr bool has_infinity = true, is_element = true, is_integer = false;
};

// Two's complement, in units of 2^-6. Every code is a number; -128, which is -2, is read and never written.
struct INT8 {
  static constexpr int parts = 1, mantissa_bits = 6, bias = 1, emax = 0;
  static constexpr u32 max_code = 0x7f, special_carry = 0;
  static constexpr u32 first_exact = 0;  // a multiple of 2^-133 with 8 significant bits is a bfloat16
  static constexpr u32 last_fast = 252;  // above this code 4 * 2^(s - 127) is not a bfloat16
  static constexpr bool has_infinity = false, is_element = true, is_integer = true;
};

// Dtypes of values. The numbers are onnx.TensorProto.DataType.
constexpr i64 FLOAT32 = 1, FLOAT16 = 10, BFLOAT16 = 16;

// `parts`: how many bfloat16 values a value is the sum of (`take_part`).
struct F32 {
  static constexpr int bytes = 4, parts = 3;
  static constexpr i64 dtype = FLOAT32;
  static constexpr bool is_element = false;
};

struct F16 {
  static constexpr int bytes = 2, parts = 2;
  static constexpr i64 dtype = FLOAT16;
  static constexpr bool is_element = false;
};

struct BF16 {
  static constexpr int bytes = 2, parts = 1;
  static constexpr i64 dtype = BFLOAT16;
  static constexpr bool is_element = false;
};

template <class V>
DEVICE float read_value(const void* p, i64 i) {
  if (V::dtype == FLOAT32) return static_cast<const float*>(p)[i];
  const u16 h = static_cast<const u16*>(p)[i];
  return V::dtype == FLOAT16 ? from_float16(h) : float_of(static_cast<u32>(h) << 16);
}

DEVICE void write_value(void* p, i64 i, float v, i64 dtype) {
  if (dtype == FLOAT32)
    static_cast<float*>(p)[i] = v;
  else
    static_cast<u16*>(p)[i] = dtype == FLOAT16 ? to_float16(v) : to_bfloat16(v);
}

// Values i to i + 7, in accesses of 16 bytes: `p` is aligned to that, and i a multiple of 8.
DEVICE void write8(void* p, i64 i, const float (&v)[8], i64 dtype) {
  if (dtype == FLOAT32) {
    u8* to = static_cast<u8*>(p) + 4 * i;
    store16(to, make_uint4(bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])));
    store16(to + 16, make_uint4(bits_of(v[4]), bits_of(v[5]), bits_of(v[6]), bits_of(v[7])));
    return;
  }
  u32 w[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const u32 low = dtype == FLOAT16 ? to_float16(v[2 * j]) : to_bfloat16(v[2 * j]);
    const u32 high = dtype == FLOAT16 ? to_float16(v[2 * j + 1]) : to_bfloat16(v[2 * j + 1]);
    w[j] = low | (high << 16);
  }
  store16(static_cast<u8*>(p) + 2 * i, make_uint4(w[0], w[1], w[2], w[3]));
}

// 16 consecutive values as they are stored, from an address aligned to 16 bytes.
template <class V>
DEVICE void read16_raw(const void* p, u32 (&raw)[4 * V::bytes]) {
#pragma unroll
  for (int i = 0; i < V::bytes; ++i) {
    const uint4 q = load16(static_cast<const u8*>(p) + 16 * i);
    raw[4 * i] = q.x, raw[4 * i + 1] = q.y, raw[4 * i + 2] = q.z, raw[4 * i + 3] = q.w;
  }
}

// Value `i` of 16 as they are stored.
template <class V>
DEVICE float value_of(const u32 (&raw)[4 * V::bytes], int i) {
  if (V::bytes == 4) return float_of(raw[i & (4 * V::bytes - 1)]);
  const u32 w = raw[i >> 1];
  if (V::dtype == FLOAT16) return from_float16(static_cast<u16>(i & 1 ? w >> 16 : w));
  return float_of(i & 1 ? w & 0xffff0000u : w << 16);
}

// 16 consecutive values from an address aligned to 16 bytes.
template <class V>
DEVICE void read16(const void* p, float (&v)[16]) {
  u32 raw[4 * V::bytes];
  read16_raw<V>(p, raw);
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] = value_of<V>(raw, i);
}

// 16 consecutive values to an address aligned to 16 bytes.
template <class V>
DEVICE void write16(void* p, const float (&v)[16]) {
  u8* bytes = static_cast<u8*>(p);
#pragma unroll
  for (int i = 0; i < V::bytes; ++i) {
    u32 w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (V::bytes == 4) {
        w[j] = bits_of(v[(4 * i + j) & 15]);
      } else {
        const int at = (8 * i + 2 * j) & 15;
        const u32 low = V::dtype == FLOAT16 ? to_float16(v[at]) : to_bfloat16(v[at]);
        const u32 high = V::dtype == FLOAT16 ? to_float16(v[at + 1]) : to_bfloat16(v[at + 1]);
        w[j] = low | (high << 16);
      }
    }
    store16(bytes + 16 * i, make_uint4(w[0], w[1], w[2], w[3]));
  }
}

// Takes what bfloat16 holds off `v`; the rest comes back times 2^8. A float32 is p0 + 2^-8 p1 + 2^-16 p2 of what three
// calls return, exactly, and a float16 p0 + 2^-8 p1 of two: the last 16 bits of `v` are what is missing, a float32 has
// 24 significant bits and each part has 8. By the factors of 2^8 not even the smallest float32, 2^-149, is too small
// for a bfloat16 (2^-133), and no part overflows: what is missing is below 2^-7 |v|. Of Inf and NaN some part is NaN.
DEVICE float take_part(float& v) {
  const float part = float_of(bits_of(v) & 0xffff0000u);
  v = (v - part) * 256.0f;
  return part;
}

// Whether bfloat16 cannot represent the number; NaN it can.
DEVICE bool lost_in_bfloat16(float v) { return (bits_of(v) & 0xffffu) != 0 && v == v; }

DEVICE u32 magnitude(float x) { return bits_of(x) & 0x7fffffffu; }

// Bits of amax -> scale code; `increment` is formats.scale_increment, of which a subnormal number takes half: the bits
// of one with the exponent -127 have its mantissa shifted right by one. NaN and Inf give the NaN code.
template <class F>
DEVICE u32 scale_code(u32 amax_bits, u32 increment) {
  if (amax_bits >= INFINITY_BITS) return SCALE_NAN;
  const u32 added = amax_bits < FIRST_NORMAL_BITS ? increment >> 1 : increment;
  const int s = static_cast<int>((amax_bits + added) >> 23) - F::emax;
  return s < 0 ? 0u : s > 254 ? 254u : static_cast<u32>(s);
}

// 2^(127 - s), the factor on values; NaN for the NaN code, so that all 32 elements become NaN.
DEVICE float inverse_scale(u32 s) {
  if (s == SCALE_NAN) return float_of(NAN_BITS);
  return float_of(s == 254 ? 0x00400000u : (254u - s) << 23);
}

// 2^(s - 127); code 0 is a subnormal.
DEVICE float decode_scale(u32 s) { return float_of(s == SCALE_NAN ? NAN_BITS : s == 0 ? 0x00400000u : s << 23); }

// Rounds to nearest even, saturating; NaN -> 0x7f; -0 stays -0.
template <class F>
DEVICE u32 encode(float x) {
  if constexpr (F::is_integer) {
    // The sum has a unit in the last place of 1, so it rounds, and its low bits are two's complement. Of NaN and a
    // number fminf takes the number, so it comes first.
    const float saturated = fmaxf(fminf(x, F::max_code * 0x1p-6f), F::max_code * -0x1p-6f);
    return bits_of(fmaf(saturated, 64.0f, 0x1.8p23f)) & 0xffu;
  }
  constexpr int shift = 23 - F::mantissa_bits;
  constexpr u32 first_normal = static_cast<u32>(128 - F::bias) << 23;
  // Its unit in the last place is the smallest subnormal element: adding it rounds to a multiple of that.
  constexpr u32 magic = static_cast<u32>(127 + 24 - F::bias - F::mantissa_bits) << 23;
  const u32 a = magnitude(x), sign = (bits_of(x) >> 24) & 0x80u;
  if (a > INFINITY_BITS) return ELEMENT_NAN;
  if (a < first_normal) return sign | (bits_of(float_of(a) + float_of(magic)) - magic);
  const u32 rebased = a - (static_cast<u32>(127 - F::bias) << 23);
  const u32 code = (rebased + (1u << (shift - 1)) - 1 + ((rebased >> shift) & 1)) >> shift;
  return sign | (code > F::max_code ? F::max_code : code);
}

// Four values to four elements, the first in the low byte.
template <class F>
DEVICE u32 encode4(float a, float b, float c, float d) {
#ifdef HAS_FP8_CONVERSION
  if (F::emax == E4M3::emax) return to_e4m3x2(a, b) | (to_e4m3x2(c, d) << 16);
  if (F::emax == E5M2::emax) return to_e5m2x2(a, b) | (to_e5m2x2(c, d) << 16);
#endif
  return encode<F>(a) | (encode<F>(b) << 8) | (encode<F>(c) << 16) | (encode<F>(d) << 24);
}

template <class F>
DEVICE uint4 encode16(const float (&v)[16], float inverse) {
  u32 w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    w[i] = encode4<F>(v[4 * i] * inverse, v[4 * i + 1] * inverse, v[4 * i + 2] * inverse, v[4 * i + 3] * inverse);
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// `count` <= 16 elements of `q` to `to`; all 16 in one access unless RAGGED.
template <bool RAGGED>
DEVICE void write_elements(u8* to, uint4 q, int count) {
  if (!RAGGED) {
    store16(to, q);
    return;
  }
  const u32 w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (i < count) to[i] = static_cast<u8>(w[i >> 2] >> (8 * (i & 3)));
}

// Value of an element code.
template <class F>
DEVICE float decode(u32 q) {
  // 2^17 has a unit in the last place of 2^-6; q ^ 0x80 is 128 more than the integer.
  if constexpr (F::is_integer) return float_of(0x48000000u | (q ^ 0x80u)) - (0x1p17f + 2.0f);
  const u32 low = q & 0x7fu, sign = (q & 0x80u) << 24;
  if (low > F::max_code) return float_of(F::has_infinity && low == F::max_code + 1 ? INFINITY_BITS | sign : NAN_BITS);
  return float_of(sign | (low << (23 - F::mantissa_bits))) * float_of(static_cast<u32>(254 - F::bias) << 23);
}
