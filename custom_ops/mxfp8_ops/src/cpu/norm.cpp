// How a norm is split into tasks, and its entry point.
#include "norm.h"

#include "arguments.h"
#include "tasks.h"

namespace mxfp8 {

void norm_quantize(const Kernels& kernels, const Parallel& parallel, const NormArgs& args) {
  if (args.rows == 0 || args.k == 0) return;
  const int64_t tasks = equal_ranges(parallel, args.rows, args.k), per_task = ceil_div(args.rows, tasks);
  const int64_t room = ceil_div(std::min(norm_rows(args.k), per_task) * args.k, 16) * 16;  // whole cache lines
  const int64_t bytes = ceil_div(args.rows, per_task) * room * int64_t(sizeof(float));
  const Scratch rooms = scratch_of(bytes);
  for_ranges(parallel, args.rows, per_task, [&](int64_t task, int64_t begin, int64_t end) {
    norm_quantize_kernels[kernels.column](args, begin, end, static_cast<float*>(rooms.get()) + task * room);
  });
}

}  // namespace mxfp8

using namespace mxfp8;

extern "C" {

int mxfp8_norm_quantize(int value_dtype, const void* x, const void* residual, const float* scale, const float* bias,
                        int64_t rows, int64_t k, int norm, float epsilon, int element_format, int scale_rounding,
                        uint8_t* elements, uint8_t* scales, void* normalized, void* sum, int threads) {
  return computed([&] {
    check_value_dtype("value_dtype", value_dtype);
    check_norm("norm", norm);
    check_element_format("element_format", element_format);
    check_rounding("scale_rounding", scale_rounding);
    check_sizes({{"rows", rows}, {"k", k}});
    const int64_t bytes = value_bytes(value_dtype);
    check_array(array("x", x, bytes), {rows, k});
    for (const Array& each :
         {array("residual", residual, bytes), array("normalized", normalized, bytes), array("sum", sum, bytes)}) {
      if (each.address != 0) check_array(each, {rows, k});
    }
    if (rows > 0) check_array(array("scale", scale, sizeof(float)), {k});
    if (rows > 0 && bias != nullptr) check_array(array("bias", bias, sizeof(float)), {k});
    check_blocks(elements, scales, rows, k, 1);
    norm_quantize(kernels_in_use(), checked_threads(threads),
                  {value_dtype, x, residual, scale, bias, rows, k, norm, epsilon, element_format,
                   scale_increment(element_format, scale_rounding), elements, scales, normalized, sum});
  });
}

}  // extern "C"
