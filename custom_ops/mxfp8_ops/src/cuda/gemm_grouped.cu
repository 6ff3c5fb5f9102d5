// Both grouped gemms: slots of rows that share an expert (group_rows.cu), each as gemm_skinny.cu multiplies few rows.
//
//   x [.., k] X: F32, F16, BF16, or elements with x_scales      b [count, n, k] F with b_scales
//   y [rows, n] of dtype `y_dtype`: 0 for rows without an expert, NaN for rows whose index names none
//   places, slots     of group_rows.cu, with tokens = 8 * TILES / X::parts
//   grid      `slots` * ceil(n / (16 * WARPS)) thread blocks of 8 warps; those of an empty slot end at once
//   bytes     33/32 n k for each slot: slots of one expert read its weight together, all but one from the L2 cache
//
// `whole` says that k % 32 = 0, 0 < k < 2^25, and x and b are aligned to 16. Other products sum in float32 on ordinary
// cores, one result a thread: right, and slow.
#include "skinny.cuh"

// Tokens are rows that were sorted.
struct SortedRows {
  const int* places;
  DEVICE_MEMBER i64 of_y(i64 token) const { return places[2 * token]; }
  DEVICE_MEMBER i64 of_x(i64 token) const { return places[2 * token + 1]; }
};

template <class X, class F, int TILES, int WARPS = TILES == 1 ? 1 : 4>
__global__ void __launch_bounds__(256, TILES <= 2 ? 2 : 1)
    gemm_grouped(const u8* __restrict__ x, const u8* __restrict__ x_scales, const u8* __restrict__ b,
                 const u8* __restrict__ b_scales, u8* __restrict__ y, const int* __restrict__ places,
                 const int* __restrict__ slots, i64 count, i64 n, i64 k, i64 y_dtype, i64 all_slots, i64 whole) {
  constexpr int ROWS = 16 * WARPS;
  // Slots of one expert are neighbours, and so are their blocks: they read the same rows of the weight at one time.
  const i64 across = static_cast<i64>(blockIdx.x) / all_slots, first_row = across * ROWS;
  const int* slot = slots + 4 * (static_cast<i64>(blockIdx.x) - across * all_slots);
  const i64 expert = slot[0], m = slot[2];
  if (m == 0) return;
  const SortedRows rows_of = {places + 2 * static_cast<i64>(slot[1])};
  const i64 weight = expert * n;
  if (expert < count && whole) {
    multiply_few_rows<X, F, TILES, WARPS, TILES >= 4 ? 3 : 2>(rows_of, x, x_scales, b + weight * k,
                                                              b_scales + weight * (k >> 5), nullptr, y, m, n, k,
                                                              y_dtype, 1, 0, first_row);
    return;
  }
  for (int i = static_cast<int>(threadIdx.x); i < ROWS * m; i += 256) {
    const i64 row = first_row + i % ROWS, token = i / ROWS;
    if (row >= n) continue;
    float sum = expert <= count ? 0.0f : float_of(NAN_BITS);
    if (expert < count)
      for (i64 at = 0; at < k; ++at)
        sum = fmaf(operand<F>(b, b_scales, weight + row, at, k), operand<X>(x, x_scales, rows_of.of_x(token), at, k),
                   sum);
    write_value(y, rows_of.of_y(token) * n + row, sum, y_dtype);
  }
}
