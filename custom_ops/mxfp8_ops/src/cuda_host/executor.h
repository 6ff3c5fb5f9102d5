// Does plans through the CUDA driver, without Python once the kernels are loaded.
#pragma once
#include <atomic>
#include <vector>

#include "cuda_driver.h"
#include "planner.h"

namespace mxfp8::cuda {

// Where a plan is done: a stream, and the plan's scratch memory.
struct Resources {
  Stream stream;
  uint64_t scratch;
};

class Executor {
 public:
  // Loads the kernels of these numbers, the only ones that its plans have. Throws CudaError if the loader cannot.
  Executor(const Gpu&, const std::vector<int>& kernels);

  // The one of a GPU for the C ABI, which loads a kernel on its first use; another after mxfp8_cuda_open. Throws
  // CudaError.
  static const Executor& for_gpu(int gpu);

  // Asks cuBLASLt about the products of a plan. The result throws CudaError. `warning` gets the text of first refusals.
  Ask ask(Warning* warning) const;

  // Queues all steps. The GPU is current. Throws CudaError.
  void run(const Plan&, const Resources&) const;

  const Gpu& gpu() const { return gpu_; }

 private:
  explicit Executor(const Gpu&);
  CudaFunction function(const mxfp8_cuda_step&) const;

  Gpu gpu_;
  bool loads_later_;
  mutable std::vector<std::atomic<CudaFunction>> functions_;  // by number; null for those that are not loaded
};

}  // namespace mxfp8::cuda
