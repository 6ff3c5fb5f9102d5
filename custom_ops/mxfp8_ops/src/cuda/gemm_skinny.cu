// Both gemms for few rows (m X::parts <= 8 * TILES, TILES <= 8) on bfloat16 tensor cores, exact: limited by reading the
// weight.
//
//   x [m, k] X: F32, F16, BF16, or elements with x_scales      b [n, k] F with b_scales      bias [n] float32, or null
//   y [m, n] of dtype `y_dtype`, or, for splits > 1, float32 [splits, m, n] that finish.cu adds up
//   k % 32 = 0, k < 2^25; x and b aligned to 16
//   grid      at least splits * ceil(n / (16 * WARPS)) thread blocks of 8 warps: WARPS across n, the others across k
//   bytes     33/32 n k for the weight, once; x once per thread block, from the L2 cache: WARPS is a trade between that
//             and how many multiprocessors have work; 8 m n for each split, if there are several, in the L2 cache
//
// Splits (cuda_host/cuts.cpp): as many as the multiprocessors have room for when n alone gives them too little
// to do, but never so many that a block's part of k is less than it reads ahead anyway (32 KiB), and several only if
// each block then reads 96 KiB less. That is what the launch of finish.cu costs: a block streams about 32 KiB in one
// latency of memory, 0.8 us. So the floor of n = 1024, k = 8192 on 132 multiprocessors is 64 blocks * 128 KiB at
// 2.6 TB/s = 3.2 us in one split, and 0.8 us + 2 us for the second launch in four.
#include "skinny.cuh"

template <class X, class F, int TILES, int WARPS = TILES == 1 ? 1 : 4>
__global__ void __launch_bounds__(256, TILES <= 2 ? 2 : 1)
    gemm_skinny(const u8* __restrict__ x, const u8* __restrict__ x_scales, const u8* __restrict__ b,
                const u8* __restrict__ b_scales, const float* __restrict__ bias, u8* __restrict__ y, i64 m, i64 n,
                i64 k, i64 y_dtype, i64 splits) {
  constexpr int ROWS = 16 * WARPS;
  const int across = static_cast<int>((n + ROWS - 1) / ROWS), split = static_cast<int>(blockIdx.x) / across;
  // With x of elements no register is left for the upper half of `split`, which a comparison of 64 bits would keep.
  if constexpr (X::is_element) {
    if (split >= static_cast<int>(splits)) return;
  } else if (split >= splits) {
    return;
  }
  const i64 first_row = static_cast<i64>(static_cast<int>(blockIdx.x) % across) * ROWS;
  multiply_few_rows<X, F, TILES, WARPS, (TILES >= 4 ? 3 : 2)>(AllRows(), x, x_scales, b, b_scales, bias, y, m, n, k,
                                                              y_dtype, splits, split, first_row);
}
