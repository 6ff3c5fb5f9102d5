// The C ABI of libmxfp8_ops: native.py calls it through ctypes, and any other language may.
//
// Every function has the meaning of its namesake in numpy_nodes.py. Pointers are to contiguous memory unless a stride
// is given. A function returns 0, or a negative code below; it never throws, never allocates for its result, and keeps
// no reference to its arguments. All are safe to call from several threads at once.
//
// These are bad arguments, refused before a byte is read or written:
// - a dtype, format or rounding that is not named here; a size or number of threads below 0;
// - an index that names no row;
// - an array of more than 2^48 bytes, or one that ends beyond the address space;
// - a stride below the values of a row;
// - NULL, or an address that is not a multiple of the size of a value (4 or 2 bytes; stats: 8), for an array that has
//   values. An array without values may be anywhere, NULL included. Where y is empty, no other array is looked at but
//   indices.
// The caller is responsible for the rest, which cannot be checked: that the memory exists, is as large as the sizes
// say, and that results overlap neither operands nor each other. If they overlap, the results are undefined, but no
// other memory is written.
#pragma once
#include <stdint.h>

#if defined(_WIN32)
#define MXFP8_API __declspec(dllexport)
#else
#define MXFP8_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Value dtypes, element formats and dtypes of indices carry their onnx.TensorProto.DataType codes; roundings and
// epilogues their index in formats.SCALE_ROUNDINGS and contract.EPILOGUES.
enum { MXFP8_FLOAT32 = 1, MXFP8_FLOAT16 = 10, MXFP8_BFLOAT16 = 16, MXFP8_E4M3 = 17, MXFP8_E5M2 = 19, MXFP8_INT8 = 3 };
enum { MXFP8_INT32 = 6, MXFP8_INT64 = 7, MXFP8_BOOL = 9 };
enum { MXFP8_CEIL = 0, MXFP8_FLOOR = 1, MXFP8_EVEN = 2 };
enum { MXFP8_NONE = 0, MXFP8_RELU = 1, MXFP8_GELU = 2, MXFP8_GELU_TANH = 3, MXFP8_SILU = 4 };
// MXFP8_FAILED: any other error.
enum { MXFP8_OK = 0, MXFP8_BAD_ARGUMENT = -1, MXFP8_NO_MEMORY = -2, MXFP8_NO_SUCH_ISA = -3, MXFP8_FAILED = -5 };

// A field of the error of the last call that failed on this thread, in UTF-8: what was wrong ("k is -1"), what is
// expected ("0 or more"), what to do ("pass the size of an array"); or all of these as one message. Empty if none has
// failed, or if the error has no such field. Valid until the thread's next call that fails.
enum { MXFP8_MESSAGE = 0, MXFP8_PROBLEM = 1, MXFP8_EXPECTED = 2, MXFP8_ADVICE = 3 };
MXFP8_API const char* mxfp8_last_error(int field);

// The version of the node contract these kernels implement (contract.VERSION).
#define MXFP8_CONTRACT_VERSION 1
MXFP8_API int mxfp8_contract_version(void);

// The instruction sets compiled in and usable on this machine, best first, comma-separated:
// "amx_bf16,avx512_bf16,avx512_vnni,avx512,avx2_vnni,avx2,portable", on Arm "neon_mm,neon_dot,portable".
MXFP8_API const char* mxfp8_isa_available(void);
// The one in use. The environment variable MXFP8_ISA chooses one at first use; mxfp8_isa_force changes it (tests do).
// NULL, and MXFP8_NO_SUCH_ISA from every kernel, if MXFP8_ISA names one that is not available.
MXFP8_API const char* mxfp8_isa(void);
MXFP8_API int mxfp8_isa_force(const char* name);

// For processes that also compute with OpenMP, as PyTorch does: its threads wait busily, in the way of this library's.
// From now on every call whose `threads` is not 0 runs on teams of the OpenMP runtime whose GOMP_parallel this is;
// after fork(), and with NULL, on the library's own threads.
MXFP8_API void mxfp8_use_openmp(void (*gomp_parallel)(void (*team)(void*), void* argument, unsigned threads,
                                                      unsigned flags));

