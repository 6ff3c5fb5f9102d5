// Plans of quantizing, along one axis or both.
#include "kernels.h"
#include "requests.h"
#include "steps.h"

namespace mxfp8::cuda {
namespace {

const Kernel kQuantizeRows("quantize_rows", {values(), formats(), flag()});  // ragged
// MXFP8_PLAIN, MXFP8_TRANSPOSED, that and rows; ragged.
const Kernel kQuantizeColumns("quantize_columns", {values(), formats(), {"PLAIN", "TRANSPOSED", "BOTH"}, flag()});

mxfp8_cuda_quantize checked(const mxfp8_cuda_quantize* request) {
  mxfp8_cuda_quantize q = not_null("quantize", request);
  check_value_dtype("x_dtype", q.x_dtype);
  check_element_format("format", q.format);
  check_range({"increment", q.increment}, 0, UINT32_MAX);
  const bool both = q.row_elements != 0;
  check_range({"layout", q.layout}, both ? MXFP8_TRANSPOSED : MXFP8_PLAIN, MXFP8_TRANSPOSED);
  check_sizes({{"outer", q.outer}, {"k", q.k}, {"inner", q.inner}});
  if (q.outer == 0 || q.k == 0 || q.inner == 0) q.outer = q.k = q.inner = 0;
  check_array(at("x", q.x, bytes_of(q.x_dtype)), {q.outer, q.k, q.inner});
  check_array(at("elements", q.elements, 1), {q.outer, q.k, q.inner});
  if (q.k == 0) return q;
  check_scales("scales", q.scales, q.outer, q.k, q.inner);
  if (both) {
    check_range({"outer", q.outer}, 1, 1);
    check_array(at("row_elements", q.row_elements, 1), {q.k, q.inner});
    check_scales("row_scales", q.row_scales, q.k, q.inner, 1);
  }
  return q;
}

}  // namespace

template <>
Plan plan(const mxfp8_cuda_quantize& q) {
  const Kind x = value_kind(q.x_dtype), format = element_kind(q.format);
  const bool both = q.row_elements != 0, transposed = q.layout == MXFP8_TRANSPOSED;
  if (transposed && q.inner > 1 && q.outer > 1) {
    throw Error(MXFP8_BAD_ARGUMENT, "this layout needs a matrix", "outer or inner to be 1", "use the plain layout");
  }
  Steps steps;
  if (volume({q.outer, q.k, q.inner}) == 0) return steps.finished();
  if (q.inner == 1 && !both) {
    const bool ragged = q.k % 32 != 0 || unaligned({q.x, q.elements});
    steps.launch(kQuantizeRows({x, format_choice(format), ragged}), ceil_div(q.outer * scale_count(q.k) * 2, kThreads),
                 {q.x, q.elements, q.scales, q.outer, q.k, q.increment});
  } else {
    const bool ragged = q.inner % (both ? 32 : 16) != 0 || (transposed && q.k % 32 != 0) ||
                        unaligned({q.x, q.elements, q.scales, q.row_elements});
    steps.launch(kQuantizeColumns({x, format_choice(format), transposed + both, ragged}),
                 q.outer * scale_count(q.k) * ceil_div(q.inner, 512),
                 {q.x, q.elements, q.scales, q.row_elements, q.row_scales, q.k, q.inner, q.increment});
  }
  return steps.finished();
}

template <>
std::vector<int> kernels<mxfp8_cuda_quantize>(int64_t x_dtype, int64_t format) {
  const int x = value_kind(x_dtype), f = format_choice(element_kind(format));
  std::vector<int> numbers;
  kQuantizeRows.append(&numbers, {x, f, Kernel::kAny});
  kQuantizeColumns.append(&numbers, {x, f, MXFP8_PLAIN, Kernel::kAny});
  return numbers;
}

}  // namespace mxfp8::cuda

MXFP8_CUDA_PLAN(quantize)
