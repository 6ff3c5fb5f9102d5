// Scales [rows, blocks] -> cuBLASLt's 128x4 layout, which block-scaled products on Blackwell read.
//
//   scales  [rows, blocks]      y  ceil(rows / 128) * 128 * ceil(blocks / 4) * 4 codes, the padding zero; aligned to 16
//   grid    one thread per 16 codes of y (4 blocks of 4 rows that lie 32 apart): ceil(size / 16 / 256) blocks of 256
//   bytes   1 a scale read, 1 written
#include "codec.cuh"

__global__ void __launch_bounds__(256)
    swizzle_scales(const u8* __restrict__ scales, u8* __restrict__ y, i64 rows, i64 blocks) {
  const i64 unit = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  const i64 across = (blocks + 3) >> 2;
  // Neighbouring threads take neighbouring blocks of a row, so that reads are what is contiguous.
  const i64 tile = unit / (32 * across), within = unit - tile * 32 * across;
  const i64 in_tile = within / across, row = tile * 128 + in_tile, kb = (within % across) * 4;
  if (tile * 128 >= rows) return;
  u32 w[4] = {};
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (row + 32 * r < rows && kb + i < blocks)
        w[r] |= static_cast<u32>(scales[(row + 32 * r) * blocks + kb + i]) << (8 * i);
  // cuBLAS documentation, "1D Block Scaling Factors Layout": 512 codes for 128 rows and 4 blocks, row 32 i + j at
  // 16 j + 4 i.
  store16(y + (tile * across + kb / 4) * 512 + in_tile * 16, make_uint4(w[0], w[1], w[2], w[3]));
}
