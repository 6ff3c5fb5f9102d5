// The launches of each operation: the one planner of all hosts, in plain C, and what queues its plans.
//
// A plan is a list of steps: kernels of src/cuda to launch, words to clear, products for cuBLASLt. Plans are made of
// addresses and sizes alone, and need no GPU. With a queue, the same call does the steps in order, on one stream,
// unless they need scratch memory: the host allocates it and calls mxfp8_cuda_run. What depends on data is decided on
// the device.
//
// Every field of what goes in has 8 bytes, so that any language can fill it as an array of 64-bit integers. An address
// that is 0 stands for nothing. Dtypes and formats are the codes of mxfp8_ops.h.
//
// Functions return 0 or a status of mxfp8_ops.h, and mxfp8_last_error says more. Bad arguments are what they are there,
// for arrays on the GPU; also a struct that is NULL, and a plan of more than a million steps. Then the plan is all
// zeros.
#pragma once
#include "../mxfp8_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

// No row of the dispatch table fits: the device is too old, or the forced row cannot do the product.
enum { MXFP8_NO_ROUTE = -4 };

// Products for cuBLASLt.
enum {
  MXFP8_BFLOAT16_PRODUCTS = 1,
  MXFP8_BLOCK_SCALED_PRODUCTS = 2,  // of FP8 elements and their scales
};

// Where a product runs and which choices are taken from the planner; all but the first three may be 0.
typedef struct {
  int64_t capability;  // compute capability, 10 major + minor
  int64_t processors;  // multiprocessors
  int64_t cublaslt;    // products that it may do: MXFP8_BFLOAT16_PRODUCTS ...
  int64_t forced;      // row i - 1 of the dispatch table is the one to take
  // For measurements, how products are cut up: parts of K, warps of gemm_skinny that share x, bytes of the sums of
  // parts.
  int64_t splits, warps, parts_bytes;
} mxfp8_cuda_place;

// y [m, n] = x [m, k] b [n, k]^T + bias [n] float32. x is values, or elements with scales; b elements with scales.
typedef struct {
  int64_t x_kind, b_kind, y_dtype;
  int64_t x, x_scales, b, b_scales, bias, y;
  int64_t m, n, k;
  int64_t wide, wide_inexact;  // b in bfloat16, if it is kept, and a word that is not 0 if that cannot hold it
  int64_t activation_dtype;    // MXFP8_BFLOAT16: values of x are rounded to it first; 0, MXFP8_FLOAT32: as they are
  int64_t b_swizzled;          // b_scales in the 128x4 layout, aligned to 16 bytes, if they are kept
} mxfp8_cuda_gemm;

enum { MXFP8_PLAIN = 0, MXFP8_TRANSPOSED = 1 };

// x [outer, k, inner] quantized along k; with row_elements (outer = 1) also along inner, reading x once.
typedef struct {
  int64_t x_dtype, format;
  int64_t increment;  // formats.scale_increment
  // MXFP8_PLAIN: as numpy_nodes.quantize has it. MXFP8_TRANSPOSED (outer = 1): elements [inner, k] and scales
  // [inner, ceil(k / 32)]; only then may there be row_elements and row_scales, which are plain.
  int64_t layout;
  int64_t x, outer, k, inner;
  int64_t elements, scales, row_elements, row_scales;
} mxfp8_cuda_quantize;

// y [outer, k, inner]. `inexact` is 0, or a word that becomes 1 if y is bfloat16 and does not hold every value, else 0.
typedef struct {
  int64_t format, y_dtype;
  int64_t elements, scales, outer, k, inner;
  int64_t y, inexact;
} mxfp8_cuda_dequantize;

// y [count, d] = the rows of b [v, d] that indices [count] name, int32 or int64; NaN for one that names none.
typedef struct {
  int64_t index_dtype, b_format, y_dtype;
  int64_t indices, b, b_scales, count, v, d;
  int64_t y;
} mxfp8_cuda_embedding;

// y [outer middle inner, n], each row x [x_rows, k] times the transpose of one of b [count, n, k]. Row (i, j, l) of y
// has row i x_outer + j x_middle + l x_inner of x, and the index experts [indices] at i e_outer + j e_middle + l
// e_inner: -1 is the last matrix, `count` gives a row of zeros, and one that names none a row of NaN.
typedef struct {
  int64_t x_kind, b_kind, y_dtype, activation_dtype;
  int64_t x, x_scales, b, b_scales, experts, y;
  int64_t x_rows, indices, count, n, k;
  int64_t outer, middle, inner, x_outer, x_middle, x_inner, e_outer, e_middle, e_inner;
} mxfp8_cuda_grouped;

