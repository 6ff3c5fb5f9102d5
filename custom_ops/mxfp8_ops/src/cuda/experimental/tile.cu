// x for gemm_fused.cu: in bfloat16, cut into the tiles that it copies, each in the order in which wgmma reads it.
//
//   x        [m, k] X: BF16, or elements with scales; k % 32 = 0, aligned to 16
//   tiles    [ceil(m / 128), ceil(k / 64), 128 rows, 8 places, 8] bfloat16; rows past the end of x are not written
//   inexact  a word that becomes 1 if bfloat16 cannot hold some value; of X = BF16 it holds all, so with `clears` that
//            word becomes 0, for what comes after
//   grid     one thread per 16 values of a tile: ceil(4 m ceil(k / 64) / 256) thread blocks of 256
//   bytes    2 (BF16) or 33/32, and 2, a value
//
// A row of a tile is 64 values of k as 8 parts of 8. Part c of row r is in place c ^ (r % 8): the 128-byte swizzle of
// wgmma, without which rows would meet in the same banks. Values of k are in another order: lane t of four holds 16
// that follow each other of the weight, k = 16t ..., and wgmma takes of it four for each 16 of k, in pairs. So the t-th
// pair of part c is k = 16t + 2c, 16t + 2c + 1; PAIRED, those of parts 2w and 2w + 1 are k = 16t + 4w and the second
// after it, and k = 16t + 4w + 1 and the second after that.
#include "codec.cuh"

template <class X, bool PAIRED>
__global__ void __launch_bounds__(256)
    tile(const u8* __restrict__ x, const u8* __restrict__ scales, u8* __restrict__ tiles, i64 m, i64 k,
         u32* __restrict__ inexact, i64 clears) {
  const i64 steps = (k + 63) >> 6, index = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  const i64 step = (index >> 2) / m, row = (index >> 2) - step * m;
  const int parts = static_cast<int>(index & 3) * 2;  // this thread's two
  if (step >= steps) return;
  if (clears != 0 && index == 0) *inexact = 0;
  u32 pairs[2][4] = {};
  bool lost = false;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const i64 at = step * 64 + 16 * t + 2 * parts;
    if (at >= k) continue;  // zeros
    if constexpr (X::is_element) {
      const u32 q = *reinterpret_cast<const u32*>(x + row * k + at);
      const float scale = decode_scale(scales[(row * k + at) >> 5]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float v = decode<X>((q >> (8 * i)) & 0xffu) * scale;
        lost |= lost_in_bfloat16(v);
        const int pair = PAIRED ? i & 1 : i >> 1, half = PAIRED ? i >> 1 : i & 1;
        pairs[pair][t] |= static_cast<u32>(to_bfloat16(v)) << (16 * half);
      }
    } else {
      const u64 values = *reinterpret_cast<const u64*>(x + (row * k + at) * 2);
      const u32 low = static_cast<u32>(values), high = static_cast<u32>(values >> 32);
      pairs[0][t] = PAIRED ? (low & 0xffffu) | (high << 16) : low;
      pairs[1][t] = PAIRED ? (low >> 16) | (high & 0xffff0000u) : high;
    }
  }
  const int of_tile = static_cast<int>(row & 127);
  u8* to = tiles + (((row >> 7) * steps + step) * 128 + of_tile) * 128;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    store16(to + ((parts + i) ^ (of_tile & 7)) * 16, make_uint4(pairs[i][0], pairs[i][1], pairs[i][2], pairs[i][3]));
  if (lost) *inexact = 1;
}
