// The operations over checked arguments: how each is split into tasks. Both faces of the library - the C ABI in
// api.cpp and the ONNX Runtime binding - call these. They throw std::bad_alloc, and nothing else.
#pragma once
#include "kernels/kernels.h"
#include "mxfp8_ops.h"
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
void embedding(const Kernels&, const Parallel&, const EmbeddingArgs&);  // whose indices are checked: indices.h
void gemm(const Kernels&, const Parallel&, const GemmArgs&);

// args.outer is N; `transposed` says that args.x is [K, N].
void pack(const Kernels&, const Parallel&, const QuantizeArgs&, bool transposed, mxfp8_pack_stats* stats);

}  // namespace mxfp8
