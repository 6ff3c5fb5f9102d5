// Every kernel of src/cuda and its folder experimental, by number: files and what their templates are made for.
#pragma once
#include <initializer_list>
#include <vector>

#include "routes.h"

namespace mxfp8::cuda {

// The files, and in which order `kernel` takes what their instances differ in.
enum class Source {
  kFold,
  kSwizzleScales,
  kFinish,           // ragged
  kBfloat16Parts,    // F32, F16; ragged
  kBfloat16Rounded,  // the same
  kTile,             // BF16, then the formats; paired
  kQuantizeRows,     // value dtype, format, swizzled, ragged
  kQuantizeColumns,  // value dtype, format, rows too, layout (MXFP8_PLAIN ...), ragged
  kQuantizeBands,    // value dtype, format, rows too
  kDequantize,       // value dtype, format, last axis, ragged
  kEmbedding,        // value dtype, format, ragged
  kGemmFloat32,      // kind of x, format
  kGemmFused,        // format, 64-row blocks - 1 (+ 2: paired), or 4: two blocks a multiprocessor
  kGemmSkinny,       // kind of x, format, 2 log2(tiles) + 1 if few warps share x, or 8: two tiles, four steps ahead
};

// The number of an instance; a format counts from 0. Throws Error if there is none.
int kernel(Source, std::initializer_list<int> choices);

inline int format_choice(Kind format) { return format - kValueKinds; }

// The numbers of the kernels that plans of a node may launch, on any shape and at any address.
std::vector<int> quantize_kernels(int64_t x_dtype, int64_t format);
std::vector<int> dequantize_kernels(int64_t format, int64_t y_dtype);
std::vector<int> embedding_kernels(int64_t b_format, int64_t y_dtype);
std::vector<int> gemm_kernels(int64_t x_kind, int64_t b_kind, bool cublas);

// Names as C++ writes them, by number.
const std::vector<std::string>& kernel_names();

}  // namespace mxfp8::cuda
