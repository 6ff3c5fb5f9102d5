// Plans of grouped products.
#include "kernels.h"
#include "requests.h"
#include "routes.h"
#include "steps.h"

namespace mxfp8::cuda {
namespace {

const Kernel kGroupRows("group_rows", {});
const Kernel kGemmGrouped("gemm_grouped", {products(), {"1", "2", "4", "8"}});  // tiles of 8 rows of x

mxfp8_cuda_grouped checked(const mxfp8_cuda_grouped* request) {
  mxfp8_cuda_grouped g = not_null("grouped", request);
  const bool quantized = is_element(kind_of(g.x_kind));
  check_element_format("b_kind", g.b_kind);
  check_value_dtype("y_dtype", g.y_dtype);
  check_activation_dtype("activation_dtype", g.activation_dtype);
  check_sizes({{"x_rows", g.x_rows},
               {"indices", g.indices},
               {"count", g.count},
               {"n", g.n},
               {"k", g.k},
               {"outer", g.outer},
               {"middle", g.middle},
               {"inner", g.inner}});
  const int64_t rows = volume({g.outer, g.middle, g.inner});
  if (rows == 0 || g.n == 0) {
    g.outer = g.n = 0;
    return g;
  }
  // Places, slots and experts are 32-bit.
  check_range({"rows of y", rows}, 0, INT32_MAX);
  check_range({"x_rows", g.x_rows}, 0, INT32_MAX);
  check_range({"count", g.count}, 0, INT32_MAX - 2);
  const auto check_strides = [&](const char* name, int64_t outer, int64_t middle, int64_t inner, int64_t size) {
    for (const int64_t stride : {outer, middle, inner}) check_range({name, stride}, 0, INT32_MAX);
    check_range({name, (g.outer - 1) * outer + (g.middle - 1) * middle + (g.inner - 1) * inner}, 0, size - 1);
  };
  check_strides("the last row of x", g.x_outer, g.x_middle, g.x_inner, g.x_rows);
  check_strides("the last index", g.e_outer, g.e_middle, g.e_inner, g.indices);
  check_array(at("x", g.x, bytes_of(g.x_kind)), {g.x_rows, g.k});
  if (quantized) check_scales("x_scales", g.x_scales, g.x_rows, g.k, 1);
  check_array(at("b", g.b, 1), {g.count, g.n, g.k});
  check_scales("b_scales", g.b_scales, volume({g.count, g.n}), g.k, 1);
  check_array(at("experts", g.experts, 8), {g.indices});
  check_array(at("y", g.y, bytes_of(g.y_dtype)), {rows, g.n});
  return g;
}

// Tiles for twice as many rows of an expert as there are on average: more would compute what is not there.
int tiles_log2(int64_t rows, int64_t count, int64_t parts) {
  const int64_t most = std::min(rows, 2 * ceil_div(rows, std::max<int64_t>(count, 1)));
  int log2 = 0;
  while (log2 < 3 && (8 << log2) / parts < most) ++log2;
  return log2;
}

}  // namespace

template <>
Plan plan(const mxfp8_cuda_grouped& g) {
  Steps steps;
  const int64_t rows = volume({g.outer, g.middle, g.inner});
  if (rows * g.n == 0) return steps.finished();
  Kind x_kind = kind_of(g.x_kind);
  Argument x = g.x;
  if (g.activation_dtype == MXFP8_BFLOAT16 && parts_of(x_kind) > 1) {
    x = rounded(&steps, x_kind, x, g.x_rows * g.k);
    x_kind = kBF16;
  }
  const int log2 = tiles_log2(rows, g.count, parts_of(x_kind));
  const int64_t tokens = (8 << log2) / parts_of(x_kind);
  const int64_t slots = rows / tokens + std::min(g.count + 2, rows), blocks = ceil_div(g.n, log2 == 0 ? 16 : 64);
  const bool whole = g.k % 32 == 0 && g.k > 0 && g.k < (1 << 25) && x.aligned() && g.b % 16 == 0;
  const Argument places = steps.reserve(8 * rows), at = steps.reserve(16 * slots);
  steps.clear(at, 4 * slots);
  steps.launch(kGroupRows({}), g.count + 2,
               {g.experts, places, at, rows, g.count, tokens, g.middle, g.inner, g.x_outer, g.x_middle, g.x_inner,
                g.e_outer, g.e_middle, g.e_inner});
  steps.launch(kGemmGrouped({product_choice(x_kind, element_kind(g.b_kind)), log2}), volume({slots, blocks}),
               {x, g.x_scales, g.b, g.b_scales, g.y, places, at, g.count, g.n, g.k, row_of(value_kind(g.y_dtype)).code,
                slots, whole});
  return steps.finished();
}

template <>
std::vector<int> kernels<mxfp8_cuda_grouped>(int64_t x_kind, int64_t b_kind) {
  std::vector<int> numbers = {kGroupRows({})};
  const Kind x = kind_of(x_kind);
  kGemmGrouped.append(&numbers, {product_choice(x, element_kind(b_kind)), Kernel::kAny});
  if (parts_of(x) == 1) return numbers;
  kBfloat16Rounded.append(&numbers, {x, Kernel::kAny});
  kGemmGrouped.append(&numbers, {product_choice(kBF16, element_kind(b_kind)), Kernel::kAny});
  return numbers;
}

}  // namespace mxfp8::cuda

MXFP8_CUDA_PLAN(grouped)
