// MXFP8Quantize along an axis that is not the last, and along both axes of a matrix in one pass over it.
//
//   x         [outer, k, inner] V, blocked along k       blocks = ceil(k / 32)
//   LAYOUT    PLAIN: elements [outer, k, inner], scales [outer, blocks, inner]
//             TRANSPOSED (outer = 1): elements [inner, k], scales [inner, blocks]: what a product over k reads
//             BOTH: the same, and blocked along inner: row_elements [k, inner], row_scales [k, ceil(inner / 32)]
//   grid      one thread block of 256 per 32 x 512 tile: outer * blocks * ceil(inner / 512); unless PLAIN, neighbouring
//             blocks take the same columns, because they write parts of the same cache lines
//   bytes     V::bytes + 1 + 1/32 a value, each once; BOTH adds 1 + 1/32
//
// Each of 8 warps keeps 4 rows of the tile in registers, 16 columns a lane. Only the largest magnitude of each column
// crosses warps, through shared memory, and unless PLAIN the elements, a word of 4 rows at a time. RAGGED is for
// inner % 16 != 0 (BOTH: inner % 32), unless PLAIN also for k % 32 != 0, and for unaligned addresses.
#include "codec.cuh"

constexpr int PLAIN = 0, TRANSPOSED = 1, BOTH = 2;

// Three blocks a multiprocessor leave 80 registers: too few for float32, BOTH, and PLAIN with RAGGED addresses on
// sm_100a.
template <class V, class F, int LAYOUT, bool RAGGED>
__global__ void __launch_bounds__(256, V::dtype == BFLOAT16 && (LAYOUT == TRANSPOSED || (LAYOUT == PLAIN && !RAGGED))
                                           ? 3
                                           : 2)
    quantize_columns(const u8* __restrict__ x, u8* __restrict__ elements, u8* __restrict__ scales,
                     u8* __restrict__ row_elements, u8* __restrict__ row_scales, i64 k, i64 inner, i64 increment) {
  // Column c of the tile is lane c / 16, value c % 16, and lies at [c % 16][c / 16]: no two lanes meet in a bank.
  __shared__ u32 shared[8][16][32];  // the largest magnitudes of 4 rows each, then, unless PLAIN, elements of 4 rows
  __shared__ float inverse[16][32];
  __shared__ __align__(16) u8 codes[512];

  const u32 tiles = static_cast<u32>((inner + 511) >> 9), blocks = static_cast<u32>((k + 31) >> 5);
  const u32 bands = gridDim.x / tiles;
  const u32 band = LAYOUT == PLAIN ? blockIdx.x / tiles : blockIdx.x % bands;  // outer * blocks + block
  const u32 tile = LAYOUT == PLAIN ? blockIdx.x % tiles : blockIdx.x / bands;
  const i64 outer = band / blocks, kb = band % blocks;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i64 tile_column = static_cast<i64>(tile) * 512;
  const i64 column = tile_column + lane * 16, first_row = kb * 32 + warp * 4;
  const int count = static_cast<int>(inner - column < 16 ? inner - column : 16);  // <= 0: past the end

  u32 raw[4][4 * V::bytes] = {};  // as stored, so that 16-bit values take half the registers
  i64 at[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    at[r] = (outer * k + first_row + r) * inner + column;
    if (first_row + r >= k) continue;
    if (!RAGGED) {
      if (count > 0) read16_raw<V>(x + at[r] * V::bytes, raw[r]);
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (i < count) {
          if (V::bytes == 4)
            raw[r][i & (4 * V::bytes - 1)] = reinterpret_cast<const u32*>(x)[at[r] + i];
          else
            raw[r][i >> 1] |= static_cast<u32>(reinterpret_cast<const u16*>(x)[at[r] + i]) << (16 * (i & 1));
        }
    }
  }

#pragma unroll
  for (int i = 0; i < 16; ++i) {
    u32 amax = 0;
#pragma unroll
    for (int r = 0; r < 4; ++r) amax = max(amax, magnitude(value_of<V>(raw[r], i)));
    shared[warp][i][lane] = amax;
  }
  __syncthreads();
  for (int j = threadIdx.x; j < 512; j += 256) {
    const int i = j >> 5, l = j & 31;
    u32 amax = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) amax = max(amax, shared[w][i][l]);
    const u32 s = scale_code<F>(amax, static_cast<u32>(increment));
    inverse[i][l] = inverse_scale(s);
    if (LAYOUT == PLAIN && !RAGGED) {
      codes[l * 16 + i] = static_cast<u8>(s);
    } else if (const i64 c = tile_column + l * 16 + i; c < inner) {
      scales[LAYOUT == PLAIN ? band * inner + c : c * blocks + kb] = static_cast<u8>(s);
    }
  }
  __syncthreads();

  if (LAYOUT == PLAIN && !RAGGED && warp == 0 && count > 0)
    store16(scales + band * inner + column, load_shared16(codes + lane * 16));
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const bool live = first_row + r < k && count > 0;
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = value_of<V>(raw[r], i);
    if (LAYOUT == BOTH) {
      u32 amax = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) amax = max(amax, magnitude(v[i]));
      amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
      const u32 s = scale_code<F>(amax, static_cast<u32>(increment));
      if (live) {
        write_elements<RAGGED>(row_elements + at[r], encode16<F>(v, inverse_scale(s)), count);
        const i64 row = first_row + r, row_blocks = (inner + 31) >> 5, block = column >> 5;
        if ((lane & 1) == 0) row_scales[row * row_blocks + block] = s;
      }
    }
    if (LAYOUT != PLAIN || !live) continue;
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] *= inverse[i][lane];
    write_elements<RAGGED>(elements + at[r], encode16<F>(v, 1.0f), count);
  }

  if (LAYOUT != PLAIN) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float f = inverse[i][lane];
      // The upper warps swap halves of the banks, so that below the two threads of a column do not meet in one.
      shared[warp][i][lane ^ ((warp & 4) << 2)] = encode4<F>(value_of<V>(raw[0], i) * f, value_of<V>(raw[1], i) * f,
                                                             value_of<V>(raw[2], i) * f, value_of<V>(raw[3], i) * f);
    }
    __syncthreads();
    for (int j = threadIdx.x; j < 1024; j += 256) {  // two neighbouring threads write the 32 elements of a column
      const int half = j & 1, i = j >> 6, l = (j >> 1) & 31;
      const i64 c = tile_column + l * 16 + i, row = kb * 32 + half * 16;
      if (c >= inner || row >= k) continue;
      u32 w[4];
#pragma unroll
      for (int g = 0; g < 4; ++g) w[g] = shared[half * 4 + g][i][l ^ (half << 4)];
      write_elements<RAGGED>(elements + c * k + row, make_uint4(w[0], w[1], w[2], w[3]),
                             static_cast<int>(k - row < 16 ? k - row : 16));
    }
  }
}
