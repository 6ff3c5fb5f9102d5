// Does plans through the CUDA driver: the kernels of a node, loaded when it is made, and launched without Python.
#pragma once
#include <vector>

#include "cuda_driver.h"
#include "planner.h"

namespace mxfp8::cuda {

// Where a plan is done: a stream, a cuBLAS handle that is set to it (or null: no plan may ask for it), and the plan's
// scratch memory.
struct Resources {
  Stream stream;
  void* cublas;
  uint64_t scratch;
};

class Executor {
 public:
  // Loads the kernels of these numbers. Throws CudaError if the loader cannot.
  Executor(const Gpu&, const std::vector<int>& kernels);

  // For the planner: this GPU, with cuBLAS if the caller has a handle and the loader knows it.
  mxfp8_cuda_place place(bool cublas_handle) const;

  // Queues the steps. The GPU is current. Throws CudaError.
  void run(const Plan&, const Resources&) const;

 private:
  void matmul_bf16(const int64_t (&arguments)[MXFP8_MOST_ARGUMENTS], void* cublas) const;

  Gpu gpu_;
  std::vector<CudaFunction> functions_;  // by number; null for those that are not loaded
};

}  // namespace mxfp8::cuda
