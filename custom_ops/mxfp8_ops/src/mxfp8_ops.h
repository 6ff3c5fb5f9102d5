// The C ABI of libmxfp8_ops: MXFP8 and MXINT8 kernels for the CPU. Python calls it through ctypes; so can any other
// language.
//
// An array of values is stored as elements, a byte each, and shared scales. A block is 32 neighbouring values along K,
// the dimension that a product sums over; the last block of a row may have fewer. Each block has one scale, a byte s
// that stands for 2^(s - 127), or for NaN where s is 255. A value is its element times the scale of its block.
//
//   float x[2 * 64];                      // two rows of K = 64 values
//   uint8_t elements[2 * 64], scales[2 * 2];
//   int status = mxfp8_quantize(MXFP8_FLOAT32, x, 2, 64, 1, MXFP8_E4M3, MXFP8_CEIL, elements, scales, 0);
//   if (status != MXFP8_OK) puts(mxfp8_last_error(MXFP8_MESSAGE));
//
// Arrays are row-major and contiguous, except where an argument is a stride. numpy_nodes.py defines the result of each
// function, under the same name without `mxfp8_`.
//
// Every function that returns int, mxfp8_contract_version aside, returns MXFP8_OK or a negative code of codes.h.
// A function never throws, never allocates its result, and keeps no pointer after it returns; the exceptions are b and
// b_scales of a weight. Any number of threads may call at once.
//
// The library checks these, before it reads or writes an array, and returns MXFP8_BAD_ARGUMENT:
// - every dtype, format and rounding is one of codes.h; no size or number of threads is below 0;
// - every index names a row;
// - an array has at most 2^48 bytes and ends inside the address space;
// - a stride is at least the number of values of a row;
// - the address of an array that has values is a multiple of the size of one value (mxfp8_pack_stats: 8 bytes). An
//   array without values may have any address, NULL too. If y has no values, only y and indices are checked.
//
// The library cannot check these, so you must: the memory exists and is as large as the sizes say, and results overlap
// neither operands nor each other. If they overlap, their values are undefined; no other memory is written.
#pragma once
#include <stdint.h>

#include "codes.h"

#if defined(_WIN32)
#define MXFP8_API __declspec(dllexport)
#else
#define MXFP8_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// --- the library -----------------------------------------------------------------------------------------------------

// Returns one field of the last error on this thread, as UTF-8: the problem ("k is -1"), what is expected ("0 or
// more"), the advice ("pass the size of an array"), or the message, which has all three. Returns "" if no call has
// failed, or if the error has no such field. The text stays valid until another call fails on this thread.
enum { MXFP8_MESSAGE = 0, MXFP8_PROBLEM = 1, MXFP8_EXPECTED = 2, MXFP8_ADVICE = 3 };
MXFP8_API const char* mxfp8_last_error(int field);

// Returns the version of the node contract that these kernels implement (contract.VERSION).
#define MXFP8_CONTRACT_VERSION 1
MXFP8_API int mxfp8_contract_version(void);

// Returns the instruction sets that this build has and this machine supports, best first, separated by commas. On x86
// at most "amx_bf16,avx512_bf16,avx512_vnni,avx512,avx2_vnni,avx2,portable", on Arm "neon_mm,neon_dot,portable".
MXFP8_API const char* mxfp8_isa_available(void);
// Returns the instruction set in use. The environment variable MXFP8_ISA names one at the first use; without it, the
// library chooses the fastest. If MXFP8_ISA names one that is not available, this returns NULL and every kernel returns
// MXFP8_NO_SUCH_ISA.
MXFP8_API const char* mxfp8_isa(void);
// Changes the instruction set in use, for the whole process. Tests use it to compare sets.
MXFP8_API int mxfp8_isa_force(const char* name);

// Runs later calls whose `threads` is not 0 on the OpenMP runtime that has this GOMP_parallel. Call it in a process
// that also computes with OpenMP, as PyTorch does: idle OpenMP threads spin, and would slow down the library's own
// threads. With NULL, and in a child after fork(), calls run on the library's own threads again.
MXFP8_API void mxfp8_use_openmp(void (*gomp_parallel)(void (*team)(void*), void* argument, unsigned threads,
                                                      unsigned flags));

// --- quantize and dequantize -----------------------------------------------------------------------------------------
// `threads`, here and in all functions below, is the most threads that the call uses. 0 means one per core. The library
// lowers a number above both 256 and the number of cores to the larger of these.

// Quantizes x [outer, K, inner] in blocks along K: elements [outer, K, inner], scales [outer, ceil(K/32), inner]. For a
// matrix [rows, K], outer is the number of rows, and inner is 1.
MXFP8_API int mxfp8_quantize(int value_dtype, const void* x, int64_t outer, int64_t k, int64_t inner,
                             int element_format, int scale_rounding, uint8_t* elements, uint8_t* scales, int threads);

