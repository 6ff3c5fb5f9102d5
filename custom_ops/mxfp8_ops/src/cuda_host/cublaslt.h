// cuBLASLt, opened at run time: the products of the rows `block_scaled` and `large` of the dispatch table.
#pragma once
#include <map>
#include <mutex>
#include <set>

#include "cuda_driver.h"
#include "planner.h"

namespace mxfp8::cuda {

class CublasLt {
 public:
  // The one of a GPU, which is current; until the process ends.
  static CublasLt& of(const Gpu&);

  // Whether the library can do a product. It is asked at the first product of a shape. `warning` gets the text of the
  // first refusal for each combination of dtypes, or that there is no library or none that starts, once. Throws
  // CudaError for failures that say nothing about the product, such as a lack of memory: the next call asks again.
  bool multiplies(const Gpu&, const LtProduct&, std::string* warning);
  // Why the library cannot do a product, or "".
  std::string refusal(const Gpu& gpu, const LtProduct& p) { return answer(gpu, p).refusal; }

  // Queues a product: the arguments of MXFP8_MATMUL. Throws CudaError.
  void multiply(const Gpu&, const int64_t (&arguments)[MXFP8_MOST_ARGUMENTS], Stream);

 private:
  // cublasLtMatmulHeuristicResult_t
  struct Choice {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
  };
  struct Answer {
    std::string refusal;  // why the library cannot do a product, or ""
    Choice choice;
  };
  struct Description;

  explicit CublasLt(const std::string& file);  // its file, or ""
  Answer answer(const Gpu&, const LtProduct&);
  Answer ask(const Gpu&, const LtProduct&);
  [[noreturn]] void fail(const Gpu&, int status) const;

  struct Functions {
    size_t (*version)();
    const char* (*status_name)(int);
    int (*create)(void**);
    int (*create_description)(void**, int compute, int scale);
    int (*describe)(void*, int attribute, const void*, size_t);
    int (*destroy_description)(void*);
    int (*create_layout)(void**, int type, uint64_t rows, uint64_t columns, int64_t stride);
    int (*destroy_layout)(void*);
    int (*create_preference)(void**);
    int (*prefer)(void*, int attribute, const void*, size_t);
    int (*destroy_preference)(void*);
    int (*choose)(void*, void* description, void* a, void* b, void* c, void* d, void* preference, int most, Choice*,
                  int* count);
    int (*multiply)(void*, void* description, const void* one, const void* a, void* a_layout, const void* b,
                    void* b_layout, const void* zero, const void* c, void* c_layout, void* d, void* d_layout,
                    const void* algorithm, void* workspace, size_t bytes, Stream);
  };

  Functions lt_ = {};
  std::mutex mutex_;  // of what follows; handle_ stays as it is once it exists
  void* handle_ = nullptr;
  std::string unusable_;  // why the library cannot be used at all, or ""
  std::map<LtProduct, Answer> answers_;
  std::set<std::array<int64_t, 3>> warned_;  // about these dtypes; zeros: that the library cannot be used
};

}  // namespace mxfp8::cuda
