// A weight that never changes, in the layout of the kernel that multiplies it. Its panels are known by what they hold:
// weights of equal elements, scales and sizes share them, in all sessions and programs of the process.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>

#include "gemm.h"
#include "tasks.h"

namespace mxfp8 {

struct SharedPanels;
struct ConvArgs;
struct ConvWeight;

// One weight b [N, K] with its scales. The first call sets both; that call and every later one read its panels. Any
// number of threads may use one weight at once. The owner keeps b and its scales in memory, unchanged.
class ConstantWeight {
 public:
  // The panels for a call with these arguments, or null if its kernel reads b directly.
  const Panels* panels(const Kernels&, const Parallel&, const GemmArgs&);
  // The parts of a convolution's weight, which has a weight for each group; null if the first convolution had another
  // b.
  const ConvWeight* parts(const ConvArgs&);

 private:
  bool is_of(const GemmArgs&) const;

  std::atomic<bool> ready_{false};
  std::mutex making_;
  GemmArgs first_ = {};                   // of the first call
  std::shared_ptr<SharedPanels> shared_;  // null if there are none
  std::shared_ptr<ConvWeight> parts_;     // null before the first convolution
};

// The weight that mxfp8_weight_new gave this number; null for 0. Throws Error for a number that no weight has.
std::shared_ptr<ConstantWeight> numbered_weight(int64_t number);

}  // namespace mxfp8