// Computes the values y [outer, K, inner] of elements and scales, which have the shapes that mxfp8_quantize writes.
MXFP8_API int mxfp8_dequantize(int element_format, const uint8_t* elements, const uint8_t* scales, int64_t outer,
                               int64_t k, int64_t inner, int value_dtype, void* y, int threads);

// Rows of the table b [V, D], dequantized: row i of y [count, D] is the row that indices[i] names. indices [count] are
// MXFP8_INT32 or MXFP8_INT64, from -V to V - 1; a negative one counts from the last row.
MXFP8_API int mxfp8_embedding(int index_dtype, const void* indices, int64_t count, int b_format, const uint8_t* b,
                              const uint8_t* b_scales, int64_t v, int64_t d, int y_dtype, void* y, int threads);

// --- convolutions
// ------------------------------------------------------------------------------------------------------

// One spatial axis of a convolution: the sizes of x and of the kernel, the stride, the dilation, and the zeros before
// and after x. A convolution of one axis has a first axis {1, 1, 1, 1, 0, 0}.
typedef struct {
  int64_t in, kernel, stride, dilation, pad_begin, pad_end;
} mxfp8_conv_axis;

// y [N, O, out...] = epilogue(conv(x, b) + bias + residual). x [N, C, in...] is quantized to x_format, in blocks of 32
// channels of one pixel. b is [O, kernel..., C / group], and has scales [O, kernel..., ceil(C / group / 32)]. With
// groups, C / group is a multiple of 32. bias [O] and residual, of the shape of y, may be NULL; with residual_after the
// residual is added after the epilogue. alpha and beta: the bounds of MXFP8_CLIP; alpha: the slope of MXFP8_LEAKY_RELU;
// MXFP8_HARD_SWISH is x * clip(alpha * x + beta, 0, 1). axes has two. weight is as in a gemm, for the whole b: y has
// the same bits with and without it, if an image of y has 3 pixels or more.
MXFP8_API int mxfp8_conv(int x_dtype, const void* x, int64_t n, int64_t c, int64_t o, int64_t group,
                         const mxfp8_conv_axis* axes, int x_format, int scale_rounding, int b_format, const uint8_t* b,
                         const uint8_t* b_scales, const float* bias, int residual_dtype, const void* residual,
                         int residual_after, int epilogue, float alpha, float beta, int y_dtype, void* y,
                         int64_t weight, int threads);

// --- gemms -----------------------------------------------------------------------------------------------------------
// The operand b is [N, K]: the transpose of the matrix that the product is written with, so that blocks lie along K.
// A stride is the distance from one row to the next, in values.

// Computes y [M, N] = a [M, K] times the transpose of b, plus bias [N], which may be NULL.
MXFP8_API int mxfp8_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format, const uint8_t* b,
                         const uint8_t* b_scales, const float* bias, int64_t m, int64_t n, int64_t k, int y_dtype,
                         void* y, int64_t y_stride, int64_t weight, int threads);

// Computes the same from an unquantized x [M, K]. With activation_dtype MXFP8_FLOAT32 the values of x are multiplied
// unchanged, whatever their dtype; with MXFP8_BFLOAT16 they are first rounded to bfloat16, to nearest even.
MXFP8_API int mxfp8_weight_gemm(int x_dtype, const void* x, int64_t x_stride, int activation_dtype, int b_format,
                                const uint8_t* b, const uint8_t* b_scales, const float* bias, int64_t m, int64_t n,
                                int64_t k, int y_dtype, void* y, int64_t y_stride, int64_t weight, int threads);

// The same two gemms, which then apply an epilogue to the sums plus bias, and multiply the result by factor [M, N],
// which may be NULL. Both steps compute in float32.
MXFP8_API int mxfp8_fused_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format, const uint8_t* b,
                               const uint8_t* b_scales, const float* bias, int epilogue, int factor_dtype,
                               const void* factor, int64_t m, int64_t n, int64_t k, int y_dtype, void* y,
                               int64_t y_stride, int64_t weight, int threads);
MXFP8_API int mxfp8_fused_weight_gemm(int x_dtype, const void* x, int64_t x_stride, int activation_dtype, int b_format,
                                      const uint8_t* b, const uint8_t* b_scales, const float* bias, int epilogue,
                                      int factor_dtype, const void* factor, int64_t m, int64_t n, int64_t k,
                                      int y_dtype, void* y, int64_t y_stride, int64_t weight, int threads);

// A weight b [N, K] that never changes: a number above 0, which a gemm takes as `weight`; there, 0 stands for none. The
// first gemm with it copies b and its scales into the layout of its kernel, if that kernel has one; that gemm and later
// ones read the copy. It has 1.03 bytes a value; where the kernel multiplies float32, only a small weight is copied, up
// to 512 KiB as float32. Weights of equal contents share one copy, which is freed with the last of them. Any number of
// threads may use one weight.
//
// The first gemm sets the b, b_scales, format, N and K of the weight. A gemm with others computes from its own b. Keep
// b and b_scales in memory and unchanged until mxfp8_weight_free. Gemms without a copy read them; so do, beside a copy,
// those of up to 3 rows on amx_bf16, and those of up to 4 rows on neon_mm, except for INT8. From 3 rows on, a gemm with
// a weight gives the same bits as one without.
//
// A weight may be freed while gemms of other threads use it. No gemm takes its number after that.
MXFP8_API int mxfp8_weight_new(int64_t* weight);
MXFP8_API void mxfp8_weight_free(int64_t weight);

