#include "profile.h"

#include <exception>
#include <mutex>
#include <string>

#include "../mxfp8_ops.h"
#include "gemm.h"
#include "last_error.h"

namespace mxfp8 {
namespace {

constexpr size_t kMostBytesWritten = size_t(1) << 26;  // later calls are not recorded

std::atomic<bool> on{false};
std::mutex mutex;     // guards `written`
std::string written;  // the lines so far
thread_local ProfiledCall* current = nullptr;

// The name with line ends and backslashes escaped, so that a record stays one line.
std::string escaped(const char* name) {
  std::string text;
  for (; *name != 0; ++name) {
    if (*name == '\\') text += "\\\\";
    if (*name == '\n') text += "\\n";
    if (*name != '\\' && *name != '\n') text += *name;
  }
  return text;
}

std::string names_of(const Kernels& kernels, uint32_t gemms) {
  std::string names;
  for (int i = 0; gemms >> i != 0; ++i) {
    if ((gemms >> i & 1) != 0) names += (names.empty() ? "" : ",") + std::string(kernels.gemms[i].kernel->name);
  }
  return names;
}

}  // namespace

ProfiledCall::ProfiledCall(const char* where) noexcept
    : where_(where), on_(current == nullptr && on.load(std::memory_order_relaxed)) {
  if (!on_) return;
  current = this;
  start_ = std::chrono::steady_clock::now();
}

ProfiledCall::~ProfiledCall() {
  if (!on_) return;
  current = nullptr;
  if (where_ == nullptr && kernels_ == nullptr && route_ == nullptr) return;  // it computed nothing, or failed first
  const auto nanoseconds = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count();
  try {
    const char* where_it_ran = kernels_ != nullptr ? kernels_->isa : route_ != nullptr ? "cuda" : "";
    std::string line = std::to_string(nanoseconds) + '\t' + where_it_ran + '\t';
    line += kernels_ != nullptr ? names_of(*kernels_, gemms_.load()) : route_ != nullptr ? route_ : "";
    line += '\t' + escaped(where_ == nullptr ? "" : where_) + '\n';
    const std::lock_guard<std::mutex> lock(mutex);
    if (written.size() + line.size() <= kMostBytesWritten) written += line;
  } catch (const std::exception&) {  // out of memory: the record lacks this call
  }
}

void runs_on(const Kernels& kernels) noexcept {
  if (current != nullptr) current->kernels_ = &kernels;
}

void ran_on_gpu(const char* route) noexcept {
  if (current != nullptr) current->route_ = route;
}

GemmsUsed* gemms_used() noexcept { return current == nullptr ? nullptr : &current->gemms_; }

}  // namespace mxfp8

extern "C" {

int mxfp8_profile(int wanted) {
  return mxfp8::answer([&] {
    const std::lock_guard<std::mutex> lock(mxfp8::mutex);
    mxfp8::written.clear();
    mxfp8::on = wanted != 0;
  });
}

const char* mxfp8_profile_text(void) {
  thread_local std::string text;
  try {
    const std::lock_guard<std::mutex> lock(mxfp8::mutex);
    text = mxfp8::written;
    return text.c_str();
  } catch (const std::exception&) {
    return nullptr;
  }
}
}
