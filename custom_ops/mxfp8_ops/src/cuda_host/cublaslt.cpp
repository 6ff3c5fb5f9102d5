#include "cublaslt.h"

#include <memory>

#include "../cpu/system.h"
#include "routes.h"

namespace mxfp8::cuda {
namespace {

// cublasLt.h and library_types.h
constexpr int kCompute32F = 68, kCudaR32F = 0, kTransposeA = 3, kScaleOfA = 17, kScaleOfB = 18, kScaleModeOfA = 31;
constexpr int kScaleModeOfB = 32, kBlocksOf32 = 2, kTransposed = 1, kMostWorkspace = 1, kReductions = 3;
constexpr int kReductionInFloat32 = 2, kAlignmentOfA = 5;
constexpr int kNotInitialized = 1, kInvalidValue = 7, kArchMismatch = 8, kNotSupported = 15;  // cublasStatus_t
constexpr size_t kMostAnswers = 4096;  // M may differ at each call; an answer has some hundred bytes

// Whether a status is an answer about the product.
bool refuses(int status) { return status == kInvalidValue || status == kArchMismatch || status == kNotSupported; }

void* pointer(int64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

// A product as cuBLASLt has it. It is column-major: y^T [n, m] = b [n, k] x^T, where our row-major b is its transposed
// operand A, and x its operand B.
struct CublasLt::Description {
  Description(const Functions& lt, const LtProduct& p, int64_t x_scales, int64_t b_scales) : lt(lt) {
    const auto [x_dtype, b_dtype, y_dtype, m, n, k, of_x, of_b, of_y] = p;
    const auto set = [&](int attribute, auto value) {
      if (status == 0) status = lt.describe(product, attribute, &value, sizeof value);
    };
    const auto lay_out = [&](void** layout, int64_t code, int64_t rows, int64_t columns) {
      const int type = row_of(kind_of(code)).cuda_type;
      if (status == 0) status = lt.create_layout(layout, type, uint64_t(rows), uint64_t(columns), rows);
    };
    status = lt.create_description(&product, kCompute32F, kCudaR32F);
    set(kTransposeA, int32_t(kTransposed));
    if (x_scales != 0) {
      set(kScaleModeOfA, int32_t(kBlocksOf32));
      set(kScaleModeOfB, int32_t(kBlocksOf32));
      set(kScaleOfA, b_scales);
      set(kScaleOfB, x_scales);
    }
    lay_out(&b, b_dtype, k, n);
    lay_out(&x, x_dtype, k, m);
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
    unusable_ = "not found";
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
}

void CublasLt::fail(const Gpu& gpu, int status) const {
  throw CudaError(gpu.where() + ": GPU " + std::to_string(gpu.index()) + ": cannot multiply: cuBLASLt " +
                  std::to_string(lt_.version()) + ": " + lt_.status_name(status) +
                  "; expected success; see nvidia-smi for the state and the memory of the GPU");
}

CublasLt::Answer CublasLt::ask(const Gpu& gpu, const LtProduct& p) {
  if (unusable_.empty() && handle_ == nullptr) {
    void* handle = nullptr;
    const int status = lt_.create(&handle);
    if (status == 0) handle_ = handle;
    if (status != 0 && status != kNotInitialized && !refuses(status)) fail(gpu, status);
    if (status != 0) unusable_ = std::string("cublasLtCreate: ") + lt_.status_name(status);
  }
  if (!unusable_.empty()) return {unusable_, {}};
  // The library wants addresses of scales, and does not read them here.
  const int64_t scales = p[0] == MXFP8_BFLOAT16 ? 0 : 1 << 20;
  const Description d(lt_, p, scales, scales);
  void* preference = nullptr;
  int status = d.status, count = 0;
  if (status == 0) status = lt_.create_preference(&preference);
  const auto prefer = [&](int attribute, auto value) {
    if (status == 0) status = lt_.prefer(preference, attribute, &value, sizeof value);
  };
  prefer(kMostWorkspace, uint64_t(kCublasLtWorkspace));
  prefer(kReductions, uint32_t(kReductionInFloat32));  // of the sums of a split K
  // Of A, B, C and D; the library assumes 256.
  const int64_t alignments[] = {p[7], p[6], p[8], p[8]};
  for (int operand = 0; operand < 4; ++operand) prefer(kAlignmentOfA + operand, uint32_t(alignments[operand]));
  Choice choice = {};
  if (status == 0) status = lt_.choose(handle_, d.product, d.b, d.x, d.y, d.y, preference, 1, &choice, &count);
  if (preference != nullptr) lt_.destroy_preference(preference);
  if (status == 0 && count > 0) status = choice.status;
  if (status == 0 && count > 0) return {"", choice};
  if (status != 0 && !refuses(status)) fail(gpu, status);
  return {"cuBLASLt " + std::to_string(lt_.version()) + ": " + (status == 0 ? "no algorithm" : lt_.status_name(status)),
          {}};
}

CublasLt::Answer CublasLt::answer(const Gpu& gpu, const LtProduct& p) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = answers_.find(p);
  if (known != answers_.end()) return known->second;
  if (answers_.size() >= kMostAnswers) answers_.clear();
  return answers_.emplace(p, ask(gpu, p)).first->second;
}

bool CublasLt::multiplies(const Gpu& gpu, const LtProduct& p, std::string* warning) {
  const std::string why = refusal(gpu, p);
  if (why.empty()) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool usable = unusable_.empty();
  if (!warned_.insert(usable ? std::array<int64_t, 3>{p[0], p[1], p[2]} : std::array<int64_t, 3>{}).second)
    return false;
  if (!warning->empty()) *warning += "; ";  // one plan may have several refusals
  *warning += usable ? "cuBLASLt refuses " + words_of(kind_of(p[0]), kind_of(p[1]), p[3], p[4], p[5]) + ", in " +
                           row_of(kind_of(p[2])).name + " (" + why + "); such products"
                     : "no cuBLASLt (" + why + "); products of many rows";
  *warning += " take the next row of the dispatch table, which is slower; pip install --upgrade nvidia-cublas " +
              std::string("(CUDA 12: nvidia-cublas-cu12)");
  return false;
}

void CublasLt::multiply(const Gpu& gpu, const int64_t (&arguments)[MXFP8_MOST_ARGUMENTS], Stream stream) {
  const auto [x, x_scales, b, b_scales, y, m, n, k, x_dtype, b_dtype, y_dtype, workspace, none, nothing] = arguments;
  const LtProduct p = {x_dtype, b_dtype, y_dtype, m, n, k, alignment(x), alignment(b), alignment(y)};
  const Answer known = answer(gpu, p);
  if (!known.refusal.empty()) throw CudaError(gpu.where() + ": cannot multiply: " + known.refusal);
  const Description d(lt_, p, x_scales, b_scales);
  const float one = 1, zero = 0;
  int status = d.status;
  if (status == 0) {
    status = lt_.multiply(handle_, d.product, &one, pointer(b), d.b, pointer(x), d.x, &zero, pointer(y), d.y,
                          pointer(y), d.y, known.choice.algorithm, pointer(workspace), known.choice.workspace, stream);
  }
  if (status != 0) fail(gpu, status);
}

}  // namespace mxfp8::cuda
