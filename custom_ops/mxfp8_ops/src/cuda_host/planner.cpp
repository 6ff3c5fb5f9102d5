// Plans of what is not a product, and the C ABI of all plans.
#include "planner.h"

#include "../cpu/arguments.h"
#include "executor.h"
#include "experimental/variants.h"
#include "requests.h"
#include "steps.h"

namespace mxfp8::cuda {
namespace {

thread_local Plan latest;
thread_local int64_t plans = 0;  // how many the thread has made

// Queues the steps of the thread's latest plan that it can.
void proceed(const mxfp8_cuda_queue& queue, mxfp8_cuda_plan* plan) {
  const Executor& executor = Executor::of(int(queue.gpu));
  const Current current(executor.gpu());
  const Resources resources = {reinterpret_cast<Stream>(queue.stream), nullptr, uint64_t(queue.scratch),
                               uint64_t(queue.result)};
  plan->done = int64_t(executor.run(&latest, resources, size_t(plan->done)));
}

// Makes a plan in memory of the calling thread and shows it; does it too where there is a queue and no need to wait.
template <class Make>
int shown(const mxfp8_cuda_queue* queue, mxfp8_cuda_plan* to, const Make& make) noexcept {
  const int status = answer([&] {
    if (to == nullptr) throw Error(MXFP8_BAD_ARGUMENT, "plan is NULL", "the address of a struct", "pass one");
    latest = make();
    *to = {latest.steps.data(), int64_t(latest.steps.size()), latest.scratch_bytes, latest.route, 0, ++plans};
    if (queue != nullptr && latest.scratch_bytes == 0 && !latest.steps.empty()) proceed(*queue, to);
  });
  if (status != MXFP8_OK && to != nullptr) *to = {};
  return status;
}

// Whether quantize_bands.cu does it: where that was measured to be faster, and only whole blocks.
bool in_bands(const mxfp8_cuda_quantize& q) {
  const bool both = q.row_elements != 0;
  if (q.layout != MXFP8_TRANSPOSED || q.k % 32 != 0 || q.inner % (both ? 32 : 16) != 0) return false;
  if (unaligned({q.x, q.elements, q.row_elements})) return false;
  const Sizes sizes = {q.capability, q.processors, q.x_dtype, q.k, q.inner};
  const Variant chosen = variant(both ? kBothPlain : kColumnsPlain, sizes, q.variant);
  return chosen == kColumnsBands || chosen == kBothBands;
}

}  // namespace

Plan plan(const mxfp8_cuda_quantize& q) {
  const Kind x = value_kind(q.x_dtype), format = element_kind(q.format);
  const bool both = q.row_elements != 0, swizzled = q.layout == MXFP8_SWIZZLED,
             transposed = q.layout == MXFP8_TRANSPOSED;
  if (q.layout < MXFP8_PLAIN || q.layout > MXFP8_TRANSPOSED ||
      (q.layout != MXFP8_PLAIN && q.inner > 1 && q.outer > 1)) {
    throw Error(MXFP8_BAD_ARGUMENT, "this layout needs a matrix", "outer or inner to be 1", "use the plain layout");
  }
  Steps steps;
  if (volume({q.outer, q.k, q.inner}) == 0) return steps.finished();
  const bool rows = q.inner == 1 && !both;
  if (swizzled) {
    steps.clear(q.scales, (rows ? swizzled_bytes(q.outer, q.k) : swizzled_bytes(q.inner, q.k)) / 4);
    if (both) steps.clear(q.row_scales, swizzled_bytes(q.k, q.inner) / 4);
  }
  if (rows) {
    const bool ragged = q.k % 32 != 0 || unaligned({q.x, q.elements});
    steps.launch(kernel(Source::kQuantizeRows, {x, format_choice(format), swizzled, ragged}),
                 ceil_div(q.outer * scale_count(q.k) * 2, kThreads),
                 {q.x, q.elements, q.scales, q.outer, q.k, q.increment});
  } else if (in_bands(q)) {
    steps.launch(kernel(Source::kQuantizeBands, {x, format_choice(format), both}),
                 ceil_div(q.k, 128) * ceil_div(q.inner, 128),
                 {q.x, q.elements, q.scales, q.row_elements, q.row_scales, q.k, q.inner, q.increment});
  } else {
    const bool ragged = q.inner % (both ? 32 : 16) != 0 || (transposed && q.k % 32 != 0) ||
                        unaligned({q.x, q.elements, q.scales, q.row_elements});
    steps.launch(kernel(Source::kQuantizeColumns, {x, format_choice(format), both, int(q.layout), ragged}),
                 q.outer * scale_count(q.k) * ceil_div(q.inner, 512),
                 {q.x, q.elements, q.scales, q.row_elements, q.row_scales, q.k, q.inner, q.increment});
  }
  return steps.finished();
}

Plan plan(const mxfp8_cuda_dequantize& d) {
  const Kind format = element_kind(d.format), y = value_kind(d.y_dtype);
  const int64_t total = volume({d.outer, d.k, d.inner});
  const bool last = d.inner == 1;
  const bool ragged = (last ? d.k % 32 : d.inner % 16) != 0 || unaligned({d.elements, d.y, last ? 0 : d.scales});
  Steps steps;
  if (d.inexact != 0) steps.clear(d.inexact, 1);
  if (total == 0) return steps.finished();
  steps.launch(kernel(Source::kDequantize, {y, format_choice(format), last, ragged}), ceil_div(total, 16 * kThreads),
               {d.elements, d.scales, d.y, d.k, d.inner, total, d.inexact});
  return steps.finished();
}

Plan plan(const mxfp8_cuda_embedding& e) {
  const int64_t parts = volume({e.count, ceil_div(e.d, 16)});
  const bool ragged = e.d % 16 != 0 || unaligned({e.b, e.y});
  Steps steps;
  if (parts == 0) return steps.finished();
  const int instance =
      kernel(Source::kEmbedding, {value_kind(e.y_dtype), format_choice(element_kind(e.b_format)), ragged});
  steps.launch(instance, ceil_div(parts, kThreads),
               {e.indices, e.b, e.b_scales, e.y, e.count, e.v, e.d, e.index_dtype == MXFP8_INT64});
  return steps.finished();
}

Plan plan(const mxfp8_cuda_fold& f) {
  Steps steps;
  if (volume({f.rows, f.k}) == 0) return steps.finished();
  steps.launch(kernel(Source::kFold, {}), f.rows, {f.elements, f.scales, f.folded, f.row_scales, f.k});
  return steps.finished();
}

}  // namespace mxfp8::cuda

