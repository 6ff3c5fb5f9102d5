// Elements to bfloat16 in registers: what the gemms on tensor cores make of a quantized operand.
//
// Bits are moved to where bfloat16 has them (E4M3::wide_shift), and one multiplication by 2^(s - bias) applies the
// scale. Both are exact for scale codes first_exact..last_fast and elements that are neither NaN nor Inf: `fast_code`
// and `any_special` check that. Anything else has to be summed in another way.
//
// An element q of INT8 is 2 + (q & 0x7f) / 64, less 2, or less 4 where q is negative. Times the scale, both are
// bfloat16 numbers whose bits need no multiplication: low seven bits and the sign are added to those of 2 * 2^(s -
// 127), as the mantissa of the one and to the exponent of the other.
#pragma once
#include "codec.cuh"

template <class F>
DEVICE bool fast_code(u32 s) {
  return s >= F::first_exact && s <= F::last_fast;
}

template <class F>
DEVICE u32 scale_bf16x2(u32 s) {
  return (F::is_integer ? s + 1 : s + 127 - F::bias) * 0x00800080u;  // the exponent fields of both halves
}

// Two elements of INT8, each in a half of its own, times the scale.
DEVICE u32 decode_int8_bf16x2(u32 q, u32 scale) {
  return fma_bf16x2((scale + q) & 0xff80ff80u, 0xbf80bf80u, scale | (q & 0x007f007fu));  // times -1
}

DEVICE u32 multiply_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, b, 0x80008000u); }  // adds -0

// Elements 2 * PAIR and 2 * PAIR + 1 of four, times the scale.
template <class F, int PAIR>
DEVICE u32 decode_bf16x2(u32 w, u32 scale) {
  if constexpr (F::is_integer) {
    return decode_int8_bf16x2(pick_bytes(w, PAIR == 0 ? 0x4140u : 0x4342u), scale);
  } else {
    const u32 spread = pick_bytes(w, PAIR == 0 ? 0x1404u : 0x3424u);  // each byte to the top of its half
    return multiply_bf16x2((spread & 0x80008000u) | ((spread >> F::wide_shift) & F::wide_mask), scale);
  }
}

// Whether one of 16 elements is NaN or Inf.
template <class F>
DEVICE bool any_special(uint4 q) {
  const u32 carries = ((q.x & 0x7f7f7f7fu) + F::special_carry) | ((q.y & 0x7f7f7f7fu) + F::special_carry) |
                      ((q.z & 0x7f7f7f7fu) + F::special_carry) | ((q.w & 0x7f7f7f7fu) + F::special_carry);
  return (carries & 0x80808080u) != 0;
}

// Whether 16 elements and their scale are what the above multiplies exactly. Zeros may have any small scale: blocks of
// nothing else have code 0.
template <class F>
DEVICE bool fast_elements(uint4 q, u32 s) {
  const bool zero = ((q.x | q.y | q.z | q.w) & 0x7f7f7f7fu) == 0;
  return (fast_code<F>(s) || (zero && s < F::first_exact)) && !any_special<F>(q);
}

// The same for all elements that were seen, decided once at the end: no branch for any of them.
template <class F>
struct FastElements {
  DEVICE_MEMBER void see(uint4 q, u32 s) {
    // Adding special_carry flips bit 7 of a byte that is NaN or Inf. It flips others only above such a byte.
    flipped |= (q.x + F::special_carry) ^ q.x;
    flipped |= (q.y + F::special_carry) ^ q.y;
    flipped |= (q.z + F::special_carry) ^ q.z;
    flipped |= (q.w + F::special_carry) ^ q.w;
    largest = max(largest, s);
    const u32 below = static_cast<u32>(static_cast<int>(s - F::first_exact) >> 31);  // all bits or none
    tiny |= (q.x | q.y | q.z | q.w) & below;
  }
  DEVICE_MEMBER bool all() const {
    return (flipped & 0x80808080u) == 0 && largest <= F::last_fast && (tiny & 0x7f7f7f7fu) == 0;
  }

  u32 flipped = 0, largest = 0, tiny = 0;
};
