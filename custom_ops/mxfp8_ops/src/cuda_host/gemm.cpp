// Plans of products: each row of the dispatch table (routes.cpp) as steps.
#include <optional>

#include "cuts.h"
#include "executor.h"
#include "kernels.h"
#include "requests.h"
#include "steps.h"

namespace mxfp8::cuda {
namespace {

static_assert(kF32 == 0 && kF16 == 1 && kBF16 == 2, "kBfloat16Parts and kBfloat16Rounded count from kF32");
const Kernel kSwizzleScales("swizzle_scales", {});
const Kernel kFinish("finish", {flag()});                                          // ragged
const Kernel kBfloat16Parts("bfloat16_parts", {kinds_from(kF32, kBF16), flag()});  // ragged
const Kernel kGemmFloat32("gemm_float32", {products()});
// 2 log2(tiles of 8 rows of x) + 1 if few warps share x.
const Kernel kGemmSkinny("gemm_skinny", {products(), {"1, 2", "1", "2", "2, 2", "4", "4, 2", "8", "8, 2"}});

constexpr int64_t kPartsBytes = 256 << 20;  // most bytes of the sums of parts; it limits the rows of x in a slice

// Values, or elements with a scale for each block.
struct Operand {
  Kind kind;
  Argument data, scales;
};

// A weight in bfloat16.
struct Wide {
  Argument data, inexact;  // a word that is not 0 if that cannot hold it
};

struct Product {
  Operand x, b;
  Argument bias, y;
  int64_t y_dtype, m, n, k;
  std::optional<Wide> wide;  // b, if it is kept
  Argument b_swizzled;       // the same for its scales

  Shape shape() const { return {x.kind, b.kind, m, n, k, x.data.aligned(), b.data.aligned()}; }
};

// Float32 sums [parts, m, n] before their last step: part i counts 2^(-i shift).
struct Sums {
  Argument at;
  int64_t parts = 1, shift = 0;
  Argument inexact = 0;  // a word that becomes 1 when a sum is NaN or Inf
};

void launch_swizzle(Steps* steps, Argument scales, int64_t rows, int64_t k, Argument to) {
  steps->launch(kSwizzleScales({}), ceil_div(swizzled_bytes(rows, k), 16 * kThreads),
                {scales, to, rows, scale_count(k)});
}

class GemmPlanner {
 public:
  GemmPlanner(const mxfp8_cuda_place& place, const Ask& ask) : place_(place), ask_(ask) {}

  // With `rounds`, values of x are rounded to bfloat16 first.
  Plan plan_of(Product p, bool rounds) {
    if (p.m * p.n == 0) return steps_.finished();
    if (rounds && parts_of(p.x.kind) > 1) p.x = {kBF16, rounded(&steps_, p.x.kind, p.x.data, p.m * p.k), 0};
    const Row row = route(p);
    by(row, p);
    return steps_.finished(row);
  }

 private:
  // The first row that fits and whose product cuBLASLt does not refuse. What it refuses is no choice in this plan
  // again.
  Row route(const Product& p) {
    for (;;) {
      const Row row = choose(place_, p.shape());
      if (row == kNoRow) {
        const std::string capability =
            std::to_string(place_.capability / 10) + "." + std::to_string(place_.capability % 10);
        const mxfp8_cuda_route* forced = mxfp8_cuda_route_at(int(place_.forced) - 1);
        throw Error(
            MXFP8_NO_ROUTE,
            "no route for " + words_of(p.x.kind, p.b.kind, p.m, p.n, p.k) + " on compute capability " + capability,
            forced == nullptr ? "compute capability 8.0 or later"
                              : std::string("the forced route '") + forced->name + "' to fit",
            "use another device or route");
      }
      const Product asked = row == kParts ? in_parts(p, slice_rows(p), 0, 0) : p;
      const Row inner = row == kParts ? choose(unforced(place_), asked.shape()) : row;
      const int64_t cublaslt = mxfp8_cuda_route_at(inner)->cublaslt;
      if (cublaslt == 0 || !ask_ || ask_(for_cublaslt(inner, asked))) return row;
      place_.cublaslt &= ~cublaslt;
    }
  }

  void by(Row row, const Product& p) {
    if (row == kSkinny) return skinny(p, cut_skinny(place_, p.shape()));
    if (row == kBlockScaled) return block_scaled(p);
    if (row == kLarge) return large(p);
    if (row == kSlices) return slices(p);
    if (row == kParts) return parts(p);
    float32(p);  // takes any product
  }

