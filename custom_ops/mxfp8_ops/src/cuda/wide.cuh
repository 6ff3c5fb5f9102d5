// Elements to bfloat16 in registers: what the gemms on tensor cores make of a quantized operand.
//
// Bits are moved to where bfloat16 has them (E4M3::wide_shift), and one multiplication by 2^(s - bias) applies the
// scale. Both are exact for scale codes first_exact..last_fast and elements that are neither NaN nor Inf: `fast_code`
// and `any_special` tell. Anything else has to be summed in another way.
#pragma once
#include "codec.cuh"

template <class F>
DEVICE bool fast_code(u32 s) {
  return s >= F::first_exact && s <= F::last_fast;
}

template <class F>
DEVICE u32 scale_bf16x2(u32 s) {
  return (s + 127 - F::bias) * 0x00800080u;  // the exponent fields of both halves
}

// Elements 2 * PAIR and 2 * PAIR + 1 of four, times the scale.
template <class F, int PAIR>
DEVICE u32 decode_bf16x2(u32 w, u32 scale) {
  const u32 spread = pick_bytes(w, PAIR == 0 ? 0x1404u : 0x3424u);  // each byte to the top of its half
  return multiply_bf16x2((spread & 0x80008000u) | ((spread >> F::wide_shift) & F::wide_mask), scale);
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
