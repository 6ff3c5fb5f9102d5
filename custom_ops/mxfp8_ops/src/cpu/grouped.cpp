// MXFP8GroupedGemm and MXFP8GroupedWeightGemm: rows are sorted by expert, and each expert that has rows is one gemm
// with its quantized matrix.
//
// y [M, N], a [.., K], b [E, N, K]. The gemm of an expert reads its rows of a in place (GemmArgs::a_rows). It writes
// them in place if they are neighbours in y; otherwise results are copied. Bytes moved: 1.03 N K for each expert that
// has rows, K values of each row, and N of each copied row.
#include "grouped.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "arguments.h"
#include "tasks.h"

namespace mxfp8 {
namespace {

constexpr int64_t kCopyBytes = 1 << 18;  // bytes that one task copies: 20 us

using Bytes = std::unique_ptr<char[]>;

// Calls body(i) for every row, in parallel; the row size sets the number of rows in a task.
template <class Body>
void for_rows(const Parallel& parallel, int64_t rows, int64_t row_bytes, const Body& body) {
  const int64_t each = std::max<int64_t>(1, kCopyBytes / std::max<int64_t>(1, row_bytes));
  parallel_for(parallel, ceil_div(rows, each), [&](int64_t task) {
    for (int64_t i = task * each; i < std::min(rows, (task + 1) * each); ++i) body(i);
  });
}

bool lie_together(const std::vector<int64_t>& rows) {
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i] != rows[0] + int64_t(i)) return false;
  }
  return true;
}

class Grouped {
 public:
  Grouped(const Kernels& kernels, const Parallel& parallel, const GroupedArgs& args)
      : kernels_(kernels), parallel_(parallel), args_(args), g_(args.gemm) {
    y_bytes_ = g_.n * value_bytes(g_.y_dtype);
  }

  void run() {
    std::vector<int64_t> order(static_cast<size_t>(g_.m));
    std::iota(order.begin(), order.end(), 0);
    const auto before = [this](int64_t i, int64_t j) {
      const int64_t a = expert(i), b = expert(j);
      return a != b ? a < b : i < j;
    };
    if (!std::is_sorted(order.begin(), order.end(), before)) std::sort(order.begin(), order.end(), before);
    for (auto begin = order.begin(); begin != order.end();) {
      const int64_t e = expert(*begin);
      const auto end = std::find_if(begin, order.end(), [&](int64_t i) { return expert(i) != e; });
      multiply(e, {begin, end});
      begin = end;
    }
  }

 private:
  int64_t expert(int64_t row) const {
    const int64_t e = args_.expert[row];
    return e < 0 ? e + args_.experts : e;
  }
  char* y(int64_t row) const { return static_cast<char*>(g_.y) + row * y_bytes_; }

  // Computes the rows of y that expert `e` has.
  void multiply(int64_t e, const std::vector<int64_t>& rows) {
    if (e == args_.experts) {  // no matrix: zeros
      return for_rows(parallel_, int64_t(rows.size()), y_bytes_,
                      [&](int64_t i) { std::memset(y(rows[size_t(i)]), 0, size_t(y_bytes_)); });
    }
    GemmArgs g = g_;
    g.m = int64_t(rows.size()), g.bias = nullptr, g.a_stride = g.k, g.y_stride = g.n;
    if (g.k > 0)
      g.b += e * g.n * g.k, g.b_scales += e * g.n * ceil_div(g.k, kBlock);  // b has no values if K is 0, so no offset
    if (args_.weights != nullptr) g.weight = args_.weights[e].get();
    std::vector<int64_t> sources = rows;
    if (args_.row != nullptr) {
      for (int64_t& row : sources) row = args_.row[row];
    }
    g.a_rows = sources.data(), g.rounds_a = args_.activation_dtype == MXFP8_BFLOAT16;
    const bool together = lie_together(rows);
    Bytes scratch(together ? nullptr : new char[size_t(g.m * y_bytes_)]);
    g.y = together ? y(rows[0]) : scratch.get();
    gemm(kernels_, parallel_, g);
    if (together) return;
    for_rows(parallel_, g.m, y_bytes_,
             [&](int64_t i) { std::memcpy(y(rows[size_t(i)]), scratch.get() + i * y_bytes_, size_t(y_bytes_)); });
  }

