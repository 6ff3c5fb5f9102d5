// The last step of a float32 matrix product: the bias, and the dtype of the result.
//
//   sums  [parts, m, n] float32, total = m n          y [m, n] of dtype `y_dtype`, not over sums
//         added up from the last to the first, each times 2^-shift on the way
//   inexact  null, or a word that becomes 1 if a sum is NaN or Inf
//   bias  [n] float32, or null
//   grid  one thread per 8 values: ceil(total / 8 / 256) thread blocks of 256
//   bytes 4 parts + 2 (or 4) a value
//
// RAGGED is for n % 8 != 0 and for addresses that are not aligned to 16.
#include "codec.cuh"

DEVICE void load8(const float* p, float (&v)[8]) {
  const uint4 a = load16(p), b = load16(p + 4);
  const u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = float_of(w[i]);
}

template <bool RAGGED>
__global__ void __launch_bounds__(256)
    finish(const float* __restrict__ sums, i64 parts, i64 shift, const float* __restrict__ bias, u8* __restrict__ y,
           i64 total, i64 n, i64 y_dtype, u32* __restrict__ inexact) {
  const i64 first = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * 8;
  if (first >= total) return;
  const float step = float_of(static_cast<u32>(127 - shift) << 23);
  sums += (parts - 1) * total;
  bool finite = true;
  if (RAGGED) {
    for (i64 i = first; i < first + 8 && i < total; ++i) {
      float v = sums[i];
      for (i64 part = 1; part < parts; ++part) v = v * step + sums[i - part * total];
      finite = finite && magnitude(v) < INFINITY_BITS;
      if (bias != nullptr) v += bias[i % n];
      write_value(y, i, v, y_dtype);
    }
    if (!finite && inexact != nullptr) *inexact = 1;
    return;
  }
  const i64 column = first % n;
  float v[8];
  load8(sums + first, v);
#pragma unroll 2
  for (i64 part = 1; part < parts; ++part) {
    float more[8];
    load8(sums + first - part * total, more);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = v[i] * step + more[i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) finite = finite && magnitude(v[i]) < INFINITY_BITS;
  if (!finite && inexact != nullptr) *inexact = 1;
  if (bias != nullptr) {  // -0 + 0 is +0: nothing is added where there is nothing to add
    float add[8];
    load8(bias + column, add);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] += add[i];
  }
  write8(y, first, v, y_dtype);
}
