#include "cublaslt.h"

#include <memory>

#include "../cpu/system.h"
#include "routes.h"

namespace mxfp8::cuda {
namespace {

// cublasLt.h and library_types.h
constexpr int kCompute32F = 68, kCudaR32F = 0, kTransposeA = 3, kScaleOfA = 17, kScaleOfB = 18, kScaleModeOfA = 31;
constexpr int kScaleModeOfB = 32, kBlocksOf32 = 2, kTransposed = 1, kMostWorkspace = 1, kAlignmentOfA = 5;
constexpr size_t kMostAnswers = 4096;  // M may differ at each call; an answer has some hundred bytes

void* pointer(int64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

// A product as cuBLASLt has it. It is column-major: y^T [n, m] = b [n, k] x^T, where our row-major b is its transposed
// operand A, and x its operand B.
struct CublasLt::Description {
  Description(const Functions& lt, const BlockScaled& p, int64_t x_scales, int64_t b_scales) : lt(lt) {
    const auto [x_format, b_format, y_dtype, m, n, k] = p;
    const auto set = [&](int attribute, auto value) {
      if (status == 0) status = lt.describe(product, attribute, &value, sizeof value);
    };
    const auto lay_out = [&](void** layout, int64_t code, int64_t rows, int64_t columns) {
      const int type = row_of(kind_of(code)).cuda_type;
      if (status == 0) status = lt.create_layout(layout, type, uint64_t(rows), uint64_t(columns), rows);
    };
    status = lt.create_description(&product, kCompute32F, kCudaR32F);
    set(kTransposeA, int32_t(kTransposed));
    set(kScaleModeOfA, int32_t(kBlocksOf32));
    set(kScaleModeOfB, int32_t(kBlocksOf32));
    set(kScaleOfA, b_scales);
    set(kScaleOfB, x_scales);
    lay_out(&b, b_format, k, n);
    lay_out(&x, x_format, k, m);
    lay_out(&y, y_dtype, n, m);
  }
  ~Description() {
    for (void* layout : {b, x, y}) {
      if (layout != nullptr) lt.destroy_layout(layout);
    }
    if (product != nullptr) lt.destroy_description(product);
  }
  Description(const Description&) = delete;

  const Functions& lt;
  int status;
  void *product = nullptr, *b = nullptr, *x = nullptr, *y = nullptr;
};

CublasLt& CublasLt::of(const Gpu& gpu) {
  using Key = std::pair<std::string, int>;  // the file, the GPU
  static std::mutex mutex;
  static auto& all = *new std::map<Key, std::unique_ptr<CublasLt>>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& one = all[{gpu.cublaslt(), gpu.index()}];
  if (one == nullptr) one.reset(new CublasLt(gpu.cublaslt()));
  return *one;
}

CublasLt::CublasLt(const std::string& file) {
  if (file.empty()) {
    unusable_ = "cuBLASLt is not installed";
    return;
  }
  unusable_ = load_functions(file.c_str(), {{"cublasLtGetVersion", &lt_.version},
                                            {"cublasLtGetStatusName", &lt_.status_name},
                                            {"cublasLtCreate", &lt_.create},
                                            {"cublasLtMatmulDescCreate", &lt_.create_description},
                                            {"cublasLtMatmulDescSetAttribute", &lt_.describe},
                                            {"cublasLtMatmulDescDestroy", &lt_.destroy_description},
                                            {"cublasLtMatrixLayoutCreate", &lt_.create_layout},
                                            {"cublasLtMatrixLayoutDestroy", &lt_.destroy_layout},
                                            {"cublasLtMatmulPreferenceCreate", &lt_.create_preference},
                                            {"cublasLtMatmulPreferenceSetAttribute", &lt_.prefer},
                                            {"cublasLtMatmulPreferenceDestroy", &lt_.destroy_preference},
                                            {"cublasLtMatmulAlgoGetHeuristic", &lt_.choose},
                                            {"cublasLtMatmul", &lt_.multiply}});
  if (!unusable_.empty()) return;
  const int status = lt_.create(&handle_);
  if (status != 0) unusable_ = std::string("cublasLtCreate: ") + lt_.status_name(status);
}

CublasLt::Answer CublasLt::ask(const BlockScaled& p) const {
  if (!unusable_.empty()) return {unusable_, {}};
  constexpr int64_t somewhere = 1 << 20;  // the library wants addresses of scales, and does not read them here
  const Description d(lt_, p, somewhere, somewhere);
  void* preference = nullptr;
  int status = d.status, count = 0;
  if (status == 0) status = lt_.create_preference(&preference);
  const size_t workspace = kCublasLtWorkspace;
  if (status == 0) status = lt_.prefer(preference, kMostWorkspace, &workspace, sizeof workspace);
  // Operands are aligned to 16 bytes, as the row of the table demands; the library assumes 256.
  for (int operand = 0; status == 0 && operand < 4; ++operand) {
    const uint32_t alignment = 16;
    status = lt_.prefer(preference, kAlignmentOfA + operand, &alignment, sizeof alignment);
  }
  Choice choice = {};
  if (status == 0) status = lt_.choose(handle_, d.product, d.b, d.x, d.y, d.y, preference, 1, &choice, &count);
  if (preference != nullptr) lt_.destroy_preference(preference);
  if (status == 0 && count > 0) status = choice.status;
  if (status == 0 && count > 0) return {"", choice};
  return {"cuBLASLt " + std::to_string(lt_.version()) + ": " + (status == 0 ? "no algorithm" : lt_.status_name(status)),
          {}};
}

CublasLt::Answer CublasLt::answer(const BlockScaled& p) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = answers_.find(p);
  if (known != answers_.end()) return known->second;
  if (answers_.size() >= kMostAnswers) answers_.clear();
  return answers_.emplace(p, ask(p)).first->second;
}

bool CublasLt::multiplies(const Gpu& gpu, const BlockScaled& p) {
  const std::string refusal = answer(p).refusal;
  if (refusal.empty()) return true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!warned_.insert({p[0], p[1], p[2]}).second) return false;
  }
  const auto name = [](int64_t code) { return std::string(row_of(kind_of(code)).name); };
  gpu.warn(gpu.where() + ": no product on FP8 tensor cores: " + name(p[0]) + " times " + name(p[1]) + " -> " +
           name(p[2]) + ", M = " + std::to_string(p[3]) + ", N = " + std::to_string(p[4]) +
           ", K = " + std::to_string(p[5]) + " (" + refusal + "); such products take the next row of the dispatch " +
           "table; to use these cores, pip install --upgrade nvidia-cublas");
  return false;
}

void CublasLt::multiply(const Gpu& gpu, const int64_t (&arguments)[MXFP8_MOST_ARGUMENTS], Stream stream) {
  const auto [x, x_scales, b, b_scales, y, m, n, k, x_format, b_format, y_dtype, workspace, none, nothing] = arguments;
  const BlockScaled p = {x_format, b_format, y_dtype, m, n, k};
  const Answer known = answer(p);
  if (!known.refusal.empty()) throw CudaError(gpu.where() + ": cannot multiply: " + known.refusal);
  const Description d(lt_, p, x_scales, b_scales);
  const float one = 1, zero = 0;
  int status = d.status;
  if (status == 0) {
    status = lt_.multiply(handle_, d.product, &one, pointer(b), d.b, pointer(x), d.x, &zero, pointer(y), d.y,
                          pointer(y), d.y, known.choice.algorithm, pointer(workspace), known.choice.workspace, stream);
  }
  if (status != 0) gpu.fail("multiply", status, "cuBLASLt");
}

}  // namespace mxfp8::cuda