  const Kernels& kernels_;
  const Parallel& parallel_;
  const GroupedArgs& args_;
  const GemmArgs& g_;
  int64_t y_bytes_;  // bytes of a row
};

}  // namespace

void grouped_gemm(const Kernels& kernels, const Parallel& parallel, const GroupedArgs& args) {
  if (args.gemm.m != 0 && args.gemm.n != 0) Grouped(kernels, parallel, args).run();
}

}  // namespace mxfp8

using namespace mxfp8;

namespace {

// Checks the arguments of both grouped gemms, all but a. Returns whether there is something to compute.
bool check_grouped(const GroupedArgs& args) {
  const GemmArgs& g = args.gemm;
  check_element_format("b_format", g.b_format);
  check_value_dtype("y_dtype", g.y_dtype);
  check_sizes({{"count", args.experts}, {"m", g.m}, {"n", g.n}, {"k", g.k}});
  if (g.m == 0 || g.n == 0) return false;
  check_array(array("b", g.b, 1), {args.experts, g.n, g.k});
  check_array(array("b_scales", g.b_scales, 1), {args.experts, g.n, scale_count(g.k)});
  check_array(array("experts", args.expert, sizeof(int64_t)), {g.m});
  check_array(array("y", g.y, value_bytes(g.y_dtype)), {g.m, g.n});
  return true;
}

// Both grouped gemms: A is elements and scales if `quantized`, otherwise values.
int grouped_product(GroupedArgs args, bool quantized, int threads) {
  return computed([&] {
    GemmArgs& g = args.gemm;
    const uint8_t no_scales = 0;  // as in quantized_product of gemm_entries.cpp
    if (quantized) {
      check_element_format("a_format", g.a_format);
    } else {
      check_value_dtype("x_dtype", g.a_format);
      check_activation_dtype("activation_dtype", args.activation_dtype);
    }
    const bool writes = check_grouped(args);
    const Parallel parallel = checked_threads(threads);
    if (!writes) return;
    check_array(quantized ? array("a", g.a, 1) : array("x", g.a, value_bytes(g.a_format)), {g.m, g.k});
    if (quantized) check_array(array("a_scales", g.a_scales, 1), {g.m, scale_count(g.k)});
    if (quantized && g.k == 0) g.a_scales = &no_scales;
    for (int64_t i = 0; i < g.m; ++i) {
      check_range({"an entry of experts", args.expert[i]}, -args.experts, args.experts);
    }
    grouped_gemm(kernels_in_use(), parallel, args);
  });
}

}  // namespace

extern "C" {

int mxfp8_grouped_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format, const uint8_t* b,
                       const uint8_t* b_scales, const int64_t* experts, int64_t count, int64_t m, int64_t n, int64_t k,
                       int y_dtype, void* y, int threads) {
  const GemmArgs g = {.a_format = a_format,
                      .a = a,
                      .a_scales = a_scales,
                      .a_stride = k,
                      .b_format = b_format,
                      .b = b,
                      .b_scales = b_scales,
                      .m = m,
                      .n = n,
                      .k = k,
                      .y_dtype = y_dtype,
                      .y = y,
                      .y_stride = n};
  return grouped_product({g, count, experts, nullptr, MXFP8_FLOAT32}, true, threads);
}

int mxfp8_grouped_weight_gemm(int x_dtype, const void* x, int activation_dtype, int b_format, const uint8_t* b,
                              const uint8_t* b_scales, const int64_t* experts, int64_t count, int64_t m, int64_t n,
                              int64_t k, int y_dtype, void* y, int threads) {
  const GemmArgs g = {.a_format = x_dtype,
                      .a = x,
                      .a_stride = k,
                      .b_format = b_format,
                      .b = b,
                      .b_scales = b_scales,
                      .m = m,
                      .n = n,
                      .k = k,
                      .y_dtype = y_dtype,
                      .y = y,
                      .y_stride = n};
  return grouped_product({g, count, experts, nullptr, activation_dtype}, false, threads);
}

}  // extern "C"
