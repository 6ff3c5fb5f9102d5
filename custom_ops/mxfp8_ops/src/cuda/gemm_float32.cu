// Both gemms in float32 on the ordinary cores: any dtype, any k, any scale code, any alignment. The slow one that
// handles everything: the other gemms leave to it what they cannot do exactly.
//
//   x [m, k] X with x_scales (element formats only)    b [n, k] F with b_scales      bias [n] float32, or null
//   y [m, n] of dtype `y_dtype`
//   only_if   null, or a word: if it is 0 nothing is written. The device reads it, so the host need not wait.
//   grid      any number of thread blocks of 256; each walks over 64 x 64 tiles of y
//   bytes     each operand once per 64 rows of the other
#include "operand.cuh"

template <class X, class F>
__global__ void __launch_bounds__(256, 2)
    gemm_float32(const u8* __restrict__ x, const u8* __restrict__ x_scales, const u8* __restrict__ b,
                 const u8* __restrict__ b_scales, const float* __restrict__ bias, u8* __restrict__ y, i64 m, i64 n,
                 i64 k, i64 y_dtype, const u32* __restrict__ only_if) {
  __shared__ float a_tile[16][68], b_tile[16][68];  // [k][row]; 68 so that neighbouring k lie 4 banks apart
  if (only_if != nullptr && *only_if == 0) return;
  const i64 across = (n + 63) >> 6, tiles = across * ((m + 63) >> 6);
  const int load_row = threadIdx.x >> 2, load_k = (threadIdx.x & 3) * 4;
  const int y_row = (threadIdx.x >> 4) * 4, y_column = (threadIdx.x & 15) * 4;
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const i64 m0 = tile / across * 64, n0 = tile % across * 64;
    float sums[4][4] = {};
    for (i64 k0 = 0; k0 < k; k0 += 16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const i64 at = k0 + load_k + i, a_row = m0 + load_row, b_row = n0 + load_row;
        a_tile[load_k + i][load_row] = at < k && a_row < m ? operand<X>(x, x_scales, a_row, at, k) : 0.0f;
        b_tile[load_k + i][load_row] = at < k && b_row < n ? operand<F>(b, b_scales, b_row, at, k) : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int step = 0; step < 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sums[i][j] = fmaf(a_tile[step][y_row + i], b_tile[step][y_column + j], sums[i][j]);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const i64 row = m0 + y_row + i, column = n0 + y_column + j;
        if (row >= m || column >= n) continue;
        write_value(y, row * n + column, bias == nullptr ? sums[i][j] : sums[i][j] + bias[column], y_dtype);
      }
  }
}
