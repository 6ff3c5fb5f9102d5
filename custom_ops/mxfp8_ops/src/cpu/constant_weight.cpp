// Packs the panels of a constant weight at its first call, unless an equal weight has them, and then releases the pages
// of its file.
#include "constant_weight.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "content_hash.h"
#include "system.h"

namespace mxfp8 {
namespace {

// What panels are made of, and for.
struct Content {
  Digest elements, scales;
  int format;
  int64_t n, k;
  const GemmKernel* kernel;
  bool decoded;

  bool operator<(const Content& other) const { return fields() < other.fields(); }

 private:
  auto fields() const -> decltype(std::tie(elements, scales, format, n, k, kernel, decoded)) {
    return std::tie(elements, scales, format, n, k, kernel, decoded);
  }
};

}  // namespace

// Panels, for as long as a weight uses them.
class SharedPanels {
 public:
  explicit SharedPanels(const Content& content) : content_(content) {}
  ~SharedPanels();
  SharedPanels(const SharedPanels&) = delete;

  // Packs the panels of these arguments, if no earlier call has. Null if there are none.
  const Panels* panels(const Parallel&, const GemmArgs&);

 private:
  void make(bool decoded, const Parallel&, const GemmArgs&);

  const Content content_;
  std::mutex making_;
  bool ready_ = false;
  Panels panels_ = {};
  Scratch data_;  // the memory of panels_; null if there are none
};

namespace {

// All panels of the process. Never destroyed: weights of other libraries may live longer than static objects.
struct Store {
  std::mutex mutex;
  std::map<Content, std::weak_ptr<SharedPanels>> panels;
};
Store& store() {
  static Store& store = *new Store;
  return store;
}

std::shared_ptr<SharedPanels> shared_panels(const Content& content) {
  const std::lock_guard<std::mutex> lock(store().mutex);
  std::weak_ptr<SharedPanels>& known = store().panels[content];
  std::shared_ptr<SharedPanels> panels = known.lock();
  if (panels == nullptr) known = panels = std::make_shared<SharedPanels>(content);
  return panels;
}

}  // namespace

SharedPanels::~SharedPanels() {
  const std::lock_guard<std::mutex> lock(store().mutex);
  const auto each = store().panels.find(content_);
  // Another thread may have made new panels of this content since the last owner of these let go.
  if (each != store().panels.end() && each->second.expired()) store().panels.erase(each);
}

const Panels* SharedPanels::panels(const Parallel& parallel, const GemmArgs& args) {
  const std::lock_guard<std::mutex> lock(making_);
  if (!ready_) {
    make(content_.decoded, parallel, args);
    if (data_ == nullptr && content_.decoded) make(false, parallel, args);
    ready_ = true;
  }
  return data_ == nullptr ? nullptr : &panels_;
}

// Leaves data_ null if the kernel cannot hold the values, or if memory for panels is missing: gemms then read b.
void SharedPanels::make(bool decoded, const Parallel& parallel, const GemmArgs& args) {
  const GemmKernel& kernel = *content_.kernel;
  data_.reset(::operator new(size_t(kernel.panel_bytes(args, decoded)), std::align_val_t{64}, std::nothrow));
  if (data_ == nullptr) return;
  use_large_pages(data_.get(), kernel.panel_bytes(args, decoded));
  std::vector<int> lowest(size_t(ceil_div(args.n, kPanelColumns)));
  parallel_for(parallel, int64_t(lowest.size()), [&](int64_t task) {
    const int64_t begin = task * kPanelColumns, end = std::min(args.n, begin + kPanelColumns);
    lowest[size_t(task)] = kernel.make_panels(args, decoded, begin, end, data_.get());
  });
  panels_ = {&kernel, decoded, *std::min_element(lowest.begin(), lowest.end()), data_.get()};
  if (panels_.lowest == kNotExact) data_.reset();
}

// The owner keeps b and its scales in memory, so no other weight gets their addresses.
bool ConstantWeight::is_of(const GemmArgs& args) const {
  return args.b == first_.b && args.b_scales == first_.b_scales && args.b_format == first_.b_format &&
         args.n == first_.n && args.k == first_.k;
}

const Panels* ConstantWeight::panels(const Kernels& kernels, const Parallel& parallel, const GemmArgs& args) {
  if (prepack_ == Prepack::kNever || args.k == 0) return nullptr;
  const GemmKernel* kernel = kernel_of_panels(kernels, args);
  if (kernel == nullptr) return nullptr;
  if (!ready_.load(std::memory_order_acquire)) {
    // Other callers wait for the panels: if they read b meanwhile, a call of one or two rows would add in another order
    // than later ones. This cannot deadlock, because no task calls a gemm.
    const std::lock_guard<std::mutex> lock(making_);
    if (!ready_.load(std::memory_order_relaxed)) {
      const int64_t values = args.n * args.k, scales = args.n * ceil_div(args.k, kBlock);
      shared_ = shared_panels({content_hash(parallel, args.b, values), content_hash(parallel, args.b_scales, scales),
                               args.b_format, args.n, args.k, kernel, prepack_ == Prepack::kDecoded});
      first_ = args;
      panels_ = shared_->panels(parallel, args);
      if (panels_ != nullptr) release_mapped_file(args.b, values);
      ready_.store(true, std::memory_order_release);
    }
  }
  return is_of(args) && panels_ != nullptr && kernel == panels_->kernel ? panels_ : nullptr;
}

}  // namespace mxfp8
