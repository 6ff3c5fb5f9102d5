// Panels of constant weights: when they are made, and what becomes of the memory that they were made from.
#include "constant_weight.h"

#include <map>
#include <utility>

#include "system_memory.h"

namespace mxfp8 {
namespace {

constexpr int64_t kLeastRows = 3;  // one or two rows are multiplied as fast with rows of b as they lie

}  // namespace

const Panels* ConstantWeight::panels(const Kernels& kernels, const Parallel& parallel, const GemmArgs& args) {
  if (prepack_ == Prepack::kNever || args.k == 0) return nullptr;
  if (!ready_.load(std::memory_order_acquire)) {
    if (args.m < kLeastRows) return nullptr;
    // Whoever does not get the lock reads b: waiting for a thread that waits for tasks of this one would never end.
    const std::unique_lock<std::mutex> lock(making_, std::try_to_lock);
    if (!lock.owns_lock()) return nullptr;
    if (!ready_.load(std::memory_order_relaxed)) make(kernels, parallel, args);
  }
  return panels_.kernel != nullptr && panels_.kernel == kernel_of_panels(kernels, args) ? &panels_ : nullptr;
}

void ConstantWeight::make(const Kernels& kernels, const Parallel& parallel, const GemmArgs& args) {
  const GemmKernel* kernel = kernel_of_panels(kernels, args);
  if (kernel == nullptr) return;  // other operands may have one
  bool decoded = prepack_ == Prepack::kDecoded;
  for (;; decoded = false) {
    data_.reset();
    data_ = scratch_of(kernel->panel_bytes(args, decoded));
    const int64_t tasks = ceil_div(args.n, kPanelColumns);
    std::atomic<int> lowest{kAllZero};
    parallel_for(parallel, tasks, [&](int64_t task) {
      const int64_t begin = task * kPanelColumns;
      const int code =
          kernel->make_panels(args, decoded, begin, std::min(args.n, begin + kPanelColumns), data_.get());
      int before = lowest.load();
      while (code < before && !lowest.compare_exchange_weak(before, code)) {
      }
    });
    panels_ = {kernel, decoded, lowest.load(), data_.get()};
    if (panels_.lowest != kNotExact || !decoded) break;
  }
  if (panels_.lowest == kNotExact) {
    panels_.kernel = nullptr;
    data_.reset();
  } else {
    release_mapped_file(args.b, args.n * args.k);
  }
  ready_.store(true, std::memory_order_release);
}

std::shared_ptr<ConstantWeight> shared_weight(const void* elements, Prepack prepack) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, Prepack>, std::weak_ptr<ConstantWeight>> weights;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto each = weights.begin(); each != weights.end();) {
    each = each->second.expired() ? weights.erase(each) : std::next(each);
  }
  std::weak_ptr<ConstantWeight>& known = weights[{elements, prepack}];
  std::shared_ptr<ConstantWeight> weight = known.lock();
  if (weight == nullptr) known = weight = std::make_shared<ConstantWeight>(prepack);
  return weight;
}

}  // namespace mxfp8
