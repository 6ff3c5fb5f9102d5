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
  kAuto = MXFP8_PREPACK_AUTO,        // the codes of the weight, turned
  kNever = MXFP8_PREPACK_NEVER,      // nothing
  kDecoded = MXFP8_PREPACK_DECODED,  // what is multiplied: bfloat16 numbers, where the kernel multiplies those
};

// Elements b [N, K] and their scales: those of the first call, which makes the panels that it and every later call
// reads. Any number of threads may call with one weight at once.
class ConstantWeight {
 public:
  explicit ConstantWeight(Prepack prepack) : prepack_(prepack) {}

  // The panels for such a call, or null where it has to read b as it lies.
  const Panels* panels(const Kernels&, const Parallel&, const GemmArgs&);

 private:
  void make(const GemmKernel&, bool decoded, const Parallel&, const GemmArgs&);

  const Prepack prepack_;
  std::atomic<bool> ready_{false};
  std::mutex making_;
  const uint8_t* b_ = nullptr;  // of the first call
  int format_ = 0;
  int64_t n_ = 0, k_ = 0;
  Panels panels_ = {};
  Scratch data_;  // of panels_, or null where there are none
};

// The one of elements at this address, which all who multiply with them share. The caller keeps the elements.
std::shared_ptr<ConstantWeight> shared_weight(const void* elements, Prepack);

}  // namespace mxfp8
