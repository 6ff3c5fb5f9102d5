// Which kernels ran, and how long: for `mxfp8-graph run --profile`. Nothing is recorded unless mxfp8_profile turned it
// on; then a line for each call of the C ABI, and of each node in an ONNX Runtime session.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

#include "kernels/kernels.h"

namespace mxfp8 {

using GemmsUsed = std::atomic<uint32_t>;  // bit i: Kernels::gemms[i]

// A call, from here to the end of the scope. `where` outlives it; null: a call of the C ABI.
class ProfiledCall {
 public:
  explicit ProfiledCall(const char* where) noexcept;
  ~ProfiledCall();
  ProfiledCall(const ProfiledCall&) = delete;
  ProfiledCall& operator=(const ProfiledCall&) = delete;

 private:
  friend void runs_on(const Kernels&) noexcept;
  friend GemmsUsed* gemms_used() noexcept;

  const char* where_;
  bool on_;
  const Kernels* kernels_ = nullptr;  // null: a GPU's
  GemmsUsed gemms_{0};
  std::chrono::steady_clock::time_point start_;
};

// Records the instruction set of the calling thread's call. The second returns where to note the gemm kernels that ran,
// or null if the call is not recorded.
void runs_on(const Kernels&) noexcept;
GemmsUsed* gemms_used() noexcept;

}  // namespace mxfp8
