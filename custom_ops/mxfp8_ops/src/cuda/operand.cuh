// One value of a gemm operand, quantized or not, in float32: what the exact paths multiply.
#pragma once
#include "codec.cuh"

// Row `row`, column `at` of a matrix [rows, k]; T is a dtype (F32, F16, BF16; `scales` is unused) or an element format.
template <class T>
DEVICE float operand(const u8* data, const u8* scales, i64 row, i64 at, i64 k) {
  if constexpr (T::is_element)
    return decode<T>(data[row * k + at]) * decode_scale(scales[row * ((k + 31) >> 5) + (at >> 5)]);
  else
    return read_value<T>(data, row * k + at);
}
