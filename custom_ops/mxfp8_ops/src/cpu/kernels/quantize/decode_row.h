// A row of elements and its scales to values, bit for bit those of numerics.dequantize. dequantize.cpp and
// embedding.cpp decode their rows with it.
#pragma once
#include "../common/codec.h"
#include "../common/simd.h"

namespace mxfp8::MXFP8_ISA {

// Scales whose products with elements are normal float32 numbers, and so exact in bfloat16 too: the smallest element is
// 2^-16.
constexpr int kLowestPlainScale = 17;
constexpr int kHighestPlainScale = 246;  // above, the product with 2^8 that undoes halves_to_floats overflows

template <class F>
MXFP8_INLINE void decode_block(const uint8_t* elements, float scale, float* values) {
#if defined(__AVX2__)
  if (F::has_infinity || F::is_integer || !any_nan_code(elements)) {
    return halves_to_floats<F>(elements, scale * kHalfFactor<F>, values);
  }
#endif
  for (int i = 0; i < kBlock; ++i) values[i] = decode<F>(elements[i]) * scale;
}

// `k` elements with ceil(k / 32) scales.
template <class F, class D>
MXFP8_INLINE void decode_row(const uint8_t* elements, const uint8_t* scales, int64_t k, typename D::Storage* y) {
  alignas(64) float values[kBlock];
  for (int64_t start = 0; start < k; start += kBlock, elements += kBlock, y += kBlock) {
    const int code = *scales++;
    const float scale = scale_value(uint32_t(code));
    if (k - start < kBlock) {
      for (int64_t i = 0; i < k - start; ++i) y[i] = D::store(decode<F>(elements[i]) * scale);
    } else if (code >= kLowestPlainScale && code <= kHighestPlainScale) {
      decode_block<F>(elements, scale, values);
      D::store_short_block(values, y);
    } else {
      for (int i = 0; i < kBlock; ++i) y[i] = D::store(decode<F>(elements[i]) * scale);
    }
  }
}

}  // namespace mxfp8::MXFP8_ISA
