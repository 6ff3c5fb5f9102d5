// The planner: mxfp8_cuda_plan.h for C++.
#pragma once
#include <array>
#include <functional>
#include <vector>

#include "../contract.h"
#include "mxfp8_cuda_plan.h"

namespace mxfp8::cuda {

constexpr int kThreads = 256;  // threads of a block, in every kernel

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t scale_count(int64_t k) { return ceil_div(k, kBlock); }

// A product of MXFP8_MATMUL: the dtypes of x, b and y, then m, n, k, then the alignments of x, b and y in bytes.
using LtProduct = std::array<int64_t, 9>;
inline int64_t alignment(int64_t address) { return address % 16 == 0 ? 16 : address & -address; }  // at most 16
// Whether cuBLASLt can do a product. An empty one stands for yes.
using Ask = std::function<bool(const LtProduct&)>;
constexpr int64_t kCublasLtWorkspace = 32 << 20;  // bytes that NVIDIA recommends for Hopper and later

struct Plan {
  std::vector<mxfp8_cuda_step> steps;
  int64_t scratch_bytes = 0;
  int route = -1;
};

// Each request's file has these two. Plans throw Error for unknown codes, for what does not fit a launch, and that of a
// product, where there is no route.
template <class Request>
Plan plan(const Request&);
Plan plan(const mxfp8_cuda_place&, const mxfp8_cuda_gemm&, const Ask& = {});
// Scales [rows, ceil(k / 32)] into the 128x4 layout.
Plan swizzle(int64_t scales, int64_t rows, int64_t k, int64_t to);
// The numbers of the kernels that plans of a node may launch, on any shape and at any address, by what it reads and
// what it writes: dtypes or formats.
template <class Request>
std::vector<int> kernels(int64_t in, int64_t out);
std::vector<int> gemm_kernels(int64_t x_kind, int64_t b_kind, const mxfp8_cuda_place&);

// The body of a function of the C ABI that plans: makes a plan in memory of the calling thread and shows it; does it
// too where there is a queue and no need to wait.
int answer_with(const mxfp8_cuda_queue*, mxfp8_cuda_plan* to, const std::function<Plan()>& make) noexcept;

}  // namespace mxfp8::cuda
