// float32 or float16 values as sums of bfloat16 values: x = x0 + 2^-8 x1 + 2^-16 x2, exactly, so that bfloat16 tensor
// cores can multiply what they cannot hold (`take_part`). The products of the parts, [parts m, k] times b, go to
// finish.cu. Inf and NaN become NaN in some part; finish.cu then asks for gemm_float32.
//
//   x      [total] X, F32 or F16               parts  [3 or 2, total] bfloat16
//   grid   one thread per 16 values: ceil(total / 16 / 256) thread blocks of 256
//   bytes  X::bytes + 2 a part a value
//
// The error of the whole product stays within numerics.gemm_error_bound. With u = 2^-24 and S = sum |x||b|: parts have
// the sign of x, so the sums S_i of their magnitudes (factors included) add up to S. Products of parts are exact, and
// each of the three sums takes k - 1 roundings, (k - 1) u S_i at most; adding them takes two more, the bias one:
// (k - 1) u (S_0 + S_1 + S_2) + 3 u S = (k + 2) u S. Where sums are subnormal a rounding is 2^-150 instead, for S_1
// and S_2 2^-8 and 2^-16 of that: at worst 1.004 of the bound's second term, if S is below 2^-126.
// That is for rounding to nearest. Tensor cores add several products at a time and cut off instead (Fasi et al. 2021,
// "Numerical behavior of NVIDIA tensor cores"), which only a GPU can show to stay within the bound.
//
// RAGGED is for total % 16 != 0 and for addresses that are not aligned to 16.
#include "codec.cuh"

template <class X, bool RAGGED>
__global__ void __launch_bounds__(256) bfloat16_parts(const u8* __restrict__ x, u8* __restrict__ parts, i64 total) {
  const i64 first = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * 16;
  if (first >= total) return;
  if (RAGGED) {
    for (i64 i = first; i < first + 16 && i < total; ++i) {
      float v = read_value<X>(x, i);
      for (int part = 0; part < X::parts; ++part) write_value(parts, part * total + i, take_part(v), BFLOAT16);
    }
    return;
  }
  float v[16];
  read16<X>(x + first * X::bytes, v);
#pragma unroll
  for (int part = 0; part < X::parts; ++part) {
    float taken[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) taken[i] = take_part(v[i]);
    write16<BF16>(parts + 2 * (part * total + first), taken);
  }
}
