// What a float32 matrix product still needs: the bias, and the dtype of the result.
//
//   sums  [m, n] float32, total = m n      bias [n] float32, or null      y [m, n] of dtype `y_dtype`
//   grid  one thread per 4 values: ceil(total / 4 / 256) thread blocks of 256
//   bytes 4 + 2 (or 4) a value
#include "codec.cuh"

__global__ void __launch_bounds__(256) finish(const float* __restrict__ sums, const float* __restrict__ bias,
                                              u8* __restrict__ y, i64 total, i64 n, i64 y_dtype) {
  const i64 first = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * 4;
  for (i64 i = first; i < first + 4 && i < total; ++i)
    write_value(y, i, bias == nullptr ? sums[i] : sums[i] + bias[i % n], y_dtype);
}
