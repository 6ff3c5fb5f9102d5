#include "cuda_launch.h"

#include <algorithm>

#include "../cpu/ops.h"

namespace mxfp8::ort {
namespace {

constexpr int kCublasTranspose = 1, kCublasNoTranspose = 0, kCublasCompute32F = 68, kCublasDefaultAlgorithm = -1;
constexpr int kCudaR16BF = 14, kCudaR32F = 0;
constexpr int kDisallowReducedPrecisionReduction = 16;  // sums of split-K stay in float32
constexpr int64_t kSkinnyMost = 64;                     // rows gemm_skinny takes

// How many warps of gemm_skinny share A, for 8 << i rows: `few` where n is too small to give every multiprocessor work.
constexpr int skinny_warps(int i, bool few) { return few ? (i == 0 ? 1 : 2) : (i == 0 ? 2 : 4); }

// Bytes a block reads ahead, and those it streams while a second kernel is launched: cuda_skinny.py.
constexpr int64_t kAhead = 32 << 10, kSecondLaunch = 96 << 10;

std::string kind(int dtype) {
  switch (dtype) {
    case MXFP8_FLOAT32:
      return "F32";
    case MXFP8_FLOAT16:
      return "F16";
    case MXFP8_BFLOAT16:
      return "BF16";
    case MXFP8_E4M3:
      return "E4M3";
    default:
      return "E5M2";
  }
}

// How many rows of bfloat16 a row of A is.
int64_t parts_of(int a_format) { return a_format == MXFP8_FLOAT32 ? 3 : a_format == MXFP8_FLOAT16 ? 2 : 1; }

const char* flag(bool value) { return value ? "true" : "false"; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class... Pointers>
bool unaligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 != 0) || ...);
}

int64_t aligned(int64_t bytes) { return ceil_div(bytes, 256) * 256; }

// Where the large route keeps what in its scratch memory.
struct LargeLayout {
  LargeLayout(const GemmArgs& g, bool wide)  // B is kept
      : direct(g.bias == nullptr && g.y_dtype != MXFP8_FLOAT16),
        a(b + (wide ? 0 : aligned(2 * g.n * g.k))),
        sums(a + (is_element_format(g.a_format) ? aligned(2 * g.m * g.k) : 0)),
        bytes(sums + (direct ? 0 : 4 * g.m * g.n)) {}
  bool direct;                       // cuBLAS writes y itself
  static constexpr int64_t b = 256;  // before it, one word each for A and B: whether bfloat16 does not hold it
  int64_t a, sums, bytes;
};

constexpr int64_t kPartsBytes = 256 << 20;  // of the sums of parts at most: cuda_kernels.py

// Where the route parts keeps what: before the parts of A, a word that says whether a sum is not finite.
struct PartsLayout {
  explicit PartsLayout(const GemmArgs& g)
      : count(parts_of(g.a_format)),
        rows(std::min(g.m, std::max(kPartsBytes / (4 * count * g.n), kSkinnyMost))),
        sums(parts + aligned(2 * count * rows * g.k)),
        inner(sums + aligned(4 * count * rows * g.n)) {}
  int64_t count, rows;  // parts of A, and rows of A at a time
  static constexpr int64_t parts = 256;
  int64_t sums, inner;
};

// The product of the parts of `m` rows of A; without memory, only its shape.
GemmArgs inner_product(const GemmArgs& g, const PartsLayout& at, int64_t m, char* scratch = nullptr) {
  GemmArgs inner = g;
  inner.a_format = MXFP8_BFLOAT16, inner.m = at.count * m, inner.bias = nullptr, inner.y_dtype = MXFP8_FLOAT32;
  inner.a = scratch == nullptr ? nullptr : scratch + at.parts;
  inner.y = scratch == nullptr ? nullptr : scratch + at.sums;
  return inner;
}

}  // namespace

CudaQuantize::CudaQuantize(const Gpu& gpu, int dtype, int format) : gpu_(gpu) {
  const std::string types = kind(dtype) + ", " + kind(format) + ", ";
  for (const bool ragged : {false, true}) {
    rows_[ragged] = gpu.kernel("quantize_rows<" + types + "false, " + flag(ragged) + ">");
    columns_[ragged] = gpu.kernel("quantize_columns<" + types + "false, PLAIN, " + flag(ragged) + ">");
  }
}

