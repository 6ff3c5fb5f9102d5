// MXFP8Quantize along the last axis.
//
//   x         [rows, k] V                     elements  [rows, k]
//   scales    [rows, blocks], blocks = ceil(k / 32)
//   grid      one thread per 16 values (half a block): ceil(rows * blocks * 2 / 256) thread blocks of 256
//   bytes     V::bytes + 1 + 1/32 a value, each once
//
// Two neighbouring lanes share a block: 16-byte loads, one shuffle, one 16-byte store. RAGGED is for k % 32 != 0 and
// for addresses that are not aligned to 16: the same work with single accesses.
#include "codec.cuh"

template <class V, class F, bool RAGGED>
__global__ void __launch_bounds__(256) quantize_rows(const u8* __restrict__ x, u8* __restrict__ elements,
                                                     u8* __restrict__ scales, i64 rows, i64 k, i64 increment) {
  const i64 blocks = (k + 31) >> 5;
  const i64 half = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  const i64 block = half >> 1;
  const bool live = block < rows * blocks;
  float v[16] = {};
  i64 at = half * 16;
  int count = 16;
  if (RAGGED) {
    // 32 bits hold every index of a tensor that fits a GPU, and divide four times as fast.
    const i64 row = static_cast<u32>(block) / static_cast<u32>(blocks);
    const i64 first = (block - row * blocks) * 32 + (half & 1) * 16;
    at = row * k + first;
    count = live ? static_cast<int>(k - first < 16 ? k - first : 16) : 0;  // <= 0: past the end of the row
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < count) v[i] = read_value<V>(x, at + i);
  } else if (live) {
    read16<V>(x + at * V::bytes, v);
  }
  u32 amax = 0;  // magnitudes order as their bits do, and NaN wins by itself
#pragma unroll
  for (int i = 0; i < 16; ++i) amax = max(amax, magnitude(v[i]));
  amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
  const u32 s = scale_code<F>(amax, static_cast<u32>(increment));
  if (!live) return;
  write_elements<RAGGED>(elements + at, encode16<F>(v, inverse_scale(s)), count);
  if ((half & 1) == 0) scales[block] = static_cast<u8>(s);
}
