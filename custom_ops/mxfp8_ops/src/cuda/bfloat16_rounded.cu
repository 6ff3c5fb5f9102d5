// float32 or float16 values as bfloat16, rounded to nearest even, for products with that activation_dtype: a row of x
// is one row of bfloat16 then, where bfloat16_parts.cu makes three (two) of it. Beyond the greatest number it gives
// Inf.
//
//   x      [total] X, F32 or F16               y      [total] bfloat16
//   grid   one thread per 16 values: ceil(total / 16 / 256) thread blocks of 256
//   bytes  X::bytes + 2 a value
//
// RAGGED is for total % 16 != 0 and for addresses that are not aligned to 16.
#include "codec.cuh"

template <class X, bool RAGGED>
__global__ void __launch_bounds__(256) bfloat16_rounded(const u8* __restrict__ x, u8* __restrict__ y, i64 total) {
  const i64 first = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * 16;
  if (first >= total) return;
  if (RAGGED) {
    for (i64 i = first; i < first + 16 && i < total; ++i) write_value(y, i, read_value<X>(x, i), BFLOAT16);
    return;
  }
  float v[16];
  read16<X>(x + first * X::bytes, v);
  write16<BF16>(y + 2 * first, v);
}