void CudaQuantize::operator()(const QuantizeArgs& q, Stream stream) const {
  if (q.outer * q.k * q.inner == 0) return;
  const int64_t blocks = ceil_div(q.k, kBlock), increment = q.increment;
  if (q.inner == 1) {
    const bool ragged = q.k % kBlock != 0 || unaligned(q.x, q.elements);
    const int64_t grid = ceil_div(q.outer * blocks * 2, kThreads);
    gpu_.launch(rows_[ragged], grid, stream, q.x, q.elements, q.scales, q.outer, q.k, increment);
  } else {
    const bool ragged = q.inner % 16 != 0 || unaligned(q.x, q.elements, q.scales);
    const int64_t grid = q.outer * blocks * ceil_div(q.inner, 512), none = 0;
    gpu_.launch(columns_[ragged], grid, stream, q.x, q.elements, q.scales, none, none, q.k, q.inner, increment);
  }
}

CudaDequantize::CudaDequantize(const Gpu& gpu, int format, int dtype, bool last_axis_only) : gpu_(gpu) {
  for (const bool last : {false, true}) {
    for (const bool ragged : {false, true}) {
      if (!last && last_axis_only) continue;
      functions_[last][ragged] =
          gpu.kernel("dequantize<" + kind(dtype) + ", " + kind(format) + ", " + flag(last) + ", " + flag(ragged) + ">");
    }
  }
}

void CudaDequantize::operator()(const DequantizeArgs& d, Stream stream, uint32_t* inexact) const {
  const int64_t total = d.outer * d.k * d.inner;
  if (total == 0) return;
  const bool last = d.inner == 1;
  const bool ragged = last ? d.k % kBlock != 0 || unaligned(d.elements, d.y)
                           : d.inner % 16 != 0 || unaligned(d.elements, d.y, d.scales);
  gpu_.launch(functions_[last][ragged], ceil_div(total, 16 * kThreads), stream, d.elements, d.scales, d.y, d.k, d.inner,
              total, inexact);
}

CudaGemm::CudaGemm(const Gpu& gpu, int a_format, int b_format)
    : gpu_(gpu), b_format_(b_format), skinny_{}, finish_{}, parts_{} {
  const std::string types = kind(a_format) + ", " + kind(b_format);
  float32_ = gpu.kernel("gemm_float32<" + types + ">");
  for (const bool ragged : {false, true}) finish_[ragged] = gpu.kernel(std::string("finish<") + flag(ragged) + ">");
  for (int i = 0; i < 4; ++i) {
    for (const bool few : {false, true}) {
      const bool implied = few == (i == 0);  // the template's default
      const std::string warps = implied ? "" : ", " + std::to_string(skinny_warps(i, few));
      skinny_[i][few] = gpu.kernel("gemm_skinny<" + types + ", " + std::to_string(1 << i) + warps + ">");
    }
  }
  if (parts_of(a_format) > 1) {
    const std::string name = "bfloat16_parts<" + kind(a_format) + ", ";
    for (const bool ragged : {false, true}) parts_[ragged] = gpu.kernel(name + flag(ragged) + ">");
    inner_ = std::make_unique<CudaGemm>(gpu, MXFP8_BFLOAT16, b_format);
    return;
  }
  if (gpu.properties().cublas_gemm_ex == nullptr) return;
  widen_b_ = std::make_unique<CudaDequantize>(gpu, b_format, MXFP8_BFLOAT16, true);
  if (is_element_format(a_format)) {
    widen_a_ = std::make_unique<CudaDequantize>(gpu, a_format, MXFP8_BFLOAT16, true);
  }
}

CudaGemm::Route CudaGemm::route(const GemmArgs& g, bool cublas) const {
  if (g.k == 0) return Route::kFloat32;  // nothing but the bias
  const bool whole = g.k % kBlock == 0 && g.k < (1 << 25) && !unaligned(g.a, g.b);
  if (whole && g.m * parts_of(g.a_format) <= kSkinnyMost) return Route::kSkinny;
  if (inner_ != nullptr) {
    const auto inner = inner_->route(inner_product(g, PartsLayout(g), g.m), cublas);
    return inner == Route::kFloat32 ? inner : Route::kParts;
  }
  const bool fits_int = g.m <= INT32_MAX && g.n <= INT32_MAX && g.k <= INT32_MAX;
  if (cublas && widen_b_ != nullptr && fits_int) return Route::kLarge;
  return whole ? Route::kSlices : Route::kFloat32;
}