// The kinds of steps, and their arguments.
enum {
  MXFP8_LAUNCH = 0,  // launch a kernel: its parameters
  MXFP8_CLEAR = 1,   // write zeros: address, number of 32-bit words
  // A product y = x b^T by cuBLASLt, summed in float32 throughout: x, x_scales, b, b_scales, y, m, n, k, the codes of
  // the dtypes of x, b and y, a workspace. FP8 operands have scales per block in the 128x4 layout, operands of bfloat16
  // have none.
  MXFP8_MATMUL = 2,
};
enum { MXFP8_MOST_ARGUMENTS = 14 };

typedef struct {
  int32_t step;
  int32_t kernel;       // MXFP8_LAUNCH: its number, see mxfp8_cuda_kernel
  int32_t grid, block;  // thread blocks, and threads in each
  int32_t count;        // arguments
  uint32_t in_scratch;  // bit i: argument i is an offset into memory of `scratch_bytes`, aligned to 256
  int64_t arguments[MXFP8_MOST_ARGUMENTS];
} mxfp8_cuda_step;

typedef struct {
  const mxfp8_cuda_step* steps;  // valid until the calling thread makes its next plan
  int64_t count;
  int64_t scratch_bytes;  // memory that the steps need from the first to the last
  int64_t route;          // for a product, the row of the dispatch table, -1 if there is nothing to do
  int64_t done;           // 1 if the steps are queued
  int64_t number;         // which of the calling thread's plans this is
} mxfp8_cuda_plan;

// Where steps go. mxfp8_cuda_open (mxfp8_cuda.h) has been called; kernels are loaded on their first use.
typedef struct {
  int64_t gpu;      // its index
  int64_t stream;   // CUstream
  int64_t scratch;  // address of the plan's scratch memory; 0: there is none yet
} mxfp8_cuda_queue;

// With a queue, a plan that needs no scratch memory is done too, and a product goes to cuBLASLt only if that can do it:
// it is asked at the first product of a shape. NULL: it is only planned.
MXFP8_API int mxfp8_cuda_plan_gemm(const mxfp8_cuda_place*, const mxfp8_cuda_gemm*, const mxfp8_cuda_queue*,
                                   mxfp8_cuda_plan*);
MXFP8_API int mxfp8_cuda_plan_quantize(const mxfp8_cuda_quantize*, const mxfp8_cuda_queue*, mxfp8_cuda_plan*);
MXFP8_API int mxfp8_cuda_plan_dequantize(const mxfp8_cuda_dequantize*, const mxfp8_cuda_queue*, mxfp8_cuda_plan*);
MXFP8_API int mxfp8_cuda_plan_embedding(const mxfp8_cuda_embedding*, const mxfp8_cuda_queue*, mxfp8_cuda_plan*);
MXFP8_API int mxfp8_cuda_plan_grouped(const mxfp8_cuda_grouped*, const mxfp8_cuda_queue*, mxfp8_cuda_plan*);

// Queues the steps of a plan, which is the calling thread's latest and was made with a queue: without one, cuBLASLt
// was not asked, so its refusal is an error here.
MXFP8_API int mxfp8_cuda_run(const mxfp8_cuda_queue*, mxfp8_cuda_plan*);

// Bytes of scales [rows, ceil(k / 32)] in the 128x4 layout; or a status, which is below 0.
MXFP8_API int64_t mxfp8_cuda_swizzled_bytes(int64_t rows, int64_t k);

// The kernel of a number, as C++ writes it: "quantize_rows<F32, E4M3, false>"; its file has the name before the
// "<". NULL past the last.
MXFP8_API const char* mxfp8_cuda_kernel(int number);

// A row of the dispatch table (routes.cpp): the products that it is for.
typedef struct {
  const char* name;
  int64_t capability;    // least compute capability, 10 major + minor
  int64_t most_rows;     // greatest M, 0 for any; float32 (float16) x, whose rows are three (two) of bfloat16: a third
  int64_t n_multiple;    // N is a multiple of it
  int64_t whole_blocks;  // 1 if K must be a multiple of 32 and both operands aligned to 16 bytes
  int64_t x_kinds, b_kinds;  // the kinds of x and b: bits of kValueDtypes, then of kElementFormats (contract.h)
  int64_t cublaslt;          // cuBLASLt does it: which of its products; 0: a kernel does
} mxfp8_cuda_route;

// NULL past the last row.
MXFP8_API const mxfp8_cuda_route* mxfp8_cuda_route_at(int row);

#ifdef __cplusplus
}
#endif
