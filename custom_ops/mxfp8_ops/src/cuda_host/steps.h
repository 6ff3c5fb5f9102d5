// How a plan is put together: addresses, scratch memory, steps.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "kernels.h"
#include "planner.h"

namespace mxfp8::cuda {

// Kernels that plans of products launch too.
extern const Kernel kDequantize;       // value dtype, format, last axis, ragged
extern const Kernel kBfloat16Rounded;  // float32 or float16, ragged

inline int64_t swizzled_bytes(int64_t rows, int64_t k) {
  return ceil_div(rows, 128) * 128 * (ceil_div(scale_count(k), 4) * 4);
}

// How many values sizes stand for; throws Error for one below 0, or if 63 bits do not hold the number.
inline int64_t volume(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(product, size, &product)) {
      throw Error(MXFP8_BAD_ARGUMENT, "a negative size or an array of 2^63 values or more", "neither",
                  "report this as a bug");
    }
  }
  return product;
}

// A number, an address, or an address that only whoever does the plan knows: so far into the scratch memory.
struct Argument {
  enum class Base { kNone, kScratch };
  Argument(int64_t value = 0, Base base = Base::kNone) : value(value), base(base) {}  // NOLINT: numbers are arguments
  Argument operator+(int64_t bytes) const { return {value + bytes, base}; }
  bool null() const { return base == Base::kNone && value == 0; }
  bool aligned() const { return value % 16 == 0; }

  int64_t value;
  Base base;
};

inline bool unaligned(std::initializer_list<Argument> addresses) {
  return !std::all_of(addresses.begin(), addresses.end(), [](const Argument& a) { return a.aligned(); });
}

constexpr size_t kMostSteps = 1 << 20;  // a second of launches

class Steps {
 public:
  Steps() { plan_.steps.reserve(8); }  // more than most plans have
  void launch(int kernel, int64_t grid, std::initializer_list<Argument> arguments) {
    if (grid > INT32_MAX) {
      throw Error(MXFP8_BAD_ARGUMENT, "a product or tensor needs 2^31 thread blocks or more", "fewer",
                  "use a smaller batch");
    }
    mxfp8_cuda_step& step = add(MXFP8_LAUNCH, arguments);
    step.kernel = kernel, step.grid = int32_t(grid), step.block = kThreads;
  }
  void clear(Argument address, int64_t words) { add(MXFP8_CLEAR, {address, words}); }
  mxfp8_cuda_step& add(int what, std::initializer_list<Argument> arguments) {
    if (plan_.steps.size() >= kMostSteps) {
      throw Error(MXFP8_BAD_ARGUMENT, "a plan of more than " + std::to_string(kMostSteps) + " steps", "fewer",
                  "use a smaller batch");
    }
    mxfp8_cuda_step step = {};
    step.step = what;
    for (const Argument& argument : arguments) {
      step.in_scratch |= uint32_t(argument.base == Argument::Base::kScratch) << step.count;
      step.arguments[step.count++] = argument.value;
    }
    plan_.steps.push_back(step);
    return plan_.steps.back();
  }

  // Scratch memory, aligned to 256; memory taken after `mark` may be taken again after `release`.
  Argument reserve(int64_t bytes) {
    const int64_t at = taken_;
    taken_ += ceil_div(bytes, 256) * 256;
    plan_.scratch_bytes = std::max(plan_.scratch_bytes, taken_);
    return {at, Argument::Base::kScratch};
  }
  int64_t mark() const { return taken_; }
  void release(int64_t mark) { taken_ = mark; }

  Plan&& finished(int route = -1) {
    plan_.route = route;
    return std::move(plan_);
  }

 private:
  Plan plan_;
  int64_t taken_ = 0;
};

// Values x in bfloat16, in scratch memory; float32 and float16 alone are not that already.
Argument rounded(Steps*, Kind, Argument x, int64_t total);

}  // namespace mxfp8::cuda