size_t CudaGemm::scratch_bytes(const GemmArgs& g, bool cublas, bool wide) const {
  if (g.m * g.n == 0) return 0;
  const Route route = this->route(g, cublas);
  if (route == Route::kSkinny) {
    const int64_t splits = cut(g).splits;
    return splits == 1 ? 0 : size_t(4 * splits * g.m * g.n);
  }
  if (route == Route::kParts) {
    const PartsLayout at(g);
    const int64_t last = (g.m - 1) % at.rows + 1;
    const size_t most = std::max(inner_->scratch_bytes(inner_product(g, at, at.rows), cublas, wide),
                                 inner_->scratch_bytes(inner_product(g, at, last), cublas, wide));
    return size_t(at.inner) + most;
  }
  return route == Route::kLarge ? size_t(LargeLayout(g, wide).bytes) : 0;
}

void CudaGemm::operator()(const GemmArgs& g, const GemmResources& resources) const {
  if (g.m * g.n == 0) return;
  switch (route(g, resources.cublas != nullptr)) {
    case Route::kSkinny:
      return skinny(g, resources);
    case Route::kLarge:
      return large(g, resources);
    case Route::kSlices:
      return slices(g, resources.stream);
    case Route::kParts:
      return parts(g, resources);
    case Route::kFloat32:
      return float32(g, resources.stream);
  }
}

CudaGemm::Cut CudaGemm::cut(const GemmArgs& g) const {
  int i = 0;
  while (g.m * parts_of(g.a_format) > (8 << i)) ++i;
  const bool two_blocks = (is_element_format(g.a_format) ? 1 : 2) << i <= 2;  // fit a multiprocessor, and are wanted
  const int64_t wanted = int64_t(gpu_.properties().processors) * (two_blocks ? 2 : 1);
  const bool few = 10 * ceil_div(g.n, 16 * skinny_warps(i, false)) < 9 * wanted;
  const int64_t rows = 16 * skinny_warps(i, few), blocks = ceil_div(g.n, rows), streamed = rows * g.k;
  const int64_t splits = std::min(wanted / blocks, streamed / kAhead);
  const bool worth = splits > 1 && streamed * (splits - 1) >= kSecondLaunch * splits;
  return {i, few, blocks, worth ? splits : 1};
}

void CudaGemm::skinny(const GemmArgs& g, const GemmResources& resources) const {
  Cut cut = this->cut(g);
  if (resources.scratch == nullptr) cut.splits = 1;
  const bool whole = cut.splits == 1;
  gpu_.launch(skinny_[cut.tiles][cut.few], cut.splits * cut.blocks, resources.stream, g.a, g.a_scales, g.b, g.b_scales,
              whole ? g.bias : nullptr, whole ? g.y : resources.scratch, g.m, g.n, g.k,
              int64_t(whole ? g.y_dtype : MXFP8_FLOAT32), cut.splits);
  if (!whole) finish(g, resources.scratch, resources.stream, {cut.splits});
}

void CudaGemm::slices(const GemmArgs& g, Stream stream) const {
  const bool quantized = g.a_scales != nullptr;
  for (int64_t row = 0; row < g.m; row += kSkinnyMost) {
    GemmArgs slice = g;
    slice.m = g.m - row < kSkinnyMost ? g.m - row : kSkinnyMost;
    slice.a = static_cast<const char*>(g.a) + row * g.k * (quantized ? 1 : 2);
    if (quantized) slice.a_scales = g.a_scales + row * (g.k / kBlock);
    slice.y = static_cast<char*>(g.y) + row * g.n * int64_t(value_bytes(g.y_dtype));
    skinny(slice, {stream, nullptr, nullptr});
  }
}

void CudaGemm::large(const GemmArgs& g, const GemmResources& resources) const {
  const LargeLayout at(g, resources.wide != nullptr);
  auto* inexact = reinterpret_cast<uint32_t*>(resources.scratch);
  gpu_.check(gpu_.driver().fill(reinterpret_cast<uint64_t>(inexact), 0, 2, resources.stream), "clear memory");
  const WideWeight b = resources.wide == nullptr ? WideWeight{resources.scratch + at.b, inexact} : *resources.wide;
  if (resources.wide == nullptr) widen(g.b, g.b_scales, g.n, g.k, b, resources.stream);
  const void* a = g.a;
  if (widen_a_ != nullptr) {
    void* wide = resources.scratch + at.a;
    (*widen_a_)({g.a_format, static_cast<const uint8_t*>(g.a), g.a_scales, g.m, g.k, 1, MXFP8_BFLOAT16, wide},
                resources.stream, inexact + 1);
    a = wide;
  }
  void* sums = at.direct ? g.y : resources.scratch + at.sums;
  matmul_bf16(g, a, b.data, sums, at.direct && g.y_dtype == MXFP8_BFLOAT16 ? kCudaR16BF : kCudaR32F, resources.cublas);
  if (!at.direct) finish(g, sums, resources.stream, {});
  if (widen_a_ != nullptr) float32(g, resources.stream, inexact + 1);
  float32(g, resources.stream, b.inexact);
}

