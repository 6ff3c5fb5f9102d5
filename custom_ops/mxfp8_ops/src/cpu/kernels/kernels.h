// Every instruction set has a table of kernels over the argument structs below; tables.cpp has all tables. A file of
// this folder is compiled for each set that runs it differently, into the namespace mxfp8::<isa>; CMakeLists.txt lists
// them. Nothing in this header has code, and the kernels call nothing of the C++ library, so no function compiled with
// one set of flags can be linked into the path of another.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../../contract.h"

namespace mxfp8 {

constexpr int64_t kColumnTile = 64;     // columns a strided kernel handles at once
constexpr int64_t kPackDepth = 8;       // blocks along K in one tile of the transposing pack
constexpr int64_t kGemmRows = 256;      // rows of A packed at a time: they stay in L2
constexpr int64_t kAmxStripRows = 512;  // the same for AMX, which multiplies so fast that decoding B counts more
constexpr int64_t kSkinnyRows = 16;     // the most rows of A that B is decoded in registers for
// Up to here gemm_skinny_f32 adds sums across lanes in less time than other kernels turn B, as measured.
constexpr int64_t kFewRowsAvx2 = 11, kFewRowsAvx512 = 8;
constexpr int64_t kFewRowsInt8 = 6;    // and gemm_skinny_int8
constexpr int64_t kInt8Group = 8;      // rows of A that it multiplies at a time
constexpr int64_t kGemmColumns = 64;   // columns of one accumulator strip
constexpr int64_t kNormValues = 4096;  // that a norm handles at a time, whole rows of them: they stay in L1

// x is [outer, K, inner] for quantize; for pack it is [N, K] or, transposed, [K, N], with `stride` values per row.
struct QuantizeArgs {
  int dtype;
  const void* x;
  int64_t outer, k, inner, stride;
  int format;
  uint32_t increment;  // formats.scale_increment
  uint8_t* elements;
  uint8_t* scales;
};

// Rows of k > 0 values that a norm handles at a time.
constexpr int64_t norm_rows(int64_t k) { return k < kNormValues ? kNormValues / k : 1; }

// One task's share of mxfp8_pack_stats. Blocks that hold a NaN or Inf count in neither sum.
struct Stats {
  double signal = 0;
  double noise = 0;
  int64_t first_nonfinite = -1;
};

struct DequantizeArgs {
  int format;
  const uint8_t* elements;
  const uint8_t* scales;
  int64_t outer, k, inner;
  int dtype;
  void* y;
};

// Rows of b [v, d] that indices [count] name, each within -v..v-1.
struct EmbeddingArgs {
  int index_dtype;
  const void* indices;
  int64_t count;
  int b_format;
  const uint8_t* b;
  const uint8_t* b_scales;
  int64_t v, d;
  int y_dtype;
  void* y;
};

// q [batch, rows, q_heads * d], k [batch, keys, kv_heads * d], v [batch, keys, kv_heads * dv], past_key
// [batch, kv_heads, past, d] and past_value likewise; y [batch, rows, q_heads * dv]. All of one dtype.
struct AttentionArgs {
  int dtype;
  const void *q, *k, *v, *past_key, *past_value;
  int mask_dtype;           // MXFP8_BOOL or a value dtype
  const void* mask;         // null: none
  int64_t mask_strides[4];  // from batch to batch, head, row and key, in values; 0 where the mask has one for all
  void *y, *present_key, *present_value;  // the presents may be null
  int64_t batch, rows, keys, past, q_heads, kv_heads, d, dv;
  float scale;     // not 0
  bool causal;     // row i sees keys up to past + i
  bool rounds;     // q, k, v and weights are rounded to bfloat16 before they are multiplied
  bool nan_guard;  // rows without a sum give 0, not NaN
};

// Rows of one head of keys: those of the query heads that share it, `rows` each, one after the other.
struct AttentionTask {
  int64_t batch, head, row_begin, row_end, key_begin, key_end;
};
constexpr int64_t kAttentionRows = 256;   // the most rows of a task: they share what is packed of keys and values
constexpr int64_t kAttentionRowPad = 32;  // rows are padded to a multiple of it in a task's memory
constexpr int64_t kAttentionPad = 16;     // and values of a row

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
  // Where its rows are quantized: y is float32, or null, and these take the codes, rows beside each other.
  int y_format = 0;          // 0: they are not
  uint32_t y_increment = 0;  // formats.scale_increment
  uint8_t* y_elements = nullptr;
  uint8_t* y_scales = nullptr;
};