using namespace mxfp8::cuda;

extern "C" {

MXFP8_API int mxfp8_cuda_plan_gemm(const mxfp8_cuda_place* place, const mxfp8_cuda_gemm* gemm,
                                   const mxfp8_cuda_queue* queue, mxfp8_cuda_plan* to) {
  return shown(queue, to, [&] { return plan(checked(place), checked(gemm)); });
}
MXFP8_API int mxfp8_cuda_plan_quantize(const mxfp8_cuda_quantize* quantize, const mxfp8_cuda_queue* queue,
                                       mxfp8_cuda_plan* to) {
  return shown(queue, to, [&] { return plan(checked(quantize)); });
}
MXFP8_API int mxfp8_cuda_plan_dequantize(const mxfp8_cuda_dequantize* dequantize, const mxfp8_cuda_queue* queue,
                                         mxfp8_cuda_plan* to) {
  return shown(queue, to, [&] { return plan(checked(dequantize)); });
}
MXFP8_API int mxfp8_cuda_plan_embedding(const mxfp8_cuda_embedding* embedding, const mxfp8_cuda_queue* queue,
                                        mxfp8_cuda_plan* to) {
  return shown(queue, to, [&] { return plan(checked(embedding)); });
}
MXFP8_API int mxfp8_cuda_plan_fold(const mxfp8_cuda_fold* fold, const mxfp8_cuda_queue* queue, mxfp8_cuda_plan* to) {
  return shown(queue, to, [&] { return plan(checked(fold)); });
}
MXFP8_API int mxfp8_cuda_continue(const mxfp8_cuda_queue* queue, mxfp8_cuda_plan* plan) {
  return mxfp8::answer([&] {
    if (queue == nullptr || plan == nullptr) {
      throw mxfp8::Error(MXFP8_BAD_ARGUMENT, "queue or plan is NULL", "the addresses of structs", "pass both");
    }
    if (plan->number != plans || plan->done < 0 || plan->done > int64_t(latest.steps.size())) {
      throw mxfp8::Error(MXFP8_BAD_ARGUMENT, "not the latest plan of this thread", "that one", "plan again");
    }
    if (queue->scratch == 0 && latest.scratch_bytes != 0) {
      throw mxfp8::Error(MXFP8_BAD_ARGUMENT, "no scratch memory", std::to_string(latest.scratch_bytes) + " bytes",
                         "allocate it");
    }
    proceed(*queue, plan);
  });
}
MXFP8_API int64_t mxfp8_cuda_swizzled_bytes(int64_t rows, int64_t k) {
  int64_t bytes = 0;
  const int status = mxfp8::answer([&] { bytes = checked_swizzled_bytes(rows, k); });
  return status == MXFP8_OK ? bytes : status;
}

}  // extern "C"
