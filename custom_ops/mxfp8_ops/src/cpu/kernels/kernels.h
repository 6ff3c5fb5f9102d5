// How the operations of cpu/ reach the kernels of an instruction set. A file of these folders is compiled for the sets
// portable, avx2 and avx512, or for the sets that CMakeLists.txt names, into the namespace mxfp8::<set>. This header
// and the headers that declare kernels have no code, and the kernels call nothing of the C++ library. So a function
// compiled with one set of flags cannot be linked into the path of another set.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../../formats.h"

#if defined(MXFP8_X86)
#define MXFP8_ON_X86(...) __VA_ARGS__
#else
#define MXFP8_ON_X86(...)
#endif

// Declares a kernel of the sets portable, avx2 and avx512, and the array NAME_kernels: NAME_kernels[column] is the
// kernel of the instruction set in use.
#define MXFP8_KERNEL(RESULT, NAME, ...)                                                                     \
  namespace portable {                                                                                      \
  RESULT NAME(__VA_ARGS__);                                                                                 \
  }                                                                                                         \
  MXFP8_ON_X86(namespace avx2 { RESULT NAME(__VA_ARGS__); } namespace avx512 { RESULT NAME(__VA_ARGS__); }) \
  constexpr decltype(&portable::NAME) NAME##_kernels[] = {                                                  \
      &portable::NAME MXFP8_ON_X86(, &avx2::NAME, &avx512::NAME, &avx512::NAME, &avx512::NAME)};

// The same for a kernel that avx512_bf16 and amx_bf16 have too.
#define MXFP8_KERNEL_WITH_BF16(RESULT, NAME, ...)                                                             \
  namespace portable {                                                                                        \
  RESULT NAME(__VA_ARGS__);                                                                                   \
  }                                                                                                           \
  MXFP8_ON_X86(                                                                                               \
      namespace avx2 { RESULT NAME(__VA_ARGS__); } namespace avx512 {                                         \
        RESULT NAME(__VA_ARGS__);                                                                             \
      } namespace avx512_bf16 { RESULT NAME(__VA_ARGS__); } namespace amx_bf16 { RESULT NAME(__VA_ARGS__); }) \
  constexpr decltype(&portable::NAME) NAME##_kernels[] = {                                                    \
      &portable::NAME MXFP8_ON_X86(, &avx2::NAME, &avx512::NAME, &avx512_bf16::NAME, &amx_bf16::NAME)};

namespace mxfp8 {

struct Parallel;
struct GemmRow;

// An instruction set.
struct Kernels {
  const char* isa;
  int column;            // index in NAME_kernels: 0 portable, 1 avx2, 2 avx512, 3 avx512_bf16, 4 amx_bf16
  const GemmRow* gemms;  // fastest first; the last one takes all arguments
  bool has_bf16;         // whether there are gemms for Values::kBf16
  int64_t strip_rows;    // rows of A packed at a time
  // With fewer rows of A, only panels of INT8 weights are used: B of other formats is read as it lies.
  int64_t least_panel_rows = 1;
};

}  // namespace mxfp8
