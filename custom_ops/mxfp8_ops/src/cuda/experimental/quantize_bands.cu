// quantize_columns<V, F, ROWS, TRANSPOSED> in other thread blocks, whose writes fill whole cache lines. Not measured.
//
//   x         [k, inner] V, blocked along k; k % 32 = 0, inner % 16 = 0 (ROWS: 32)      blocks = k / 32
//   elements  [inner, k], scales [inner, blocks]: what a product over k reads
//   ROWS      also blocked along inner: row_elements [k, inner], row_scales [k, inner / 32]
//   grid      one thread block of 256 per 128 x 128 tile: ceil(k / 128) * ceil(inner / 128), neighbours take the same
//             columns; x, elements and row_elements aligned to 16
//   bytes     V::bytes + 1 + 1/32 a value, each once; ROWS adds 1 + 1/32
//
// quantize_columns takes 32 rows of 512 columns: it writes 32 bytes of a column, and 512 scales one byte at a time,
// each to a cache line of its own. Here a column's 128 elements are one cache line and its four scales one word.
//
// Each of 8 warps keeps 16 rows in registers: a lane 4 that follow each other, of 16 columns; eight lanes have one row.
// The largest magnitudes cross lanes and warps through shared memory, two warps to a block of 32 rows; so do the
// elements, a word of 4 rows at a time.
#include "codec.cuh"

// Four scale codes of a row of scales [.., blocks] from block `kb` on, a multiple of 4: at once if they are a word.
DEVICE void write_codes(u8* scales, i64 row, i64 kb, i64 blocks, u32 codes) {
  u8* to = scales + row * blocks + kb;
  if (blocks % 4 == 0 && reinterpret_cast<u64>(scales) % 4 == 0) {
    *reinterpret_cast<u32*>(to) = codes;
    return;
  }
  for (int i = 0; i < 4 && kb + i < blocks; ++i) to[i] = static_cast<u8>(codes >> (8 * i));
}

template <class V, class F, bool ROWS>
__global__ void __launch_bounds__(256, V::dtype == BFLOAT16 && !ROWS ? 3
                                       : V::dtype == FLOAT32 && ROWS ? 1
                                                                     : 2)
    quantize_bands(const u8* __restrict__ x, u8* __restrict__ elements, u8* __restrict__ scales,
                   u8* __restrict__ row_elements, u8* __restrict__ row_scales, i64 k, i64 inner, i64 increment) {
  // Column c of the tile is lane c / 16 of the eight, value c % 16.
  __shared__ u32 shared[8][16][32];    // [warp][value][lane]: the largest magnitudes of 4 rows, then their elements
  __shared__ float inverse[4][16][8];  // [block of 32 rows][value][lane]
  __shared__ u8 codes[128][4];         // scale codes of columns
  __shared__ u8 row_codes[128][4];

  const u32 bands = static_cast<u32>((k + 127) >> 7), band = blockIdx.x % bands, tile = blockIdx.x / bands;
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31;
  const i64 band_row = static_cast<i64>(band) * 128, tile_column = static_cast<i64>(tile) * 128;
  const int mine = warp * 16 + (lane >> 3) * 4;  // the first of this lane's rows in the band
  const i64 first_row = band_row + mine, column = tile_column + (lane & 7) * 16;
  const bool live = first_row < k && column < inner;  // all four rows, all 16 columns

  u32 raw[4][4 * V::bytes] = {};  // as stored, so that 16-bit values take half the registers
#pragma unroll
  for (int r = 0; r < 4; ++r)
    if (live) read16_raw<V>(x + ((first_row + r) * inner + column) * V::bytes, raw[r]);

#pragma unroll
  for (int i = 0; i < 16; ++i) {
    u32 amax = 0;
#pragma unroll
    for (int r = 0; r < 4; ++r) amax = max(amax, magnitude(value_of<V>(raw[r], i)));
    shared[warp][i][lane] = amax;
  }
  __syncthreads();
#pragma unroll
  for (int j = thread; j < 512; j += 256) {
    const int block = j >> 7, i = (j >> 3) & 15, l = j & 7;
    u32 amax = 0;
#pragma unroll
    for (int w = 0; w < 2; ++w)
#pragma unroll
      for (int g = 0; g < 4; ++g)  // in another order for each value, so that no two lanes meet in a bank
        amax = max(amax, shared[2 * block + w][i][((g + i) & 3) * 8 + l]);
    const u32 s = scale_code<F>(amax, static_cast<u32>(increment));
    inverse[block][i][l] = inverse_scale(s);
    codes[l * 16 + i][block] = static_cast<u8>(s);
  }
  __syncthreads();

  if (ROWS) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float v[16];
      u32 amax = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        v[i] = value_of<V>(raw[r], i);
        amax = max(amax, magnitude(v[i]));
      }
      amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
      const u32 s = scale_code<F>(amax, static_cast<u32>(increment));
      if (live) store16(row_elements + (first_row + r) * inner + column, encode16<F>(v, inverse_scale(s)));
      if ((lane & 1) == 0) row_codes[mine + r][(lane & 7) >> 1] = static_cast<u8>(s);
    }
  }
  // A warp writes its words where none of the eight threads that read a column below meet in a bank, nor do those of
  // four neighbouring columns.
  const int place = lane ^ ((warp & 3) << 3) ^ (warp & 4);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float f = inverse[warp >> 1][i][lane & 7];
    shared[warp][i][place] = encode4<F>(value_of<V>(raw[0], i) * f, value_of<V>(raw[1], i) * f,
                                        value_of<V>(raw[2], i) * f, value_of<V>(raw[3], i) * f);
  }
  __syncthreads();

  if (thread < 128) {
    const i64 c = tile_column + thread;
    const u8* four = codes[thread];
    if (c < inner)
      write_codes(scales, c, band * 4, k >> 5, four[0] | four[1] << 8 | four[2] << 16 | u32(four[3]) << 24);
  } else if (ROWS) {
    const int row = thread - 128;
    const u8* four = row_codes[row];
    if (band_row + row < k)
      write_codes(row_scales, band_row + row, tile * 4, inner >> 5,
                  four[0] | four[1] << 8 | four[2] << 16 | u32(four[3]) << 24);
  }
#pragma unroll
  for (int j = thread; j < 1024; j += 256) {  // eight neighbouring threads write the 128 elements of a column
    const int part = j & 7, l = (j >> 3) & 7, i = j >> 6;
    const i64 c = tile_column + l * 16 + i, row = band_row + part * 16;
    if (c >= inner || row >= k) continue;
    u32 w[4];
#pragma unroll
    for (int g = 0; g < 4; ++g) w[g] = shared[part][i][(g * 8 + l) ^ ((part & 3) << 3) ^ (part & 4)];
    store16(elements + c * k + row, make_uint4(w[0], w[1], w[2], w[3]));
  }
}
