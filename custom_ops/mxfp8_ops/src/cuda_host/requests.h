// The checks of the planner's C ABI. These functions throw Error, which names the field; else they return the
// request. A request with an empty tensor comes back with all sizes 0: its other fields are not checked.
#pragma once
#include "mxfp8_cuda_plan.h"

namespace mxfp8::cuda {

const mxfp8_cuda_place& checked(const mxfp8_cuda_place*);
mxfp8_cuda_gemm checked(const mxfp8_cuda_gemm*);
mxfp8_cuda_quantize checked(const mxfp8_cuda_quantize*);
mxfp8_cuda_dequantize checked(const mxfp8_cuda_dequantize*);
mxfp8_cuda_embedding checked(const mxfp8_cuda_embedding*);
mxfp8_cuda_fold checked(const mxfp8_cuda_fold*);

// Bytes of scales [rows, ceil(k / 32)] in the 128x4 layout.
int64_t checked_swizzled_bytes(int64_t rows, int64_t k);

}  // namespace mxfp8::cuda
