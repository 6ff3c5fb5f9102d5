// MXFP8GroupedGemm and MXFP8GroupedWeightGemm: their arguments.
#pragma once
#include "constant_weight.h"

namespace mxfp8 {

// A gemm with several weights: b is [experts, N, K], and `expert` selects the weight of each row of y.
struct GroupedArgs {
  GemmArgs gemm;          // m is the number of rows of y; bias and strides are ignored: a and y are dense
  int64_t experts;        // E
  const int64_t* expert;  // [m], from -E to E: a negative one counts from the end; E gives a row of zeros
  const int64_t* row;     // [m], the row of a for each row of y; null: row i of a for row i of y
  int activation_dtype;   // MXFP8_BFLOAT16 rounds the values of a first; MXFP8_FLOAT32 does not
  const std::shared_ptr<ConstantWeight>* weights = nullptr;  // [experts], if b never changes
};
void grouped_gemm(const Kernels&, const Parallel&, const GroupedArgs&);

}  // namespace mxfp8
