// The planner: mxfp8_cuda_plan.h for C++.
#pragma once
#include <vector>

#include "../contract.h"
#include "mxfp8_cuda_plan.h"

namespace mxfp8::cuda {

constexpr int kThreads = 256;  // threads of a block, in every kernel

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t scale_count(int64_t k) { return ceil_div(k, kBlock); }

struct Plan {
  std::vector<mxfp8_cuda_step> steps;
  int64_t scratch_bytes = 0;
  int route = -1;
};

// Throw Error for unknown codes, for what does not fit a launch, and, the first, where there is no route.
Plan plan(const mxfp8_cuda_place&, const mxfp8_cuda_gemm&);
Plan plan(const mxfp8_cuda_quantize&);
Plan plan(const mxfp8_cuda_dequantize&);
Plan plan(const mxfp8_cuda_embedding&);
Plan plan(const mxfp8_cuda_fold&);

}  // namespace mxfp8::cuda