// x is [outer, K, inner], blocked along K. elements: the shape of x; scales: [outer, ceil(K/32), inner].
// threads: how many threads to use, 0 for all cores; more than 256, or than cores if there are more, count as that.
MXFP8_API int mxfp8_quantize(int value_dtype, const void* x, int64_t outer, int64_t k, int64_t inner,
                             int element_format, int scale_rounding, uint8_t* elements, uint8_t* scales, int threads);

MXFP8_API int mxfp8_dequantize(int element_format, const uint8_t* elements, const uint8_t* scales, int64_t outer,
                               int64_t k, int64_t inner, int value_dtype, void* y, int threads);

// Rows of the table b [V, D] that indices [count] name, int32 or int64: y [count, D]. A negative index counts from the
// last row.
MXFP8_API int mxfp8_embedding(int index_dtype, const void* indices, int64_t count, int b_format, const uint8_t* b,
                              const uint8_t* b_scales, int64_t v, int64_t d, int y_dtype, void* y, int threads);

// One matrix product: a [M, K] x b [N, K] -> y [M, N], rows of y `y_stride` values apart. bias [N] or NULL.
MXFP8_API int mxfp8_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format, const uint8_t* b,
                         const uint8_t* b_scales, const float* bias, int64_t m, int64_t n, int64_t k, int y_dtype,
                         void* y, int64_t y_stride, int threads);

// The same with an unquantized x [M, K], rows `x_stride` values apart. activation_dtype: MXFP8_FLOAT32 multiplies its
// values as they are, whatever their dtype; MXFP8_BFLOAT16 rounds them to it, to nearest even, first.
MXFP8_API int mxfp8_weight_gemm(int x_dtype, const void* x, int64_t x_stride, int activation_dtype, int b_format,
                                const uint8_t* b, const uint8_t* b_scales, const float* bias, int64_t m, int64_t n,
                                int64_t k, int y_dtype, void* y, int64_t y_stride, int threads);

// These two, and then an epilogue of sums and bias in float32, and that times factor [M, N], or NULL, in float32.
MXFP8_API int mxfp8_fused_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format, const uint8_t* b,
                               const uint8_t* b_scales, const float* bias, int epilogue, int factor_dtype,
                               const void* factor, int64_t m, int64_t n, int64_t k, int y_dtype, void* y,
                               int64_t y_stride, int threads);
MXFP8_API int mxfp8_fused_weight_gemm(int x_dtype, const void* x, int64_t x_stride, int activation_dtype, int b_format,
                                      const uint8_t* b, const uint8_t* b_scales, const float* bias, int epilogue,
                                      int factor_dtype, const void* factor, int64_t m, int64_t n, int64_t k,
                                      int y_dtype, void* y, int64_t y_stride, int threads);

// A weight b [N, K] that never changes. The first gemm that uses it copies b into the layout of its kernel, and it and
// every later one read the copy (with AMX those of four rows or more, on neon_mm, but for INT8, of five; others b): b
// has to stay, unchanged, as long as the weight does. prepack: MXFP8_PREPACK_AUTO copies the codes;
// MXFP8_PREPACK_DECODED makes them bfloat16 where the kernel multiplies those, two bytes a value; with
// MXFP8_PREPACK_NEVER gemms read b. Any number of threads may use one weight. Of three rows or more a gemm gives the
// same bits with MXFP8_PREPACK_AUTO and without a weight.
enum { MXFP8_PREPACK_AUTO = 0, MXFP8_PREPACK_NEVER = 1, MXFP8_PREPACK_DECODED = 2 };
typedef struct mxfp8_weight mxfp8_weight;
MXFP8_API int mxfp8_weight_new(int prepack, mxfp8_weight** weight);
MXFP8_API void mxfp8_weight_free(mxfp8_weight* weight);
// The next of the four gemms above that this thread calls has this weight for its b; NULL: none. It is for the b,
// format and sizes of the first call; a call with others reads its own b.
MXFP8_API void mxfp8_weight_use(mxfp8_weight* weight);

