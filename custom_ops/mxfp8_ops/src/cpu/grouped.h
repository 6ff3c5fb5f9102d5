// MXFP8GroupedGemm and MXFP8GroupedWeightGemm.
#pragma once
#include "constant_weight.h"

namespace mxfp8 {

// One gemm of many weights: b [experts, N, K], and every row of y says which it is multiplied with.
struct GroupedArgs {
  GemmArgs gemm;          // its bias is not used, and rows of a and y are dense; m: rows of y
  int64_t experts;        // E
  const int64_t* expert;  // [m], each -E..E: below 0 it counts from the end, and E is none: a row of zeros
  const int64_t* row;     // [m], the row of a that each row of y is made of; null: its own
  int activation_dtype;   // MXFP8_BFLOAT16: values of a are rounded to that first; MXFP8_FLOAT32: they stay as they are
  const std::shared_ptr<ConstantWeight>* weights = nullptr;  // [experts], if b never changes
};
void grouped_gemm(const Kernels&, const Parallel&, const GroupedArgs&);

}  // namespace mxfp8
