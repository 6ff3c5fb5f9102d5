// The entry points of the gemms, and of the constant weights that they use.
#include <string>
#include <unordered_map>

#include "../error.h"
#include "arguments.h"
#include "constant_weight.h"

using namespace mxfp8;

namespace {

// The weights that a caller has made, by their numbers. A number is never used again, so that one of a freed weight is
// an error. Never destroyed: callers may free weights while the process ends.
class Weights {
 public:
  int64_t add(std::shared_ptr<ConstantWeight> weight) {
    const std::lock_guard<std::mutex> lock(mutex_);
    weights_.emplace(++last_, std::move(weight));
    return last_;
  }
  void remove(int64_t number) {
    std::shared_ptr<ConstantWeight> removed;  // its memory is freed after the lock is released
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto each = weights_.find(number);
    if (each == weights_.end()) return;
    removed = std::move(each->second);
    weights_.erase(each);
  }
  // Throws Error for a number that no weight has. 0 stands for no weight.
  std::shared_ptr<ConstantWeight> at(int64_t number) {
    if (number == 0) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto each = weights_.find(number);
    if (each != weights_.end()) return each->second;
    throw Error(MXFP8_BAD_ARGUMENT, "weight is " + std::to_string(number), "0, or the number of a weight",
                "free a weight after its last product");
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<ConstantWeight>> weights_;
  int64_t last_ = 0;
};
Weights& weights() {
  static Weights& weights = *new Weights;
  return weights;
}

// Checks b, bias, factor and y of a gemm. Returns whether there is something to compute: where y is empty, no operand
// is read.
bool check_product(const GemmArgs& g) {
  check_element_format("b_format", g.b_format);
  check_value_dtype("y_dtype", g.y_dtype);
  check_epilogue("epilogue", g.epilogue);
  check_value_dtype("factor_dtype", g.factor_dtype);
  check_sizes({{"m", g.m}, {"n", g.n}, {"k", g.k}});
  check_range({"y_stride", g.y_stride}, g.n, INT64_MAX);
  if (g.m == 0 || g.n == 0) return false;
  check_array(array("b", g.b, 1), {g.n, g.k});
  check_array(array("b_scales", g.b_scales, 1), {g.n, scale_count(g.k)});
  if (g.bias != nullptr) check_array(array("bias", g.bias, sizeof(float)), {g.n});
  if (g.factor != nullptr) check_array(array("factor", g.factor, value_bytes(g.factor_dtype)), {g.m, g.n});
  check_rows(array("y", g.y, value_bytes(g.y_dtype)), g.m, g.n, g.y_stride);
  return true;
}

void multiply(GemmArgs g, const Parallel& parallel) {
  g.a_stride = stride_of(g.m, g.k, g.a_stride), g.y_stride = stride_of(g.m, g.n, g.y_stride);
  gemm(kernels_in_use(), parallel, g);
}

// The gemms whose A is quantized, then those whose A is values.
int quantized_product(GemmArgs g, int64_t number, int threads) {
  return computed([&] {
    check_element_format("a_format", g.a_format);
    const uint8_t no_scales = 0;  // for K = 0, where a_scales may be null: a null pointer would say that A is values
    const bool writes = check_product(g);
    const Parallel parallel = checked_threads(threads);
    const std::shared_ptr<ConstantWeight> weight = weights().at(number);  // lives until this call ends
    g.weight = weight.get();
    if (!writes) return;
    check_array(array("a", g.a, 1), {g.m, g.k});
    check_array(array("a_scales", g.a_scales, 1), {g.m, scale_count(g.k)});
    if (g.k == 0) g.a_scales = &no_scales;
    multiply(g, parallel);
  });
}

int weight_product(GemmArgs g, int activation_dtype, int64_t number, int threads) {
  return computed([&] {
    check_value_dtype("x_dtype", g.a_format);
    check_activation_dtype("activation_dtype", activation_dtype);
    g.rounds_a = activation_dtype == MXFP8_BFLOAT16;
    const bool writes = check_product(g);
    check_range({"x_stride", g.a_stride}, g.k, INT64_MAX);
    const Parallel parallel = checked_threads(threads);
    const std::shared_ptr<ConstantWeight> weight = weights().at(number);  // lives until this call ends
    g.weight = weight.get();
    if (!writes) return;
    check_rows(array("x", g.a, value_bytes(g.a_format)), g.m, g.k, g.a_stride);
    multiply(g, parallel);
  });
}

}  // namespace

std::shared_ptr<ConstantWeight> mxfp8::numbered_weight(int64_t number) { return weights().at(number); }

extern "C" {

int mxfp8_weight_new(int64_t* weight) {
  return answer([&] {
    check_array(array("weight", weight, alignof(int64_t)), {1});
    *weight = weights().add(std::make_shared<ConstantWeight>());
  });
}

void mxfp8_weight_free(int64_t weight) { weights().remove(weight); }

int mxfp8_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format, const uint8_t* b,
               const uint8_t* b_scales, const float* bias, int64_t m, int64_t n, int64_t k, int y_dtype, void* y,
               int64_t y_stride, int64_t weight, int threads) {
  return mxfp8_fused_gemm(a_format, a, a_scales, b_format, b, b_scales, bias, MXFP8_NONE, MXFP8_FLOAT32, nullptr, m, n,
                          k, y_dtype, y, y_stride, weight, threads);
}

int mxfp8_weight_gemm(int x_dtype, const void* x, int64_t x_stride, int activation_dtype, int b_format,
                      const uint8_t* b, const uint8_t* b_scales, const float* bias, int64_t m, int64_t n, int64_t k,
                      int y_dtype, void* y, int64_t y_stride, int64_t weight, int threads) {
  return mxfp8_fused_weight_gemm(x_dtype, x, x_stride, activation_dtype, b_format, b, b_scales, bias, MXFP8_NONE,
                                 MXFP8_FLOAT32, nullptr, m, n, k, y_dtype, y, y_stride, weight, threads);
}

int mxfp8_fused_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format, const uint8_t* b,
                     const uint8_t* b_scales, const float* bias, int epilogue, int factor_dtype, const void* factor,
                     int64_t m, int64_t n, int64_t k, int y_dtype, void* y, int64_t y_stride, int64_t weight,
                     int threads) {
  return quantized_product({.a_format = a_format,
                            .a = a,
                            .a_scales = a_scales,
                            .a_stride = k,
                            .b_format = b_format,
                            .b = b,
                            .b_scales = b_scales,
                            .bias = bias,
                            .m = m,
                            .n = n,
                            .k = k,
                            .y_dtype = y_dtype,
                            .y = y,
                            .y_stride = y_stride,
                            .epilogue = epilogue,
                            .factor_dtype = factor_dtype,
                            .factor = factor},
                           weight, threads);
}

int mxfp8_fused_weight_gemm(int x_dtype, const void* x, int64_t x_stride, int activation_dtype, int b_format,
                            const uint8_t* b, const uint8_t* b_scales, const float* bias, int epilogue,
                            int factor_dtype, const void* factor, int64_t m, int64_t n, int64_t k, int y_dtype, void* y,
                            int64_t y_stride, int64_t weight, int threads) {
  return weight_product({.a_format = x_dtype,
                         .a = x,
                         .a_stride = x_stride,
                         .b_format = b_format,
                         .b = b,
                         .b_scales = b_scales,
                         .bias = bias,
                         .m = m,
                         .n = n,
                         .k = k,
                         .y_dtype = y_dtype,
                         .y = y,
                         .y_stride = y_stride,
                         .epilogue = epilogue,
                         .factor_dtype = factor_dtype,
                         .factor = factor},
                        activation_dtype, weight, threads);
}

}  // extern "C"
