// Records the kernels that ran, and their time, for `mxfp8-graph run --profile`. Once mxfp8_profile turns it on, it
// adds a line for each call of the C ABI and of each node in an ONNX Runtime session.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

#include "kernels/kernels.h"

namespace mxfp8 {

using GemmsUsed = std::atomic<uint32_t>;  // bit i: Kernels::gemms[i]

// A call, which lasts from the constructor to the end of the scope. `where` names the node, and outlives this object;
// it is null for a call of the C ABI.
class ProfiledCall {
 public:
  explicit ProfiledCall(const char* where) noexcept;
  ~ProfiledCall();
  ProfiledCall(const ProfiledCall&) = delete;
  ProfiledCall& operator=(const ProfiledCall&) = delete;

 private:
  friend void runs_on(const Kernels&) noexcept;
  friend GemmsUsed* gemms_used() noexcept;
  friend void ran_on_gpu(const char*) noexcept;

  const char* where_;
  bool on_;
  const Kernels* kernels_ = nullptr;  // null for a call on a GPU
  const char* route_ = nullptr;       // there, the row of the dispatch table; "" for a call without a product
  GemmsUsed gemms_{0};
  std::chrono::steady_clock::time_point start_;
};

// Records the instruction set of the call on this thread. gemms_used returns the set of gemm kernels to add to, or null
// if the call is not recorded.
void runs_on(const Kernels&) noexcept;
GemmsUsed* gemms_used() noexcept;

// Records that the call on this thread ran on a GPU, and its row of the dispatch table, if it has a product. The name
// outlives the call.
void ran_on_gpu(const char* route) noexcept;

}  // namespace mxfp8
