// MXFP8NormQuantize and MXFP8AddNormQuantize.
#pragma once
#include "kernels/kernels.h"

namespace mxfp8 {

constexpr int64_t kNormValues = 4096;  // that a norm handles at a time, whole rows of them: they stay in L1

// Rows of k > 0 values that a norm handles at a time.
constexpr int64_t norm_rows(int64_t k) { return k < kNormValues ? kNormValues / k : 1; }

// Rows of x + residual, normalized, times scale, plus bias; and quantized. May be null: residual and bias, and the
// results normalized and sum.
struct NormArgs {
  int dtype;
  const void* x;
  const void* residual;
  const float* scale;
  const float* bias;
  int64_t rows, k;
  int norm;
  float epsilon;
  int format;
  uint32_t increment;  // formats.scale_increment
  uint8_t* elements;
  uint8_t* scales;
  void* normalized;
  void* sum;
};

// `room` has norm_rows(k) * k values.
MXFP8_KERNEL(void, norm_quantize, const NormArgs&, int64_t row_begin, int64_t row_end, float* room)

void norm_quantize(const Kernels&, const Parallel&, const NormArgs&);

}  // namespace mxfp8