  void skinny(const Product& p, const SkinnyCut& cut) {
    const Product to = into_sums(p, cut.splits);
    const int instance = kGemmSkinny({product_choice(p.x.kind, p.b.kind), 2 * cut.tiles_log2 + cut.few});
    steps_.launch(instance, cut.splits * cut.blocks,
                  {p.x.data, p.x.scales, p.b.data, p.b.scales, to.bias, to.y, p.m, p.n, p.k, to.y_dtype, cut.splits});
    if (cut.splits > 1) finish(p, {to.y, cut.splits});
  }

  void slices(const Product& p) {
    for (int64_t row = 0; row < p.m; row += kSkinnyRows) {
      const Product slice = rows_of(p, row, std::min(kSkinnyRows, p.m - row));
      SkinnyCut cut = cut_skinny(place_, slice.shape());
      cut.splits = 1;
      skinny(slice, cut);
    }
  }

  void large(const Product& p) {
    const bool quantized = is_element(p.x.kind);
    // One word for both operands: either pass sets it, and one check does the product again.
    const Argument inexact = !p.wide || quantized ? steps_.reserve(4) : Argument();
    if (!inexact.null()) steps_.clear(inexact, 1);
    const Wide b = p.wide ? *p.wide : widened(p.b, p.n, p.k, inexact);
    const Wide x = quantized ? widened(p.x, p.m, p.k, inexact) : Wide{p.x.data, 0};
    multiply(kLarge, p, {kBF16, x.data, 0}, {kBF16, b.data, 0});
    if (!inexact.null()) float32(p, inexact);
    if (p.wide && !b.inexact.null()) float32(p, b.inexact);  // 0: who keeps the weight knows that bfloat16 holds it
  }

  void block_scaled(const Product& p) {
    const Argument x_scales = swizzled(p.x, p.m, p.k);
    const Argument b_scales = p.b_swizzled.null() ? swizzled(p.b, p.n, p.k) : p.b_swizzled;
    multiply(kBlockScaled, p, {p.x.kind, p.x.data, x_scales}, {p.b.kind, p.b.data, b_scales});
  }

  // By cuBLASLt, which writes float32 for finish.cu if there is more to do.
  void multiply(Row row, const Product& p, const Operand& x, const Operand& b) {
    const Argument y = direct(row, p) ? p.y : steps_.reserve(4 * p.m * p.n);
    const LtProduct product = for_cublaslt(row, p);
    steps_.add(MXFP8_MATMUL, {x.data, x.scales, b.data, b.scales, y, p.m, p.n, p.k, product[0], product[1], product[2],
                              steps_.reserve(kCublasLtWorkspace)});
    if (!direct(row, p)) finish(p, {y});
  }

  // cuBLASLt adds no bias here, and writes no float16 for bfloat16.
  static bool direct(Row row, const Product& p) {
    return p.bias.null() && (row == kBlockScaled || p.y_dtype != MXFP8_FLOAT16);
  }

  static LtProduct for_cublaslt(Row row, const Product& p) {
    const bool wide = row == kLarge;
    const auto dtype = [&](const Operand& o) { return wide ? int64_t(MXFP8_BFLOAT16) : row_of(o.kind).code; };
    const int64_t y_dtype = direct(row, p) ? p.y_dtype : int64_t(MXFP8_FLOAT32);
    const int64_t scratch = 0;  // it is aligned to more than 16
    const int64_t x = wide && is_element(p.x.kind) ? scratch : p.x.data.value, y = direct(row, p) ? p.y.value : scratch;
    const int64_t b = !wide ? p.b.data.value : p.wide ? p.wide->data.value : scratch;
    return {dtype(p.x), dtype(p.b), y_dtype, p.m, p.n, p.k, alignment(x), alignment(b), alignment(y)};
  }

  Wide widened(const Operand& x, int64_t rows, int64_t k, Argument inexact) {
    const Argument to = steps_.reserve(2 * rows * k);
    const bool ragged = k % 32 != 0 || unaligned({x.data});
    const int instance = kDequantize({kBF16, format_choice(x.kind), true, ragged});
    steps_.launch(instance, ceil_div(rows * k, 16 * kThreads), {x.data, x.scales, to, k, 1, rows * k, inexact});
    return {to, inexact};
  }

