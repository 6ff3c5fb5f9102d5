// The gemms, and the table of their kernels that every instruction set has.
#pragma once
#include "kernels/kernels.h"

namespace mxfp8 {

constexpr int64_t kGemmRows = 256;      // rows of A packed at a time: they stay in L2
constexpr int64_t kAmxStripRows = 512;  // the same for AMX, which multiplies so fast that decoding B counts more
constexpr int64_t kSkinnyRows = 16;     // the most rows of A that B is decoded in registers for
// Up to here gemm_skinny_f32 adds sums across lanes in less time than other kernels turn B, as measured.
constexpr int64_t kFewRowsAvx2 = 11, kFewRowsAvx512 = 8;
constexpr int64_t kFewRowsNeon = 4;    // the same for gemm_skinny_half and BFMMLA, as llvm-mca predicts
constexpr int64_t kRowsAsTheyLie = 2;  // up to here rows of a B that is not constant are read as they lie
constexpr int64_t kGemmColumns = 64;   // columns of one accumulator strip
constexpr int64_t kPanelColumns = 32;  // columns of the widest panel

struct GemmKernel;
class ConstantWeight;

// A constant weight in the layout of a kernel.
struct Panels {
  const GemmKernel* kernel;
  bool decoded;  // to what is multiplied
  int lowest;    // of decoded ones: the lowest scale code
  const void* data;
};

// a is either quantized (a_format is an element format, a_scales set) or values (a_format is a value dtype); `rounds_a`
// says that each of these is rounded to bfloat16, to nearest even, before it is multiplied.
struct GemmArgs {
  int a_format;
  const void* a;
  const uint8_t* a_scales;
  int64_t a_stride;
  int b_format;
  const uint8_t* b;
  const uint8_t* b_scales;
  const float* bias;
  int64_t m, n, k;
  int y_dtype;
  void* y;
  int64_t y_stride;
  bool rounds_a = false;
  // The epilogue of sums and bias (epilogue.h); its result times a factor [m, n], or null.
  int epilogue = MXFP8_NONE;
  int factor_dtype = MXFP8_FLOAT32;
  const void* factor = nullptr;
  ConstantWeight* weight = nullptr;  // of b, if it never changes: see constant_weight.h
  const Panels* panels = nullptr;    // of that, for the kernel whose they are
};

// The gemm kernels work alike. Rows of A are packed, in tiles of `tile_rows`, into scratch memory
// that all tasks share; each task multiplies a range of those tiles with a range of rows of B, which it decodes a few
// at a time. `row` is the first packed row, `rows` their number.
//
// `exponent` is at most that of the lowest bit set in any packed value: a bf16 dot product flushes subnormal numbers to
// zero, so it is used only where exponents show that no product reaches down there. See gemm_bf16.cpp.
constexpr int kNotExact = -(1 << 20);  // an `exponent`: this kernel cannot hold the values; use a later one
constexpr int kAllZero = 1 << 20;

// The operands that a kernel is for: values of A that bf16 holds, on a processor that multiplies bf16; other values;
// any; or elements of A and B that are all E4M3, or all INT8.
enum class Values { kBf16, kOther, kAny, kE4M3, kInt8 };

struct GemmKernel {
  const char* name;
  int tile_rows;
  int value_bytes;  // bytes that are packed for each value
  int (*pack)(const GemmArgs&, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end, void* packed);
  void (*multiply)(const GemmArgs&, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                   int64_t column_begin, int64_t column_end, const void* packed, int exponent);
  // Of kernels that read panels of a constant weight, else null: the bytes of all of them, and what makes those of some
  // columns, which begin at a multiple of kPanelColumns. It returns the lowest scale code, or kNotExact where there can
  // be no such panels.
  int64_t (*panel_bytes)(const GemmArgs&, bool decoded);
  int (*make_panels)(const GemmArgs&, bool decoded, int64_t column_begin, int64_t column_end, void* data);
};

// Defines the kernel NAME, of NAME_pack and NAME_multiply; or that of NAME_panel_bytes and NAME_make_panels too.
#define MXFP8_GEMM_KERNEL(NAME, TILE_ROWS, VALUE_BYTES) \
  extern const GemmKernel NAME;                         \
  constexpr GemmKernel NAME = {#NAME, TILE_ROWS, VALUE_BYTES, NAME##_pack, NAME##_multiply, nullptr, nullptr}
#define MXFP8_PANEL_KERNEL(NAME, TILE_ROWS, VALUE_BYTES)                                            \
  extern const GemmKernel NAME;                                                                     \
  constexpr GemmKernel NAME = {#NAME,           TILE_ROWS,          VALUE_BYTES,       NAME##_pack, \
                               NAME##_multiply, NAME##_panel_bytes, NAME##_make_panels}

// What a set uses a kernel for: these values, in strips of `least_rows` to `most_rows` rows.
struct GemmRow {
  Values values;
  int64_t least_rows, most_rows;
  const GemmKernel* kernel;
};

// The kernel that multiplies such operands with panels of a constant weight; null if there is none for so many rows.
const GemmKernel* kernel_of_panels(const Kernels&, const GemmArgs&);

void gemm(const Kernels&, const Parallel&, GemmArgs);

}  // namespace mxfp8
