// Both gemms for few rows (m <= 8 * TILES, TILES <= 8) on bfloat16 tensor cores, exact: limited by reading the weight.
//
//   x [m, k] X: BF16, or elements with x_scales        b [n, k] F with b_scales      bias [n] float32, or null
//   y [m, n] of dtype `y_dtype`                        k % 32 = 0, k < 2^25; x and b aligned to 16
//   grid      ceil(n / 16) thread blocks of 8 warps; a warp takes every eighth slab of 128 along k
//   bytes     33/32 n k for the weight, once; x once per thread block, from the L2 cache
//
// The weight is the A operand of the mma (16 rows), x the B operand (8 rows a tile). Lane t of a group of four owns one
// whole block (32 values) of its rows, so it needs one scale and only 16-byte loads: the sum does not care in which
// order k is taken, as long as both operands take it alike. Elements become bfloat16 by moving their bits (E4M3::
// wide_shift), and one multiplication by 2^(s - bias) applies the scale; both are exact for codes
// first_exact..last_fast.
//
// Two things that hardly ever occur are decided per slab for the whole warp: a scale outside that range (the slab is
// summed in float32 instead), and NaN or Inf elements (their products are added afterwards; the finite numbers they
// were taken for do no harm, because NaN and Inf absorb them).
#include "operand.cuh"

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

// Bit 7 of every byte that holds a NaN or Inf element.
template <class F>
DEVICE u32 specials(uint4 q) {
  return ((q.x & 0x7f7f7f7fu) + F::special_carry) | ((q.y & 0x7f7f7f7fu) + F::special_carry) |
         ((q.z & 0x7f7f7f7fu) + F::special_carry) | ((q.w & 0x7f7f7f7fu) + F::special_carry);
}

// Adds a slab in float32 to the lane's sums: all products, or only those with a NaN or Inf in them.
template <class X, class F, int TILES>
DEVICE void add_slab(float (&sums)[TILES][4], bool only_special, const u8* x, const u8* x_scales, const u8* b,
                     const u8* b_scales, i64 row, i64 m, i64 n, i64 first, i64 k, int lane) {
  const i64 rows[2] = {row < n ? row : n - 1, row + 8 < n ? row + 8 : n - 1};  // past the end: summed, never stored
  const i64 end = first + 128 < k ? first + 128 : k;
  // One sum after the other: this must not take registers from the loop that calls it.
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const i64 token = i * 8 + (lane & 3) * 2 + (j & 1);
#pragma unroll 1
      for (i64 at = first; at < end; ++at) {
        const float w = operand<F>(b, b_scales, rows[j >> 1], at, k);
        const float value = operand<X>(x, x_scales, token < m ? token : m - 1, at, k);
        const bool special = magnitude(w) >= INFINITY_BITS || magnitude(value) >= INFINITY_BITS;
        if (!only_special || special) sums[i][j] = fmaf(w, value, sums[i][j]);
      }
    }
}

template <class X, class F, int TILES>
__global__ void __launch_bounds__(256, TILES == 1   ? (X::is_element || F::has_infinity ? 3 : 4)
                                       : TILES == 2 ? 2
                                                    : 1)
    gemm_skinny(const u8* __restrict__ x, const u8* __restrict__ x_scales, const u8* __restrict__ b,
                const u8* __restrict__ b_scales, const float* __restrict__ bias, u8* __restrict__ y, i64 m, i64 n,
                i64 k, i64 y_dtype) {
  __shared__ float parts[8][16][8 * TILES + 1];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2;
  const i64 blocks = k >> 5, first_row = static_cast<i64>(blockIdx.x) * 16, row = first_row + group;
  float sums[TILES][4] = {};

#pragma unroll 1
  for (i64 slab = warp * 128; slab < k; slab += 8 * 128) {
    const i64 at = slab + (lane & 3) * 32;
    uint4 weight[2][2] = {};  // [row, row + 8][half of the block]
    u32 scale[2], special = 0;
    bool fast = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u32 s = 127;
      if (at < k && row + 8 * r < n) {
        const u8* p = b + (row + 8 * r) * k + at;
        weight[r][0] = load16(p);
        weight[r][1] = load16(p + 16);
        s = b_scales[(row + 8 * r) * blocks + (at >> 5)];
      }
      fast = fast && fast_code<F>(s);
      scale[r] = scale_bf16x2<F>(s);
      special |= specials<F>(weight[r][0]) | specials<F>(weight[r][1]);
    }
    u32 x_scale[TILES] = {};
    if constexpr (X::is_element) {
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        const i64 token = i * 8 + group;
        const u32 s = at < k && token < m ? x_scales[token * blocks + (at >> 5)] : 127;
        fast = fast && fast_code<X>(s);
        x_scale[i] = scale_bf16x2<X>(s);
      }
    }
    const bool all_fast = __all_sync(0xffffffffu, fast);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!all_fast) break;
      const u32 w[2][4] = {{weight[0][half].x, weight[0][half].y, weight[0][half].z, weight[0][half].w},
                           {weight[1][half].x, weight[1][half].y, weight[1][half].z, weight[1][half].w}};
      u32 a[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        a[j][0] = decode_bf16x2<F, 0>(w[0][j], scale[0]);
        a[j][1] = decode_bf16x2<F, 0>(w[1][j], scale[1]);
        a[j][2] = decode_bf16x2<F, 1>(w[0][j], scale[0]);
        a[j][3] = decode_bf16x2<F, 1>(w[1][j], scale[1]);
      }
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        const u32 token = i * 8 + group, from = token * static_cast<u32>(k) + static_cast<u32>(at) + 16 * half;
        const bool live = at < k && token < m;
        u32 v[8];
        if constexpr (X::is_element) {
          const uint4 q = live ? load16(x + from) : make_uint4(0, 0, 0, 0);
          const u32 packed[4] = {q.x, q.y, q.z, q.w};
          special |= specials<X>(q);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            v[2 * j] = decode_bf16x2<X, 0>(packed[j], x_scale[i]);
            v[2 * j + 1] = decode_bf16x2<X, 1>(packed[j], x_scale[i]);
          }
        } else {
          const uint4 p = live ? load16(x + 2 * static_cast<u64>(from)) : make_uint4(0, 0, 0, 0);
          const uint4 q = live ? load16(x + 2 * static_cast<u64>(from) + 16) : make_uint4(0, 0, 0, 0);
          v[0] = p.x, v[1] = p.y, v[2] = p.z, v[3] = p.w;
          v[4] = q.x, v[5] = q.y, v[6] = q.z, v[7] = q.w;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_m16n8k16(sums[i], a[j], v[2 * j], v[2 * j + 1]);
      }
    }
    if (__any_sync(0xffffffffu, !all_fast || (special & 0x80808080u) != 0))
      add_slab<X, F, TILES>(sums, all_fast, x, x_scales, b, b_scales, row, m, n, slab, k, lane);
  }

#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) parts[warp][group + (j >> 1) * 8][i * 8 + (lane & 3) * 2 + (j & 1)] = sums[i][j];
  __syncthreads();
  for (int e = threadIdx.x; e < 16 * 8 * TILES; e += 256) {
    const int r = e & 15, token = e >> 4;
    if (token >= m || first_row + r >= n) continue;
    float sum = bias == nullptr ? 0.0f : bias[first_row + r];
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += parts[w][r][token];
    write_value(y, token * n + first_row + r, sum, y_dtype);
  }
}
