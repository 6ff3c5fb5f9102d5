// Hostile requests to the planner of CUDA launches, and drivers that are none. Which requests are refused is tested by
// tests/mxfp8_ops/test_native_hostile.py; here an accepted one must give a plan that stays inside its memory.
#include "cuda_host/mxfp8_cuda.h"
#include "cuda_host/mxfp8_cuda_plan.h"
#include "hostile.h"

namespace hostile {
namespace {

constexpr int64_t kAddress = int64_t(1) << 32, kSize = 64;

// Returns a request with other sizes and formats than `good`, and maybe with a hostile number in some fields.
template <class Request>
Request varied(Random& random, Request good) {
  int64_t fields[sizeof good / sizeof(int64_t)];
  std::memcpy(fields, &good, sizeof good);
  for (auto& field : fields) {
    if (field == kSize) field = size(random, 100000);
    if (field == MXFP8_E4M3) field = code(random, FORMATS, 100000);
    if (field == MXFP8_FLOAT32) field = code(random, VALUES, 100000);
    if (chance(random, 30)) field = chance(random, 2) ? hostile_number(random) : int64_t(random() % 20);
  }
  std::memcpy(&good, fields, sizeof good);
  return good;
}

void check_steps(const mxfp8_cuda_plan& plan) {
  for (int64_t i = 0; i < plan.count; ++i) {
    const mxfp8_cuda_step& step = plan.steps[i];
    if (step.count < 0 || step.count > MXFP8_MOST_ARGUMENTS) fail("plan: arguments of a step");
    if (step.step == MXFP8_LAUNCH && (step.grid < 1 || mxfp8_cuda_kernel(step.kernel) == nullptr)) {
      fail("plan: a launch of nothing");
    }
    for (int j = 0; j < step.count; ++j) {
      if ((step.in_scratch >> j & 1) && (step.arguments[j] < 0 || step.arguments[j] >= plan.scratch_bytes)) {
        fail("plan: beyond the scratch memory");
      }
    }
  }
}

int plan_any(Random& random, mxfp8_cuda_plan* plan) {
  const bool none = chance(random, 50);
  const auto planned = [&](auto plan_of, const auto& good) {
    const auto request = varied(random, good);
    return plan_of(none ? nullptr : &request, nullptr, plan);
  };
  const int64_t at = kAddress, f = MXFP8_FLOAT32, e = MXFP8_E4M3, s = kSize;
  switch (random() % 6) {
    case 0:
      return planned(mxfp8_cuda_plan_quantize, mxfp8_cuda_quantize{f, e, 0, MXFP8_PLAIN, at, s, s, s, at, at, 0, 0});
    case 1:
      return planned(mxfp8_cuda_plan_dequantize, mxfp8_cuda_dequantize{e, f, at, at, s, s, s, at, 0});
    case 2:
      return planned(mxfp8_cuda_plan_embedding, mxfp8_cuda_embedding{MXFP8_INT64, e, f, at, at, at, s, s, s, at});
    case 3:
      return planned(mxfp8_cuda_plan_grouped,
                     mxfp8_cuda_grouped{e, e, f, 0, at, at, at, at, at, at, s, s, s, s, s, 1, 1, s, 0, 0, 1, 0, 0, 1});
    default:
      const int64_t capabilities[] = {0, 70, 80, 86, 89, 90, 100, 103, 120};
      const int64_t capability = one_of(random, capabilities), forced = chance(random, 3) ? int64_t(random() % 7) : 0;
      const auto place = varied(random, mxfp8_cuda_place{capability, 132, int64_t(random() % 8), forced, 0, 0, 0});
      return planned(
          [&](const mxfp8_cuda_gemm* gemm, const mxfp8_cuda_queue* queue, mxfp8_cuda_plan* to) {
            return mxfp8_cuda_plan_gemm(chance(random, 50) ? nullptr : &place, gemm, queue, to);
          },
          mxfp8_cuda_gemm{chance(random, 2) ? e : f, e, f, at, at, at, at, at, at, s, s, s, 0, 0, 0});
  }
}

void plan(Random& random, Counts* counts) {
  mxfp8_cuda_plan result;
  std::memset(&result, kUntouched, sizeof result);
  mxfp8_cuda_plan* to = chance(random, 50) ? nullptr : &result;
  const int status = plan_any(random, to);
  if (status != MXFP8_OK && status != MXFP8_BAD_ARGUMENT && status != MXFP8_NO_ROUTE) {
    fail("plan: status " + std::to_string(status) + " (" + mxfp8_last_error(MXFP8_MESSAGE) + ")");
  }
  if (status == MXFP8_OK && to == nullptr) fail("a plan was accepted without a place for its result");
  if (status == MXFP8_OK) check_steps(result);
  if (status != MXFP8_OK && to != nullptr && result.count != 0) fail("plan: refused, yet there is a plan");
  ++(status == MXFP8_OK ? counts->accepted : counts->refused);
}

void open_driver(Random& random, Counts* counts) {
  const mxfp8_cuda_loader loaders[] = {{nullptr, nullptr},
                                       {[](int, mxfp8_cuda_gpu*, char*, size_t) { return 1; }, nullptr},
                                       {[](int, mxfp8_cuda_gpu*, char*, size_t) { return 1; },
                                        [](int, int, const char* const*, void**, char*, size_t) { return 1; }}};
  const char* drivers[] = {nullptr, "", "no such library.so", "/", "libc.so.6"};
  const size_t sizes[] = {0, 1, 2, 7, 1000};
  const size_t room = one_of(random, sizes);
  const std::unique_ptr<char, decltype(&std::free)> message(static_cast<char*>(std::malloc(room)), std::free);
  const mxfp8_cuda_loader* loader = chance(random, 4) ? nullptr : &loaders[random() % 3];
  if (mxfp8_cuda_open(one_of(random, drivers), loader, chance(random, 4) ? nullptr : message.get(), room) !=
      MXFP8_BAD_ARGUMENT) {
    fail("a driver that is none was opened");
  }
  ++counts->refused;
}

void names_and_sizes(Random& random, Counts* counts) {
  const int number = chance(random, 2) ? int(random()) : int(random() % 400);
  if (number < 0 && mxfp8_cuda_kernel(number) != nullptr) fail("a kernel of a number below 0");
  mxfp8_cuda_kernel(number);
  if ((mxfp8_cuda_route_at(number) != nullptr) != (number >= 0 && number < 6)) fail("routes");
  const int64_t sides[] = {size(random, 3), size(random, 3)};
  const bool sized = sides[0] >= 0 && sides[1] >= 0 && dense({sides[0], blocks(sides[1])}, 1) <= kMostBytes;
  const int64_t bytes = mxfp8_cuda_swizzled_bytes(sides[0], sides[1]);
  if (sized ? Wide(bytes) < dense({sides[0], blocks(sides[1])}, 1) : bytes != MXFP8_BAD_ARGUMENT) {
    fail("swizzled_bytes" + list({sides[0], sides[1], bytes}));
  }
  ++(sized ? counts->accepted : counts->refused);
}

}  // namespace

void call_planner(Random& random, Counts* counts) {
  if (!chance(random, 4)) return plan(random, counts);
  // The system looks for a driver on the disk, which takes long.
  chance(random, 100) ? open_driver(random, counts) : names_and_sizes(random, counts);
}

}  // namespace hostile
