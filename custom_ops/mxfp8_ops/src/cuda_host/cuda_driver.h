// The CUDA driver, opened at run time, and the GPUs that the loader describes. See mxfp8_cuda.h.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "mxfp8_cuda.h"
#include "mxfp8_cuda_plan.h"

namespace mxfp8::cuda {

using CudaFunction = void*;  // CUfunction
using Stream = void*;        // CUstream, which is cudaStream_t too

// The functions of the driver that are used. Every function returns a CUresult, 0 for success; addresses on the GPU
// have 64 bits.
struct Driver {
  int (*push_context)(void* context);
  int (*pop_context)(void** context);
  int (*launch)(CudaFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                void**);
  int (*allocate)(uint64_t* address, size_t bytes);
  int (*free)(uint64_t address);
  int (*copy_in)(uint64_t to, const void* from, size_t bytes, Stream);
  int (*copy_out)(void* to, uint64_t from, size_t bytes, Stream);
  int (*fill)(uint64_t address, unsigned value, size_t words, Stream);
  int (*wait)(Stream);
  int (*error_name)(int status, const char** name);
};

// The functions that mxfp8_cuda_open has found last, null before; never freed.
const Driver* connected_driver();

struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A GPU, on behalf of one node.
class Gpu {
 public:
  // Throws CudaError, which begins with `where`, if the driver is not open or the loader has no such GPU.
  Gpu(const std::string& where, int index);

  const std::string& where() const { return where_; }
  int index() const { return index_; }
  const mxfp8_cuda_gpu& properties() const { return properties_; }
  const Driver& driver() const { return *driver_; }
  const std::string& cublaslt() const { return cublaslt_; }  // its file, or ""

  // For the planner: with all products of cuBLASLt, which is asked at each of them.
  mxfp8_cuda_place place() const;

  // Loads kernels. Throws CudaError if the loader cannot.
  std::vector<CudaFunction> kernels(const std::vector<const char*>& names) const;

  // Throws CudaError unless the status is 0.
  void check(int status, const char* doing) const {
    if (status != 0) fail(doing, status);
  }
  [[noreturn]] void fail(const char* doing, int status) const;
  void warn(const std::string& message) const {  // unless it is empty
    if (loader_.warn != nullptr && !message.empty()) loader_.warn((where_ + ": " + message).c_str());
  }

 private:
  std::string where_;
  int index_;
  const Driver* driver_;
  mxfp8_cuda_loader loader_;
  mxfp8_cuda_gpu properties_;  // cublaslt is null: see cublaslt_
  std::string cublaslt_;
};

// A warning that is shown at the end of a scope, after an exception too: once no lock is held, as `warn` may run
// Python.
class Warning {
 public:
  explicit Warning(const Gpu& gpu) : gpu_(gpu) {}
  ~Warning() { gpu_.warn(text); }
  Warning(const Warning&) = delete;
  std::string text;

 private:
  const Gpu& gpu_;
};

// Makes a GPU the thread's current one, as ONNX Runtime and the caller's own thread may not have.
class Current {
 public:
  explicit Current(const Gpu& gpu) : gpu_(gpu) {
    gpu.check(gpu.driver().push_context(gpu.properties().context), "make the GPU current");
  }
  ~Current() {
    void* context;
    gpu_.driver().pop_context(&context);
  }
  Current(const Current&) = delete;

 private:
  const Gpu& gpu_;
};

}  // namespace mxfp8::cuda
