// Plans of folding: one scale for each row.
#include "kernels.h"
#include "requests.h"
#include "steps.h"

namespace mxfp8::cuda {

const Kernel kFoldKernel("fold", {});

namespace {

constexpr int64_t kVector = 16;  // bytes that fold.cu reads at once

mxfp8_cuda_fold checked(const mxfp8_cuda_fold* request) {
  mxfp8_cuda_fold f = not_null("fold", request);
  check_sizes({{"rows", f.rows}, {"k", f.k}});
  if (f.k % kBlock != 0) {
    throw Error(MXFP8_BAD_ARGUMENT, "k is " + std::to_string(f.k), "a multiple of " + std::to_string(kBlock),
                "use the weight without folding");
  }
  if (f.rows == 0 || f.k == 0) {
    f.rows = f.k = 0;
    return f;
  }
  check_array(at("elements", f.elements, 1), {f.rows, f.k});
  check_scales("scales", f.scales, f.rows, f.k, 1);
  check_array(at("folded", f.folded, 1), {f.rows, f.k});
  check_array(at("row_scales", f.row_scales, 4), {f.rows});
  for (const auto& [name, address] : {Size{"elements", f.elements}, Size{"folded", f.folded}}) {
    check_array(at(name, address, kVector), {1});
  }
  return f;
}

}  // namespace

template <>
Plan plan(const mxfp8_cuda_fold& f) {
  Steps steps;
  if (volume({f.rows, f.k}) == 0) return steps.finished();
  steps.launch(kFoldKernel({}), f.rows, {f.elements, f.scales, f.folded, f.row_scales, f.k});
  return steps.finished();
}

}  // namespace mxfp8::cuda

extern "C" MXFP8_API int mxfp8_cuda_plan_fold(const mxfp8_cuda_fold* request, const mxfp8_cuda_queue* queue,
                                              mxfp8_cuda_plan* to) {
  using namespace mxfp8::cuda;
  return answer_with(queue, to, [&] { return plan(checked(request)); });
}
