// MXFP8 with a scale per block -> E4M3 with one scale per row, which FP8 tensor cores before Blackwell can multiply.
// Bit for bit folding.py.
//
//   elements  [rows, k] E4M3                  scales      [rows, k / 32]
//   folded    [rows, k] E4M3                  row_scales  [rows] float32, powers of two
//   k % 32 = 0; elements and folded aligned to 16
//   grid      one thread block of 256 per row
//   bytes     2 + 1/32 a value
//
// The row's scale is the largest of its blocks' (NaN aside); elements of the others are multiplied by 2^-shift and
// rounded. The first elements are already on their way while the scales are searched.
#include "codec.cuh"

// 16 elements times 2^-shift, rounded to elements; NaN for a block of NaN.
DEVICE uint4 folded16(uint4 q, u32 shift, bool nan) {
#ifdef HAS_FP8_CONVERSION
  // In float16, which rounds twice and yet right: its grid is 2^-24, elements have 4 bits and are rounded to 2^-9. No
  // such product is between a tie of elements and that tie rounded. 2^-24 times any element rounds to zero.
  const u32 least = shift < 24u ? shift : 24u, half = least < 15u ? (15u - least) << 10 : 1u << (24u - least);
  const u32 factor = nan ? 0x7fff7fffu : half * 0x00010001u;
  return make_uint4(multiply_e4m3x4(q.x, factor), multiply_e4m3x4(q.y, factor), multiply_e4m3x4(q.z, factor),
                    multiply_e4m3x4(q.w, factor));
#else
  const u32 w[4] = {q.x, q.y, q.z, q.w};
  float v[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] = decode<E4M3>((w[i >> 2] >> (8 * (i & 3))) & 0xffu);
  return encode16<E4M3>(v, nan ? float_of(NAN_BITS) : float_of((127u - shift) << 23));
#endif
}

__global__ void __launch_bounds__(256) fold(const u8* __restrict__ elements, const u8* __restrict__ scales,
                                            u8* __restrict__ folded, float* __restrict__ row_scales, i64 k) {
  __shared__ u32 largest[8];
  const i64 row = blockIdx.x;
  const int blocks = static_cast<int>(k >> 5), halves = 2 * blocks, thread = static_cast<int>(threadIdx.x);
  const u8 *from = elements + row * k, *codes = scales + row * blocks;
  uint4 q = make_uint4(0, 0, 0, 0);
  if (thread < halves) q = load16(from + 16 * thread);

  u32 top = 0;
  for (int i = thread; i < blocks; i += 256) {
    const u32 s = codes[i];
    if (s != SCALE_NAN) top = max(top, s);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) top = max(top, __shfl_xor_sync(0xffffffffu, top, mask));
  if ((thread & 31) == 0) largest[thread >> 5] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; ++w) top = max(top, largest[w]);
  if (thread == 0) row_scales[row] = decode_scale(top);

  for (int half = thread; half < halves; half += 256) {
    const u32 s = codes[half >> 1], shift = top - s < 32u ? top - s : 32u;  // 448 * 2^-32 rounds to zero
    const uint4 now = q;
    if (half + 256 < halves) q = load16(from + 16 * (half + 256));
    store16(folded + row * k + 16 * half, s == SCALE_NAN || shift != 0 ? folded16(now, shift, s == SCALE_NAN) : now);
  }
}
