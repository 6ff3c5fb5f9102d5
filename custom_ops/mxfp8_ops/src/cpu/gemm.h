// The gemms: their arguments, and the table of kernels that each instruction set has.
#pragma once
#include "kernels/kernels.h"

namespace mxfp8 {

constexpr int64_t kGemmRows = 256;  // rows of A packed at a time: they stay in L2
constexpr int64_t kAmxStripRows =
    512;                             // for AMX: it multiplies so fast that decoding B takes a larger share of the time
constexpr int64_t kSkinnyRows = 16;  // the most rows of A for which B is decoded in registers
// Up to this number of rows, gemm_skinny_f32 adds lanes in less time than other kernels need to turn B, as measured.
constexpr int64_t kFewRowsAvx2 = 11, kFewRowsAvx512 = 8;
// The same where K is below kShortK: lanes are added once for each row of B, however short it is.
constexpr int64_t kShortK = 512, kShortRowsAvx2 = 6;
constexpr int64_t kFewRowsNeon = 4;    // for gemm_skinny_half instead of BFMMLA, as llvm-mca predicts
constexpr int64_t kRowsAsTheyLie = 2;  // up to this number of rows, a B that is not constant is read without turning
constexpr int64_t kGemmColumns = 64;   // columns of one accumulator strip
constexpr int64_t kPanelColumns = 32;  // columns of the widest panel

struct GemmKernel;
class ConstantWeight;

// A constant weight in the layout of a kernel.
struct Panels {
  const GemmKernel* kernel;
  bool outside_range;  // what make_panels has returned
  const void* data;
};

// The rows of A in a convolution whose pixels are packed: block b of row r is block b % blocks of a pixel, which
// pixels[b / blocks * m + r] names. Kernels with pack_pixels take it.
struct TapRows {
  const uint32_t* pixels;  // [taps, m]
  int64_t blocks;          // of a tap
  int64_t first, stride;   // packed blocks before the first block of a pixel, and from a pixel to the next
  const uint8_t* scales;   // [pixels, stride], of each packed block
  const void* packed;
  // GemmKernel::unpack_block, for sums that the kernel computes from the operands themselves.
  void (*unpack)(const void* packed, int64_t index, uint8_t* elements);
};

// Sums of some rows of the result, from column `column` on; rows are `stride` values apart.
struct Finished {
  int64_t row, rows, column, width;
  float* sums;
  int64_t stride;
};

// y = a times the transpose of b. `a` is either quantized (a_format is an element format, a_scales is not null) or
// values (a_format is a value dtype, a_scales is null). With `rounds_a` values are rounded to bfloat16, to nearest
// even, before they are multiplied. Fill it by names: GCC and Clang take the designated initializers of C++20.
struct GemmArgs {
  int a_format = 0;
  const void* a = nullptr;
  const uint8_t* a_scales = nullptr;
  int64_t a_stride = 0;
  const int64_t* a_rows = nullptr;  // [m], the row of `a` for each row of y; null: row i for row i
  const TapRows* taps = nullptr;    // in place of `a`, a_scales (which is not null) and a_rows
  int b_format = 0;
  const uint8_t* b = nullptr;
  const uint8_t* b_scales = nullptr;
  const float* bias = nullptr;
  int64_t m = 0, n = 0, k = 0;
  int64_t block_values = kBlock;  // values at the front of each block of A and B; the values behind them are 0
  int y_dtype = 0;
  void* y = nullptr;
  int64_t y_stride = 0;
  bool rounds_a = false;
  // The epilogue is applied to sums plus bias (epilogue.h); its result is multiplied by factor [m, n], if not null.
  int epilogue = MXFP8_NONE;
  int factor_dtype = MXFP8_FLOAT32;
  const void* factor = nullptr;
  ConstantWeight* weight = nullptr;  // b, if it never changes: see constant_weight.h
  const Panels* panels = nullptr;    // of `weight`; only the kernel panels->kernel reads them
  // In place of y, if not null: store(to, sums) gets the sums without the bias.
  void (*store)(const void* to, const Finished&) = nullptr;
  const void* to = nullptr;
};

// All gemm kernels have these steps. Rows of A are packed, in tiles of `tile_rows`, into scratch memory that all tasks
// share; each task multiplies a range of the tiles with a range of rows of B, which it decodes a few at a time. `row`
// is the first packed row, `rows` is their number.
//
// `exponent` is at most the exponent of the lowest bit in any packed value. A bf16 dot product flushes subnormal
// numbers to zero, so kernels use it only if exponents show that no product is that small. See gemm_bf16.cpp.
constexpr int kNotExact = -(1 << 20);  // an `exponent`: this kernel cannot hold the values; use a later kernel
constexpr int kAllZero = 1 << 20;      // an `exponent`: all values are 0, or NaN or Inf
constexpr int kExact = 0;              // an `exponent` of integers: packed A holds all values

// The operands of a kernel: values of A that bfloat16 holds, on a processor that multiplies bfloat16; other values of
// A; any values; elements of A and B that are all E4M3; or elements that are all INT8.
enum class Values { kBf16, kOther, kAny, kE4M3, kInt8 };

// Quantized blocks of pixels that lie one behind the other: elements [pixels, row_bytes], scales [pixels, blocks].
struct PixelBlocks {
  const uint8_t* elements;
  const uint8_t* scales;
  int64_t pixels, blocks, row_bytes;
};

struct GemmKernel {
  const char* name;
  int tile_rows;
  int value_bytes;  // bytes of packed A for each value
  int (*pack)(const GemmArgs&, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end, void* packed);
  void (*multiply)(const GemmArgs&, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                   int64_t column_begin, int64_t column_end, const void* packed, int exponent);
  // Null unless the kernel reads panels of a constant weight. panel_bytes: the bytes of all panels. make_panels: packs
  // the panels of some columns, which begin at a multiple of kPanelColumns, and returns whether the kernel of INT8 has
  // to add a block of theirs apart.
  int64_t (*panel_bytes)(const GemmArgs&);
  bool (*make_panels)(const GemmArgs&, int64_t column_begin, int64_t column_end, void* data);
  // Null unless `multiply` takes GemmArgs::taps. Packs pixels of a convolution, `stride` blocks apart, from `first` on.
  // False if it cannot hold the scale of a block.
  bool (*pack_pixels)(const PixelBlocks& pixels, void* first, int64_t stride) = nullptr;
  // Writes the 32 elements of packed block `index`.
  void (*unpack_block)(const void* packed, int64_t index, uint8_t* elements) = nullptr;
  int64_t block_bytes = 0;  // of a packed block
};

// Defines the kernel NAME from NAME_pack and NAME_multiply; the second macro also takes NAME_panel_bytes and
// NAME_make_panels, and may end with what pixels need.
#define MXFP8_GEMM_KERNEL(NAME, TILE_ROWS, VALUE_BYTES) \
  extern const GemmKernel NAME;                         \
  constexpr GemmKernel NAME = {#NAME, TILE_ROWS, VALUE_BYTES, NAME##_pack, NAME##_multiply, nullptr, nullptr}
#define MXFP8_PANEL_KERNEL(NAME, TILE_ROWS, VALUE_BYTES, ...)                                        \
  extern const GemmKernel NAME;                                                                      \
  constexpr GemmKernel NAME = {#NAME,           TILE_ROWS,          VALUE_BYTES,        NAME##_pack, \
                               NAME##_multiply, NAME##_panel_bytes, NAME##_make_panels, __VA_ARGS__}

// A row of an instruction set's table: its kernel takes these values, in strips of `least_rows` to `most_rows` rows, or
// to `most_short_rows` rows where K is below kShortK.
struct GemmRow {
  Values values;
  int64_t least_rows, most_rows;
  const GemmKernel* kernel;
  int64_t most_short_rows = most_rows;
};

// The kernel that multiplies these operands with panels of a constant weight; null if none does for args.m rows.
const GemmKernel* kernel_of_panels(const Kernels&, const GemmArgs&);

void gemm(const Kernels&, const Parallel&, GemmArgs);

// The row of the table whose kernel multiplies these operands with packed pixels, or null.
const GemmRow* gemm_of_pixels(const Kernels&, const GemmArgs&);
// Multiplies args.taps.
void multiply_pixels(const Kernels&, const Parallel&, const GemmRow&, const GemmArgs&);

}  // namespace mxfp8
