// MXFP8Dequantize along any axis.
//
//   elements  [outer, k, inner], blocked along k         scales  [outer, ceil(k / 32), inner]
//   y         [outer, k, inner] V
//   inexact   null, or a word that becomes 1 if V is bfloat16 and cannot hold some value: what a product on bfloat16
//             tensor cores must know before it calls itself exact
//   grid      one thread per 16 consecutive elements: ceil(total / 16 / 256) thread blocks of 256
//   bytes     V::bytes + 1 + 1/32 a value, each once
//
// LAST: inner = 1, and 16 elements share one scale. RAGGED is for k % 32 != 0 (LAST) or inner % 16 != 0, and for
// addresses that are not aligned to 16.
#include "wide.cuh"

template <class V, class F>
DEVICE float dequantized(u32 q, u32 s, bool& lost) {
  const float v = decode<F>(q) * decode_scale(s);
  lost |= V::dtype == BFLOAT16 && s < F::first_exact && lost_in_bfloat16(v);
  return v;
}

template <class V, class F, bool LAST, bool RAGGED>
__global__ void __launch_bounds__(256)
    dequantize(const u8* __restrict__ elements, const u8* __restrict__ scales, u8* __restrict__ y, i64 k, i64 inner,
               i64 total, u32* __restrict__ inexact) {
  const i64 part = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  const i64 first = part * 16, blocks = (k + 31) >> 5;
  if (first >= total) return;
  bool lost = false;
  if (RAGGED) {
    const i64 end = total - first < 16 ? total : first + 16;
    for (i64 i = first; i < end; ++i) {
      const i64 row = i / inner, outer = row / k;
      const u32 s = scales[(outer * blocks + ((row - outer * k) >> 5)) * inner + (i - row * inner)];
      write_value(y, i, dequantized<V, F>(elements[i], s, lost), V::dtype);
    }
  } else {
    u8 s[16];
    if (LAST) {
      s[0] = scales[part >> 1];
    } else {
      const i64 row = first / inner, outer = row / k;
      const uint4 q = load16(scales + (outer * blocks + ((row - outer * k) >> 5)) * inner + (first - row * inner));
      const u32 w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int i = 0; i < 16; ++i) s[i] = static_cast<u8>(w[i >> 2] >> (8 * (i & 3)));
    }
    const uint4 q = load16(elements + first);
    const u32 w[4] = {q.x, q.y, q.z, q.w};
    if constexpr (LAST && V::dtype == BFLOAT16) {
      if (fast_elements<F>(q,
                           s[0])) {  // nearly always: bits are moved, and one product of two values applies the scale
        const u32 scale = scale_bf16x2<F>(s[0]);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          store16(y + 2 * first + 16 * i,
                  make_uint4(decode_bf16x2<F, 0>(w[2 * i], scale), decode_bf16x2<F, 1>(w[2 * i], scale),
                             decode_bf16x2<F, 0>(w[2 * i + 1], scale), decode_bf16x2<F, 1>(w[2 * i + 1], scale)));
        return;
      }
    }
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = dequantized<V, F>((w[i >> 2] >> (8 * (i & 3))) & 0xffu, s[LAST ? 0 : i], lost);
    write16<V>(y + first * V::bytes, v);
  }
  if (lost && inexact != nullptr) *inexact = 1;
}