  // float32 and float16 x: its bfloat16 parts are two or three rows for each, and finish.cu adds up.
  void parts(const Product& p) {
    const int64_t count = parts_of(p.x.kind), rows = slice_rows(p);
    place_ = unforced(place_);  // from here on: the products of the parts
    const Argument inexact = steps_.reserve(4);
    const Argument data = steps_.reserve(2 * count * rows * p.k), sums = steps_.reserve(4 * count * rows * p.n);
    steps_.clear(inexact, 1);
    for (int64_t first = 0; first < p.m; first += rows) {
      const Product slice = rows_of(p, first, std::min(rows, p.m - first));
      const int64_t total = slice.m * p.k;
      const bool ragged = total % 16 != 0 || unaligned({slice.x.data});
      steps_.launch(kBfloat16Parts({p.x.kind, ragged}), ceil_div(total, 16 * kThreads), {slice.x.data, data, total});
      const Product inner = in_parts(slice, slice.m, data, sums);
      const int64_t mark = steps_.mark();
      by(route(inner), inner);
      steps_.release(mark);
      finish(slice, {sums, count, 8, inexact});
    }
    float32(p, inexact);
  }

  // The rows of x whose parts are multiplied at once.
  int64_t slice_rows(const Product& p) const {
    const int64_t most = place_.parts_bytes != 0 ? place_.parts_bytes : kPartsBytes;
    return std::min(p.m, std::max(most / (4 * parts_of(p.x.kind) * p.n), kSkinnyRows));
  }

  // The product of the parts of the first rows of x, into sums.
  static Product in_parts(Product p, int64_t rows, Argument parts, Argument sums) {
    p.m = rows * parts_of(p.x.kind), p.x = {kBF16, parts, 0};
    p.bias = 0, p.y = sums, p.y_dtype = MXFP8_FLOAT32;
    return p;
  }

  // Without `only_if`; with it, a word, only if that is not 0 then.
  void float32(const Product& p, Argument only_if = 0) {
    const int64_t tiles = ceil_div(p.m, 64) * ceil_div(p.n, 64);
    steps_.launch(kGemmFloat32({product_choice(p.x.kind, p.b.kind)}), std::min(tiles, 4 * place_.processors),
                  {p.x.data, p.x.scales, p.b.data, p.b.scales, p.bias, p.y, p.m, p.n, p.k, p.y_dtype, only_if});
  }

  Argument swizzled(const Operand& o, int64_t rows, int64_t k) {
    const Argument to = steps_.reserve(swizzled_bytes(rows, k));
    launch_swizzle(&steps_, o.scales, rows, k, to);
    return to;
  }

  void finish(const Product& p, const Sums& s) {
    const bool ragged = p.n % 8 != 0 || unaligned({s.at, p.bias, p.y});
    steps_.launch(kFinish({ragged}), ceil_div(p.m * p.n, 8 * kThreads),
                  {s.at, s.parts, s.shift, p.bias, p.y, p.m * p.n, p.n, p.y_dtype, s.inexact});
  }

  // The product that puts the sums of several parts of K into scratch memory; `p` itself for one.
  Product into_sums(const Product& p, int64_t splits) {
    Product to = p;
    if (splits > 1) to.y = steps_.reserve(4 * splits * p.m * p.n), to.bias = 0, to.y_dtype = MXFP8_FLOAT32;
    return to;
  }

  static Product rows_of(const Product& p, int64_t first, int64_t count) {
    Product slice = p;
    slice.m = count;
    slice.x.data = p.x.data + first * p.k * row_of(p.x.kind).bytes;
    if (!p.x.scales.null()) slice.x.scales = p.x.scales + first * scale_count(p.k);
    slice.y = p.y + first * p.n * row_of(kind_of(p.y_dtype)).bytes;
    return slice;
  }

