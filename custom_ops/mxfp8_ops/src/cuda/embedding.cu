// MXFP8Embedding: rows of a packed table.
//
//   indices   [count] int32, or int64 if `wide`; a negative one counts from the last row, and one that names no row
//   gives
//             a row of NaN: nothing on the device can raise an error
//   b         [v, d] F with b_scales [v, ceil(d / 32)]          y [count, d] V
//   grid      one thread per 16 consecutive values of a row: ceil(count ceil(d / 16) / 256) thread blocks of 256
//   bytes     V::bytes + 1 + 1/32 a value, and an index for each thread, from the L1 cache but for the first
//
// RAGGED is for d % 16 != 0, and for addresses that are not aligned to 16.
#include "codec.cuh"

template <class V, class F, bool RAGGED>
__global__ void __launch_bounds__(256)
    embedding(const u8* __restrict__ indices, const u8* __restrict__ b, const u8* __restrict__ b_scales,
              u8* __restrict__ y, i64 count, i64 v, i64 d, i64 wide) {
  const i64 part = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x, parts = (d + 15) >> 4;
  const i64 position = part / parts, at = (part - position * parts) * 16;
  if (position >= count) return;
  i64 row = wide ? reinterpret_cast<const i64*>(indices)[position] : reinterpret_cast<const int*>(indices)[position];
  if (row < 0) row += v;
  const bool known = row >= 0 && row < v;
  if (!known) row = 0;  // is read where there is a table, and not used
  float values[16];
  const int some = d - at < 16 ? static_cast<int>(d - at) : 16;
  if (v == 0) {
#pragma unroll
    for (int i = 0; i < 16; ++i) values[i] = float_of(NAN_BITS);
  } else {
    const float scale = known ? decode_scale(b_scales[row * ((d + 31) >> 5) + (at >> 5)]) : float_of(NAN_BITS);
    if (RAGGED) {
#pragma unroll
      for (int i = 0; i < 16; ++i) values[i] = i < some ? decode<F>(b[row * d + at + i]) * scale : 0.0f;
    } else {
      const uint4 q = load16(b + row * d + at);
      const u32 w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int i = 0; i < 16; ++i) values[i] = decode<F>((w[i >> 2] >> (8 * (i & 3))) & 0xffu) * scale;
    }
  }
  if (RAGGED) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < some) write_value(y, position * d + at + i, values[i], V::dtype);
  } else {
    write16<V>(y + (position * d + at) * V::bytes, values);
  }
}
