// The operations over checked arguments: how each is split into tasks. Both faces of the library - the C ABI in
// api.cpp and the ONNX Runtime binding - call these. They throw std::bad_alloc, and nothing else.
#pragma once
#include "../mxfp8_ops.h"
#include "kernels/kernels.h"
#include "parallel.h"

namespace mxfp8 {

bool is_value_dtype(int dtype);
bool is_element_format(int format);

// Bytes of one value, and formats.scale_increment: what to add to the bits of amax before its exponent is read. Codes
// that are unknown end the process.
size_t value_bytes(int dtype);
uint32_t scale_increment(int format, int scale_rounding);

void quantize(const Kernels&, const Parallel&, const QuantizeArgs&);
void dequantize(const Kernels&, const Parallel&, const DequantizeArgs&);
void embedding(const Kernels&, const Parallel&, const EmbeddingArgs&);  // indices are checked before: indices.h
void gemm(const Kernels&, const Parallel&, const GemmArgs&);
void norm_quantize(const Kernels&, const Parallel&, const NormArgs&);

// One gemm of many weights: b [experts, N, K], and every row of y says which it is multiplied with. grouped.cpp.
struct GroupedArgs {
  GemmArgs gemm;          // its bias is not used, and rows of a and y are dense; m: rows of y
  int64_t experts;        // E
  const int64_t* expert;  // [m], each -E..E: below 0 it counts from the end, and E is none: a row of zeros
  const int64_t* row;     // [m], the row of a that each row of y is made of; null: its own
  int activation_dtype;   // MXFP8_BFLOAT16: values of a are rounded to that first; MXFP8_FLOAT32: they stay as they are
};
void grouped_gemm(const Kernels&, const Parallel&, const GroupedArgs&);

// A scale of 0 stands for 1 / sqrt(d), and a mask of one value that hides nothing for none. attention.cpp.
void attention(const Kernels&, const Parallel&, AttentionArgs);
// Those of a dense mask with these sizes.
void set_mask_strides(const int64_t (&sizes)[4], AttentionArgs*);

// args.outer is N; `transposed` says that args.x is [K, N].
void pack(const Kernels&, const Parallel&, const QuantizeArgs&, bool transposed, mxfp8_pack_stats* stats);

}  // namespace mxfp8