  mxfp8_cuda_place place_;
  const Ask& ask_;
  Steps steps_;
};

const mxfp8_cuda_place& checked(const mxfp8_cuda_place* request) {
  const mxfp8_cuda_place& place = not_null("place", request);
  constexpr int64_t most = int64_t(1) << 20;  // more than any GPU or measurement has
  check_range({"capability", place.capability}, 0, most);
  check_range({"processors", place.processors}, 1, most);
  check_range({"cublaslt", place.cublaslt}, 0, MXFP8_BFLOAT16_PRODUCTS | MXFP8_BLOCK_SCALED_PRODUCTS);
  check_range({"forced", place.forced}, 0, kRows);
  check_range({"splits", place.splits}, 0, 1024);
  check_range({"warps", place.warps}, 0, kThreads / 32);
  check_range({"parts_bytes", place.parts_bytes}, 0, kMostBytes);
  return place;
}

mxfp8_cuda_gemm checked(const mxfp8_cuda_gemm* request) {
  mxfp8_cuda_gemm g = not_null("gemm", request);
  const bool quantized = is_element(kind_of(g.x_kind));
  check_element_format("b_kind", g.b_kind);
  check_value_dtype("y_dtype", g.y_dtype);
  if (g.activation_dtype != 0) check_activation_dtype("activation_dtype", g.activation_dtype);
  check_sizes({{"m", g.m}, {"n", g.n}, {"k", g.k}});
  if (g.m == 0 || g.n == 0) {
    g.m = g.n = g.k = 0;
    return g;
  }
  check_array(at("x", g.x, bytes_of(g.x_kind)), {g.m, g.k});
  if (quantized) check_scales("x_scales", g.x_scales, g.m, g.k, 1);
  check_array(at("b", g.b, 1), {g.n, g.k});
  check_scales("b_scales", g.b_scales, g.n, g.k, 1);
  if (g.bias != 0) check_array(at("bias", g.bias, 4), {g.n});
  check_array(at("y", g.y, bytes_of(g.y_dtype)), {g.m, g.n});
  if (g.wide != 0) check_array(at("wide", g.wide, 2), {g.n, g.k});
  if (g.wide_inexact != 0) check_array(at("wide_inexact", g.wide_inexact, 4), {1});
  if (g.b_swizzled != 0) check_array(at("b_swizzled", g.b_swizzled, 16), {swizzled_bytes(g.n, g.k) / 16});
  return g;
}

}  // namespace

const Kernel kBfloat16Rounded("bfloat16_rounded", {kinds_from(kF32, kBF16), flag()});

Argument rounded(Steps* steps, Kind kind, Argument x, int64_t total) {
  if (total == 0) return x;  // nothing is read there, and scratch memory may have no such place
  const Argument to = steps->reserve(2 * total);
  const bool ragged = total % 16 != 0 || unaligned({x});
  steps->launch(kBfloat16Rounded({kind, ragged}), ceil_div(total, 16 * kThreads), {x, to, total});
  return to;
}

Plan swizzle(int64_t scales, int64_t rows, int64_t k, int64_t to) {
  Steps steps;
  launch_swizzle(&steps, scales, rows, k, to);
  return steps.finished();
}

Plan plan(const mxfp8_cuda_place& place, const mxfp8_cuda_gemm& g, const Ask& ask) {
  const Operand x = {kind_of(g.x_kind), g.x, g.x_scales}, b = {element_kind(g.b_kind), g.b, g.b_scales};
  Product p = {x, b, g.bias, g.y, row_of(value_kind(g.y_dtype)).code, g.m, g.n, g.k, {}, g.b_swizzled};
  if (place.processors < 1)
    throw Error(MXFP8_BAD_ARGUMENT, "a GPU with 0 multiprocessors", "1 or more", "report this as a bug");
  for (const int64_t operand : {volume({g.m, g.n}), volume({g.m, g.k}), volume({g.n, g.k})}) volume({8, operand});
  if (g.wide != 0) p.wide = Wide{g.wide, g.wide_inexact};
  return GemmPlanner(place, ask).plan_of(p, g.activation_dtype == MXFP8_BFLOAT16);
}

std::vector<int> gemm_kernels(int64_t x_kind, int64_t b_kind, const mxfp8_cuda_place& place) {
  const Kind x = kind_of(x_kind), b = element_kind(b_kind);
  std::vector<int> numbers;
  kFinish.append(&numbers, {Kernel::kAny});
  for (const Kind kind : {x, kBF16}) {
    if (kind != x && parts_of(x) == 1) continue;  // only float32 and float16 have parts
    kGemmFloat32.append(&numbers, {product_choice(kind, b)});
    kGemmSkinny.append(&numbers, {product_choice(kind, b), Kernel::kAny});
  }
  if (parts_of(x) > 1) {
    kBfloat16Parts.append(&numbers, {x, Kernel::kAny});
    kBfloat16Rounded.append(&numbers, {x, Kernel::kAny});
  }
  if (choose(place, many_rows(x, b, 16, kBlock, true)) == kBlockScaled) kSwizzleScales.append(&numbers, {});
  kDequantize.append(&numbers, {kBF16, format_choice(b), true, Kernel::kAny});
  if (is_element(x) && x != b) kDequantize.append(&numbers, {kBF16, format_choice(x), true, Kernel::kAny});
  return numbers;
}

}  // namespace mxfp8::cuda

extern "C" MXFP8_API int mxfp8_cuda_plan_gemm(const mxfp8_cuda_place* place, const mxfp8_cuda_gemm* gemm,
                                              const mxfp8_cuda_queue* queue, mxfp8_cuda_plan* to) {
  using namespace mxfp8::cuda;
  return answer_with(queue, to, [&] {
    if (queue == nullptr) return plan(checked(place), checked(gemm));
    const Executor& executor = Executor::for_gpu(int(queue->gpu));
    Warning warning(executor.gpu());
    return plan(checked(place), checked(gemm), executor.ask(&warning));
  });
}
