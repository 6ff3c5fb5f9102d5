// Does plans through the CUDA driver, without Python once the kernels are loaded.
#pragma once
#include <atomic>
#include <vector>

#include "cuda_driver.h"
#include "planner.h"

namespace mxfp8::cuda {

// Where a plan is done: a stream, a cuBLAS handle that is set to it (or null: the caller multiplies), and the plan's
// scratch memory.
struct Resources {
  Stream stream;
  void* cublas;
  uint64_t scratch;
};

class Executor {
 public:
  // Loads the kernels of these numbers, the only ones that its plans have. Throws CudaError if the loader cannot.
  Executor(const Gpu&, const std::vector<int>& kernels);

  // The one of a GPU for the C ABI, which loads a kernel on its first use; another after mxfp8_cuda_open. Throws
  // CudaError.
  static const Executor& for_gpu(int gpu);

  // Whether cuBLASLt can do a product; see CublasLt. Throws CudaError.
  bool multiplies(const BlockScaled&) const;

  // Queues all steps. The GPU is current. Throws CudaError, also for a product that needs another library.
  void run(Plan, const Resources&) const;

  // Queues the steps from `first` on, up to a product that the caller has to do, whose addresses it fills in, or the
  // end; returns which. The GPU is current. Throws CudaError.
  size_t run(Plan*, const Resources&, size_t first) const;

  const Gpu& gpu() const { return gpu_; }

 private:
  explicit Executor(const Gpu&);
  CudaFunction function(const mxfp8_cuda_step&) const;
  void matmul_bf16(const int64_t (&arguments)[MXFP8_MOST_ARGUMENTS], void* cublas) const;

  Gpu gpu_;
  bool loads_later_;
  mutable std::vector<std::atomic<CudaFunction>> functions_;  // by number; null for those that are not loaded
};

}  // namespace mxfp8::cuda
