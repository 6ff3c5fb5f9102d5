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
  kAuto,     // the bytes of the weight, turned
  kNever,    // nothing
  kDecoded,  // what is multiplied: bfloat16 numbers, where the kernel multiplies those
};

// Elements b [N, K] and their scales. Its panels are made by the first call of kLeastRows rows or more, and every later
// call reads them. Any number of threads may call with one weight at once.
class ConstantWeight {
 public:
  explicit ConstantWeight(Prepack prepack) : prepack_(prepack) {}

  // The panels for such a call, or null if it is to read b as it lies.
  const Panels* panels(const Kernels&, const Parallel&, const GemmArgs&);

 private:
  void make(const Kernels&, const Parallel&, const GemmArgs&);

  const Prepack prepack_;
  std::atomic<bool> ready_{false};
  std::mutex making_;
  Panels panels_ = {};  // with a null kernel where there can be none
  Scratch data_;
};

// The one of elements at this address, which all who multiply with them share. The caller keeps the elements.
std::shared_ptr<ConstantWeight> shared_weight(const void* elements, Prepack);

}  // namespace mxfp8
