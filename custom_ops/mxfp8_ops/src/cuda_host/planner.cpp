// What queues plans, for the C ABI.
#include "planner.h"

#include "../cpu/arguments.h"
#include "../cpu/profile.h"
#include "executor.h"
#include "requests.h"
#include "steps.h"

namespace mxfp8::cuda {
namespace {

thread_local Plan latest;
thread_local int64_t plans = 0;  // how many the thread has made

// Queues the steps of the thread's latest plan.
void proceed(const mxfp8_cuda_queue& queue, mxfp8_cuda_plan* plan) {
  const Executor& executor = Executor::for_gpu(int(queue.gpu));
  const Current current(executor.gpu());
  executor.run(latest, {reinterpret_cast<Stream>(queue.stream), uint64_t(queue.scratch)});
  plan->done = 1;
}

}  // namespace

int answer_with(const mxfp8_cuda_queue* queue, mxfp8_cuda_plan* to, const std::function<Plan()>& make) noexcept {
  const int status = answer([&] {
    if (to == nullptr) throw Error(MXFP8_BAD_ARGUMENT, "plan is NULL", "the address of a struct", "pass one");
    const ProfiledCall profiled(nullptr);
    latest = make();
    *to = {latest.steps.data(), int64_t(latest.steps.size()), latest.scratch_bytes, latest.route, 0, ++plans};
    if (queue != nullptr && latest.scratch_bytes == 0 && !latest.steps.empty()) proceed(*queue, to);
  });
  if (status != MXFP8_OK && to != nullptr) *to = {};
  return status;
}

}  // namespace mxfp8::cuda

using namespace mxfp8::cuda;

extern "C" {

MXFP8_API int mxfp8_cuda_run(const mxfp8_cuda_queue* queue, mxfp8_cuda_plan* plan) {
  return mxfp8::answer([&] {
    if (queue == nullptr || plan == nullptr) {
      throw mxfp8::Error(MXFP8_BAD_ARGUMENT, "queue or plan is NULL", "the addresses of structs", "pass both");
    }
    if (plan->number != plans) {
      throw mxfp8::Error(MXFP8_BAD_ARGUMENT, "not the latest plan of this thread", "that one", "plan again");
    }
    if (queue->scratch == 0 && latest.scratch_bytes != 0) {
      throw mxfp8::Error(MXFP8_BAD_ARGUMENT, "no scratch memory", std::to_string(latest.scratch_bytes) + " bytes",
                         "allocate it");
    }
    const mxfp8::ProfiledCall profiled(nullptr);
    proceed(*queue, plan);
  });
}
MXFP8_API int64_t mxfp8_cuda_swizzled_bytes(int64_t rows, int64_t k) {
  int64_t bytes = 0;
  const int status = mxfp8::answer([&] {
    mxfp8::check_sizes({{"rows", rows}, {"k", k}});
    if (rows == 0 || k == 0) return;
    check_scales("the matrix of scales", 1, rows, k, 1);
    bytes = swizzled_bytes(rows, k);
  });
  return status == MXFP8_OK ? bytes : status;
}

}  // extern "C"
