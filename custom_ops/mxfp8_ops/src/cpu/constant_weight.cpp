// Packs the panels of a constant weight at its first call, or takes those of an equal weight, and then releases the
// pages of its file.
//
// Elements and scales are hashed in the pass that packs them, while they are in the cache. Only where the first slice
// equals the first slice of other panels, the whole weight is hashed before.
#include "constant_weight.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "content_hash.h"
#include "system.h"

namespace mxfp8 {
namespace {

// What panels are for, and of: digests of elements and scales. A slice is kPanelColumns rows of b.
struct Content {
  int format;
  int64_t n, k;
  const GemmKernel* kernel;
  Digest first_slice, values;

  auto begins() const { return std::tie(format, n, k, kernel, first_slice); }
  bool operator<(const Content& other) const {
    return std::tuple_cat(begins(), std::tie(values)) < std::tuple_cat(other.begins(), std::tie(other.values));
  }
};

}  // namespace

// Panels, for as long as a weight uses them.
struct SharedPanels {
  Content content = {};
  Panels panels = {};
  Scratch data;  // the memory of panels

  ~SharedPanels();
};

namespace {

// The panels of the process. Never destroyed: weights of other libraries may live longer than static objects.
struct Store {
  std::mutex mutex;
  std::map<Content, std::weak_ptr<SharedPanels>> panels;
};
Store& store() {
  static Store& store = *new Store;
  return store;
}

// The panels of this content, or null.
std::shared_ptr<SharedPanels> known(const Content& content) {
  const std::lock_guard<std::mutex> lock(store().mutex);
  const auto each = store().panels.find(content);
  return each == store().panels.end() ? nullptr : each->second.lock();
}

// Whether there are panels whose content begins as this does.
bool knows_begin(const Content& content) {
  const std::lock_guard<std::mutex> lock(store().mutex);
  Content lowest = content;
  lowest.values = {0, 0};
  const auto each = store().panels.lower_bound(lowest);
  return each != store().panels.end() && !(content.begins() < each->first.begins());
}

// Adds panels, or returns the equal ones that another thread has added meanwhile.
std::shared_ptr<SharedPanels> add(const std::shared_ptr<SharedPanels>& made) {
  const std::lock_guard<std::mutex> lock(store().mutex);
  std::weak_ptr<SharedPanels>& slot = store().panels[made->content];
  std::shared_ptr<SharedPanels> panels = slot.lock();
  if (panels == nullptr) slot = panels = made;
  return panels;
}

// The slices of a weight, and their digests.
struct Slices {
  const GemmArgs& args;
  std::vector<Digest> digests;

  // The first hash of a process draws the key, which may throw: here, and not in a task.
  explicit Slices(const GemmArgs& args) : args(args), digests(2 * size_t(count()), content_hash(nullptr, 0)) {}
  int64_t count() const { return ceil_div(args.n, kPanelColumns); }
  int64_t begin(int64_t slice) const { return slice * kPanelColumns; }
  int64_t end(int64_t slice) const { return std::min(args.n, begin(slice) + kPanelColumns); }
  void hash(int64_t slice) {
    const int64_t rows = end(slice) - begin(slice), blocks = ceil_div(args.k, kBlock);
    digests[size_t(2 * slice)] = content_hash(args.b + begin(slice) * args.k, rows * args.k);
    digests[size_t(2 * slice + 1)] = content_hash(args.b_scales + begin(slice) * blocks, rows * blocks);
  }
  Digest of_first() const { return content_hash(digests.data(), 2 * int64_t(sizeof(Digest))); }
  Digest of_all() const { return content_hash(digests.data(), int64_t(digests.size() * sizeof(Digest))); }
};

// Null if memory for panels is missing: gemms then read b.
std::shared_ptr<SharedPanels> make_panels(const GemmKernel& kernel, const Parallel& parallel, const GemmArgs& args) {
  Slices slices(args);
  slices.hash(0);
  Content content = {args.b_format, args.n, args.k, &kernel, slices.of_first(), {}};
  const bool hashes_before = knows_begin(content);
  if (hashes_before) {
    parallel_for(parallel, slices.count(), [&](int64_t slice) { slices.hash(slice); });
    content.values = slices.of_all();
    if (auto panels = known(content)) return panels;
  }
  auto made = std::make_shared<SharedPanels>();
  const int64_t bytes = kernel.panel_bytes(args);
  made->data.reset(::operator new(size_t(bytes), std::align_val_t{64}, std::nothrow));
  if (made->data == nullptr) return nullptr;
  use_large_pages(made->data.get(), bytes);
  std::atomic<bool> outside_range{false};
  parallel_for(parallel, slices.count(), [&](int64_t slice) {
    if (!hashes_before) slices.hash(slice);
    if (kernel.make_panels(args, slices.begin(slice), slices.end(slice), made->data.get())) outside_range = true;
  });
  made->panels = {&kernel, outside_range, made->data.get()};
  content.values = slices.of_all();
  made->content = content;
  return add(made);
}

}  // namespace

SharedPanels::~SharedPanels() {
  const std::lock_guard<std::mutex> lock(store().mutex);
  const auto each = store().panels.find(content);
  // Another thread may have added panels of this content since the last owner of these let go.
  if (each != store().panels.end() && each->second.expired()) store().panels.erase(each);
}

// The owner keeps b and its scales in memory, so no other weight gets their addresses.
bool ConstantWeight::is_of(const GemmArgs& args) const {
  return args.b == first_.b && args.b_scales == first_.b_scales && args.b_format == first_.b_format &&
         args.n == first_.n && args.k == first_.k;
}

const Panels* ConstantWeight::panels(const Kernels& kernels, const Parallel& parallel, const GemmArgs& args) {
  if (args.k == 0) return nullptr;
  const GemmKernel* kernel = kernel_of_panels(kernels, args);
  if (kernel == nullptr) return nullptr;
  if (!ready_.load(std::memory_order_acquire)) {
    // Other callers wait for the panels: if they read b meanwhile, a call of one or two rows would add in another order
    // than later ones. This cannot deadlock, because no task calls a gemm.
    const std::lock_guard<std::mutex> lock(making_);
    if (!ready_.load(std::memory_order_relaxed)) {
      shared_ = make_panels(*kernel, parallel, args);
      if (shared_ != nullptr) release_mapped_file(args.b, args.n * args.k);
      first_ = args;
      ready_.store(true, std::memory_order_release);
    }
  }
  return shared_ != nullptr && is_of(args) && kernel == shared_->panels.kernel ? &shared_->panels : nullptr;
}

}  // namespace mxfp8
