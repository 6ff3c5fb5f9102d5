// What kernels know of formats.py.
#pragma once
#include <cstdint>

#include "codes.h"

namespace mxfp8 {

// custom_ops/generate.py writes the lines below, up to the last one: ROW(name, mantissa bits, exponent bias, code of
// the largest finite magnitude).
// clang-format off
#define MXFP8_ELEMENT_FORMATS(ROW) ROW(E4M3, 3, 7, 0x7e) ROW(E5M2, 2, 15, 0x7b) ROW(INT8, 6, 1, 0x7f)
constexpr int64_t kBlock = 32;

}  // namespace mxfp8