// A gemm with one of several matrices for each row, as a mixture of experts needs: row i of y [M, N] is row i of a
// [M, K] times the transpose of b[experts[i]], where b is [count, N, K]. experts [M] are from -count to count; a
// negative one counts from the last matrix, and `count` itself selects no matrix: the row of y is zeros.
MXFP8_API int mxfp8_grouped_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format,
                                 const uint8_t* b, const uint8_t* b_scales, const int64_t* experts, int64_t count,
                                 int64_t m, int64_t n, int64_t k, int y_dtype, void* y, int threads);

// Computes the same from an unquantized x [M, K]; activation_dtype is as in mxfp8_weight_gemm.
MXFP8_API int mxfp8_grouped_weight_gemm(int x_dtype, const void* x, int activation_dtype, int b_format,
                                        const uint8_t* b, const uint8_t* b_scales, const int64_t* experts,
                                        int64_t count, int64_t m, int64_t n, int64_t k, int y_dtype, void* y,
                                        int threads);

// --- attention -------------------------------------------------------------------------------------------------------

// Per head, y = softmax(scale * q k^T + mask) v, in float32. Head h of q uses head h / (q_heads / kv_heads) of k and v.
typedef struct {
  // dtype: of q, k, v, pasts, y and presents. mask_dtype: MXFP8_BOOL, where 0 hides a key from a row, or a value dtype,
  // whose values are added to the scores. activation_dtype: MXFP8_BFLOAT16 rounds q, k, v and the weights to bfloat16
  // before it multiplies them. causal: if not 0, row i sees keys 0 .. past + i. nan_guard: if not 0, a row that sees no
  // key, or NaN, gives 0 instead of NaN.
  int dtype, mask_dtype, activation_dtype, causal, nan_guard;
  float scale;  // 0 stands for 1 / sqrt(d)
  // past: the number of earlier keys. d: the size of a head of q and k; dv: of v. kv_heads divides q_heads.
  int64_t batch, rows, keys, past, q_heads, kv_heads, d, dv;
  int64_t mask_sizes[4];  // each is the size of [batch, q_heads, rows, past + keys], or 1; mask is contiguous
  // q [batch, rows, q_heads * d], k [batch, keys, kv_heads * d], v [batch, keys, kv_heads * dv]; mask may be NULL;
  // past_key [batch, kv_heads, past, d], past_value [batch, kv_heads, past, dv].
  const void *q, *k, *v, *mask, *past_key, *past_value;
  // y [batch, rows, q_heads * dv]. The presents are the past, then the new keys or values: [batch, kv_heads,
  // past + keys, d] and [.., dv]; each may be NULL.
  void *y, *present_key, *present_value;
} mxfp8_attention_arguments;
MXFP8_API int mxfp8_attention(const mxfp8_attention_arguments* arguments, int threads);

// --- packing of weights ----------------------------------------------------------------------------------------------

typedef struct {
  double signal;            // sum of w^2, over the blocks that hold no NaN or Inf
  double noise;             // sum of (w - dequantized)^2, over the same blocks
  int64_t first_nonfinite;  // row-major index in w, strides aside, of the first NaN or Inf; -1 if w has none
} mxfp8_pack_stats;
// Quantizes a weight along K and measures the error: elements [N, K], scales [N, ceil(K/32)]. w is [N, K] if
// `transposed` is 0, else [K, N].
MXFP8_API int mxfp8_pack(int value_dtype, const void* w, int64_t w_stride, int transposed, int64_t n, int64_t k,
                         int element_format, int scale_rounding, uint8_t* elements, uint8_t* scales,
                         mxfp8_pack_stats* stats, int threads);

// --- profiling -------------------------------------------------------------------------------------------------------

// Starts a record of all calls in the process, those of nodes in ONNX Runtime sessions too; with 0, stops recording.
// Either deletes the earlier record. A record has at most 64 MiB; later calls are left out.
MXFP8_API int mxfp8_profile(int on);

// Returns the record, a line per call, in the order in which they end. A line has four fields, separated by tabs:
// nanoseconds; the instruction set, or "cuda"; the gemm kernels that ran, separated by commas, or on a GPU the row of
// the dispatch table (cuda_host/routes.cpp); and the node, as "TYPE 'NAME'" with backslashes and line ends escaped,
// empty for a call of this header. The time of a call on a GPU is the time to queue its work; device "cuda-copies"
// waits for the work. The text stays valid until this thread calls the function again. Returns NULL if there is no
// memory for it.
MXFP8_API const char* mxfp8_profile_text(void);

#ifdef __cplusplus
}
#endif
