// MXFP8Quantize along an axis that is not the last, and along both axes of a matrix in one pass over it.
//
//   x         [outer, k, inner] V, blocked along k       elements [outer, k, inner]
//   scales    [outer, blocks, inner], blocks = ceil(k / 32); SWIZZLED (outer = 1): the 128x4 layout of [inner, blocks]
//   ROWS      (outer = 1) also blocked along inner: row_elements [k, inner], row_scales [k, ceil(inner / 32)] or, if
//             SWIZZLED, the 128x4 layout of that
//   grid      one thread block of 256 per 32 x 512 tile: outer * blocks * ceil(inner / 512)
//   bytes     V::bytes + 1 + 1/32 a value, each once; ROWS adds 1 + 1/32
//
// Each of 8 warps keeps 4 rows of the tile in registers, 16 columns a lane. Only the largest magnitude of each column
// crosses warps, through shared memory. RAGGED is for inner % 16 != 0 (ROWS: inner % 32) and unaligned addresses.
#include "codec.cuh"

template <class V, class F, bool ROWS, bool SWIZZLED, bool RAGGED>
__global__ void __launch_bounds__(256)
    quantize_columns(const u8* __restrict__ x, u8* __restrict__ elements, u8* __restrict__ scales,
                     u8* __restrict__ row_elements, u8* __restrict__ row_scales, i64 k, i64 inner, i64 increment) {
  // Column c of the tile is lane c / 16, value c % 16, and lies at [c % 16][c / 16]: no two lanes meet in a bank.
  __shared__ u32 largest[8][16][32];
  __shared__ float inverse[16][32];
  __shared__ __align__(16) u8 codes[512];

  const u32 tiles = static_cast<u32>((inner + 511) >> 9), blocks = static_cast<u32>((k + 31) >> 5);
  const u32 band = blockIdx.x / tiles;  // outer * blocks + block
  const i64 outer = band / blocks, kb = band % blocks;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i64 tile_column = static_cast<i64>(blockIdx.x % tiles) * 512;
  const i64 column = tile_column + lane * 16, first_row = kb * 32 + warp * 4;
  const int count = static_cast<int>(inner - column < 16 ? inner - column : 16);  // <= 0: past the end

  float v[4][16] = {};
  i64 at[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    at[r] = (outer * k + first_row + r) * inner + column;
    if (first_row + r >= k) continue;
    if (!RAGGED) {
      if (count > 0) read16<V>(x + at[r] * V::bytes, v[r]);
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (i < count) v[r][i] = read_value<V>(x, at[r] + i);
    }
  }

#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const u32 upper = max(magnitude(v[0][i]), magnitude(v[1][i]));
    largest[warp][i][lane] = max(upper, max(magnitude(v[2][i]), magnitude(v[3][i])));
  }
  __syncthreads();
  for (int j = threadIdx.x; j < 512; j += 256) {
    const int i = j >> 5, l = j & 31;
    u32 amax = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) amax = max(amax, largest[w][i][l]);
    const u32 s = scale_code<F>(amax, static_cast<u32>(increment));
    inverse[i][l] = inverse_scale(s);
    codes[l * 16 + i] = static_cast<u8>(s);
  }
  __syncthreads();

  if (warp == 0 && count > 0) {
    if (!SWIZZLED && !RAGGED) {
      store16(scales + band * inner + column, load_shared16(codes + lane * 16));
    } else {
      for (int i = 0; i < count; ++i) {
        const i64 to = SWIZZLED ? swizzled(column + i, kb, blocks) : band * inner + column + i;
        scales[to] = codes[lane * 16 + i];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const bool live = first_row + r < k && count > 0;
    if (ROWS) {
      u32 amax = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) amax = max(amax, magnitude(v[r][i]));
      amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
      const u32 s = scale_code<F>(amax, static_cast<u32>(increment));
      if (live) {
        write_elements<RAGGED>(row_elements + at[r], encode16<F>(v[r], inverse_scale(s)), count);
        const i64 row = first_row + r, row_blocks = (inner + 31) >> 5, block = column >> 5;
        if ((lane & 1) == 0) row_scales[SWIZZLED ? swizzled(row, block, row_blocks) : row * row_blocks + block] = s;
      }
    }
    if (!live) continue;
#pragma unroll
    for (int i = 0; i < 16; ++i) v[r][i] *= inverse[i][lane];
    write_elements<RAGGED>(elements + at[r], encode16<F>(v[r], 1.0f), count);
  }
}
