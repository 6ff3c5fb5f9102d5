// Plans of dequantizing.
#include "kernels.h"
#include "requests.h"
#include "steps.h"

namespace mxfp8::cuda {
const Kernel kDequantize("dequantize", {values(), formats(), flag(), flag()});

namespace {

mxfp8_cuda_dequantize checked(const mxfp8_cuda_dequantize* request) {
  mxfp8_cuda_dequantize d = not_null("dequantize", request);
  check_element_format("format", d.format);
  check_value_dtype("y_dtype", d.y_dtype);
  check_sizes({{"outer", d.outer}, {"k", d.k}, {"inner", d.inner}});
  if (d.outer == 0 || d.k == 0 || d.inner == 0) d.outer = d.k = d.inner = 0;
  check_array(at("elements", d.elements, 1), {d.outer, d.k, d.inner});
  check_scales("scales", d.scales, d.outer, d.k, d.inner);
  check_array(at("y", d.y, bytes_of(d.y_dtype)), {d.outer, d.k, d.inner});
  if (d.inexact != 0) check_array(at("inexact", d.inexact, 4), {1});
  return d;
}

}  // namespace

template <>
Plan plan(const mxfp8_cuda_dequantize& d) {
  const Kind format = element_kind(d.format), y = value_kind(d.y_dtype);
  const int64_t total = volume({d.outer, d.k, d.inner});
  const bool last = d.inner == 1;
  const bool ragged = (last ? d.k % 32 : d.inner % 16) != 0 || unaligned({d.elements, d.y, last ? 0 : d.scales});
  Steps steps;
  if (d.inexact != 0) steps.clear(d.inexact, 1);
  if (total == 0) return steps.finished();
  steps.launch(kDequantize({y, format_choice(format), last, ragged}), ceil_div(total, 16 * kThreads),
               {d.elements, d.scales, d.y, d.k, d.inner, total, d.inexact});
  return steps.finished();
}

template <>
std::vector<int> kernels<mxfp8_cuda_dequantize>(int64_t format, int64_t y_dtype) {
  std::vector<int> numbers;
  kDequantize.append(&numbers, {value_kind(y_dtype), format_choice(element_kind(format)), Kernel::kAny, Kernel::kAny});
  return numbers;
}

}  // namespace mxfp8::cuda

MXFP8_CUDA_PLAN(dequantize)