// Products with matrices of a stack: row i of y [M, N] is row i of a [M, K] times the transpose of b[experts[i]], b
// being [count, N, K]. experts [M] are -count..count: below 0 they count from the end, and `count` is none, a row of
// zeros.
MXFP8_API int mxfp8_grouped_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format,
                                 const uint8_t* b, const uint8_t* b_scales, const int64_t* experts, int64_t count,
                                 int64_t m, int64_t n, int64_t k, int y_dtype, void* y, int threads);

// The same with an unquantized x [M, K], used as it is (activation_dtype MXFP8_FLOAT32) or rounded to nearest even
// first (MXFP8_BFLOAT16).
MXFP8_API int mxfp8_grouped_weight_gemm(int x_dtype, const void* x, int activation_dtype, int b_format,
                                        const uint8_t* b, const uint8_t* b_scales, const int64_t* experts,
                                        int64_t count, int64_t m, int64_t n, int64_t k, int y_dtype, void* y,
                                        int threads);

// Attention: per head, y = softmax(scale * q k^T + mask) v, computed in float32; head h of q meets head
// h / (q_heads / kv_heads) of k and v. q [batch, rows, q_heads * d], k [batch, keys, kv_heads * d] and v
// [batch, keys, kv_heads * dv], behind past_key [batch, kv_heads, past, d] and past_value [batch, kv_heads, past, dv];
// y [batch, rows, q_heads * dv]; present_key [batch, kv_heads, past + keys, d] and present_value, or NULL. dtype is
// that of all of them. mask: MXFP8_BOOL, 0 where a row may not see a key, or values to add to the scores; dense, its
// four sizes those of [batch, q_heads, rows, past + keys] or 1; NULL for none. causal: row i sees keys 0 .. past + i.
// scale: 0 stands for 1 / sqrt(d). activation_dtype: MXFP8_BFLOAT16 rounds q, k, v and weights to that before they are
// multiplied. nan_guard: rows that see nothing, or NaN, give 0, not NaN.
typedef struct {
  int dtype, mask_dtype, activation_dtype, causal, nan_guard;
  float scale;
  int64_t batch, rows, keys, past, q_heads, kv_heads, d, dv;
  int64_t mask_sizes[4];
  const void *q, *k, *v, *mask, *past_key, *past_value;
  void *y, *present_key, *present_value;
} mxfp8_attention_arguments;
MXFP8_API int mxfp8_attention(const mxfp8_attention_arguments* arguments, int threads);

// Packs a weight for the pass: quantizes along K and stores [N, K] elements, [N, ceil(K/32)] scales.
// transposed == 0: w is [N, K]; 1: w is [K, N]; rows `w_stride` values apart.
typedef struct {
  double signal;            // sum of w^2, over the blocks that hold no NaN or Inf
  double noise;             // sum of (w - dequantized)^2, over the same blocks
  int64_t first_nonfinite;  // row-major index into the source [rows, cols] of the first NaN or Inf, -1 if none
} mxfp8_pack_stats;
MXFP8_API int mxfp8_pack(int value_dtype, const void* w, int64_t w_stride, int transposed, int64_t n, int64_t k,
                         int element_format, int scale_rounding, uint8_t* elements, uint8_t* scales,
                         mxfp8_pack_stats* stats, int threads);

// Writes down every call from now on, those of nodes in ONNX Runtime sessions too, in the whole process; or no longer,
// with 0. Earlier records are deleted. At most 64 MiB are written.
MXFP8_API int mxfp8_profile(int on);

// Returns a line for each call that has ended since then: nanoseconds, instruction set (empty: a GPU's), the gemm
// kernels that ran, separated by commas, and which node it was, as "TYPE 'NAME'" with backslashes and line ends
// escaped; empty for a call of this header. Between them are tabs. Valid until the thread calls this again; NULL if
// there is no memory.
MXFP8_API const char* mxfp8_profile_text(void);

#ifdef __cplusplus
}
#endif
