// Hostile requests to the planner of CUDA launches, and drivers that are none.
#include "cuda_host/mxfp8_cuda.h"
#include "cuda_host/mxfp8_cuda_plan.h"
#include "hostile.h"

namespace hostile {
namespace {

// An address on a GPU for an array of that many bytes. Sets `refused` if it is not one.
int64_t address(Random& random, Wide bytes, int64_t alignment, int hostile, bool* refused) {
  if (bytes > kMostBytes) *refused = true;
  if (!chance(random, hostile)) return int64_t(1) << 32;
  const int64_t wild[] = {0, (int64_t(1) << 32) + 1, INT64_MAX - 15, -16, INT64_MIN};
  const int64_t at = one_of(random, wild);
  if (bytes > 0 && (at <= 0 || at % alignment != 0 || Wide(at) + bytes > INT64_MAX)) *refused = true;
  return at;
}

void judge_plan(const std::string& call, int status, bool refused, bool small, const mxfp8_cuda_plan& plan,
                Counts* counts) {
  const bool may = status == MXFP8_OK || status == MXFP8_NO_ROUTE || (!small && status == MXFP8_BAD_ARGUMENT);
  if (refused ? status != MXFP8_BAD_ARGUMENT : !may) {
    fail(call + ": status " + std::to_string(status) + " (" + mxfp8_last_error(MXFP8_MESSAGE) + ")");
  }
  ++(status == MXFP8_OK ? counts->accepted : counts->refused);
  if (status != MXFP8_OK) {
    if (plan.steps != nullptr || plan.count != 0) fail(call + ": refused, yet there is a plan");
    return;
  }
  for (int64_t i = 0; i < plan.count; ++i) {
    const mxfp8_cuda_step& step = plan.steps[i];
    if (step.count < 0 || step.count > MXFP8_MOST_ARGUMENTS) fail(call + ": arguments of a step");
    if (step.step == MXFP8_LAUNCH && (step.grid < 1 || mxfp8_cuda_kernel(step.kernel) == nullptr)) {
      fail(call + ": a launch of nothing");
    }
    for (int j = 0; j < step.count; ++j) {
      if ((step.in_scratch >> j & 1) && (step.arguments[j] < 0 || step.arguments[j] >= plan.scratch_bytes)) {
        fail(call + ": beyond the scratch memory");
      }
    }
  }
}

mxfp8_cuda_place some_place(Random& random, int hostile, bool* refused) {
  const int64_t capabilities[] = {0, 70, 80, 86, 89, 90, 100, 103, 120};
  mxfp8_cuda_place place = {one_of(random, capabilities),
                            int64_t(1 + random() % 200),
                            int64_t(random() % 8),
                            chance(random, 3) ? int64_t(random() % 7) : 0,
                            0,
                            0,
                            0};
  if (chance(random, 4)) {
    place.splits = int64_t(random() % 9), place.warps = int64_t(random() % 9);
    place.parts_bytes = int64_t(random() % 4096);
  }
  if (chance(random, hostile)) {
    int64_t fields[sizeof place / sizeof(int64_t)];
    std::memcpy(fields, &place, sizeof place);
    const auto at = random() % 7;
    fields[at] = hostile_number(random);
    const int64_t most[] = {1 << 20, 1 << 20, 7, 6, 1024, 8, int64_t(1) << 48};
    if (fields[at] < (at == 1 ? 1 : 0) || fields[at] > most[at]) *refused = true;
    std::memcpy(&place, fields, sizeof place);
  }
  return place;
}

void plan_gemm(Random& random, Counts* counts) {
  const int hostile = chance(random, 3) ? 100000 : 20;
  bool refused = false;
  const mxfp8_cuda_place place = some_place(random, hostile, &refused);
  mxfp8_cuda_gemm g = {};
  g.x_kind = code(random, {1, 10, 16, 17, 19, 3}, hostile), g.b_kind = code(random, FORMATS, hostile);
  g.y_dtype = code(random, VALUES, hostile);
  g.m = size(random, hostile), g.n = size(random, hostile), g.k = size(random, hostile);
  g.activation_dtype = chance(random, 2) ? 0 : code(random, ACTIVATIONS, hostile);
  const bool quantized = is_one_of(g.x_kind, FORMATS);
  refused = refused || !(quantized || is_one_of(g.x_kind, VALUES)) ||
            (g.activation_dtype != 0 && !is_one_of(g.activation_dtype, ACTIVATIONS)) || !is_one_of(g.b_kind, FORMATS) ||
            !is_one_of(g.y_dtype, VALUES) || g.m < 0 || g.n < 0 || g.k < 0;
  // Routes that widen both operands multiply INT8 with another format; the other ones refuse it.
  const bool mixed = quantized && (g.x_kind == MXFP8_INT8) != (g.b_kind == MXFP8_INT8);
  bool unread = false;
  bool* bad = refused || g.m == 0 || g.n == 0 ? &unread : &refused;
  const int64_t x_bytes = bytes_of(g.x_kind), y_bytes = bytes_of(g.y_dtype);
  const Wide m = g.m, n = g.n, k = g.k;
  const bool sized = !refused;
  g.x = address(random, sized ? dense({m, k}, x_bytes) : 0, x_bytes, hostile, bad);
  if (quantized) g.x_scales = address(random, sized ? dense({m, blocks(g.k)}, 1) : 0, 1, hostile, bad);
  g.b = address(random, sized ? dense({n, k}, 1) : 0, 1, hostile, bad);
  g.b_scales = address(random, sized ? dense({n, blocks(g.k)}, 1) : 0, 1, hostile, bad);
  g.y = address(random, sized ? dense({m, n}, y_bytes) : 0, y_bytes, hostile, bad);
  if (chance(random, 2)) {
    bool wrong = false;
    g.bias = address(random, sized ? dense({n}, 4) : 0, 4, hostile, &wrong);
    if (wrong && g.bias != 0) *bad = true;
  }
  mxfp8_cuda_plan plan;
  std::memset(&plan, kUntouched, sizeof plan);
  const bool no_place = chance(random, 50 * hostile), no_gemm = chance(random, 50 * hostile);
  const int status = mxfp8_cuda_plan_gemm(no_place ? nullptr : &place, no_gemm ? nullptr : &g, nullptr, &plan);
  judge_plan("plan gemm" + list({g.x_kind, g.b_kind, g.y_dtype, g.m, g.n, g.k, place.capability, place.forced}), status,
             refused || no_place || no_gemm, m < 100 && n < 100 && k < 100 && place.forced == 0 && !mixed, plan,
             counts);
}

void plan_blockwise(Random& random, Counts* counts, bool quantize) {
  const int hostile = chance(random, 3) ? 100000 : 12;
  const int64_t outer = size(random, hostile), k = size(random, hostile),
                inner = chance(random, 2) ? size(random, hostile) : 1;
  const int dtype = code(random, VALUES, hostile), format = code(random, FORMATS, hostile);
  bool refused = !is_one_of(dtype, VALUES) || !is_one_of(format, FORMATS) || outer < 0 || k < 0 || inner < 0;
  const bool sized = !refused;
  const Wide values = sized ? dense({outer, k, inner}, bytes_of(dtype)) : 0;
  const Wide elements = sized ? dense({outer, k, inner}, 1) : 0,
             scales = sized ? dense({outer, blocks(k), inner}, 1) : 0;
  const int64_t values_at = address(random, values, bytes_of(dtype), hostile, &refused),
                elements_at = address(random, elements, 1, hostile, &refused),
                scales_at = address(random, scales, 1, hostile, &refused);
  const bool small = outer < 100 && k < 100 && inner < 100;
  mxfp8_cuda_plan plan;
  std::memset(&plan, kUntouched, sizeof plan);
  const std::string sizes = list({dtype, format, outer, k, inner});
  if (quantize) {
    const mxfp8_cuda_quantize q = {dtype, format, 0,           MXFP8_PLAIN, values_at, outer,
                                   k,     inner,  elements_at, scales_at,   0,         0};
    judge_plan("plan quantize" + sizes, mxfp8_cuda_plan_quantize(&q, nullptr, &plan), refused, small, plan, counts);
  } else {
    const mxfp8_cuda_dequantize d = {format, dtype, elements_at, scales_at, outer, k, inner, values_at, 0};
    judge_plan("plan dequantize" + sizes, mxfp8_cuda_plan_dequantize(&d, nullptr, &plan), refused, small, plan, counts);
  }
}

// Any bits at all in every field: nothing is known about the outcome but that it is one.
void plan_noise(Random& random, Counts* counts) {
  int64_t fields[24];
  for (auto& field : fields) field = chance(random, 2) ? size(random, 4) : int64_t(random() % 20);
  for (const size_t at : {4, 8, 9, 10, 11}) {
    if (chance(random, 2)) fields[at] = int64_t(1) << 32;
  }
  if (chance(random, 2)) fields[0] = 1, fields[1] = 17, fields[3] = int64_t(random() % 4);
  mxfp8_cuda_plan plan;
  mxfp8_cuda_plan* to = chance(random, 50) ? nullptr : &plan;
  const bool nothing = chance(random, 50);
  const auto request = [&](auto noise) {
    static_assert(sizeof noise <= sizeof fields, "noise for every field");
    std::memcpy(&noise, fields, sizeof noise);
    return noise;
  };
  const auto planned = [&](auto plan_of, const auto& noise) {
    return plan_of(nothing ? nullptr : &noise, nullptr, to);
  };
  const int kind = int(random() % 4);
  const int status = kind == 0   ? planned(mxfp8_cuda_plan_quantize, request(mxfp8_cuda_quantize()))
                     : kind == 1 ? planned(mxfp8_cuda_plan_dequantize, request(mxfp8_cuda_dequantize()))
                     : kind == 2 ? planned(mxfp8_cuda_plan_embedding, request(mxfp8_cuda_embedding()))
                                 : planned(mxfp8_cuda_plan_grouped, request(mxfp8_cuda_grouped()));
  if (status != MXFP8_OK && status != MXFP8_BAD_ARGUMENT) fail("plan: status " + std::to_string(status));
  if (status == MXFP8_OK && to == nullptr) fail("a plan was accepted without a place for its result");
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
  switch (random() % 4) {
    case 0:
      return plan_gemm(random, counts);
    case 1:
      return plan_blockwise(random, counts, chance(random, 2));
    case 2:
      return plan_noise(random, counts);
    default:  // a driver is looked for on the disk, which takes long
      return chance(random, 100) ? open_driver(random, counts) : names_and_sizes(random, counts);
  }
}

}  // namespace hostile
