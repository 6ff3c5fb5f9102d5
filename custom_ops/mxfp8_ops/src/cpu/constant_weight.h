// A weight that never changes, in the layout of the kernel that multiplies it.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>

#include "gemm.h"
#include "tasks.h"

namespace mxfp8 {

// The values of the setting mxfp8.prepack.
enum class Prepack {
  kAuto = MXFP8_PREPACK_AUTO,        // keeps the codes, in the layout of the kernel
  kNever = MXFP8_PREPACK_NEVER,      // keeps no panels
  kDecoded = MXFP8_PREPACK_DECODED,  // keeps bfloat16 numbers, if the kernel multiplies those
};

// The panels of one weight b [N, K]. The first call sets b and packs the panels; that call and every later one read
// them. Any number of threads may use one weight at once.
class ConstantWeight {
 public:
  explicit ConstantWeight(Prepack prepack) : prepack_(prepack) {}

  // The panels for a call with these arguments, or null if its kernel reads b directly.
  const Panels* panels(const Kernels&, const Parallel&, const GemmArgs&);

 private:
  void make(const GemmKernel&, bool decoded, const Parallel&, const GemmArgs&);

  const Prepack prepack_;
  std::atomic<bool> ready_{false};
  std::mutex making_;
  const uint8_t* b_ = nullptr;  // this and the next two are of the first call
  int format_ = 0;
  int64_t n_ = 0, k_ = 0;
  Panels panels_ = {};
  Scratch data_;  // the memory of panels_; null if there are none
};

// The weight whose elements are at this address. All callers with the same address share one, so its panels exist once.
// The caller keeps the elements in memory.
std::shared_ptr<ConstantWeight> shared_weight(const void* elements, Prepack);

}  // namespace mxfp8
