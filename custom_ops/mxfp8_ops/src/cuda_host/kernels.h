// Every kernel of src/cuda, by number: files and what their templates are made for.
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
  kTile,             // BF16, then the formats
  kQuantizeRows,     // value dtype, format, swizzled, ragged
  kQuantizeColumns,  // value dtype, format, rows too, layout (MXFP8_PLAIN ...), ragged
  kDequantize,       // value dtype, format, last axis, ragged
  kGemmFloat32,      // kind of x, format
  kGemmFused,        // format, 64-row blocks - 1
  kGemmSkinny,       // kind of x, format, 2 log2(tiles) + 1 if few warps share x
  kCount
};

constexpr int kAny = -1;

// The number of an instance; a format counts from 0. Throws std::invalid_argument if there is none.
int kernel(Source, std::initializer_list<int> choices);

// The numbers of all instances with these choices, one for each axis, of which some may be kAny.
std::vector<int> kernels_like(Source, const std::vector<int>& choices);

inline int format_choice(Kind format) { return format - kValueKinds; }

// Names as C++ writes them, by number.
const std::vector<std::string>& kernel_names();

}  // namespace mxfp8::cuda
