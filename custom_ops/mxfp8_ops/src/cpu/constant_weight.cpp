// Packs the panels of a constant weight at its first call, and then releases the pages of its file.
#include "constant_weight.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "system.h"

namespace mxfp8 {
const Panels* ConstantWeight::panels(const Kernels& kernels, const Parallel& parallel, const GemmArgs& args) {
  if (prepack_ == Prepack::kNever || args.k == 0) return nullptr;
  const GemmKernel* kernel = kernel_of_panels(kernels, args);
  if (kernel == nullptr) return nullptr;
  if (!ready_.load(std::memory_order_acquire)) {
    // Other callers wait for the panels: if they read b meanwhile, a call of one or two rows would add in another order
    // than later ones. This cannot deadlock, because no task calls a gemm.
    const std::lock_guard<std::mutex> lock(making_);
    if (!ready_.load(std::memory_order_relaxed)) {
      b_ = args.b, format_ = args.b_format, n_ = args.n, k_ = args.k;
      make(*kernel, prepack_ == Prepack::kDecoded, parallel, args);
      if (data_ == nullptr && prepack_ == Prepack::kDecoded) make(*kernel, false, parallel, args);
      ready_.store(true, std::memory_order_release);
    }
  }
  const bool fits = args.b == b_ && args.b_format == format_ && args.n == n_ && args.k == k_;
  return fits && data_ != nullptr && kernel == panels_.kernel ? &panels_ : nullptr;
}

// Leaves data_ null if the kernel cannot hold the values, or if memory for panels is missing: gemms then read b.
void ConstantWeight::make(const GemmKernel& kernel, bool decoded, const Parallel& parallel, const GemmArgs& args) {
  data_.reset(::operator new(size_t(kernel.panel_bytes(args, decoded)), std::align_val_t{64}, std::nothrow));
  if (data_ == nullptr) return;
  use_large_pages(data_.get(), kernel.panel_bytes(args, decoded));
  std::vector<int> lowest(size_t(ceil_div(args.n, kPanelColumns)));
  parallel_for(parallel, int64_t(lowest.size()), [&](int64_t task) {
    const int64_t begin = task * kPanelColumns, end = std::min(args.n, begin + kPanelColumns);
    lowest[size_t(task)] = kernel.make_panels(args, decoded, begin, end, data_.get());
  });
  panels_ = {&kernel, decoded, *std::min_element(lowest.begin(), lowest.end()), data_.get()};
  if (panels_.lowest == kNotExact) return data_.reset();
  release_mapped_file(args.b, args.n * args.k);
}

std::shared_ptr<ConstantWeight> shared_weight(const void* elements, Prepack prepack) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, Prepack>, std::weak_ptr<ConstantWeight>> weights;
  const std::lock_guard<std::mutex> lock(mutex);
  // Without this, the map would keep an entry for every weight that the process ever had.
  for (auto each = weights.begin(); each != weights.end();) {
    each = each->second.expired() ? weights.erase(each) : std::next(each);
  }
  std::weak_ptr<ConstantWeight>& known = weights[{elements, prepack}];
  std::shared_ptr<ConstantWeight> weight = known.lock();
  if (weight == nullptr) known = weight = std::make_shared<ConstantWeight>(prepack);
  return weight;
}

}  // namespace mxfp8
