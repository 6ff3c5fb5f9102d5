// How CUDA kernels get into libmxfp8_ops. Plain C: cuda/loader.py does it for Python, any other language can do the
// same.
//
// The library holds no CUDA code and is linked against no CUDA library. mxfp8_cuda_open tells it where the CUDA driver
// is, and gives it a loader: callbacks that describe a GPU and find the kernels of src/cuda, compiled for it. For ONNX
// Runtime they are called while a session is made, on the thread that makes it; only `warn` may be called while one
// runs. For the plans of mxfp8_cuda_plan.h they are called when a kernel is first used.
//
// Session options say where their nodes run by the configuration entry "mxfp8.device", read when the library is
// registered with them:
//
//   none           on the processor
//   "cuda"         on the CUDA execution provider and its stream, if that provider has the node, else on the processor
//   "cuda-copies"  on GPU 0, for the CPU execution provider: operands are copied there, results back. Constant operands
//                  - weights - are copied once, when the session is made. One node runs at a time.
//
// "mxfp8.keep_wide" is "1", with "cuda", for sessions that keep constant weights [N, K] in bfloat16 too, made when the
// session is: two more bytes a value, and products of many rows need not dequantize them.
//
// Many rows multiply on cuBLASLt, if the loader knows it; routes.cpp has the table of what runs where.
#pragma once
#include <stddef.h>

#include "../mxfp8_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  void* context;   // CUcontext: the primary context of the GPU, which stays alive
  int processors;  // its multiprocessors
  int capability;  // its compute capability, 10 major + minor
  // The file of cuBLASLt, as dlopen takes it, or NULL. The text must stay until the next call of the loader.
  const char* cublaslt;
} mxfp8_cuda_gpu;

// The first two return 0; or another number, and a message of at most `size` bytes, its final zero included.
typedef struct {
  int (*gpu)(int index, mxfp8_cuda_gpu* gpu, char* message, size_t size);
  // `kernels` are `count` instances as C++ writes them, "quantize_rows<F32, E4M3, false>"; the file has the name
  // before the "<". `functions` are CUfunctions of the GPU's primary context, and stay loaded. All at once, because
  // they may have to be compiled, which one processor does for one kernel.
  int (*kernels)(int index, int count, const char* const* kernels, void** functions, char* message, size_t size);
  // Shows a warning to the user, from any thread. May be NULL.
  void (*warn)(const char* message);
} mxfp8_cuda_loader;

// `driver` is what dlopen takes: "libcuda.so.1". The loader's functions are kept, the struct is not. May be called
// again; sessions that exist keep what they have. Returns 0, or MXFP8_BAD_ARGUMENT and a message of at most `size`
// bytes (which mxfp8_last_error has too; message may be NULL): no such file, not a driver, or NULL for one of the
// others.
MXFP8_API int mxfp8_cuda_open(const char* driver, const mxfp8_cuda_loader* loader, char* message, size_t size);

#ifdef __cplusplus
}
#endif