void CudaGemm::widen(const uint8_t* b, const uint8_t* b_scales, int64_t n, int64_t k, const WideWeight& to,
                     Stream stream) const {
  if (inner_ != nullptr) return inner_->widen(b, b_scales, n, k, to, stream);
  if (widen_b_ == nullptr) {
    throw CudaError(gpu_.where() + ": a weight is to be kept in bfloat16, but there is no cuBLAS that reads it; " +
                    "expected that of ONNX Runtime's CUDA provider; leave keep_wide out");
  }
  (*widen_b_)({b_format_, b, b_scales, n, k, 1, MXFP8_BFLOAT16, to.data}, stream, to.inexact);
}

void CudaGemm::parts(const GemmArgs& g, const GemmResources& resources) const {
  const PartsLayout at(g);
  auto* inexact = reinterpret_cast<uint32_t*>(resources.scratch);
  gpu_.check(gpu_.driver().fill(reinterpret_cast<uint64_t>(inexact), 0, 1, resources.stream), "clear memory");
  void* const to = resources.scratch + at.parts;
  for (int64_t first = 0; first < g.m; first += at.rows) {
    GemmArgs slice = g;
    slice.m = std::min(at.rows, g.m - first);
    slice.a = static_cast<const char*>(g.a) + first * g.k * int64_t(value_bytes(g.a_format));
    slice.y = static_cast<char*>(g.y) + first * g.n * int64_t(value_bytes(g.y_dtype));
    const int64_t total = slice.m * g.k;
    const bool ragged = total % 16 != 0 || unaligned(slice.a);
    gpu_.launch(parts_[ragged], ceil_div(total, 16 * kThreads), resources.stream, slice.a, to, total);
    const GemmArgs inner = inner_product(slice, at, slice.m, resources.scratch);
    (*inner_)(inner, {resources.stream, resources.cublas, resources.scratch + at.inner, resources.wide});
    finish(slice, inner.y, resources.stream, {at.count, 8, inexact});
  }
  float32(g, resources.stream, inexact);
}

void CudaGemm::finish(const GemmArgs& g, const void* sums, Stream stream, const Parts& parts) const {
  const float* no_scales = nullptr;
  const bool ragged = g.n % 8 != 0 || unaligned(sums, g.bias, g.y);
  const int64_t total = g.m * g.n;
  gpu_.launch(finish_[ragged], ceil_div(total, 8 * kThreads), stream, sums, parts.count, parts.shift, no_scales,
              no_scales, g.bias, g.y, total, g.n, int64_t(g.y_dtype), parts.inexact);
}

// cuBLAS is column-major: y^T [N, M] = b [N, K] a^T, where our row-major b is its transposed operand.
void CudaGemm::matmul_bf16(const GemmArgs& g, const void* a, const void* b, void* y, int y_type, void* cublas) const {
  using GemmEx = int(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                     const void*, void*, int, int, int, int);
  const auto& properties = gpu_.properties();
  const auto get_mode = reinterpret_cast<int (*)(void*, int*)>(properties.cublas_get_math_mode);
  const auto set_mode = reinterpret_cast<int (*)(void*, int)>(properties.cublas_set_math_mode);
  const int m = int(g.m), n = int(g.n), k = int(g.k);
  const float one = 1, zero = 0;
  int mode = 0;
  int status = get_mode(cublas, &mode);
  if (status == 0) status = set_mode(cublas, kDisallowReducedPrecisionReduction);
  if (status == 0) {
    status = reinterpret_cast<GemmEx*>(properties.cublas_gemm_ex)(
        cublas, kCublasTranspose, kCublasNoTranspose, n, m, k, &one, b, kCudaR16BF, k, a, kCudaR16BF, k, &zero, y,
        y_type, n, kCublasCompute32F, kCublasDefaultAlgorithm);
    const int restored = set_mode(cublas, mode);
    if (status == 0) status = restored;
  }
  if (status != 0) gpu_.fail("multiply", status, "cuBLAS");
}

void CudaGemm::float32(const GemmArgs& g, Stream stream, const uint32_t* only_if) const {
  const int64_t tiles = ceil_div(g.m, 64) * ceil_div(g.n, 64), most = 4 * int64_t(gpu_.properties().processors);
  gpu_.launch(float32_, tiles < most ? tiles : most, stream, g.a, g.a_scales, g.b, g.b_scales, g.bias, g.y, g.m, g.n,
              g.k, int64_t(g.y_dtype), only_if);
}

}  // namespace mxfp8::ort