// Rows of x + residual, normalized, times scale, plus bias; and quantized. May be null: residual and bias, and the
// results normalized and sum.
struct NormArgs {
  int dtype;
  const void* x;
  const void* residual;
  const float* scale;
  const float* bias;
  int64_t rows, k;
  int norm;
  float epsilon;
  int format;
  uint32_t increment;  // formats.scale_increment
  uint8_t* elements;
  uint8_t* scales;
  void* normalized;
  void* sum;
};

// The gemm kernels work alike. Rows of A are packed, in tiles of `tile_rows`, into scratch memory
// that all tasks share; each task multiplies a range of those tiles with a range of rows of B, which it decodes a few
// at a time. `row` is the first packed row, `rows` their number.
//
// `exponent` is that of the lowest bit set in any packed value: a bf16 dot product flushes subnormal numbers to zero,
// so it is used only where exponents show that no product reaches down there. See gemm_bf16.cpp.
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
};

// Defines the kernel NAME, of NAME_pack and NAME_multiply.
#define MXFP8_GEMM_KERNEL(NAME, TILE_ROWS, VALUE_BYTES) \
  extern const GemmKernel NAME;                         \
  constexpr GemmKernel NAME = {#NAME, TILE_ROWS, VALUE_BYTES, NAME##_pack, NAME##_multiply}

// What a set uses a kernel for: these values, in strips of `least_rows` to `most_rows` rows.
struct GemmRow {
  Values values;
  int64_t least_rows, most_rows;
  const GemmKernel* kernel;
};

struct Kernels {
  const char* isa;
  void (*quantize_rows)(const QuantizeArgs&, int64_t row_begin, int64_t row_end, Stats*);
  void (*quantize_columns)(const QuantizeArgs&, int64_t tile_begin, int64_t tile_end);
  void (*pack_columns)(const QuantizeArgs&, int64_t tile_begin, int64_t tile_end, Stats*);
  void (*dequantize_rows)(const DequantizeArgs&, int64_t row_begin, int64_t row_end);
  void (*dequantize_columns)(const DequantizeArgs&, int64_t tile_begin, int64_t tile_end);
  void (*embedding)(const EmbeddingArgs&, int64_t begin, int64_t end);
  // `room` has norm_rows(k) * k values.
  void (*norm_quantize)(const NormArgs&, int64_t row_begin, int64_t row_end, float* room);
  // The floats that say what a task made of its keys, and the bytes of scratch memory it needs.
  int64_t (*attention_state)(const AttentionArgs&, const AttentionTask&);
  int64_t (*attention_scratch)(const AttentionArgs&, const AttentionTask&);
  // Writes the task's rows of y or, if there is a state, that. Scratch memory begins with a cache line. `next` is what
  // the caller does then, or null.
  void (*attention)(const AttentionArgs&, const AttentionTask&, const AttentionTask* next, void* scratch, float* state);
  // Writes the rows of y of tasks that differ in their keys alone, from their states, one behind the other.
  void (*attention_merge)(const AttentionArgs&, const AttentionTask&, float* states, int64_t count);
  bool has_bf16;         // whether there are gemms for Values::kBf16
  int64_t strip_rows;    // rows of A packed at a time
  const GemmRow* gemms;  // fastest first; the last takes anything
};

}  // namespace mxfp8
